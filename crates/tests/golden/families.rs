//! What files of a family may leave unsaid or spell in several ways, and the faults in it that users of other engines
//! reported. Tests named after a report cite it.

use std::sync::Arc;

use half::f16;
use ingle_engine::batch::{self, Part};
use ingle_engine::kv::Span;
use ingle_engine::runner::{Runner, kv_plan_of_all};
use ingle_graph::{Activations, Inputs, KvType, Op, PAGE, PlanOptions};
use ingle_models::{Config, FAMILIES, Model};
use ingle_tensor::{Checkpoint, DType, Source, gguf::Writer, quant};
use ingle_tests::Random;
use serde_json::{Value, json};

use super::{checkpoint, fixture};
use crate::cpu;

/// A fixture's folder with another config.json, opened.
fn folder(model: &str, edit: impl FnOnce(&mut Value)) -> Arc<Checkpoint> {
    let (from, to) = (fixture(&format!("models/{model}")), tempfile::tempdir().expect("a temporary folder"));
    let text = std::fs::read(from.join("config.json")).expect("a fixture");
    let mut config: Value = serde_json::from_slice(&text).expect("a fixture");
    edit(&mut config);
    std::fs::write(to.path().join("config.json"), config.to_string()).expect("room");
    std::fs::copy(from.join("model.safetensors"), to.path().join("model.safetensors")).expect("room");
    Arc::new(Checkpoint::open(to.path()).expect("a folder"))
}

fn without(config: &mut Value, key: &str) {
    config.as_object_mut().expect("an object").remove(key);
}

/// A tensor on its way into a file.
#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn encode(name: &str, dtype: DType, shape: &[usize], values: &[f32]) -> Self {
        let cols = shape[shape.len() - 1];
        let mut bytes = vec![0; dtype.row_bytes(cols).expect("whole blocks") * values.len() / cols];
        let row_bytes = bytes.len() * cols / values.len();
        for (x, out) in values.chunks(cols).zip(bytes.chunks_mut(row_bytes)) {
            assert!(quant::encode_row(dtype, x, out), "{dtype} has an encoder");
        }
        Self { name: name.into(), dtype, shape: shape.into(), bytes }
    }

    fn decode(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        let cols = self.shape[self.shape.len() - 1];
        let row_bytes = self.dtype.row_bytes(cols).expect("whole blocks");
        for (bytes, out) in self.bytes.chunks(row_bytes).zip(out.chunks_mut(cols)) {
            quant::decode_row(self.dtype, bytes, out);
        }
        out
    }

    /// The same values as f32.
    fn widened(&self) -> Self {
        Self::encode(&self.name, DType::F32, &self.shape, &self.decode())
    }
}

fn tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let tensor = |t: &ingle_tensor::TensorInfo| Tensor {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        bytes: checkpoint.data(t).to_vec(),
    };
    checkpoint.tensors().iter().map(tensor).collect()
}

/// A GGUF file with these keys and tensors, opened.
fn gguf(keys: impl FnOnce(&mut Writer<'_>), tensors: &[Tensor]) -> Arc<Checkpoint> {
    let mut writer = Writer::new();
    keys(&mut writer);
    for t in tensors {
        writer.tensor(&t.name, t.dtype, &t.shape, t.bytes.as_slice()).expect("a fresh tensor");
    }
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    writer.write(&mut file.as_file()).expect("room for a small file");
    Arc::new(Checkpoint::open(file.path()).expect("the file just written"))
}

/// A GGUF fixture with other keys.
fn rekeyed(path: &str, except: &[&str], keys: impl FnOnce(&mut Writer<'_>)) -> Arc<Checkpoint> {
    let from = checkpoint(path);
    let copy = |writer: &mut Writer<'_>| {
        writer.copy(metadata(&from), except).expect("fresh keys");
        keys(writer);
    };
    gguf(copy, &tensors(&from))
}

fn metadata(checkpoint: &Checkpoint) -> &ingle_tensor::gguf::Metadata {
    match checkpoint.source() {
        Source::Gguf(metadata) => metadata,
        Source::SafeTensors { .. } => panic!("a GGUF file was wanted"),
    }
}

fn exact() -> PlanOptions {
    PlanOptions { activations: Activations::F32, kv: KvType::F32, ..PlanOptions::default() }
}

/// Logits after the last of `tokens`.
fn logits(checkpoint: &Arc<Checkpoint>, options: PlanOptions, tokens: &[u32]) -> Vec<f32> {
    let model = Arc::new(Model::open(checkpoint).expect("a model"));
    let kv = kv_plan_of_all(&model.graph, tokens.len(), 1);
    let spans = Span::whole(&kv);
    let strides = vec![tokens.len().div_ceil(PAGE); spans.len()];
    let mut runner = Runner::new(cpu(2, None), model, checkpoint.clone(), options, kv).expect("loads");
    let mut inputs = Inputs::default();
    for computed in (0..tokens.len()).step_by(512) {
        let n = (tokens.len() - computed).min(512);
        let part = Part { tokens, computed, n, spans: &spans, all_rows: false };
        batch::fill(&mut inputs, &[part], &strides);
        runner.run(&inputs).expect("runs");
    }
    runner.output("logits").expect("logits").to_vec()
}

const PROMPT: [u32; 12] = [5, 77, 130, 9, 301, 44, 44, 12, 450, 3, 208, 99];

/// Windows of the model's layers.
fn windows(checkpoint: &Checkpoint) -> Vec<Option<usize>> {
    let model = Model::open(checkpoint).expect("a model");
    let window = |op: &Op| match op {
        Op::Attention { spec, .. } => Some(spec.window),
        _ => None,
    };
    model.graph.nodes.iter().filter_map(|n| window(&n.op)).collect()
}

fn refused(checkpoint: &Checkpoint, words: &[&str]) {
    let error = Model::open(checkpoint).expect_err("an impossible setting").to_string();
    assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
}

/// Which layers slide, as the original configuration classes decide it.
#[test]
fn windows_of_config_json() {
    type Edit = fn(&mut Value);
    let rows: [(&str, Edit, &[Option<usize>]); 16] = [
        ("mistral", |_| (), &[Some(8); 3]),
        ("mistral", |c| c["sliding_window"] = json!(null), &[None; 3]),
        ("mistral", |c| without(c, "sliding_window"), &[Some(4096); 3]),
        ("qwen2_swa", |_| (), &[None, Some(8), Some(8)]),
        ("qwen2_swa", |c| without(c, "layer_types"), &[None, Some(8), Some(8)]),
        (
            "qwen2_swa",
            |c| {
                without(c, "layer_types");
                c["max_window_layers"] = json!(2);
            },
            &[None, None, Some(8)],
        ),
        (
            "qwen2_swa",
            |c| {
                without(c, "layer_types");
                without(c, "max_window_layers");
            },
            &[None; 3],
        ),
        ("qwen2_swa", |c| c["use_sliding_window"] = json!(false), &[None; 3]),
        ("qwen2_swa", |c| without(c, "use_sliding_window"), &[None; 3]),
        ("qwen2_swa", |c| without(c, "sliding_window"), &[None, Some(4096), Some(4096)]),
        ("qwen2_swa", |c| c["sliding_window"] = json!(null), &[None; 3]),
        // Llama's class has no window, whatever a converted file carries along.
        ("llama", |c| c["sliding_window"] = json!(8), &[None; 3]),
        ("gemma2", |_| (), &[Some(8), None, Some(8), None]),
        ("gemma2", |c| without(c, "layer_types"), &[Some(8), None, Some(8), None]),
        ("gemma3_text", |c| without(c, "layer_types"), &[Some(8); 4]),
        (
            "gemma3_text",
            |c| {
                without(c, "layer_types");
                c["sliding_window_pattern"] = json!(3);
            },
            &[Some(8), Some(8), None, Some(8)],
        ),
    ];
    for (i, (model, edit, want)) in rows.into_iter().enumerate() {
        assert_eq!(windows(&folder(model, edit)), want, "row {i}, {model}");
    }
    refused(
        &folder("qwen2_swa", |c| c["layer_types"][1] = json!("chunked_attention")),
        &["layer_types", "chunked"],
    );
    refused(
        &folder("gemma2", |c| c["layer_types"] = json!(["full_attention"])),
        &["layer_types", "1 entries"],
    );
}

/// GGUF calls Mistral llama, and mostly leaves its window out.
#[test]
fn windows_of_gguf() {
    let path = "gguf/mistral-s1/model-q8_0.gguf";
    assert_eq!(windows(&checkpoint(path)), [None; 3]);
    let set = |w: &mut Writer<'_>| w.set("llama.attention.sliding_window", &8u32).expect("a fresh key");
    assert_eq!(windows(&rekeyed(path, &[], set)), [Some(8); 3]);
    let path = "gguf/gemma2-s1/model-q8_0.gguf";
    assert_eq!(windows(&checkpoint(path)), [Some(8), None, Some(8), None]);
    let bare = rekeyed(path, &["gemma2.attention.sliding_window"], |_| ());
    assert_eq!(windows(&bare), [Some(4096), None, Some(4096), None]);
}

#[test]
fn caps_and_scales_left_unsaid() {
    let config = |c: &Checkpoint| Model::open(c).expect("a model").config;
    let caps = |c: &Checkpoint| {
        let c = config(c);
        (c.attention_softcap, c.final_softcap)
    };
    assert_eq!(caps(&folder("gemma2", |_| ())), (Some(20.0), Some(30.0)));
    let absent = folder("gemma2", |c| {
        without(c, "attn_logit_softcapping");
        without(c, "final_logit_softcapping");
    });
    assert_eq!(caps(&absent), (Some(50.0), Some(30.0)));
    assert_eq!(caps(&folder("gemma2", |c| c["attn_logit_softcapping"] = json!(null))), (None, Some(30.0)));
    assert_eq!(caps(&folder("gemma3_text", |_| ())), (None, None));
    refused(
        &folder("gemma2", |c| c["final_logit_softcapping"] = json!(-1)),
        &["final_logit_softcapping", "-1"],
    );

    let path = "gguf/gemma2-s1/model-q8_0.gguf";
    let keys = ["gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"];
    assert_eq!(caps(&rekeyed(path, &keys, |_| ())), (Some(50.0), Some(30.0)));
    // Scores are scaled by the root of the head, but by hidden / heads in the 27B model of 46 layers.
    assert_eq!(config(&checkpoint(path)).attention_scale, (1.0 / 32f64.sqrt()) as f32);
    let large =
        rekeyed(path, &["gemma2.block_count"], |w| w.set("gemma2.block_count", &46u32).expect("a fresh key"));
    let family = FAMILIES.iter().find(|f| f.name == "gemma2").expect("a row");
    assert_eq!(Config::read(&large, family).expect("settings").attention_scale, 0.25);
    assert_eq!(config(&folder("gemma2", |_| ())).attention_scale, (1.0 / 24f64.sqrt()) as f32);

    refused(&folder("gemma", |c| c["hidden_act"] = json!("relu")), &["hidden_act", "relu"]);
    refused(
        &folder("gemma", |c| c["use_bidirectional_attention"] = json!(true)),
        &["use_bidirectional_attention"],
    );
}

/// pytorch/executorch#2521: a file without a rotary base has its architecture's, never 0.
#[test]
fn executorch_2521_missing_frequency_base() {
    let bases = |c: &Checkpoint| {
        let c = Model::open(c).expect("a model").config;
        (c.rope_theta, c.rope_theta_local)
    };
    for (model, want) in [
        ("llama", (10_000.0, 10_000.0)),
        ("mistral", (10_000.0, 10_000.0)),
        ("gemma2", (10_000.0, 10_000.0)),
        ("gemma3_text", (1_000_000.0, 10_000.0)),
    ] {
        assert_eq!(bases(&folder(model, |c| without(c, "rope_parameters"))), want, "{model}");
        for bad in [json!(0), json!(0.0), json!(-1), json!(1), json!("10000")] {
            let checkpoint = folder(model, |c| {
                without(c, "rope_parameters");
                c["rope_theta"] = bad.clone();
            });
            refused(&checkpoint, &["rope_theta"]);
        }
    }
    let flat =
        folder("gemma3_text", |c| c["rope_parameters"] = json!({"rope_theta": 5e5, "rope_type": "default"}));
    assert_eq!(bases(&flat), (500_000.0, 10_000.0));
    assert_eq!(bases(&checkpoint("gguf/gemma-s1/model-q8_0.gguf")), (10_000.0, 10_000.0));

    let path = "gguf/llama-s1/model-q8_0.gguf";
    assert_eq!(bases(&rekeyed(path, &["llama.rope.freq_base"], |_| ())).0, 10_000.0);
    for bad in [0f32, -1.0, 1.0, f32::NAN, f32::INFINITY] {
        let set = |w: &mut Writer<'_>| w.set("llama.rope.freq_base", &bad).expect("a fresh key");
        refused(&rekeyed(path, &["llama.rope.freq_base"], set), &["llama.rope.freq_base"]);
    }
    for bad in [0u32, 1, 31, 34, u32::MAX] {
        let set = |w: &mut Writer<'_>| w.set("llama.rope.dimension_count", &bad).expect("a fresh key");
        refused(
            &rekeyed(path, &["llama.rope.dimension_count"], set),
            &["rope.dimension_count", &bad.to_string()],
        );
    }
    for bad in [0u32, 1, 33] {
        let set = |w: &mut Writer<'_>| w.set("llama.attention.key_length", &bad).expect("a fresh key");
        refused(&rekeyed(path, &["llama.attention.key_length"], set), &["key_length", &bad.to_string()]);
    }
}

/// Numbers that no model has, by either spelling: each is refused by its key, and none becomes a NaN in an answer.
#[test]
fn impossible_numbers_are_refused() {
    let nan = f32::NAN;
    for (path, key, bad) in [
        (
            "llama-s1",
            "llama.attention.layer_norm_rms_epsilon",
            &[0.0, -1e-5, 1.0, nan, f32::INFINITY, 1e-45][..],
        ),
        ("qwen2-s1", "qwen2.rope.scaling.factor", &[-1.0, nan, f32::INFINITY, 1e-30]),
        ("gemma2-s1", "gemma2.attn_logit_softcapping", &[-1.0, nan, f32::INFINITY, 1e-40, 1e-30, 1e30]),
        ("gemma2-s1", "gemma2.final_logit_softcapping", &[-1.0, nan, f32::NEG_INFINITY, 1e-30, 1e30]),
        (
            "llama_yarn-s1",
            "llama.rope.scaling.yarn_attn_factor",
            &[0.0, -1.0, nan, f32::INFINITY, 1e-30, 1e30],
        ),
        ("llama-s1", "llama.rope.freq_base_swa", &[0.0, 1.0, nan]),
        ("gemma3_text-s1", "gemma3.rope.freq_base_swa", &[0.0, 1.0, -5.0, nan, f32::INFINITY]),
    ] {
        for bad in bad {
            let set = |w: &mut Writer<'_>| w.set(key, bad).expect("a fresh key");
            let word = key.split('.').find(|part| ["rope", "attention"].contains(part)).unwrap_or(key);
            refused(&rekeyed(&format!("gguf/{path}/model-q8_0.gguf"), &[key], set), &["setting", word]);
        }
    }
    let path = "gguf/llama-s1/model-q8_0.gguf";
    for (key, bad) in [
        ("llama.attention.head_count", 0u32),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.value_length", 64),
        ("llama.block_count", 0),
        ("llama.context_length", 0),
        ("llama.embedding_length", 0),
        ("llama.feed_forward_length", 0),
        ("llama.vocab_size", 0),
        ("llama.attention.sliding_window_pattern", 0),
    ] {
        let set = |w: &mut Writer<'_>| w.set(key, &bad).expect("a fresh key");
        refused(&rekeyed(path, &[key], set), &[key]);
    }
    for (model, key, bad) in [
        ("llama", "rms_norm_eps", json!([0, -1e-5, 1, 1e-50, 1e300])),
        ("llama", "num_attention_heads", json!([0, -4, 2.5])),
        ("llama", "num_key_value_heads", json!([0, 3])),
        ("llama", "max_position_embeddings", json!([0, -1])),
        ("llama", "partial_rotary_factor", json!([0, -1, 2, 1e300])),
        ("llama", "vocab_size", json!([0, -1])),
        ("llama", "rope_theta", json!([0, 1, -1, 1e-300, 1e300])),
        ("gemma3_text", "rope_local_base_freq", json!([0, 1, -1, 1e-300, 1e300])),
        ("gemma3_text", "sliding_window_pattern", json!([0])),
        ("gemma2", "query_pre_attn_scalar", json!([0, -1, 1e300, 1e-300, 1e30, 1e-30])),
        ("gemma2", "attn_logit_softcapping", json!([-1, 1e300, 1e-300, 1e30, 1e-30])),
        ("gemma2", "final_logit_softcapping", json!([-1, 1e300, 1e-300, 1e30, 1e-30])),
    ] {
        for bad in bad.as_array().expect("a list") {
            refused(&folder(model, |c| c[key] = bad.clone()), &[key]);
        }
    }
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    for (key, bad) in [
        ("factor", json!([0, -1, 1e300, 1e-50, 1e-30])),
        ("original_max_position_embeddings", json!([0, -1])),
        ("beta_fast", json!([0, 0.5, 1e300])),
        ("beta_slow", json!([0, -1])),
        ("attention_factor", json!([0, -1, 1e300, 1e30, 1e-30])),
    ] {
        for bad in bad.as_array().expect("a list") {
            let mut scaling = yarn.clone();
            scaling[key] = bad.clone();
            let checkpoint = folder("llama", |c| {
                without(c, "rope_parameters");
                c["rope_scaling"] = scaling;
            });
            refused(&checkpoint, &["setting", key]);
        }
    }
}

/// EricLBuehler/mistral.rs#798, imoneoi/openchat#199: a model without an output matrix uses its embedding, held once; a
/// model that has both uses the output matrix.
#[test]
fn mistral_rs_798_tied_embeddings() {
    let held = |c: &Checkpoint| {
        let graph = Model::open(c).expect("a model").graph;
        let tables = ["token_embd.weight", "output.weight", "model.embed_tokens.weight", "lm_head.weight"];
        graph.tensors().iter().filter(|(name, _)| tables.contains(name)).count()
    };
    // GGUF without an output tensor: quantized embedding, and the same values as f32.
    let quantized = checkpoint("gguf/llama_tied_bias-s1/model-q8_0.gguf");
    assert!(quantized.get("output.weight").is_none());
    let wide: Vec<_> = tensors(&quantized).iter().map(Tensor::widened).collect();
    let copy = |w: &mut Writer<'_>| w.copy(metadata(&quantized), &[]).expect("fresh keys");
    let float = gguf(copy, &wide);
    let tied = logits(&quantized, exact(), &PROMPT);
    assert_eq!(logits(&float, exact(), &PROMPT), tied);
    // Both, the output tensor another: here twice the embedding.
    let mut both = wide.clone();
    let embedding = wide.iter().find(|t| t.name == "token_embd.weight").expect("an embedding");
    let doubled: Vec<f32> = embedding.decode().iter().map(|x| x * 2.0).collect();
    both.push(Tensor::encode("output.weight", DType::F32, &embedding.shape, &doubled));
    let both = gguf(copy, &both);
    let twice: Vec<f32> = tied.iter().map(|x| x * 2.0).collect();
    assert_eq!(logits(&both, exact(), &PROMPT), twice);
    assert_eq!((held(&quantized), held(&float), held(&both)), (1, 1, 2));

    // safetensors: the flag true, false, or absent decides nothing; what the file holds does.
    let tied = logits(&checkpoint("models/llama_tied_bias"), exact(), &PROMPT);
    let untied = logits(&checkpoint("models/llama"), exact(), &PROMPT);
    let edits: [fn(&mut Value); 3] = [
        |c| c["tie_word_embeddings"] = json!(true),
        |c| c["tie_word_embeddings"] = json!(false),
        |c| without(c, "tie_word_embeddings"),
    ];
    for edit in edits {
        let (one, two) = (folder("llama_tied_bias", edit), folder("llama", edit));
        assert_eq!((held(&one), held(&two)), (1, 2));
        assert_eq!(logits(&one, exact(), &PROMPT), tied);
        assert_eq!(logits(&two, exact(), &PROMPT), untied);
    }
}

/// Sizes of a made-up llama of one layer.
#[derive(Clone, Copy)]
struct Sizes {
    vocabulary: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn keys(self, w: &mut Writer<'_>, base: f32) {
        w.set("general.architecture", "llama").expect("a fresh key");
        for (key, n) in [
            ("block_count", 1),
            ("context_length", 16384),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ] {
            w.set(&format!("llama.{key}"), &(n as u32)).expect("a fresh key");
        }
        w.set("llama.attention.layer_norm_rms_epsilon", &1e-5f32).expect("a fresh key");
        w.set("llama.rope.freq_base", &base).expect("a fresh key");
    }

    /// Random tensors; matrices of the type that `dtype` names for them.
    fn tensors(self, dtype: impl Fn(&str) -> DType) -> Vec<Tensor> {
        let Self { vocabulary, hidden, ffn, heads, kv_heads, head_dim } = self;
        let mut random = Random::new(3);
        let mut out = Vec::new();
        for (name, shape) in [
            ("token_embd", [vocabulary, hidden]),
            ("output", [vocabulary, hidden]),
            ("blk.0.attn_q", [heads * head_dim, hidden]),
            ("blk.0.attn_k", [kv_heads * head_dim, hidden]),
            ("blk.0.attn_v", [kv_heads * head_dim, hidden]),
            ("blk.0.attn_output", [hidden, heads * head_dim]),
            ("blk.0.ffn_gate", [ffn, hidden]),
            ("blk.0.ffn_up", [ffn, hidden]),
            ("blk.0.ffn_down", [hidden, ffn]),
        ] {
            let scale = 1.5 / (shape[1] as f32).sqrt();
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| random.normal() * scale).collect();
            out.push(Tensor::encode(&format!("{name}.weight"), dtype(name), &shape, &values));
        }
        for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
            let values: Vec<f32> = (0..hidden).map(|_| 1.0 + random.normal() * 0.2).collect();
            out.push(Tensor::encode(&format!("{name}.weight"), DType::F32, &[hidden], &values));
        }
        out
    }
}

/// WestWaters/pollard-weights#103, ggml-org/llama.cpp#14996, #2143, #6614: rows that are no whole number of large blocks
/// have another type than the rest of the file. It loads, and decoded weights give the same bits.
#[test]
fn llama_cpp_6614_types_mixed_by_row_length() {
    let sizes = Sizes { vocabulary: 64, hidden: 256, ffn: 224, heads: 4, kv_heads: 2, head_dim: 64 };
    for narrow in [DType::Q8_0, DType::Q5_0] {
        let mixed = sizes.tensors(|name| if name.ends_with("ffn_down") { narrow } else { DType::Q4K });
        let wide: Vec<_> = mixed.iter().map(Tensor::widened).collect();
        let file = |tensors: &[Tensor]| gguf(|w| sizes.keys(w, 10_000.0), tensors);
        let (mixed, wide) = (file(&mixed), file(&wide));
        let prompt = PROMPT.map(|t| t % 64);
        let want = logits(&wide, exact(), &prompt);
        assert_eq!(logits(&mixed, exact(), &prompt), want, "{narrow}");
        // As it runs by default, activations are rounded to int8.
        let got = logits(&mixed, PlanOptions::default(), &prompt);
        let rms = |x: &mut dyn Iterator<Item = f32>| {
            let (n, sum) = x.fold((0, 0.0), |(n, sum), x| (n + 1, sum + x * x));
            (sum / n as f32).sqrt()
        };
        let error = rms(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        assert!(error < 0.05 * rms(&mut want.iter().copied()), "{narrow}: rms {error}");
    }
}

/// Logits of a [`Sizes`] model after the last of `tokens`, written out in f64; angles are rounded to f32 as everywhere.
fn written_out(sizes: Sizes, tensors: &[Tensor], base: f64, divisors: &[f32], tokens: &[u32]) -> Vec<f64> {
    let Sizes { hidden, heads, kv_heads, head_dim, .. } = sizes;
    let get = |name: &str| {
        let name = format!("{name}.weight");
        let tensor = tensors.iter().find(|t| t.name == name).expect("a tensor");
        tensor.decode().into_iter().map(f64::from).collect::<Vec<f64>>()
    };
    let product = |w: &[f64], x: &[f64]| -> Vec<f64> {
        w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(x, w)| x / (square + 1e-5).sqrt() * w).collect()
    };
    let rotate = |x: &mut [f64], position: usize| {
        for head in x.chunks_mut(head_dim) {
            for (i, pair) in head.chunks_mut(2).enumerate() {
                let frequency = base.powf(-2.0 * i as f64 / head_dim as f64) as f32 / divisors[i];
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
            }
        }
    };
    let embedding = get("token_embd");
    let embed = |t: u32| embedding[t as usize * hidden..][..hidden].to_vec();
    let (wq, wk, wv) = (get("blk.0.attn_q"), get("blk.0.attn_k"), get("blk.0.attn_v"));
    let attn_norm = get("blk.0.attn_norm");
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (position, &t) in tokens.iter().enumerate() {
        let h = norm(&embed(t), &attn_norm);
        let mut k = product(&wk, &h);
        rotate(&mut k, position);
        keys.push(k);
        values.push(product(&wv, &h));
    }
    let mut x = embed(tokens[tokens.len() - 1]);
    let mut q = product(&wq, &norm(&x, &attn_norm));
    rotate(&mut q, tokens.len() - 1);
    let mut attended = Vec::new();
    for (h, q) in q.chunks(head_dim).enumerate() {
        let at = h / (heads / kv_heads) * head_dim;
        let score = |k: &Vec<f64>| product(&k[at..at + head_dim], q)[0] / (head_dim as f64).sqrt();
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        attended.extend(
            (0..head_dim)
                .map(|d| values.iter().zip(&weights).map(|(v, w)| v[at + d] * w).sum::<f64>() / total),
        );
    }
    let add = |x: &mut Vec<f64>, y: Vec<f64>| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    add(&mut x, product(&get("blk.0.attn_output"), &attended));
    let h = norm(&x, &get("blk.0.ffn_norm"));
    let gated: Vec<f64> = product(&get("blk.0.ffn_gate"), &h)
        .into_iter()
        .zip(product(&get("blk.0.ffn_up"), &h))
        .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
        .collect();
    add(&mut x, product(&get("blk.0.ffn_down"), &gated));
    product(&get("output"), &norm(&x, &get("output_norm")))
}

/// mozilla-ai/llamafile#516, lablup/mlxcel#1355, vllm-project/vllm#7268, jmaczan/tiny-vllm#1, pie-project/pie#432: a GGUF
/// file's frequency factors are divisors. At position 9000 the logits are those of the model written out, and not those
/// of plain frequencies.
#[test]
fn llamafile_516_frequency_factors_at_position_9000() {
    let sizes = Sizes { vocabulary: 64, hidden: 32, ffn: 32, heads: 2, kv_heads: 1, head_dim: 16 };
    let base = 500_000.0;
    let divisors = [1.0f32, 1.0, 1.25, 2.0, 3.5, 5.0, 8.0, 8.0];
    let plain = sizes.tensors(|_| DType::F32);
    let mut random = Random::new(11);
    let tokens: Vec<u32> = (0..9001).map(|_| random.below(64) as u32).collect();
    let mut scaled = plain.clone();
    scaled.push(Tensor::encode("rope_freqs.weight", DType::F32, &[8], &divisors));
    let run = |tensors: &[Tensor]| {
        let file = gguf(|w| sizes.keys(w, base as f32), tensors);
        logits(&file, exact(), &tokens)
    };
    let distance = |got: &[f32], want: &[f64]| {
        got.iter().zip(want).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
    };
    let (got, without) = (run(&scaled), run(&plain));
    let want = written_out(sizes, &plain, base, &divisors, &tokens);
    assert!(distance(&got, &want) < 1e-3, "{}", distance(&got, &want));
    assert!(distance(&without, &want) > 0.05, "the factors change nothing: {}", distance(&without, &want));
    let want = written_out(sizes, &plain, base, &[1.0; 8], &tokens);
    assert!(distance(&without, &want) < 1e-3, "{}", distance(&without, &want));

    // As many divisors as frequencies, each positive, in floats.
    let file = |tensor: Tensor| gguf(|w| sizes.keys(w, base as f32), &[plain.as_slice(), &[tensor]].concat());
    let with = |values: &[f32]| Tensor::encode("rope_freqs.weight", DType::F32, &[values.len()], values);
    refused(&file(with(&[1.0; 7])), &["rope_freqs.weight", "7 divisors for 8"]);
    refused(&file(with(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])), &["rope_freqs.weight", "not positive"]);
    let halves: Vec<u8> = divisors.iter().flat_map(|&d| f16::from_f32(d).to_le_bytes()).collect();
    let halves = Tensor { bytes: halves, dtype: DType::F16, ..with(&divisors) };
    assert_eq!(logits(&file(halves), exact(), &tokens[..40]), {
        let file = gguf(|w| sizes.keys(w, base as f32), &scaled);
        logits(&file, exact(), &tokens[..40])
    });
}

/// huggingface/transformers#33129, unslothai/unsloth#10681, vllm-project/vllm#27431, lablup/mlxcel#1580: scalings that no
/// family here has are refused by name, in both kinds of file, and never run as plain rotation.
#[test]
fn transformers_33129_unknown_scalings_are_refused() {
    for kind in ["longrope", "su", "dynamic", "ntk"] {
        for key in ["rope_type", "type"] {
            let new = folder("llama", |c| {
                c["rope_parameters"] = json!({key: kind, "rope_theta": 1e4, "factor": 4.0})
            });
            refused(&new, &["rope_type", kind]);
            let old = folder("llama", |c| {
                without(c, "rope_parameters");
                c["rope_scaling"] = json!({key: kind, "factor": 4.0});
            });
            refused(&old, &["rope_type", kind]);
        }
        let path = "gguf/mistral-s1/model-q8_0.gguf";
        let set = |w: &mut Writer<'_>| w.set("llama.rope.scaling.type", kind).expect("a fresh key");
        refused(&rekeyed(path, &[], set), &["llama.rope.scaling.type", kind]);
    }
}

/// ml-explore/mlx-lm#1507, in GGUF: an explicit YaRN attention factor replaces the formula. The older key of linear
/// scaling counts, and a scaling of sliding layers alone is refused where the family has none.
#[test]
fn mlx_lm_1507_explicit_yarn_attention_factor_of_gguf() {
    let table = |c: &Checkpoint| Model::open(c).expect("a model").graph.ropes[0].clone();
    let path = "gguf/llama_yarn-s1/model-q8_0.gguf";
    assert_eq!(table(&checkpoint(path)).scale, 0.1 * 4f32.ln() + 1.0);
    let key = "llama.rope.scaling.yarn_attn_factor";
    let explicit = |factor: f32| rekeyed(path, &[key], |w| w.set(key, &factor).expect("a fresh key"));
    assert_eq!(table(&explicit(1.0)).scale, 1.0);
    refused(&explicit(0.0), &[key]);

    let path = "gguf/mistral-s1/model-q8_0.gguf";
    let plain = table(&checkpoint(path)).inv_freq;
    let linear = rekeyed(path, &[], |w| w.set("llama.rope.scale_linear", &4f32).expect("a fresh key"));
    assert_eq!(table(&linear).inv_freq, plain.iter().map(|f| f / 4.0).collect::<Vec<_>>());

    let local = |model: &str, local: Value| {
        folder(model, |c| {
            c["rope_parameters"] = json!({
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0}, "sliding_attention": local
            });
        })
    };
    let same = json!({"rope_type": "default", "rope_theta": 10000.0});
    assert_eq!(table(&local("gemma2", same)).inv_freq, table(&checkpoint("models/gemma2")).inv_freq);
    let other = json!({"rope_type": "default", "rope_theta": 20000.0});
    refused(&local("gemma2", other.clone()), &["sliding_attention"]);
    assert!(Model::open(&local("gemma3_text", other)).is_ok());
    let scaled = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0});
    refused(&local("gemma3_text", scaled), &["sliding_attention"]);
}
