//! Damaged and hostile files: every cut and every changed header byte gives an error or a load, never a panic;
//! and a file that declares more than it holds costs no memory. An allocator that counts watches.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use ingle_tensor::gguf::{Gguf, Writer};
use ingle_tensor::{Bytes, DType, safetensors};

/// The system's allocator, remembering the largest request of each thread.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every request goes to the system's allocator unchanged; the bookkeeping allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller's duties are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's duties are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// The largest single allocation that `work` makes.
fn largest_allocation(work: impl FnOnce()) -> usize {
    LARGEST.set(0);
    work();
    LARGEST.get()
}

/// A small file with every kind of value and tensor, and where its data begins.
fn small_gguf() -> (Vec<u8>, usize) {
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("general.alignment", &32u32).unwrap();
    writer.set("n", &[1u8, 2, 3]).unwrap();
    writer.set("tokens", &["a", "bc", ""]).unwrap();
    writer.set("nested", &[[true, false], [false, true]]).unwrap();
    writer.set("eps", &1e-5f32).unwrap();
    writer.tensor("w", DType::Q4_1, &[3, 32], vec![5; 60]).unwrap();
    writer.tensor("v", DType::F16, &[2, 2, 3], vec![6; 24]).unwrap();
    let bytes = writer.to_bytes();
    let start = Gguf::parse(&Bytes::from(bytes.clone())).unwrap().data_start as usize;
    (bytes, start)
}

/// Parses, and touches everything that parsing promises.
fn walk_gguf(bytes: Vec<u8>) -> bool {
    let bytes = Bytes::from(bytes);
    let Ok(gguf) = Gguf::parse(&bytes) else { return false };
    for (key, value) in gguf.metadata.iter() {
        assert!(!value.to_string().is_empty());
        let _ = (
            gguf.metadata.strings(key),
            gguf.metadata.u32s(key),
            gguf.metadata.f32(key),
            gguf.metadata.u32(key),
        );
    }
    for tensor in &gguf.tensors {
        let data = &bytes[tensor.offset as usize..][..tensor.bytes as usize];
        if tensor.dtype.is_quantized() {
            let mut row = vec![0.0; tensor.cols()];
            for bytes in data.chunks_exact(tensor.dtype.row_bytes(tensor.cols()).unwrap()) {
                ingle_tensor::quant::decode_row(tensor.dtype, bytes, &mut row);
            }
        }
    }
    true
}

#[test]
fn gguf_cut_anywhere() {
    let (bytes, _) = small_gguf();
    assert!(walk_gguf(bytes.clone()));
    // The last tensor's data ends before the padding of the file does.
    let needed = bytes.len() - 8;
    for len in 0..bytes.len() {
        assert_eq!(walk_gguf(bytes[..len].to_vec()), len >= needed, "cut to {len} of {}", bytes.len());
    }
}

#[test]
fn gguf_with_any_header_byte_changed() {
    let (bytes, start) = small_gguf();
    let (mut refused, mut loaded) = (0, 0);
    for at in 0..start {
        for value in 0..=255 {
            let mut changed = bytes.clone();
            changed[at] = value;
            if walk_gguf(changed) { loaded += 1 } else { refused += 1 }
        }
    }
    assert!(refused > 10_000 && loaded > 10_000, "{refused} {loaded}");
}

/// ggml-org/llama.cpp#19003, huggingface/candle#3533: 300 bytes that declare 2^60 of everything.
#[test]
fn gguf_that_declares_more_than_it_holds() {
    let header = |tensors: u64, keys: u64| {
        [b"GGUF", &3u32.to_le_bytes()[..], &tensors.to_le_bytes(), &keys.to_le_bytes()].concat()
    };
    let huge = 1u64 << 60;
    let key = [&1u64.to_le_bytes()[..], b"k"].concat();
    let array = |kind: u32| [header(0, 1), key.clone(), vec![9, 0, 0, 0], kind.to_le_bytes().into()].concat();
    let cases = [
        header(huge, 0),
        header(0, huge),
        [header(0, 1), huge.to_le_bytes().into()].concat(),
        [header(0, 1), key.clone(), vec![8, 0, 0, 0], huge.to_le_bytes().into()].concat(),
        [array(8), huge.to_le_bytes().into()].concat(),
        [array(9), huge.to_le_bytes().into()].concat(),
        [array(0), huge.to_le_bytes().into()].concat(),
        [array(12), (1u64 << 61).to_le_bytes().into()].concat(),
        [header(1, 0), huge.to_le_bytes().into()].concat(),
        [header(1, 0), key, u32::MAX.to_le_bytes().into()].concat(),
    ];
    for mut case in cases {
        case.resize(300, 0);
        let largest = largest_allocation(|| assert!(!walk_gguf(case.clone())));
        assert!(largest <= 4096, "{largest} bytes at once");
        // The best of ten, since a busy machine may take the processor away.
        let once = |_| {
            let start = Instant::now();
            walk_gguf(case.clone());
            start.elapsed()
        };
        let time = (0..10).map(once).min().unwrap();
        assert!(time < Duration::from_millis(50), "{time:?}");
    }
    assert!(largest_allocation(|| drop(vec![0u8; 5000])) >= 5000, "the watch is asleep");
}

const HEADER: &str = concat!(
    r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[3,4],"data_offsets":[0,24]},"#,
    r#""v":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}"#
);

fn small_safetensors() -> Vec<u8> {
    [&(HEADER.len() as u64).to_le_bytes()[..], HEADER.as_bytes(), &[7; 32]].concat()
}

fn walk_safetensors(bytes: &[u8]) -> bool {
    let Ok(tensors) = safetensors::parse(bytes, 0) else { return false };
    for tensor in &tensors {
        assert_eq!(bytes[tensor.offset as usize..][..tensor.bytes as usize].len() as u64, tensor.bytes);
    }
    true
}

#[test]
fn safetensors_cut_anywhere() {
    let bytes = small_safetensors();
    assert!(walk_safetensors(&bytes));
    for len in 0..bytes.len() {
        assert!(!walk_safetensors(&bytes[..len]), "cut to {len}");
    }
}

#[test]
fn safetensors_with_any_header_byte_changed() {
    let bytes = small_safetensors();
    let (mut refused, mut loaded) = (0, 0);
    for at in 0..8 + HEADER.len() {
        for value in 0..=255 {
            let mut changed = bytes.clone();
            changed[at] = value;
            let largest =
                largest_allocation(|| if walk_safetensors(&changed) { loaded += 1 } else { refused += 1 });
            assert!(largest <= 65_536, "{largest} bytes at once");
        }
    }
    assert!(refused > 10_000 && loaded > 1_000, "{refused} {loaded}");
}
