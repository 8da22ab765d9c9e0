//! Models that load, but whose parts, formats or numbers are not what one expects.

use std::path::{Path, PathBuf};

use ingle_graph::{KvType, PlanOptions};
use ingle_tensor::gguf::Writer;
use ingle_tensor::{DType, quant};
use ingle_tests::attack::seeds::{encoded, values};
use ingle_tests::attack::walk::{self, Reply, reply};
use tempfile::TempDir;

use super::{file, refused};

const VOCABULARY: usize = 24;

/// A tensor: name, format, shape, bytes.
type Tensor = (String, DType, Vec<usize>, Vec<u8>);

/// Tensors of a llama of one layer with one head of 32 elements for each 32 of `hidden`; `format` says how the matrix of
/// a name is stored, given its columns.
fn tensors(hidden: usize, ffn: usize, format: impl Fn(&str, usize) -> DType) -> Vec<Tensor> {
    let matrix = |name: &str, rows: usize, cols: usize| {
        let dtype = format(name, cols);
        let seed = name.bytes().fold(7, |n, b| n * 31 + u64::from(b));
        (name.to_string(), dtype, vec![rows, cols], values(dtype, rows, cols, seed))
    };
    let norm = |name: &str| {
        (name.to_string(), DType::F32, vec![hidden], encoded(DType::F32, hidden, &vec![1.0; hidden]))
    };
    vec![
        matrix("token_embd.weight", VOCABULARY, hidden),
        norm("blk.0.attn_norm.weight"),
        matrix("blk.0.attn_q.weight", hidden, hidden),
        matrix("blk.0.attn_k.weight", 32, hidden),
        matrix("blk.0.attn_v.weight", 32, hidden),
        matrix("blk.0.attn_output.weight", hidden, hidden),
        norm("blk.0.ffn_norm.weight"),
        matrix("blk.0.ffn_gate.weight", ffn, hidden),
        matrix("blk.0.ffn_up.weight", ffn, hidden),
        matrix("blk.0.ffn_down.weight", hidden, ffn),
        norm("output_norm.weight"),
        matrix("output.weight", VOCABULARY, hidden),
    ]
}

fn write_keys(w: &mut Writer<'_>, hidden: usize, ffn: usize) {
    w.set("general.architecture", "llama").unwrap();
    for (key, n) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", hidden / 32),
        ("attention.head_count_kv", 1),
    ] {
        w.set(&format!("llama.{key}"), &(n as u32)).unwrap();
    }
    w.set("llama.attention.layer_norm_rms_epsilon", &1e-5f32).unwrap();
}

fn write(path: &Path, keys: impl FnOnce(&mut Writer<'_>), tensors: &[Tensor]) -> PathBuf {
    let mut w = Writer::new();
    keys(&mut w);
    for (name, dtype, shape, bytes) in tensors {
        w.tensor(name, *dtype, shape, &bytes[..]).unwrap();
    }
    std::fs::write(path, w.to_bytes()).unwrap();
    path.to_path_buf()
}

/// The reply of a model with a hidden width of 64, an F16 embedding and else F32, after `change`.
fn changed(options: &PlanOptions, change: impl FnOnce(&mut Vec<Tensor>)) -> Result<Reply, String> {
    let dir = TempDir::new().unwrap();
    let mut list = tensors(64, 96, |name, _| if name.starts_with("token") { DType::F16 } else { DType::F32 });
    change(&mut list);
    reply(&write(&dir.path().join("m.gguf"), |w| write_keys(w, 64, 96), &list), options)
}

/// Replaces a tensor's values.
fn set(list: &mut [Tensor], name: &str, f: impl Fn(usize, f32) -> f32) {
    let (_, dtype, shape, bytes) = list.iter_mut().find(|t| t.0 == name).expect("a tensor of the model");
    let mut values = vec![0.0; shape.iter().product()];
    quant::decode_row(*dtype, bytes, &mut values);
    values.iter_mut().enumerate().for_each(|(i, v)| *v = f(i, *v));
    *bytes = encoded(*dtype, shape[shape.len() - 1], &values);
}

/// sgl-project/sglang#28209, FlashML-org/FreeToken#154, vllm-project/vllm-gguf-plugin#54,
/// Michael-A-Kuykendall/shimmy#170, ggml-org/llama.cpp#6836: a model in three parts, of which the last has the output
/// matrix, says from each part what it says whole.
#[test]
fn llama_cpp_6836_a_split_model_says_what_the_whole_one_does() {
    let dir = TempDir::new().unwrap();
    let list = tensors(64, 96, |_, _| DType::F32);
    let at = |name: &str| dir.path().join(name);
    let whole = reply(&write(&at("whole.gguf"), |w| write_keys(w, 64, 96), &list), &PlanOptions::default());
    let whole = whole.unwrap();
    assert_eq!(whole.tokens.len(), 4);
    let part = |n: usize| at(&format!("m-{:05}-of-00003.gguf", n + 1));
    let split = |w: &mut Writer<'_>, n: usize| {
        if n == 0 {
            write_keys(w, 64, 96);
        }
        w.set("split.no", &(n as u16)).unwrap();
        w.set("split.count", &3u16).unwrap();
        w.set("split.tensors.count", &(list.len() as i32)).unwrap();
    };
    let ends = [0, 5, 11, list.len()];
    let write_all = || {
        for n in 0..3 {
            write(&part(n), |w| split(w, n), &list[ends[n]..ends[n + 1]]);
        }
    };
    write_all();
    for n in 0..3 {
        assert_eq!(reply(&part(n), &PlanOptions::default()).as_ref(), Ok(&whole), "part {n}");
    }
    // Without its own output matrix the model uses the embedding: another reply, so the one above did use it.
    let tied = write(&at("tied.gguf"), |w| write_keys(w, 64, 96), &list[..11]);
    assert_ne!(reply(&tied, &PlanOptions::default()).unwrap(), whole);

    let refused = |n: usize, words: &[&str]| {
        let message = reply(&part(n), &PlanOptions::default()).unwrap_err();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    std::fs::remove_file(part(1)).unwrap();
    refused(0, &["m-00002-of-00003.gguf"]);
    refused(2, &["m-00002-of-00003.gguf"]);
    write_all();
    std::fs::rename(part(1), at("other.gguf")).unwrap();
    refused(0, &["m-00002-of-00003.gguf"]);
    assert!(reply(&at("other.gguf"), &PlanOptions::default()).unwrap_err().contains("part 2 of 3"));
    write(&part(1), |w| split(w, 1), &list[4..10]);
    refused(0, &["blk.0.attn_v.weight", "twice"]);
}

/// WestWaters/pollard-weights#103, ggml-org/llama.cpp#14996, #2143 and #6614: a row that blocks do not tile is refused
/// by its tensor's name, whatever the total.
#[test]
fn llama_cpp_14996_rows_that_blocks_do_not_tile() {
    // A writer refuses such a row, so the header of a valid file is changed: 256 rows of 896 in place of 896 of 256.
    let mut w = Writer::new();
    w.set("general.architecture", "llama").unwrap();
    w.tensor("blk.0.w", DType::Q4K, &[896, 256], vec![0; 896 * 144]).unwrap();
    let mut bytes = w.to_bytes();
    let at = bytes.windows(7).position(|w| w == b"blk.0.w").unwrap() + 7 + 4;
    bytes[at..at + 8].copy_from_slice(&896u64.to_le_bytes());
    bytes[at + 8..at + 16].copy_from_slice(&256u64.to_le_bytes());
    let (_dir, path) = file("m.gguf", &bytes);
    refused(&path, 0, walk::model, &["\"blk.0.w\"", "rows of 896", "q4_k", "256"]);
}

/// No public report: keys and values beyond the range of half precision are held at its end and counted; the reply is
/// made of numbers, as with wider types.
#[test]
fn half_precision_overflow_is_held_and_counted() {
    let with = |kv: KvType| {
        let options = PlanOptions { kv, ..PlanOptions::default() };
        changed(&options, |list| {
            set(list, "blk.0.attn_k.weight", |_, v| v * 1e6);
            set(list, "blk.0.attn_v.weight", |_, v| v * 1e6);
        })
        .unwrap()
    };
    for kv in [KvType::F16, KvType::BF16, KvType::F32, KvType::Q8_0] {
        let reply = with(kv);
        assert!(reply.failed.is_empty(), "{kv}: {:?}", reply.failed);
        assert_eq!(reply.saturated > 0, kv == KvType::F16, "{kv}: {}", reply.saturated);
        let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
        assert!(reply.tokens.iter().all(|(_, top)| top.iter().all(|(_, bits)| finite(bits))), "{kv}");
    }
    // Logits are f32 whatever the weights' type: 65504 times 64 is a number.
    let large =
        changed(&PlanOptions::default(), |list| set(list, "output.weight", |_, v| v.signum() * 65504.0));
    assert!(large.unwrap().failed.is_empty());
}

/// No public report: weights that are no numbers fail the request with a message, or do no harm; nothing panics.
#[test]
fn weights_that_are_no_numbers() {
    let names: Vec<String> = tensors(64, 96, |_, _| DType::F32).into_iter().map(|t| t.0).collect();
    for name in &names {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-45] {
            let reply = changed(&PlanOptions::default(), |list| set(list, name, |_, _| value)).unwrap();
            assert_eq!(reply.tokens.len() + 2 * reply.failed.len(), 4, "{name} {value}: {reply:?}");
        }
        changed(&PlanOptions::default(), |list| set(list, name, |i, v| if i == 1 { f32::NAN } else { v }))
            .unwrap();
    }
    let reply = changed(&PlanOptions::default(), |list| set(list, "output.weight", |_, _| f32::NAN)).unwrap();
    assert!(reply.failed.len() == 2 && reply.failed[0].contains("NaN"), "{reply:?}");
}
