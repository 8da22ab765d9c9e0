//! `verify` on every fixture, on the path the machine would choose.

use ingle_engine::verify::{Report, against};
use ingle_models::Model;
use serde_json::{Value, json};

use super::{checkpoint, fixture};
use crate::cpu;

fn report(model: &str, reference: &str) -> Report {
    let mut heard = Vec::new();
    let mut watch = |done, total| heard.push((done, total));
    let report = against(&checkpoint(model), &fixture(reference), &mut |_| Ok(cpu(2, None)), &mut watch)
        .unwrap_or_else(|e| panic!("{model}: {e}"));
    // Told of each token, up to the last.
    let total = heard[0].1;
    assert!(total > 0 && heard.iter().copied().eq((0..=total).map(|done| (done, total))), "{heard:?}");
    report
}

fn check(model: &str, reference: &str) {
    let report = report(model, reference);
    let failed: Vec<_> = report.checks.iter().filter(|c| !c.passed()).collect();
    assert!(report.passed(), "{model}: {failed:#?}\nfirst: {:?}", report.first_layer);
    let arms: String = report.checks.iter().map(|c| c.arm).collect();
    assert!(arms.contains('a') && arms.contains('b') && (arms.contains('c') || arms.contains('d')), "{arms}");
}

/// Every folder of fixtures/models.
const FOLDERS: [&str; 11] = [
    "llama",
    "llama_linear_rope",
    "llama_yarn",
    "llama_tied_bias",
    "mistral",
    "qwen2",
    "qwen2_swa",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
];

#[test]
fn safetensors_folders() {
    for name in FOLDERS {
        let reference = format!("models/{name}/reference.json");
        check(&format!("models/{name}"), &reference);
        // The older keys of config.json say the same.
        check(&format!("models/{name}/config.legacy.json"), &reference);
    }
}

/// Both spellings of config.json give the same settings, and every folder is listed above.
#[test]
fn spellings_agree() {
    for name in FOLDERS {
        let settings = |path: String| Model::open(&checkpoint(&path)).expect("a fixture").config;
        let today = settings(format!("models/{name}"));
        assert_eq!(today, settings(format!("models/{name}/config.legacy.json")), "{name}");
    }
    let found = std::fs::read_dir(fixture("models")).expect("the fixtures");
    assert_eq!(found.count(), FOLDERS.len());
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
        ("mistral-s1", "q8_0"),
        ("qwen2-s1", "q8_0"),
        ("qwen3-s1", "legacy"),
        ("qwen3-s1", "q8_0"),
        ("qwen3-s1-wide", "q4_k_m"),
        ("gemma-s1", "q8_0"),
        ("gemma2-s1", "q8_0"),
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

/// References that say too little, or are of another model, are errors and never a pass (a reference cut short once
/// passed with nothing compared).
#[test]
fn references_that_do_not_fit_are_refused() {
    let model = checkpoint("gguf/qwen3-s1/model-q8_0.gguf");
    let text = std::fs::read_to_string(fixture("gguf/qwen3-s1/reference-q8_0.json")).expect("a fixture");
    let whole: Value = serde_json::from_str(&text).expect("a fixture");
    let folder = tempfile::tempdir().expect("a temporary folder");
    type Fault = fn(&mut Value);
    let faults: [(&str, Fault); 9] = [
        ("nothing to compare", |r| r["prompts"] = json!([])),
        ("input_ids", |r| r["prompts"][0]["input_ids"] = json!([])),
        ("\"greedy\"", |r| r["prompts"][1]["greedy"] = json!([])),
        ("greedy_margin", |r| r["prompts"][1]["greedy_margin"] = json!([0.5])),
        ("512 numbers", |r| r["prompts"][2]["last_logits"] = json!([0.5])),
        ("top5_ids", |r| r["prompts"][2]["top5_ids"] = json!([[1]])),
        ("1000000", |r| r["prompts"][0]["greedy"][3] = json!(1_000_000)),
        ("input_ids", |r| r["prompts"][0]["input_ids"] = json!(["a"])),
        ("gemma3_text", |r| r["arch"] = json!("gemma3_text")),
    ];
    for (what, fault) in faults {
        let mut reference = whole.clone();
        fault(&mut reference);
        let path = folder.path().join("reference.json");
        std::fs::write(&path, reference.to_string()).expect("room");
        let error =
            against(&model, &path, &mut |_| Ok(cpu(1, None)), &mut |_, _| ()).expect_err(what).to_string();
        assert!(error.contains(what) && error.contains("reference.json"), "{what}: {error}");
    }
    let mut long = whole;
    long["prompts"][0]["input_ids"] = json!(vec![5; 400]);
    long["prompts"][0]["top5_ids"] = json!(vec![vec![5]; 400]);
    let path = folder.path().join("reference.json");
    std::fs::write(&path, long.to_string()).expect("room");
    let report =
        against(&model, &path, &mut |_| Ok(cpu(1, None)), &mut |_, _| ()).expect("any length is compared");
    assert!(!report.passed());
}
