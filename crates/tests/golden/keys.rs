//! Keys of the wrong type, in every file that has keys: each is refused by file and key, and never taken for absent. Null
//! in JSON is absent, and right values may be spelled as files spell them.

use std::path::Path;

use ingle_engine::handle::Language;
use ingle_engine::sampler::Settings;
use ingle_models::{Config, Model};
use ingle_tensor::Checkpoint;
use ingle_tensor::gguf::Writer;
use ingle_tests::attack::seeds::{self, File};
use serde_json::{Value, json};
use tempfile::TempDir;

/// All that a model's small files say.
#[derive(Debug, PartialEq)]
struct Said {
    config: Config,
    defaults: Settings,
    /// Begin token, end token, all that end a reply.
    ids: (Option<u32>, Option<u32>, Vec<u32>),
    prompt: Vec<u32>,
    has_template: bool,
}

fn said(path: &Path) -> Result<Said, String> {
    let checkpoint = Checkpoint::open(path).map_err(|e| e.to_string())?;
    let config = Model::open(&checkpoint).map_err(|e| e.to_string())?.config;
    let language = Language::open(&checkpoint).map_err(|e| e.to_string())?;
    let tokenizer = language.tokenizer();
    Ok(Said {
        config,
        defaults: language.defaults().clone(),
        ids: (tokenizer.bos(), tokenizer.eos(), tokenizer.eog().to_vec()),
        prompt: language.completion("the hiss").map_err(|e| e.to_string())?,
        has_template: language.template().map_err(|e| e.to_string())?.is_some(),
    })
}

/// A folder in which one file varies.
struct Folder {
    dir: TempDir,
    file: &'static str,
    /// What the file holds at first; an empty object where it is not there.
    first: Value,
}

impl Folder {
    fn new(files: Vec<File>, file: &'static str) -> Self {
        let dir = TempDir::new().expect("a temporary folder");
        let mut first = json!({});
        for (name, bytes) in files {
            if name == file {
                first = serde_json::from_slice(&bytes).expect("JSON");
            }
            std::fs::write(dir.path().join(name), bytes).expect("room");
        }
        Self { dir, file, first }
    }

    /// What is said when the file holds `text`.
    fn with_text(&self, text: &str) -> Result<Said, String> {
        std::fs::write(self.dir.path().join(self.file), text).expect("room");
        said(self.dir.path())
    }

    /// The same with another value at `key`, or none; dots lead into objects.
    fn with(&self, key: &str, value: Option<&Value>) -> Result<Said, String> {
        let mut file = self.first.clone();
        put(&mut file, key, value);
        self.with_text(&file.to_string())
    }

    /// The file is refused by its name and `key`, whichever of these values the key has.
    fn refuses(&self, key: &str, wrong: &Value) {
        for value in wrong.as_array().expect("a list of wrong values") {
            let problem = match self.with(key, Some(value)) {
                Err(problem) => problem,
                Ok(said) => panic!("{}: {key} = {value} is taken: {said:?}", self.file),
            };
            for word in [self.file, key, "want", "found"] {
                assert!(problem.contains(word), "{key} = {value}: {problem:?} lacks {word:?}");
            }
        }
    }

    /// Null at `key` is as no such key.
    fn takes_null_for_absent(&self, key: &str) {
        match (self.with(key, Some(&Value::Null)), self.with(key, None)) {
            (Ok(null), Ok(absent)) => assert_eq!(null, absent, "{}: {key}", self.file),
            (Err(null), Err(absent)) => {
                assert!(null == absent || null.contains(self.file) && null.contains(key), "{key}: {null}");
            }
            (null, absent) => panic!("{}: {key}: null {null:?}, absent {absent:?}", self.file),
        }
    }
}

fn put(file: &mut Value, key: &str, value: Option<&Value>) {
    match key.split_once('.') {
        Some((outer, inner)) => {
            if !file[outer].is_object() {
                file[outer] = json!({});
            }
            put(&mut file[outer], inner, value);
        }
        None => {
            let file = file.as_object_mut().expect("an object");
            match value {
                Some(value) => drop(file.insert(key.into(), value.clone())),
                None => drop(file.remove(key)),
            }
        }
    }
}

fn counts() -> Value {
    json!([true, "x", "64", [], [1], {}, {"a": 1}, -1, 1.5, 9_223_372_036_854_775_808u64, 1e300])
}

fn numbers() -> Value {
    json!([true, "x", "1e-5", [], [1.0], {}])
}

fn flags() -> Value {
    json!([3, 0, "true", [], [true], {}])
}

fn texts() -> Value {
    json!([true, 3, [], ["silu"], {}])
}

fn objects() -> Value {
    json!([true, -1, "", "llama3", [], [{}]])
}

fn ids() -> Value {
    json!([true, "", "1", {}, -1, 1.5, 9_223_372_036_854_775_808u64, [""], [null], [-1], [[1]], [1, {}]])
}

/// Keys of config.json that every family is asked for, or some.
fn config_keys() -> Vec<(String, Value)> {
    let lists = json!([true, 3, "x", {}, [3], [null], [["x"]], 9_223_372_036_854_775_808u64]);
    let mut keys = Vec::new();
    let mut add = |names: &[&str], wrong: Value| {
        keys.extend(names.iter().map(|name| (name.to_string(), wrong.clone())));
    };
    add(
        &[
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "vocab_size",
            "sliding_window",
            "sliding_window_pattern",
            "max_window_layers",
            "num_experts",
        ],
        counts(),
    );
    add(
        &[
            "rms_norm_eps",
            "rope_theta",
            "rope_local_base_freq",
            "partial_rotary_factor",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ],
        numbers(),
    );
    add(
        &[
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "use_sliding_window",
            "is_causal",
            "use_bidirectional_attention",
        ],
        flags(),
    );
    add(&["model_type", "hidden_act", "hidden_activation"], texts());
    add(&["architectures", "layer_types"], lists);
    add(&["bos_token_id", "eos_token_id", "text_config.bos_token_id", "text_config.eos_token_id"], ids());
    add(
        &[
            "rope_parameters",
            "rope_parameters.full_attention",
            "rope_parameters.sliding_attention",
            "rope_scaling",
            "text_config",
        ],
        objects(),
    );
    for object in ["rope_parameters", "rope_parameters.full_attention", "rope_parameters.sliding_attention"] {
        add(&[&format!("{object}.rope_theta")], numbers());
    }
    for object in [
        "rope_parameters",
        "rope_parameters.full_attention",
        "rope_parameters.sliding_attention",
        "rope_scaling",
    ] {
        for key in [
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ] {
            add(&[&format!("{object}.{key}")], numbers());
        }
        add(&[&format!("{object}.rope_type"), &format!("{object}.type")], texts());
        add(&[&format!("{object}.truncate")], flags());
    }
    keys
}

/// The seeds' folder, its settings in `file`; with `older`, rope settings as they were written before.
fn with_config(file: &'static str, older: bool) -> Folder {
    let mut files = seeds::folder(false);
    let (name, bytes) = files.iter_mut().find(|(name, _)| name == "config.json").expect("a config");
    *name = file.into();
    if older {
        let mut config: Value = serde_json::from_slice(bytes).expect("JSON");
        let mut scaling = config["rope_parameters"].take();
        config["rope_theta"] = scaling["rope_theta"].take();
        config["rope_scaling"] = scaling;
        *bytes = config.to_string().into_bytes();
    }
    Folder::new(files, file)
}

#[test]
fn keys_of_config_json() {
    for (file, older) in [("config.json", false), ("config.legacy.json", true)] {
        let folder = with_config(file, older);
        let plain = folder.with("no_such_key", None).expect("the seed");
        assert_eq!(plain.ids, (Some(0), Some(1), vec![1]));
        for (key, wrong) in config_keys() {
            let in_scaling = key.starts_with("rope_scaling.");
            if older || !in_scaling {
                folder.refuses(&key, &wrong);
            }
            folder.takes_null_for_absent(&key);
        }
        // Right values, in the spellings that files have.
        for (key, value) in [
            ("max_position_embeddings", json!(64.0)),
            ("hidden_size", json!(32.0)),
            ("vocab_size", json!(20)),
            ("rms_norm_eps", json!(0.00001)),
            ("architectures", json!(["LlamaForCausalLM"])),
            ("tie_word_embeddings", json!(false)),
            ("tie_word_embeddings", json!(true)),
            ("attention_bias", json!(false)),
            ("sliding_window", json!(null)),
            ("layer_types", json!(["full_attention"])),
            ("hidden_act", json!("silu")),
            ("bos_token_id", json!([0])),
            ("eos_token_id", json!([1.0])),
            ("text_config", json!({"eos_token_id": [1, 1]})),
            ("torch_dtype", json!("bfloat16")),
            ("torch_dtype", json!("torch.float32")),
            ("torch_dtype", json!({"": "float16"})),
            ("dtype", json!(null)),
            ("quantization_config", json!({"quant_method": "none"})),
            ("unheard_of", json!([{}, 3])),
        ] {
            assert_eq!(folder.with(key, Some(&value)).as_ref(), Ok(&plain), "{file}: {key} = {value}");
        }
        let theta = if older { "rope_theta" } else { "rope_parameters.rope_theta" };
        let other = folder.with(theta, Some(&json!(1e6))).expect("a base");
        assert_eq!(folder.with(theta, Some(&json!(1_000_000))), Ok(other));
        assert_ne!(folder.with(theta, None), Ok(plain));
    }
}

/// An entry for layers of a type that no family here has would otherwise leave the rope plain.
#[test]
fn rope_settings_of_unknown_layers() {
    let folder = with_config("config.json", false);
    let problem = folder.with("rope_parameters.chunked_attention.factor", Some(&json!(8.0))).unwrap_err();
    for word in ["config.json", "rope_parameters.chunked_attention", "full_attention, sliding_attention"] {
        assert!(problem.contains(word), "{problem}");
    }
}

/// A count that is too small left layers out, and the model answered otherwise.
#[test]
fn fewer_layers_than_the_file_has() {
    let dir = TempDir::new().expect("a temporary folder");
    for file in std::fs::read_dir(super::fixture("models/llama")).expect("the fixture") {
        let file = file.expect("a file").path();
        std::fs::copy(&file, dir.path().join(file.file_name().expect("a name"))).expect("room");
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("settings")).expect("JSON");
    let layers = config["num_hidden_layers"].as_u64().expect("a count");
    let open = || {
        Model::open(&Checkpoint::open(dir.path()).expect("a folder")).map(|_| ()).map_err(|e| e.to_string())
    };
    open().expect("the fixture as it is");
    config["num_hidden_layers"] = json!(layers - 1);
    std::fs::write(&path, config.to_string()).expect("room");
    let problem = open().unwrap_err();
    let last = format!("model.layers.{}.", layers - 1);
    for word in ["config.json", "num_hidden_layers", &last] {
        assert!(problem.contains(word), "{problem}");
    }
}

/// A file that says that it has biases and has none ran without them.
#[test]
fn biases_that_are_not_there() {
    let folder = with_config("config.json", false);
    for (key, tensor) in [("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.gate_proj.bias")] {
        let problem = folder.with(key, Some(&json!(true))).unwrap_err();
        for word in ["config.json", key, "true", tensor, "fetch the weights again"] {
            assert!(problem.contains(word), "{problem}");
        }
    }
}

#[test]
fn keys_of_tokenizer_config_json() {
    let folder = Folder::new(seeds::folder(false), "tokenizer_config.json");
    let plain = folder.with("no_such_key", None).expect("the seed");
    let tokens = json!([true, 3, [], ["<s>"], {}, {"content": 3}, {"content": null}, {"content": {}}]);
    let templates = json!([true, 3, {}, {"default": "x"}, ["x"], [3], [{}], [{"name": "default"}],
        [{"name": 3, "template": "x"}], [{"name": "default", "template": ["x"]}]]);
    for (key, wrong) in [
        ("bos_token", tokens.clone()),
        ("eos_token", tokens),
        ("chat_template", templates.clone()),
        ("add_bos_token", flags()),
        ("add_eos_token", flags()),
    ] {
        folder.refuses(key, &wrong);
        folder.takes_null_for_absent(key);
    }
    for (key, value) in [
        ("bos_token", json!({"__type": "AddedToken", "content": "<s>", "lstrip": false})),
        ("eos_token", json!("</s>")),
        ("chat_template", json!([{"name": "default", "template": seeds::TEMPLATE}])),
        ("add_bos_token", json!(true)),
        ("pad_token", json!(null)),
        ("model_max_length", json!(1e30)),
    ] {
        assert_eq!(folder.with(key, Some(&value)).as_ref(), Ok(&plain), "{key} = {value}");
    }
    assert!(!folder.with("chat_template", None).expect("a base model").has_template);
    let folder = Folder::new(seeds::folder(false), "chat_template.json");
    folder.refuses("chat_template", &templates);
    folder.takes_null_for_absent("chat_template");
}

#[test]
fn keys_of_generation_config_json() {
    let folder = Folder::new(seeds::folder(false), "generation_config.json");
    let plain = folder.with("no_such_key", None).expect("the seed");
    assert_eq!((plain.defaults.temperature, plain.defaults.top_k), (Some(0.7), Some(5)));
    for key in ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty"] {
        folder.refuses(key, &numbers());
        folder.takes_null_for_absent(key);
    }
    for (key, wrong) in [
        ("top_k", json!([true, "5", [], {}, 5.5, 1e300])),
        ("do_sample", flags()),
        ("bos_token_id", ids()),
        ("eos_token_id", ids()),
    ] {
        folder.refuses(key, &wrong);
        folder.takes_null_for_absent(key);
    }
    for (key, value) in [
        ("temperature", json!(0.7)),
        ("top_k", json!(5.0)),
        ("do_sample", json!(true)),
        ("eos_token_id", json!(1)),
        ("bos_token_id", json!(0)),
        ("pad_token_id", json!(-1)),
    ] {
        assert_eq!(folder.with(key, Some(&value)).as_ref(), Ok(&plain), "{key} = {value}");
    }
    assert_eq!(
        folder.with("do_sample", Some(&json!(false))).expect("greedy").defaults.temperature,
        Some(0.0)
    );
}

/// The parts of tokenizer.json; what is inside them is the `tokenizers` crate's to check.
#[test]
fn keys_of_tokenizer_json() {
    let folder = Folder::new(seeds::folder(false), "tokenizer.json");
    folder.refuses("model", &json!([null, true, 3, "BPE", []]));
    folder.refuses("added_tokens", &json!([true, 3, "<s>", {}, [3], ["<s>"], [null]]));
    for key in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        folder.refuses(key, &objects());
    }
    folder.takes_null_for_absent("normalizer");
    folder.takes_null_for_absent("post_processor");
    // Inside them: whatever the crate says, it is an error.
    for (key, wrong) in [
        ("model.vocab", json!([null, 3, "x", [], ["a"], {"a": "b"}])),
        ("model.merges", json!([3, "x", {}, [3], [["a"]]])),
        ("model.byte_fallback", json!([3, "x", [], {}])),
        ("model.ignore_merges", json!([3, "x", [], {}])),
        ("decoder.type", json!([null, 3, "x", [], {}])),
        ("pre_tokenizer.pretokenizers", json!([3, "x", {}, [3], [{}]])),
    ] {
        for value in wrong.as_array().expect("a list of wrong values") {
            folder.with(key, Some(value)).expect_err(&format!("{key} = {value}"));
        }
    }
}

#[test]
fn keys_of_an_index() {
    let file = "model.safetensors.index.json";
    let folder = Folder::new(seeds::folder(true), file);
    folder.with("metadata", Some(&json!(null))).expect("the seed");
    let refused = |key: &str, value: Option<&Value>| {
        let problem = folder.with(key, value).expect_err("a wrong map");
        assert!(problem.contains(file) && problem.contains("weight_map"), "{key} = {value:?}: {problem}");
    };
    refused("weight_map", None);
    for value in [json!(null), json!(true), json!(3), json!("a.safetensors"), json!([]), json!([{}])] {
        refused("weight_map", Some(&value));
    }
    let name = "model.norm.weight";
    for value in [json!(null), json!(true), json!(3), json!([]), json!(["a.safetensors"]), json!({})] {
        let mut index = folder.first.clone();
        index["weight_map"][name] = value.clone();
        let problem = folder.with_text(&index.to_string()).expect_err("a wrong file");
        for word in [file, "weight_map", name, "file name"] {
            assert!(problem.contains(word), "{value}: {problem:?} lacks {word:?}");
        }
    }
    let map = folder.first["weight_map"].to_string();
    for text in [format!("[{map}]"), format!("{{\"weight_map\":{map},\"weight_map\":{map}}}")] {
        let problem = folder.with_text(&text).expect_err("a wrong index");
        assert!(problem.contains(file) && problem.contains("weight_map"), "{problem}");
    }
}

#[test]
fn files_that_hold_no_object() {
    for file in [
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    ] {
        let folder = Folder::new(seeds::folder(file.ends_with("index.json")), file);
        for text in ["null", "[]", "[{}]", "3", "true", "\"{}\"", "", "{"] {
            let problem = folder.with_text(text).expect_err("no object");
            assert!(problem.contains(file), "{file} of {text:?}: {problem}");
        }
    }
}

/// Sets a key to a value of some type.
type Set = fn(&mut Writer<'_>, &str);

macro_rules! set {
    ($value:expr) => {
        |w, key| w.set(key, $value).expect("a fresh key")
    };
}

const COUNTS: &[Set] = &[
    set!("64"),
    set!(&64f32),
    set!(&true),
    set!(&[64u32]),
    set!(&-1i32),
    set!(&(1u64 << 63)),
    set!(&["64"]),
];
const NUMBERS: &[Set] = &[set!("1.0"), set!(&true), set!(&[1f32]), set!(&["1.0"])];
const FLAGS: &[Set] = &[set!("true"), set!(&1u32), set!(&1f32), set!(&[true])];
const TEXTS: &[Set] = &[set!(&1u32), set!(&1f32), set!(&true), set!(&["llama"])];
const LISTS: &[Set] = &[set!("a"), set!(&1u32), set!(&1f32), set!(&true), set!(&[[1u32]])];

/// Keys of a GGUF file that the model and the tokenizer are asked for, with values of other types. `byte_level` says which
/// of the two seeds has them.
fn gguf_keys(byte_level: bool) -> Vec<(&'static str, &'static [Set])> {
    let mut keys: Vec<(&str, &[Set])> = Vec::new();
    let mut add = |names: &[&'static str], wrong: &'static [Set]| {
        keys.extend(names.iter().map(|name| (*name, wrong)));
    };
    add(
        &[
            "llama.block_count",
            "llama.context_length",
            "llama.embedding_length",
            "llama.feed_forward_length",
            "llama.vocab_size",
            "llama.expert_count",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.attention.sliding_window",
            "llama.attention.sliding_window_pattern",
            "llama.rope.dimension_count",
            "llama.rope.scaling.original_context_length",
            "tokenizer.ggml.bos_token_id",
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        ],
        COUNTS,
    );
    add(
        &[
            "llama.attention.layer_norm_rms_epsilon",
            "llama.attn_logit_softcapping",
            "llama.final_logit_softcapping",
            "llama.rope.freq_base",
            "llama.rope.freq_base_swa",
            "llama.rope.scale_linear",
            "llama.rope.scaling.factor",
            "llama.rope.scaling.yarn_attn_factor",
            "llama.rope.scaling.yarn_beta_fast",
            "llama.rope.scaling.yarn_beta_slow",
            "general.sampling.temp",
            "general.sampling.top_p",
            "general.sampling.min_p",
            "general.sampling.penalty_repeat",
            "general.sampling.xtc_probability",
            "general.sampling.xtc_threshold",
            "general.sampling.mirostat_tau",
            "general.sampling.mirostat_eta",
        ],
        NUMBERS,
    );
    add(
        &[
            "llama.attention.causal",
            "llama.use_sliding_window",
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.add_eos_token",
        ],
        FLAGS,
    );
    add(
        &[
            "general.architecture",
            "general.type",
            "llama.rope.scaling.type",
            "tokenizer.ggml.model",
            "tokenizer.chat_template",
            "tokenizer.chat_template.tool_use",
        ],
        TEXTS,
    );
    add(&["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"], LISTS);
    add(
        &["general.sampling.top_k", "general.sampling.penalty_last_n", "general.sampling.mirostat"],
        &[set!("5"), set!(&5f32), set!(&true), set!(&[5i32])],
    );
    if byte_level {
        add(&["tokenizer.ggml.merges"], LISTS);
        add(&["tokenizer.ggml.pre"], TEXTS);
    } else {
        add(&["tokenizer.ggml.scores"], LISTS);
        add(&["tokenizer.ggml.unknown_token_id"], COUNTS);
        add(&["tokenizer.ggml.add_space_prefix"], FLAGS);
    }
    keys
}

#[test]
fn keys_of_gguf() {
    for byte_level in [false, true] {
        let dir = TempDir::new().expect("a temporary folder");
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, seeds::gguf(byte_level)).expect("room");
        let seed = Checkpoint::open(&path).expect("the seed");
        let ingle_tensor::Source::Gguf(metadata) = seed.source() else { panic!("the seed is GGUF") };
        let other = dir.path().join("changed.gguf");
        let with = |key: &str, set: Set| {
            let mut w = Writer::new();
            w.copy(metadata, &[key]).expect("fresh keys");
            set(&mut w, key);
            for tensor in seed.tensors() {
                w.tensor(&tensor.name, tensor.dtype, &tensor.shape, seed.data(tensor))
                    .expect("a fresh tensor");
            }
            std::fs::write(&other, w.to_bytes()).expect("room");
            said(&other)
        };
        let plain = said(&path).expect("the seed");
        for (key, wrong) in gguf_keys(byte_level) {
            for (i, &set) in wrong.iter().enumerate() {
                let problem = match with(key, set) {
                    Err(problem) => problem,
                    Ok(said) => panic!("{key}, value {i} is taken: {said:?}"),
                };
                for word in ["changed.gguf", key, "wanted"] {
                    assert!(problem.contains(word), "{key}, value {i}: {problem:?} lacks {word:?}");
                }
            }
        }
        // Right values, in any width.
        for (key, set) in [
            ("llama.context_length", set!(&64u64) as Set),
            ("llama.context_length", set!(&64u8)),
            ("llama.attention.head_count", set!(&2i32)),
            ("llama.rope.freq_base", set!(&10000f64)),
            ("llama.vocab_size", set!(&20u32)),
            ("general.file_type", set!(&[1u32])),
        ] {
            assert_eq!(with(key, set).as_ref(), Ok(&plain), "{key}");
        }
    }
}
