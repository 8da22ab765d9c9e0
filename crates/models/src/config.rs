//! A model's settings, from GGUF metadata or from config.json (in today's keys or the older ones), in one shape.

use ingle_graph::op::RopeStyle;
use ingle_tensor::{Checkpoint, Source, gguf::Metadata};
use serde_json::Value;

use crate::names::{Names, Style};
use crate::rope::Scaling;
use crate::{Error, Family, Result};

/// Settings of a model. Counts are elements unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Family name.
    pub family: &'static str,
    /// Tensor names.
    pub names: Names,
    /// Rows of the embedding table.
    pub vocabulary: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Rotary base.
    pub rope_theta: f64,
    /// Rotary base of sliding-window layers, where it differs.
    pub rope_theta_local: f64,
    /// Elements of a head that rotate.
    pub rope_dim: usize,
    /// Rotary scaling.
    pub rope_scaling: Scaling,
    /// Rotary pairing of this file.
    pub rope_style: RopeStyle,
    /// Sliding window in tokens, if any layer has one.
    pub window: Option<usize>,
    /// Which layers slide.
    pub slides: Vec<bool>,
    /// Factor on attention scores.
    pub attention_scale: f32,
    /// Cap of attention scores.
    pub attention_softcap: Option<f32>,
    /// Cap of the logits.
    pub final_softcap: Option<f32>,
    /// Added to norm weights when the file stores them as offsets from one.
    pub norm_offset: f32,
}

/// Settings of one source, by their GGUF key (under the architecture's prefix) or config.json key.
enum Keys<'a> {
    Gguf(&'a Metadata, String),
    Json(&'a Value),
}

fn setting(key: impl Into<String>, what: impl Into<String>) -> Error {
    Error::Setting { key: key.into(), what: what.into() }
}

impl Keys<'_> {
    fn f64_opt(&self, gguf: &str, json: &str) -> Result<Option<f64>> {
        match self {
            Keys::Gguf(m, prefix) => Ok(m.f32_opt(&format!("{prefix}.{gguf}"))?.map(f64::from)),
            Keys::Json(v) => match v.get(json) {
                None | Some(Value::Null) => Ok(None),
                Some(v) => {
                    v.as_f64().map(Some).ok_or_else(|| setting(json, format!("want a number, found {v}")))
                }
            },
        }
    }

    fn usize_opt(&self, gguf: &str, json: &str) -> Result<Option<usize>> {
        match self {
            Keys::Gguf(m, prefix) => Ok(m.u32_opt(&format!("{prefix}.{gguf}"))?.map(|v| v as usize)),
            Keys::Json(v) => match v.get(json) {
                None | Some(Value::Null) => Ok(None),
                Some(v) => match v.as_u64() {
                    Some(n) if n <= u64::from(u32::MAX) => Ok(Some(n as usize)),
                    _ => Err(setting(json, format!("want a count, found {v}"))),
                },
            },
        }
    }

    fn name(&self, gguf: &str, json: &str) -> String {
        match self {
            Keys::Gguf(_, prefix) => format!("{prefix}.{gguf}"),
            Keys::Json(_) => json.to_string(),
        }
    }

    fn usize(&self, gguf: &str, json: &str) -> Result<usize> {
        match self.usize_opt(gguf, json)? {
            Some(0) => Err(setting(self.name(gguf, json), "is 0")),
            Some(n) => Ok(n),
            None => Err(setting(self.name(gguf, json), "is missing")),
        }
    }
}

impl Config {
    /// Reads the settings of a checkpoint of this family.
    ///
    /// # Errors
    /// A missing or impossible setting, by its key.
    pub fn read(checkpoint: &Checkpoint, family: &Family) -> Result<Self> {
        let (keys, style) = match checkpoint.source() {
            Source::Gguf(m) => (Keys::Gguf(m, m.str("general.architecture")?.to_string()), Style::Gguf),
            Source::SafeTensors { config, .. } => (Keys::Json(config), Style::HuggingFace),
        };
        let gemma = family.name.starts_with("gemma");
        let names = Names { style, sandwich: gemma };
        let hidden = keys.usize("embedding_length", "hidden_size")?;
        let layers = keys.usize("block_count", "num_hidden_layers")?;
        if layers > checkpoint.tensors().len() {
            let what =
                format!("{layers} layers, but the file has only {} tensors", checkpoint.tensors().len());
            return Err(setting(keys.name("block_count", "num_hidden_layers"), what));
        }
        if let Some(experts) = keys.usize_opt("expert_count", "num_experts")?.filter(|&n| n > 0) {
            let what = format!("{experts} experts: mixtures of experts are not supported yet");
            return Err(setting(keys.name("expert_count", "num_experts"), what));
        }
        let heads = keys.usize("attention.head_count", "num_attention_heads")?;
        let kv_heads = keys.usize_opt("attention.head_count_kv", "num_key_value_heads")?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let key = keys.name("attention.head_count_kv", "num_key_value_heads");
            return Err(setting(key, format!("{kv_heads} does not divide {heads} heads")));
        }
        let head_dim = keys.usize_opt("attention.key_length", "head_dim")?.unwrap_or(hidden / heads);
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 1024 {
            let key = keys.name("attention.key_length", "head_dim");
            return Err(setting(key, format!("{head_dim}: want an even number up to 1024")));
        }
        let eps = keys.f64_opt("attention.layer_norm_rms_epsilon", "rms_norm_eps")?.ok_or_else(|| {
            setting(keys.name("attention.layer_norm_rms_epsilon", "rms_norm_eps"), "is missing")
        })?;
        let context = keys.usize("context_length", "max_position_embeddings")?;
        let embedding = checkpoint.require(&names.global("token_embd.weight"))?;
        let rope_dim = match &keys {
            Keys::Gguf(..) => keys.usize_opt("rope.dimension_count", "")?.unwrap_or(head_dim),
            Keys::Json(_) => {
                let part = keys.f64_opt("", "partial_rotary_factor")?.unwrap_or(1.0);
                (head_dim as f64 * part) as usize
            }
        };
        if rope_dim == 0 || rope_dim > head_dim || !rope_dim.is_multiple_of(2) {
            return Err(setting(
                keys.name("rope.dimension_count", "partial_rotary_factor"),
                format!("{rope_dim} of {head_dim} elements of a head: want an even number up to all of them"),
            ));
        }
        let (theta, theta_local, scaling) = match &keys {
            Keys::Gguf(m, prefix) => {
                let theta = keys.f64_opt("rope.freq_base", "")?.unwrap_or(10000.0);
                let local = keys.f64_opt("rope.freq_base_swa", "")?.unwrap_or(10000.0);
                (theta, local, Scaling::from_gguf(m, prefix, checkpoint)?)
            }
            Keys::Json(config) => rope_of_json(config)?,
        };
        let sliding = keys.usize_opt("attention.sliding_window", "sliding_window")?.filter(|&w| w > 0);
        let slides = slides(&keys, layers, gemma)?;
        let window = sliding.filter(|_| slides.iter().any(|&s| s));
        let scalar = keys.f64_opt("attention.query_pre_attn_scalar", "query_pre_attn_scalar")?;
        // The largest Gemma 3 scales by hidden / heads; its GGUF files do not say so.
        let scalar = match (&keys, gemma && layers == 62) {
            (Keys::Gguf(..), true) => (hidden / heads) as f64,
            _ => scalar.unwrap_or(head_dim as f64),
        };
        Ok(Self {
            family: family.name,
            vocabulary: embedding.shape.first().copied().unwrap_or(0),
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn: keys.usize("feed_forward_length", "intermediate_size")?,
            eps: eps as f32,
            context,
            rope_theta: theta,
            rope_theta_local: theta_local,
            rope_dim,
            rope_scaling: scaling,
            rope_style: match style {
                Style::Gguf if family.gguf_interleaved_rope => RopeStyle::Interleaved,
                _ => RopeStyle::Half,
            },
            window,
            slides,
            attention_scale: (1.0 / scalar.sqrt()) as f32,
            attention_softcap: keys
                .f64_opt("attn_logit_softcapping", "attn_logit_softcapping")?
                .map(|c| c as f32),
            final_softcap: keys
                .f64_opt("final_logit_softcapping", "final_logit_softcapping")?
                .map(|c| c as f32),
            norm_offset: if gemma && style == Style::HuggingFace { 1.0 } else { 0.0 },
            names,
        })
    }
}

/// Which layers slide: named one by one, by a pattern of which every last layer is global, or from a layer on.
fn slides(keys: &Keys<'_>, layers: usize, gemma: bool) -> Result<Vec<bool>> {
    if let Keys::Json(config) = keys {
        if let Some(types) = config.get("layer_types").and_then(|t| t.as_array()) {
            if types.len() != layers {
                return Err(setting("layer_types", format!("{} entries for {layers} layers", types.len())));
            }
            return Ok(types.iter().map(|t| t == "sliding_attention").collect());
        }
        if config.get("use_sliding_window").and_then(Value::as_bool).unwrap_or(false) {
            let from = keys.usize_opt("", "max_window_layers")?.unwrap_or(layers);
            return Ok((0..layers).map(|l| l >= from).collect());
        }
    }
    if !gemma {
        return Ok(vec![false; layers]);
    }
    let pattern = keys.usize_opt("attention.sliding_window_pattern", "sliding_window_pattern")?.unwrap_or(6);
    Ok((0..layers).map(|l| pattern != 0 && (l + 1) % pattern != 0).collect())
}

/// Bases and scaling of config.json: `rope_parameters` (flat, or one entry per layer type), or `rope_theta`,
/// `rope_local_base_freq` and `rope_scaling`.
fn rope_of_json(config: &Value) -> Result<(f64, f64, Scaling)> {
    let number = |v: &Value, key: &str| v.get(key).and_then(Value::as_f64);
    let null = Value::Null;
    let parameters = config.get("rope_parameters").unwrap_or(&null);
    let global = parameters.get("full_attention").unwrap_or(parameters);
    let local = parameters.get("sliding_attention").unwrap_or(parameters);
    let theta = number(global, "rope_theta").or(number(config, "rope_theta")).unwrap_or(10000.0);
    let theta_local =
        number(config, "rope_local_base_freq").or(number(local, "rope_theta")).unwrap_or(10000.0);
    let scaling = match (global, config.get("rope_scaling")) {
        (Value::Object(_), _) => global,
        (_, Some(scaling)) => scaling,
        _ => &null,
    };
    let context = number(config, "max_position_embeddings").unwrap_or(0.0);
    Ok((theta, theta_local, Scaling::from_json(scaling, context)?))
}
