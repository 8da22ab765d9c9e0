//! Small valid models, made in code: one llama layer in as many formats as it has matrices, with a tokenizer and a chat
//! template, as a GGUF file and as a safetensors folder.

use ingle_tensor::gguf::Writer;
use ingle_tensor::{DType, quant};
use serde_json::{Value as Json, json};

use crate::Random;

/// Width of the residual stream and of the feed-forward layer.
const HIDDEN: usize = 32;
/// Columns of keys and values.
const KV: usize = 16;

/// A file of a folder: its name and its bytes.
pub type File = (String, Vec<u8>);

/// The chat template of both.
pub const TEMPLATE: &str = "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}\n{% endfor %}\
    {% if add_generation_prompt %}<s>assistant {% endif %}";

/// `rows * cols` seeded values of standard deviation 0.1, stored as `dtype`.
pub fn values(dtype: DType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let values: Vec<f32> = (0..rows * cols).map(|_| 0.1 * random.normal()).collect();
    encoded(dtype, cols, &values)
}

/// Values in rows of `cols`, stored as `dtype`, which is no integer type.
pub fn encoded(dtype: DType, cols: usize, values: &[f32]) -> Vec<u8> {
    let row = dtype.row_bytes(cols).expect("rows that blocks tile");
    let mut bytes = vec![0; values.len() / cols * row];
    for (values, bytes) in values.chunks_exact(cols).zip(bytes.chunks_exact_mut(row)) {
        assert!(quant::encode_row(dtype, values, bytes), "{dtype} is stored");
    }
    bytes
}

/// GGUF names, Hugging Face names, shapes and formats of the tensors of a model with `vocabulary` tokens.
fn tensors(vocabulary: usize) -> [(&'static str, &'static str, Vec<usize>, DType); 12] {
    use DType::*;
    let matrix = |rows: usize| vec![rows, HIDDEN];
    let norm = || vec![HIDDEN];
    [
        ("token_embd.weight", "model.embed_tokens.weight", matrix(vocabulary), F16),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", norm(), F32),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", matrix(HIDDEN), Q8_0),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", matrix(KV), Q4_0),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", matrix(KV), F32),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", matrix(HIDDEN), BF16),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", norm(), F32),
        ("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", matrix(HIDDEN), Q5_1),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", matrix(HIDDEN), Q4_1),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", matrix(HIDDEN), IQ4NL),
        ("output_norm.weight", "model.norm.weight", norm(), F32),
        ("output.weight", "lm_head.weight", matrix(vocabulary), Q5_0),
    ]
}

/// Bytes of a tensor: seeded values, or ones for a norm.
fn content(shape: &[usize], dtype: DType, seed: u64) -> Vec<u8> {
    match shape {
        [rows, cols] => values(dtype, *rows, *cols, seed),
        _ => encoded(dtype, shape[0], &vec![1.0; shape[0]]),
    }
}

/// Tokens of a small SentencePiece vocabulary, their types and their scores.
fn pieces() -> (Vec<String>, Vec<i32>, Vec<f32>) {
    let mut tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>"].map(String::from).to_vec();
    let mut types = vec![2, 3, 3, 6, 6];
    for piece in ["\u{2581}", "a", "e", "h", "i", "s", "t", "r", "n", "u", "he", "th", "is", "\u{2581}h"] {
        tokens.push(piece.into());
        types.push(1);
    }
    tokens.push("<|x|>".into());
    types.push(4);
    let scores = (0..tokens.len()).map(|i| -(i as f32)).collect();
    (tokens, types, scores)
}

/// Tokens and merges of a small byte-level vocabulary.
fn byte_pairs() -> (Vec<&'static str>, Vec<i32>, Vec<&'static str>) {
    let tokens = vec![
        "<s>", "</s>", "<|x|>", "\u{120}", "\u{10A}", "a", "e", "h", "i", "s", "t", "r", "n", "u", "th",
        "the", "\u{120}h", "is", "\u{C3}", "\u{A9}",
    ];
    let mut types = vec![1; tokens.len()];
    types[..3].copy_from_slice(&[3, 3, 4]);
    (tokens, types, vec!["t h", "th e", "\u{120} h", "i s"])
}

/// A model of one layer as GGUF: with a SentencePiece vocabulary, or a byte-level one.
pub fn gguf(byte_level: bool) -> Vec<u8> {
    let mut w = Writer::new();
    write_settings(&mut w, byte_level);
    let vocabulary = write_tokenizer(&mut w, byte_level);
    for (seed, (name, _, shape, dtype)) in tensors(vocabulary).into_iter().enumerate() {
        w.tensor(name, dtype, &shape, content(&shape, dtype, seed as u64)).expect("a valid tensor");
    }
    w.to_bytes()
}

/// A GGUF file without tensors: the tokenizer alone.
pub fn gguf_vocabulary(byte_level: bool) -> Vec<u8> {
    let mut w = Writer::new();
    w.set("general.architecture", "llama").expect("a new key");
    write_tokenizer(&mut w, byte_level);
    w.to_bytes()
}

fn write_settings(w: &mut Writer<'_>, byte_level: bool) {
    let set = |w: &mut Writer<'_>, key: &str, n: usize| w.set(key, &(n as u32)).expect("a new key");
    w.set("general.architecture", "llama").expect("a new key");
    w.set("general.type", "model").expect("a new key");
    w.set("general.alignment", &32u32).expect("a new key");
    set(w, "llama.block_count", 1);
    set(w, "llama.context_length", 64);
    set(w, "llama.embedding_length", HIDDEN);
    set(w, "llama.feed_forward_length", HIDDEN);
    set(w, "llama.attention.head_count", 2);
    set(w, "llama.attention.head_count_kv", 1);
    set(w, "llama.rope.dimension_count", KV);
    w.set("llama.rope.freq_base", &10000f32).expect("a new key");
    w.set("llama.attention.layer_norm_rms_epsilon", &1e-5f32).expect("a new key");
    if byte_level {
        w.set("llama.rope.scaling.type", "yarn").expect("a new key");
        w.set("llama.rope.scaling.factor", &2f32).expect("a new key");
        set(w, "llama.rope.scaling.original_context_length", 32);
    }
}

fn write_tokenizer(w: &mut Writer<'_>, byte_level: bool) -> usize {
    let tokens = if byte_level {
        let (tokens, types, merges) = byte_pairs();
        w.set("tokenizer.ggml.model", "gpt2").expect("a new key");
        w.set("tokenizer.ggml.pre", "llama-bpe").expect("a new key");
        w.set("tokenizer.ggml.tokens", &tokens).expect("a new key");
        w.set("tokenizer.ggml.token_type", &types).expect("a new key");
        w.set("tokenizer.ggml.merges", &merges).expect("a new key");
        w.set("tokenizer.ggml.bos_token_id", &0u32).expect("a new key");
        w.set("tokenizer.ggml.eos_token_id", &1u32).expect("a new key");
        tokens.len()
    } else {
        let (tokens, types, scores) = pieces();
        w.set("tokenizer.ggml.model", "llama").expect("a new key");
        w.set("tokenizer.ggml.tokens", &tokens).expect("a new key");
        w.set("tokenizer.ggml.token_type", &types).expect("a new key");
        w.set("tokenizer.ggml.scores", &scores).expect("a new key");
        w.set("tokenizer.ggml.unknown_token_id", &0u32).expect("a new key");
        w.set("tokenizer.ggml.bos_token_id", &1u32).expect("a new key");
        w.set("tokenizer.ggml.eos_token_id", &2u32).expect("a new key");
        w.set("tokenizer.ggml.add_bos_token", &true).expect("a new key");
        tokens.len()
    };
    w.set("tokenizer.chat_template", TEMPLATE).expect("a new key");
    tokens
}

/// Tokens of the folder's vocabulary.
const FOLDER_TOKENS: usize = 20;

/// The same model as a safetensors folder: weights, config.json, tokenizer.json and what stands beside them.
/// `sharded` puts the weights into two files with an index.
pub fn folder(sharded: bool) -> Vec<File> {
    let list: Vec<_> = tensors(FOLDER_TOKENS)
        .into_iter()
        .enumerate()
        .map(|(seed, (_, name, shape, dtype))| {
            let dtype = if dtype.safetensors_name().is_some() { dtype } else { DType::BF16 };
            let bytes = content(&shape, dtype, seed as u64);
            (name, dtype, shape, bytes)
        })
        .collect();
    let mut files = Vec::new();
    if sharded {
        let (first, second) = list.split_at(5);
        let map: serde_json::Map<String, Json> = [(first, "a.safetensors"), (second, "b.safetensors")]
            .iter()
            .flat_map(|(part, file)| part.iter().map(move |t| (t.0.to_string(), json!(file))))
            .collect();
        files.push(("a.safetensors".into(), weights(first)));
        files.push(("b.safetensors".into(), weights(second)));
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
        files.push(("model.safetensors.index.json".into(), index.to_string().into_bytes()));
    } else {
        files.push(("model.safetensors".into(), weights(&list)));
    }
    for (name, json) in [
        ("config.json", config()),
        ("tokenizer.json", tokenizer()),
        (
            "tokenizer_config.json",
            json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}),
        ),
        (
            "generation_config.json",
            json!({"eos_token_id": [1], "temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        ),
    ] {
        files.push((name.into(), json.to_string().into_bytes()));
    }
    files
}

fn weights(tensors: &[(&str, DType, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let dtype = dtype.safetensors_name().expect("a type of this format");
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Json::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

fn config() -> Json {
    json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": KV, "intermediate_size": HIDDEN, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "vocab_size": FOLDER_TOKENS, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16, "rope_theta": 5000.0
        }
    })
}

fn tokenizer() -> Json {
    let (tokens, types, merges) = byte_pairs();
    let vocabulary: serde_json::Map<String, Json> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).into(), json!(id))).collect();
    let added: Vec<Json> = tokens
        .iter()
        .zip(types)
        .enumerate()
        .filter(|(_, (_, kind))| *kind != 1)
        .map(|(id, (token, kind))| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": id == 2,
                "normalized": kind == 4, "special": kind == 3
            })
        })
        .collect();
    let pattern = "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)|\\s+";
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
        ]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges}
    })
}
