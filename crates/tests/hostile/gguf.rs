//! GGUF files of public reports.

use ingle_tensor::Checkpoint;
use ingle_tensor::gguf::Writer;
use ingle_tests::attack::driver::timed;
use ingle_tests::attack::watch::measure_here;
use ingle_tests::attack::{seeds, walk};

use super::{file, refused};

/// Bytes of a file in the order of the format.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensors: u64, keys: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(keys)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, n: u32) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn u64(self, n: u64) -> Self {
        self.bytes(&n.to_le_bytes())
    }

    fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    /// Zeros up to the alignment, and `len` of them after it.
    fn data(mut self, len: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + len, 0);
        self
    }

    fn refused(&self, words: &[&str]) {
        let (_dir, path) = file("m.gguf", &self.0);
        refused(&path, self.0.len(), walk::model, words);
    }
}

/// A file of one F32 tensor with these dimensions, innermost first.
fn tensor(dims: &[u64], offset: u64) -> Raw {
    let raw = Raw::new(1, 0).string("blk.0.w").u32(dims.len() as u32);
    dims.iter().fold(raw, |raw, &dim| raw.u64(dim)).u32(0).u64(offset).data(64)
}

/// ggml-org/llama.cpp#25378, antirez/gguf-tools#25, gittensor-ai-lab/sparkinfer#10: more than four dimensions.
#[test]
fn llama_cpp_25378_more_than_four_dimensions() {
    for count in [5, 9, u32::MAX] {
        for values in [0, 2] {
            let raw = Raw::new(1, 0).string("blk.0.w").u32(count);
            let raw = (0..values).fold(raw, |raw, _| raw.u64(1));
            raw.data(0).refused(&["tensor \"blk.0.w\"", &format!("{count} dimensions"), "at most 4"]);
        }
    }
}

/// ggml-org/llama.cpp#18674 and #25401, huggingface/candle#3588: sizes that wrap around.
#[test]
fn llama_cpp_18674_sizes_that_wrap_around() {
    for dims in [&[1 << 32, 1 << 32][..], &[1 << 31, 1 << 31], &[1 << 62], &[1 << 21, 1 << 21, 1 << 22]] {
        tensor(dims, 0).refused(&["tensor \"blk.0.w\"", "does not fit in 63 bits"]);
    }
    tensor(&[u64::MAX], 0).refused(&["tensor \"blk.0.w\""]);
}

/// huggingface/candle#3876, ggml-org/llama.cpp#24997 and #26318, antirez/gguf-tools#27: alignments that are none.
#[test]
fn candle_3876_alignments_that_are_none() {
    let key = |kind: u32| Raw::new(0, 1).string("general.alignment").u32(kind);
    assert_eq!(key(4).u32(0).0.len(), 57);
    for value in [0, 3, 1 << 31, u32::MAX] {
        key(4).u32(value).refused(&["general.alignment", &value.to_string(), "power of two"]);
    }
    key(5).u32(32).refused(&["general.alignment", "i32 32", "wanted u32"]);
    key(10).u64(32).refused(&["general.alignment", "u64 32", "wanted u32"]);
    key(8).string("32").refused(&["general.alignment", "a string", "wanted u32"]);
}

/// ggml-org/llama.cpp#19003 and #27188, huggingface/candle#3533, leejet/stable-diffusion.cpp#1397: lengths and counts
/// beyond the file.
#[test]
fn llama_cpp_19003_lengths_beyond_the_file() {
    let value = |kind: u32| Raw::new(0, 1).string("k").u32(kind);
    for (raw, what) in [
        (Raw::new(0, 1).u64(1 << 48), "key"),
        (value(8).u64(1 << 63), "string"),
        (value(9).u32(8).u64(1 << 63), "array"),
        (value(9).u32(9).u64(1 << 63), "array"),
        (value(9).u32(0).u64(1 << 60), "array"),
        (Raw::new(1 << 63, 0), "tensors"),
        (Raw::new(0, 1 << 63), "keys"),
    ] {
        assert!(raw.0.len() < 64);
        raw.refused(&[what, "remain in the file"]);
    }
}

/// ggml-org/llama.cpp#19856: a check of every length made large vocabularies slow to load.
#[test]
fn llama_cpp_19856_a_vocabulary_of_250000_tokens_opens_fast() {
    let tokens: Vec<String> = (0..250_000).map(|i| format!("token{i}")).collect();
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("tokenizer.ggml.tokens", &tokens).unwrap();
    writer.set("tokenizer.ggml.token_type", &vec![1i32; tokens.len()]).unwrap();
    let (_dir, path) = file("m.gguf", &writer.to_bytes());
    let ((checkpoint, time), usage) = measure_here(|| timed(|| Checkpoint::open(&path).unwrap()));
    // A few milliseconds; the bound is for a machine that is slow.
    assert!(time.as_millis() < 500, "{time:?}");
    assert!(usage.peak < super::HEADER, "{usage:?}: the strings stay in the file");
    assert!(checkpoint.tensors().is_empty());
}

/// Luce-Org/lucebox#438 and #458, 1bit-MONSTER/1bit-MONSTER#1606: files cut short, offsets past the end.
#[test]
fn lucebox_438_tensors_outside_the_file() {
    let whole = seeds::gguf(false);
    let (_dir, path) = file("m.gguf", &whole);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let start = checkpoint.tensors().iter().map(|t| t.offset).min().unwrap() as usize;
    let end = checkpoint.tensors().iter().map(|t| t.offset + t.bytes).max().unwrap() as usize;
    for len in [end - 1, whole.len() / 2, start] {
        let (_dir, path) = file("m.gguf", &whole[..len]);
        refused(&path, len, walk::model, &["tensor \"", "its data", "remain in the file"]);
    }
    tensor(&[16], u64::MAX - 31).refused(&["tensor \"blk.0.w\"", "overflows"]);
    tensor(&[16], 1 << 40).refused(&["tensor \"blk.0.w\"", "needs 64 bytes", "but 0 remain"]);
    tensor(&[16], 16).refused(&["tensor \"blk.0.w\"", "16 is not a multiple of the alignment 32"]);
}

/// ggml-org/llama.cpp#13943 and #3901, ollama/ollama#4938 and #4987: byte order and version.
#[test]
fn llama_cpp_13943_versions_and_byte_order() {
    let whole = seeds::gguf(false);
    let with = |version: u32| [&whole[..4], &version.to_le_bytes(), &whole[8..]].concat();
    let said = |bytes: &[u8]| {
        let (_dir, path) = file("m.gguf", bytes);
        walk::reply(&path, &Default::default()).unwrap()
    };
    assert_eq!(said(&with(2)), said(&with(3)));
    for (bytes, words) in [
        (with(0), "GGUF version 0 is not supported"),
        (with(1), "GGUF version 1 is not supported"),
        (with(4), "GGUF version 4 is not supported"),
        (with(3u32.swap_bytes()), "big-endian GGUF"),
        (with(2u32.swap_bytes()), "big-endian GGUF"),
        ([b"GGML", &whole[4..]].concat(), "not a GGUF"),
        (Vec::new(), "the file is empty: fetch it again"),
    ] {
        let (_dir, path) = file("m.gguf", &bytes);
        refused(&path, bytes.len(), walk::model, &[words]);
    }
}

/// No public report: a tensor without dimensions is one value, and no weight; a key that is there twice is none.
#[test]
fn scalars_and_keys_that_are_there_twice() {
    let (_dir, path) = file("m.gguf", &tensor(&[], 0).0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!((checkpoint.tensors()[0].bytes, checkpoint.tensors()[0].elements()), (4, 1));
    let mut whole = seeds::gguf(false);
    let name = b"output_norm.weight";
    let at = whole.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    // One dimension becomes none; its eight bytes go, and the padding grows.
    whole[at] = 0;
    whole.drain(at + 4..at + 12);
    let next = whole.windows(13).rposition(|w| w == b"output.weight").unwrap() + 13 + 4 + 16 + 4 + 8;
    whole.splice(next..next, [0; 8]);
    let (_dir, path) = file("m.gguf", &whole);
    let message = walk::model(&path).unwrap_err();
    assert!(message.contains("output_norm.weight") && message.contains("[]"), "{message}");
    for second in [1u8, 2] {
        let raw = Raw::new(0, 2).string("k").u32(0).bytes(&[1]).string("k").u32(0).bytes(&[second]);
        raw.refused(&["key \"k\"", "twice"]);
    }
}

/// No public report: files that hold data for a model say that they are none.
#[test]
fn files_that_are_no_models() {
    for (kind, words) in [("imatrix", "importance matrix"), ("adapter", "LoRA"), ("mmproj", "projector")] {
        let mut writer = Writer::new();
        writer.set("general.type", kind).unwrap();
        let (_dir, path) = file("m.gguf", &writer.to_bytes());
        refused(&path, 0, walk::model, &[words, "not a model"]);
    }
    let vocabulary = seeds::gguf_vocabulary(false);
    let (_dir, path) = file("m.gguf", &vocabulary);
    refused(&path, vocabulary.len(), walk::model, &["a vocabulary and no tensors", "not a model"]);
}
