//! A model's settings, from GGUF metadata or from config.json (in today's keys or the older ones), in one shape.

use ingle_graph::Activation;
use ingle_graph::op::RopeStyle;
use ingle_tensor::{Checkpoint, Source, gguf::Metadata};
use serde_json::Value;

use crate::names::{Names, Style};
use crate::rope::{self, Scaling};
use crate::{Error, Family, Result, Sliding};

/// Sliding window, in tokens, of every family that has one, where its file has no such key.
const WINDOW: usize = 4096;

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
    /// Function of the feed-forward gate.
    pub activation: Activation,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Rotary base.
    pub rope_theta: f64,
    /// Rotary base of sliding-window layers: in most families the same.
    pub rope_theta_local: f64,
    /// Elements of a head that rotate.
    pub rope_dim: usize,
    /// Rotary scaling.
    pub rope_scaling: Scaling,
    /// Rotary pairing of this file.
    pub rope_style: RopeStyle,
    /// Sliding window in tokens, if any layer has one.
    pub window: Option<usize>,
    /// Which layers slide, if there is a window.
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

/// A number that is positive in f32, where it takes part.
fn positive(key: &str, value: f64) -> Result<f32> {
    Ok(rope::positive(key, value)? as f32)
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

    /// A cap, or `default` where the source has no such key at all; null and 0 mean none.
    fn cap(&self, name: &str, default: Option<f64>) -> Result<Option<f32>> {
        let cap = if self.lacks(name, name) { default } else { self.f64_opt(name, name)? };
        cap.filter(|&c| c != 0.0).map(|c| positive(&self.name(name, name), c)).transpose()
    }

    fn flag(&self, gguf: &str, json: &str) -> Result<Option<bool>> {
        match self {
            Keys::Gguf(m, prefix) => Ok(m.bool_opt(&format!("{prefix}.{gguf}"))?),
            Keys::Json(v) => match v.get(json) {
                None | Some(Value::Null) => Ok(None),
                Some(v) => {
                    v.as_bool().map(Some).ok_or_else(|| setting(json, format!("want a bool, found {v}")))
                }
            },
        }
    }

    /// The source has no such key: in config.json null is a value, which means none.
    fn lacks(&self, gguf: &str, json: &str) -> bool {
        match self {
            Keys::Gguf(m, prefix) => !m.contains(&format!("{prefix}.{gguf}")),
            Keys::Json(v) => v.get(json).is_none(),
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
        let names = Names { style, sandwich: family.sandwich };
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
        if let Some(other) = keys.usize_opt("attention.value_length", "")?.filter(|&n| n != head_dim) {
            let what = format!("{other}: heads of values that differ from those of keys, {head_dim}");
            return Err(setting(keys.name("attention.value_length", ""), what));
        }
        let eps_key = keys.name("attention.layer_norm_rms_epsilon", "rms_norm_eps");
        let eps = match keys.f64_opt("attention.layer_norm_rms_epsilon", "rms_norm_eps")? {
            None => return Err(setting(eps_key, "is missing")),
            Some(eps) if eps < 1.0 => positive(&eps_key, eps)?,
            Some(eps) => return Err(setting(eps_key, format!("{eps}: want a positive number below 1"))),
        };
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
                let theta = keys.f64_opt("rope.freq_base", "")?;
                let local = keys.f64_opt("rope.freq_base_swa", "")?;
                (theta, local, Scaling::from_gguf(m, prefix, checkpoint)?)
            }
            Keys::Json(config) => rope::of_json(config, family)?,
        };
        let base = |theta: f64, gguf: &str| {
            if theta > 1.0 && (theta as f32).is_finite() {
                Ok(theta)
            } else {
                let what = format!("{theta}: want a rotary base above 1");
                Err(setting(keys.name(gguf, "rope_theta"), what))
            }
        };
        let theta = base(theta.unwrap_or(family.rope_theta), "rope.freq_base")?;
        let theta_local = match family.rope_theta_local {
            Some(default) => base(theta_local.unwrap_or(default), "rope.freq_base_swa")?,
            None => theta,
        };
        if keys.flag("attention.causal", "is_causal")? == Some(false)
            || keys.flag("", "use_bidirectional_attention")? == Some(true)
        {
            let key = keys.name("attention.causal", "use_bidirectional_attention");
            return Err(setting(key, "attention to later tokens (an embedding model) is not supported"));
        }
        let (window, slides) = window(&keys, layers, family)?;
        let scalar = match &keys {
            Keys::Gguf(..) if family.scaled_by_width == Some(layers) => (hidden / heads) as f64,
            Keys::Gguf(..) => head_dim as f64,
            Keys::Json(_) => keys.f64_opt("", "query_pre_attn_scalar")?.unwrap_or(head_dim as f64),
        };
        positive("query_pre_attn_scalar", scalar)?;
        Ok(Self {
            family: family.name,
            vocabulary: embedding.shape.first().copied().unwrap_or(0),
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn: keys.usize("feed_forward_length", "intermediate_size")?,
            activation: activation(&keys, family)?,
            eps,
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
            attention_softcap: keys.cap("attn_logit_softcapping", family.attention_softcap)?,
            final_softcap: keys.cap("final_logit_softcapping", family.final_softcap)?,
            norm_offset: if family.norm_offset && style == Style::HuggingFace { 1.0 } else { 0.0 },
            names,
        })
    }
}

/// The gate's function. Gemma's first files say gelu and mean its tanh form.
fn activation(keys: &Keys<'_>, family: &Family) -> Result<Activation> {
    let Keys::Json(config) = keys else { return Ok(family.activation) };
    let named = |key: &'static str| config.get(key).filter(|v| !v.is_null()).map(|v| (key, v));
    match named("hidden_activation").or(named("hidden_act")) {
        None => Ok(family.activation),
        Some((key, v)) => match v.as_str() {
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
            Some("gelu") if family.activation == Activation::GeluTanh => Ok(Activation::GeluTanh),
            Some("gelu") => Ok(Activation::GeluErf),
            _ => Err(setting(key, format!("{v}: known are silu, gelu, gelu_pytorch_tanh"))),
        },
    }
}

/// The window, if any layer has one, and which layers slide: listed one by one, or as the family has it.
fn window(keys: &Keys<'_>, layers: usize, family: &Family) -> Result<(Option<usize>, Vec<bool>)> {
    let (gguf, json) = ("attention.sliding_window", "sliding_window");
    let window = match keys.usize_opt(gguf, json)?.filter(|&w| w > 0) {
        None if keys.lacks(gguf, json) && family.sliding != Sliding::Unless => Some(WINDOW),
        window => window,
    };
    let json = matches!(keys, Keys::Json(_));
    let listed = match keys {
        Keys::Json(config) => config.get("layer_types").and_then(Value::as_array),
        Keys::Gguf(..) => None,
    };
    let slides: Vec<bool> = match (family.sliding, listed) {
        (Sliding::Unless, _) => vec![!json; layers],
        (Sliding::All, _) => vec![true; layers],
        (Sliding::From, _) if keys.flag("use_sliding_window", "use_sliding_window")? != Some(true) => {
            vec![false; layers]
        }
        (_, Some(types)) => {
            if types.len() != layers {
                return Err(setting("layer_types", format!("{} entries for {layers} layers", types.len())));
            }
            let slides = types.iter().map(|t| match t.as_str() {
                Some("sliding_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                _ => Err(setting("layer_types", format!("{t}: known are full_attention, sliding_attention"))),
            });
            slides.collect::<Result<_>>()?
        }
        (Sliding::From, None) => {
            let from = keys.usize_opt("", "max_window_layers")?.unwrap_or(28);
            (0..layers).map(|l| l >= from).collect()
        }
        (Sliding::AllBut(every), None) => {
            let key = ("attention.sliding_window_pattern", "sliding_window_pattern");
            let every = keys.usize_opt(key.0, key.1)?.unwrap_or(every);
            (0..layers).map(|l| every != 0 && (l + 1) % every != 0).collect()
        }
    };
    Ok((window.filter(|_| slides.contains(&true)), slides))
}
