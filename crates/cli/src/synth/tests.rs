//! Models of a tiny shape, made by the code that makes the large ones.

use std::fs;
use std::sync::Arc;

use ingle_cpu::{Cpu, CpuOptions};
use ingle_engine::handle::{Handle, Language, TextRequest};
use ingle_engine::runner::{Runner, kv_plan};
use ingle_engine::sampler::Settings;
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::PlanOptions;
use ingle_models::Model;
use ingle_tensor::{Checkpoint, quant};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::shapes::{Experts, SHAPES};
use super::*;
use crate::mix::MIXES;

/// Wide enough for blocks of 256, with heads that are not a divisor of the width.
fn tiny(of: &str) -> Shape {
    let shape = SHAPES.iter().find(|shape| shape.name == of).unwrap().clone();
    let experts = shape.experts.map(|_| Experts { count: 4, used: 2, ffn: 256 });
    Shape { layers: 8, hidden: 256, ffn: 512, heads: 4, kv_heads: 2, head_dim: 32, experts, ..shape }
}

fn made(dir: &TempDir, shape: &Shape, mix: &Mix, seed: u64, threads: usize) -> Checkpoint {
    let path = dir.path().join(format!("{}-{}-{seed}-{threads}.gguf", shape.name, mix.name));
    let synthesis = Synthesis::new(shape, mix, seed).unwrap();
    let mut heard = 0;
    let watch = &mut |n| {
        heard += n;
        Ok(())
    };
    synthesis.write(synthesis.outline.create(&path).unwrap(), true, threads, watch).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.total_bytes(), synthesis.outline.file_bytes().unwrap());
    assert_eq!(heard, checkpoint.tensors().iter().map(|t| t.bytes).sum::<u64>());
    checkpoint
}

fn sha256(checkpoint: &Checkpoint) -> Vec<u8> {
    Sha256::digest(fs::read(checkpoint.path()).unwrap()).to_vec()
}

/// Standard deviation of all matrices' decoded values, all of which are finite, and the mean of the norms'.
fn statistics(checkpoint: &Checkpoint) -> (f64, f64) {
    let (mut matrices, mut squares, mut norms, mut sum) = (0, 0.0, 0, 0.0);
    for tensor in checkpoint.tensors().iter().filter(|t| t.name != "rope_freqs.weight") {
        let mut row = vec![0.0; tensor.cols()];
        for bytes in checkpoint.data(tensor).chunks_exact(tensor.dtype.row_bytes(tensor.cols()).unwrap()) {
            quant::decode_row(tensor.dtype, bytes, &mut row);
            assert!(row.iter().all(|v| v.is_finite()), "{}", tensor.name);
            if tensor.shape.len() == 1 {
                norms += row.len();
                sum += row.iter().map(|&v| f64::from(v)).sum::<f64>();
            } else {
                matrices += row.len();
                squares += row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
            }
        }
    }
    ((squares / matrices as f64).sqrt(), sum / norms as f64)
}

#[test]
fn every_mix_has_the_deviation_it_says() {
    let dir = TempDir::new().unwrap();
    let shape = Shape { vocabulary: 512, ..tiny("qwen3_0_6b") };
    for mix in MIXES {
        let (deviation, norm) = statistics(&made(&dir, &shape, mix, 1, 2));
        assert!((deviation / f64::from(weights::DEVIATION) - 1.0).abs() < 0.02, "{}: {deviation}", mix.name);
        assert!((norm - 1.0).abs() < 0.02, "{}: {norm}", mix.name);
    }
}

#[test]
fn the_seed_and_nothing_else_decides() {
    let dir = TempDir::new().unwrap();
    let shape = Shape { vocabulary: 20_000, ..tiny("qwen3_0_6b") };
    for mix in ["q4_k_m", "f32"] {
        let mix = MIXES.iter().find(|m| m.name == mix).unwrap();
        let one = sha256(&made(&dir, &shape, mix, 7, 1));
        for threads in [2, 3, 64] {
            assert_eq!(sha256(&made(&dir, &shape, mix, 7, threads)), one, "{threads} threads");
        }
        assert_ne!(sha256(&made(&dir, &shape, mix, 8, 1)), one);
    }
    // No row is like another, in one tensor or between layers.
    let shape = Shape { vocabulary: 2000, layers: 2, hidden: 1024, ffn: 1024, ..shape };
    let checkpoint = made(&dir, &shape, &MIXES[0], 7, 1);
    let mut rows = std::collections::HashSet::new();
    for tensor in checkpoint.tensors().iter().filter(|t| t.cols() == 1024 && t.shape.len() == 2) {
        let row_bytes = tensor.dtype.row_bytes(tensor.cols()).unwrap();
        assert!(
            checkpoint.data(tensor).chunks_exact(row_bytes).all(|row| rows.insert(row)),
            "{}",
            tensor.name
        );
    }
    assert!(rows.len() > 5000);
}

#[test]
fn what_is_made_runs() {
    let dir = TempDir::new().unwrap();
    for (of, mix) in
        [("smollm2-135m", "q4_k_m"), ("llama8b", "q4_0"), ("qwen3_32b", "iq4_xs"), ("qwen3_0_6b", "bf16")]
    {
        let mix = MIXES.iter().find(|m| m.name == mix).unwrap();
        let checkpoint = Arc::new(made(&dir, &tiny(of), mix, 0, 2));
        let model = Arc::new(Model::open(&checkpoint).unwrap());
        let language = Language::open(&checkpoint).unwrap();
        // Any text is tokens and back, in fewer tokens than bytes.
        let text = "The quick brown fox: \u{e9}\u{4e16}\u{1f600} <|im_end|>\tfn main() {}\n";
        let ids = language.completion(text).unwrap();
        let back: Vec<u8> =
            ids.iter().flat_map(|&id| language.tokenizer().token_bytes(id).to_vec()).collect();
        assert!(
            String::from_utf8(back).unwrap().ends_with(text) && ids.len() < text.len() * 2 / 3,
            "{of}: {ids:?}"
        );
        assert_eq!(language.tokenizer().vocab_len(), model.config.vocabulary);

        let backend = Box::new(Cpu::new(&CpuOptions { threads: 1, isa: None }).unwrap());
        let options = EngineOptions::default();
        let kv = kv_plan(&model.graph, 64, 1, options.chunk);
        let runner = Runner::new(backend, model, checkpoint.clone(), PlanOptions::default(), kv).unwrap();
        let engine = Engine::new(runner, checkpoint.fingerprint(), options);
        let mut handle = Handle::new(engine, language).unwrap();
        let prompt = handle.language().completion("Hello").unwrap();
        let sampling = Settings { temperature: Some(0.0), ..Settings::default() };
        let request =
            TextRequest { prompt, max_tokens: 4, sampling, logprobs: Some(1), ..TextRequest::default() };
        let reply = handle.generate(request, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
        assert!(!reply.generated_ids.is_empty());
        assert!(
            reply.steps.iter().all(|step| step.logprob.is_some_and(f32::is_finite)),
            "{of}: {:?}",
            reply.steps
        );
    }
}

/// Sizes of the real models: their parameters, and for Llama 3.1 8B the well-known 4.92 GB of its Q4_K_M.
#[test]
fn presets_are_as_large_as_the_models() {
    for (name, parameters) in [
        ("smollm2-135m", 134_515_008),
        ("llama8b", 8_030_261_248),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_32b", 32_762_123_264),
        ("qwen3_30b_a3b", 30_532_122_624),
    ] {
        let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
        let all = tensors(shape, &MIXES[0]);
        let counted = all.iter().filter(|t| t.name != "rope_freqs.weight");
        assert_eq!(counted.map(|t| t.rows() * t.cols()).sum::<usize>(), parameters, "{name}");
    }
    let preset: Preset = "llama8b-q4_k_m".parse().unwrap();
    let bytes = tensors(preset.shape, preset.mix).iter().map(|t| t.rows() * t.row_bytes()).sum::<usize>();
    assert_eq!(bytes, 4_912_898_304);
}

/// The mixture that no family runs yet: its file opens, with experts in tensors of three dimensions.
#[test]
fn a_mixture_is_written() {
    let dir = TempDir::new().unwrap();
    let checkpoint = made(&dir, &Shape { vocabulary: 600, ..tiny("qwen3_30b_a3b") }, &MIXES[0], 0, 2);
    let down = checkpoint.require("blk.0.ffn_down_exps.weight").unwrap();
    assert_eq!((&down.shape[..], down.dtype), (&[4, 256, 256][..], DType::Q6K));
    let error = Model::open(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("\"qwen3moe\" is not supported") || error.contains("experts"), "{error}");
}

#[test]
fn an_error_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let synthesis = Synthesis::new(&tiny("llama8b"), &MIXES[0], 0).unwrap();
    let mut left = 3;
    let watch = &mut |_| {
        left -= 1;
        if left == 0 { Err(Error::Refused("enough".into())) } else { Ok(()) }
    };
    let file = synthesis.outline.create(&dir.path().join("m.gguf")).unwrap();
    let said = synthesis.write(file, false, 2, watch).unwrap_err().to_string();
    assert_eq!((said.as_str(), fs::read_dir(dir.path()).unwrap().count()), ("enough", 0));
}

/// Llama 3.1's rule against its values for the first, the last and one blended frequency.
#[test]
fn rotary_divisors_of_llama3() {
    let divisors = llama3_divisors(500_000.0, 128);
    assert_eq!((divisors.len(), divisors[0], divisors[63]), (64, 1.0, 8.0));
    assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
    let blended = divisors.iter().filter(|&&d| d != 1.0 && d != 8.0).count();
    assert_eq!(blended, 6);
}
