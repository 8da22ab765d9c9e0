//! `verify` on every fixture, on the path the machine would choose.

use ingle_engine::verify::{Report, against};

use super::{checkpoint, fixture};
use crate::cpu;

fn report(model: &str, reference: &str) -> Report {
    against(&checkpoint(model), &fixture(reference), &mut || Ok(cpu(2, None)))
        .unwrap_or_else(|e| panic!("{model}: {e}"))
}

fn check(model: &str, reference: &str) {
    let report = report(model, reference);
    let failed: Vec<_> = report.checks.iter().filter(|c| !c.passed()).collect();
    assert!(report.passed(), "{model}: {failed:#?}\nfirst: {:?}", report.first_layer);
    let arms: String = report.checks.iter().map(|c| c.arm).collect();
    assert!(arms.contains('a') && arms.contains('b') && (arms.contains('c') || arms.contains('d')), "{arms}");
}

#[test]
fn safetensors_folders() {
    for name in
        ["llama", "llama_linear_rope", "llama_yarn", "llama_tied_bias", "qwen2", "qwen3", "gemma3_text"]
    {
        let reference = format!("models/{name}/reference.json");
        check(&format!("models/{name}"), &reference);
        // The older keys of config.json say the same.
        check(&format!("models/{name}/config.legacy.json"), &reference);
    }
}

#[test]
fn gguf_twins() {
    for (folder, plan) in [
        ("llama-s1", "legacy"),
        ("llama-s1", "q4_0"),
        ("llama-s1", "q8_0"),
        ("llama-s1", "f16"),
        ("llama-s1-wide", "q4_k_m"),
        ("llama_yarn-s1", "q8_0"),
        ("llama_tied_bias-s1", "q8_0"),
        ("qwen2-s1", "q8_0"),
        ("qwen3-s1", "legacy"),
        ("qwen3-s1", "q8_0"),
        ("qwen3-s1-wide", "q4_k_m"),
        ("gemma3_text-s1", "q8_0"),
    ] {
        check(&format!("gguf/{folder}/model-{plan}.gguf"), &format!("gguf/{folder}/reference-{plan}.json"));
    }
}

/// A reference of another model must fail: the comparison is not vacuous.
#[test]
fn a_wrong_reference_fails() {
    let report = report("models/llama", "models/llama_yarn/reference.json");
    assert!(!report.passed());
    assert!(report.first_layer.is_some() && !report.misses.is_empty());
}
