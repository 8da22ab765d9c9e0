//! Planted faults that arm (a) of `verify` must catch: a norm epsilon ten times too large, one tensor 5% too large,
//! rotary frequencies 2% too low, a window off by one, a cap left out.

use std::path::Path;
use std::sync::Arc;

use ingle_engine::verify::against;
use ingle_tensor::Checkpoint;
use serde_json::{Value, json};

use super::fixture;
use crate::cpu;

/// Copies a folder, lets `fault` change its config and its tensors' bytes, and says whether arm (a) passes.
fn arm_a_passes(model: &str, fault: impl Fn(&mut Value, &mut Vec<u8>)) -> bool {
    let (from, to) = (fixture(&format!("models/{model}")), tempfile::tempdir().expect("a temporary folder"));
    let read = |name: &str| std::fs::read(from.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut config: Value = serde_json::from_slice(&read("config.json")).expect("a fixture");
    let mut tensors = read("model.safetensors");
    fault(&mut config, &mut tensors);
    std::fs::write(to.path().join("config.json"), config.to_string()).expect("room");
    std::fs::write(to.path().join("model.safetensors"), tensors).expect("room");
    let checkpoint = Arc::new(Checkpoint::open(Path::new(to.path())).expect("a fixture"));
    let report =
        against(&checkpoint, &from.join("reference.json"), &mut |_| Ok(cpu(2, None)), &mut |_, _| ());
    report.expect("a fixture").checks.iter().filter(|c| c.arm == 'a').all(|c| c.passed())
}

/// Multiplies a bf16 tensor of a safetensors file by `factor`.
fn scale(file: &mut [u8], name: &str, factor: f32) {
    let infos = ingle_tensor::safetensors::parse(file, 0).expect("a fixture");
    let info = infos.iter().find(|i| i.name == name).expect("a tensor of the fixture");
    let (from, to) = (info.offset as usize, (info.offset + info.bytes) as usize);
    for x in file[from..to].chunks_exact_mut(2) {
        let scaled = half::bf16::from_le_bytes([x[0], x[1]]).to_f32() * factor;
        x.copy_from_slice(&half::bf16::from_f32(scaled).to_le_bytes());
    }
}

#[test]
fn arm_a_catches_planted_faults() {
    for model in ["llama_tied_bias", "mistral", "qwen2", "qwen2_swa", "gemma", "gemma2", "gemma3_text"] {
        assert!(arm_a_passes(model, |_, _| ()), "{model}: the copy itself");
        let epsilon = |config: &mut Value, _: &mut Vec<u8>| {
            let eps = config["rms_norm_eps"].as_f64().expect("a number");
            config["rms_norm_eps"] = json!(eps * 10.0);
        };
        assert!(!arm_a_passes(model, epsilon), "{model}: epsilon x10");
        // Gemma 2 and 3 normalize what their matrices write, which cancels a factor; not so what makes their scores.
        let tensor = match model {
            "gemma2" => "model.layers.1.self_attn.q_proj.weight",
            "gemma3_text" => "model.layers.1.self_attn.q_norm.weight",
            _ => "model.layers.1.mlp.down_proj.weight",
        };
        let one_tensor = |_: &mut Value, file: &mut Vec<u8>| scale(file, tensor, 1.05);
        assert!(!arm_a_passes(model, one_tensor), "{model}: {tensor} x1.05");
        let embedding = |_: &mut Value, file: &mut Vec<u8>| scale(file, "model.embed_tokens.weight", 1.05);
        assert!(!arm_a_passes(model, embedding), "{model}: embedding x1.05");
        let rope = |config: &mut Value, _: &mut Vec<u8>| {
            let slow = json!({"rope_type": "linear", "factor": 1.0 / 0.98});
            let merge = |to: &mut Value, theta: f64| {
                *to = slow.clone();
                to["rope_theta"] = json!(theta);
            };
            let parameters = &mut config["rope_parameters"];
            if let Some(global) = parameters.get_mut("full_attention") {
                let factor = global["factor"].as_f64().unwrap_or(1.0);
                global["factor"] = json!(factor / 0.98);
            } else {
                let theta = parameters["rope_theta"].as_f64().expect("a number");
                merge(parameters, theta);
            }
        };
        assert!(!arm_a_passes(model, rope), "{model}: frequencies x0.98");
        // What only some families have: window, caps, scale of the queries.
        let path = fixture(&format!("models/{model}/config.json"));
        let config: Value =
            serde_json::from_slice(&std::fs::read(path).expect("a fixture")).expect("a fixture");
        let has = |key: &str| config.get(key).is_some_and(Value::is_number);
        for (key, to) in [
            ("sliding_window", json!(7)),
            ("sliding_window", json!(9)),
            ("sliding_window", json!(null)),
            ("attn_logit_softcapping", json!(null)),
            ("final_logit_softcapping", json!(null)),
            ("query_pre_attn_scalar", json!(25)),
        ] {
            let fault = |config: &mut Value, _: &mut Vec<u8>| config[key] = to.clone();
            assert!(!has(key) || !arm_a_passes(model, fault), "{model}: {key} {to}");
        }
    }
}
