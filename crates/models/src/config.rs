//! A model's settings, from GGUF metadata or from config.json (in today's keys or the older ones), in one shape.

use std::ops::RangeInclusive;

use ingle_graph::Activation;
use ingle_graph::op::RopeStyle;
use ingle_tensor::json::{FromJson, Object};
use ingle_tensor::{Checkpoint, Source, gguf::Metadata};

use crate::names::{Names, Style};
use crate::rope::{self, Scaling, base, positive, setting, within};
use crate::{Error, Family, Result, Sliding, settings_of};

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

/// Settings of one source, by their GGUF key (under the architecture's prefix) or config.json key. A source that has no
/// key for a setting is asked by the empty one, which nothing answers.
enum Keys<'a> {
    Gguf(&'a Metadata, String),
    Json(Object<'a>),
}

/// Sizes of caps and of the number whose root divides scores: beyond, an answer says nothing.
const SIZES: RangeInclusive<f64> = 1e-3..=1e9;

impl<'a> Keys<'a> {
    /// The value of a config.json key; none of a GGUF file's.
    fn json<T: FromJson<'a>>(&self, json: &str) -> Result<Option<T>> {
        match self {
            Keys::Json(object) if !json.is_empty() => Ok(object.get(json)?),
            _ => Ok(None),
        }
    }

    /// The metadata and the key of a GGUF file; none of a config.json.
    fn gguf(&self, gguf: &str) -> Option<(&'a Metadata, String)> {
        match self {
            Keys::Gguf(m, prefix) if !gguf.is_empty() => Some((*m, format!("{prefix}.{gguf}"))),
            _ => None,
        }
    }

    fn f64_opt(&self, gguf: &str, json: &str) -> Result<Option<f64>> {
        match self.gguf(gguf) {
            Some((m, key)) => Ok(m.f32_opt(&key)?.map(f64::from)),
            None => self.json(json),
        }
    }

    fn usize_opt(&self, gguf: &str, json: &str) -> Result<Option<usize>> {
        let count = match self.gguf(gguf) {
            Some((m, key)) => m.u32_opt(&key)?,
            None => self.json(json)?,
        };
        Ok(count.map(|n: u32| n as usize))
    }

    /// A cap, or `default` where the source has no such key at all; null and 0 mean none.
    fn cap(&self, name: &str, default: Option<f64>) -> Result<Option<f32>> {
        let cap = if self.lacks(name, name) { default } else { self.f64_opt(name, name)? };
        cap.filter(|&c| c != 0.0).map(|c| Ok(within(&self.name(name, name), c, SIZES)? as f32)).transpose()
    }

    fn flag(&self, gguf: &str, json: &str) -> Result<Option<bool>> {
        match self.gguf(gguf) {
            Some((m, key)) => Ok(m.bool_opt(&key)?),
            None => self.json(json),
        }
    }

    /// The source has no such key: in config.json null is a value, which means none.
    fn lacks(&self, gguf: &str, json: &str) -> bool {
        match self {
            Keys::Gguf(m, prefix) => !m.contains(&format!("{prefix}.{gguf}")),
            Keys::Json(object) => !object.contains(json),
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

    /// Reads what the graph does not need, for its type alone: a file that is damaged there is damaged.
    fn check_unused(&self) -> Result<()> {
        if self.usize_opt("vocab_size", "vocab_size")? == Some(0) {
            return Err(setting(self.name("vocab_size", "vocab_size"), "is 0"));
        }
        self.json::<Vec<&str>>("architectures")?;
        // What the file holds decides whether there is an output matrix.
        self.json::<bool>("tie_word_embeddings")?;
        Ok(())
    }

    /// Refuses a file without the biases that its config.json says it has.
    fn check_biases(&self, checkpoint: &Checkpoint, names: Names, layers: usize) -> Result<()> {
        // Not all models with the first flag have a bias on the output too.
        for (key, parts) in [
            ("attention_bias", ["attn_q", "attn_k", "attn_v"]),
            ("mlp_bias", ["ffn_gate", "ffn_up", "ffn_down"]),
        ] {
            if self.json::<bool>(key)? != Some(true) {
                continue;
            }
            let names = (0..layers).flat_map(|l| parts.map(|part| names.layer(l, part, "bias")));
            if let Some(name) = names.into_iter().find(|name| !checkpoint.has(name)) {
                let what =
                    format!("true, but there is no tensor {name}: fetch the weights again, or write false");
                return Err(setting(key, what));
            }
        }
        Ok(())
    }
}

impl Config {
    /// Reads the settings of a checkpoint of this family.
    ///
    /// # Errors
    /// A setting that is missing, impossible, or of another type than it must have, by its file and key.
    pub fn read(checkpoint: &Checkpoint, family: &Family) -> Result<Self> {
        Self::of(checkpoint, family).map_err(|error| error.in_file(settings_of(checkpoint)))
    }

    /// As [`Config::read`], with errors that do not name the file.
    pub(crate) fn of(checkpoint: &Checkpoint, family: &Family) -> Result<Self> {
        let (keys, style) = match checkpoint.source() {
            Source::Gguf(m) => (Keys::Gguf(m, m.str("general.architecture")?.to_string()), Style::Gguf),
            Source::SafeTensors { config, config_path, .. } => {
                (Keys::Json(Object::of(config_path, config)?), Style::HuggingFace)
            }
        };
        keys.check_unused()?;
        let names = Names { style, sandwich: family.sandwich };
        let hidden = keys.usize("embedding_length", "hidden_size")?;
        let layers = keys.usize("block_count", "num_hidden_layers")?;
        if layers > checkpoint.tensors().len() {
            let what =
                format!("{layers} layers, but the file has only {} tensors", checkpoint.tensors().len());
            return Err(setting(keys.name("block_count", "num_hidden_layers"), what));
        }
        if let Some((layer, tensor)) = beyond(checkpoint, names, layers) {
            let what = format!("{layers} layers, but the file has tensors of layer {layer}: {tensor:?}");
            return Err(setting(keys.name("block_count", "num_hidden_layers"), what));
        }
        keys.check_biases(checkpoint, names, layers)?;
        if let Some(experts) = keys.usize_opt("expert_count", "num_experts")?.filter(|&n| n > 0) {
            return Err(Error::Experts { key: keys.name("expert_count", "num_experts"), experts });
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
            Some(eps) if eps < 1.0 => positive(&eps_key, eps)? as f32,
            Some(eps) => return Err(setting(eps_key, format!("{eps:?}: want a positive number below 1"))),
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
                let theta = |key: &str| {
                    let theta = keys.f64_opt(key, "")?;
                    theta.map(|theta| base(&keys.name(key, ""), theta)).transpose()
                };
                let (theta, local) = (theta("rope.freq_base")?, theta("rope.freq_base_swa")?);
                (theta, local, Scaling::from_gguf(m, prefix, checkpoint)?)
            }
            Keys::Json(config) => rope::of_json(config, family)?,
        };
        let theta = theta.unwrap_or(family.rope_theta);
        let theta_local = family.rope_theta_local.map_or(theta, |local| theta_local.unwrap_or(local));
        let (causal, both_ways) =
            (keys.flag("attention.causal", "is_causal")?, keys.flag("", "use_bidirectional_attention")?);
        if causal == Some(false) || both_ways == Some(true) {
            let key = keys.name("attention.causal", "use_bidirectional_attention");
            return Err(setting(key, "attention to later tokens (an embedding model) is not supported"));
        }
        let (window, slides) = window(&keys, layers, family)?;
        let scalar = match &keys {
            Keys::Gguf(..) if family.scaled_by_width == Some(layers) => (hidden / heads) as f64,
            Keys::Gguf(..) => head_dim as f64,
            Keys::Json(_) => keys.f64_opt("", "query_pre_attn_scalar")?.unwrap_or(head_dim as f64),
        };
        within("query_pre_attn_scalar", scalar, SIZES)?;
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
    let named = |key: &'static str| Ok::<_, Error>(keys.json::<&str>(key)?.map(|name| (key, name)));
    let (newer, older) = (named("hidden_activation")?, named("hidden_act")?);
    match newer.or(older) {
        None => Ok(family.activation),
        Some((_, "silu" | "swish")) => Ok(Activation::Silu),
        Some((_, "gelu_pytorch_tanh" | "gelu_new")) => Ok(Activation::GeluTanh),
        Some((_, "gelu")) if family.activation == Activation::GeluTanh => Ok(Activation::GeluTanh),
        Some((_, "gelu")) => Ok(Activation::GeluErf),
        Some((key, name)) => Err(setting(key, format!("{name:?}: known are silu, gelu, gelu_pytorch_tanh"))),
    }
}

/// The window, if any layer has one, and which layers slide: listed one by one, or as the family has it. All keys are
/// read in every family, so that one of the wrong type is seen where it would not count.
fn window(keys: &Keys<'_>, layers: usize, family: &Family) -> Result<(Option<usize>, Vec<bool>)> {
    let (gguf, json) = ("attention.sliding_window", "sliding_window");
    let window = match keys.usize_opt(gguf, json)?.filter(|&w| w > 0) {
        None if keys.lacks(gguf, json) && family.sliding != Sliding::Unless => Some(WINDOW),
        window => window,
    };
    let listed = keys.json::<Vec<&str>>("layer_types")?;
    let uses = keys.flag("use_sliding_window", "use_sliding_window")?;
    let from = keys.usize_opt("", "max_window_layers")?;
    let pattern = ("attention.sliding_window_pattern", "sliding_window_pattern");
    let every = keys.usize_opt(pattern.0, pattern.1)?;
    if every == Some(0) {
        return Err(setting(keys.name(pattern.0, pattern.1), "is 0"));
    }
    let slides: Vec<bool> = match (family.sliding, listed) {
        (Sliding::Unless, _) => vec![matches!(keys, Keys::Gguf(..)); layers],
        (Sliding::All, _) => vec![true; layers],
        (Sliding::From, _) if uses != Some(true) => vec![false; layers],
        (_, Some(types)) => {
            if types.len() != layers {
                return Err(setting("layer_types", format!("{} entries for {layers} layers", types.len())));
            }
            let slides = types.into_iter().map(|t| match t {
                "sliding_attention" => Ok(true),
                "full_attention" => Ok(false),
                _ => {
                    Err(setting("layer_types", format!("{t:?}: known are full_attention, sliding_attention")))
                }
            });
            slides.collect::<Result<_>>()?
        }
        (Sliding::From, None) => (0..layers).map(|l| l >= from.unwrap_or(28)).collect(),
        (Sliding::AllBut(default), None) => {
            let every = every.unwrap_or(default);
            (0..layers).map(|l| !(l + 1).is_multiple_of(every)).collect()
        }
    };
    Ok((window.filter(|_| slides.contains(&true)), slides))
}

/// A tensor of a layer beyond the model's: a count that is too small would leave layers out and answer all the same.
fn beyond(checkpoint: &Checkpoint, names: Names, layers: usize) -> Option<(usize, &str)> {
    checkpoint.tensors().iter().find_map(|tensor| {
        let layer = names.layer_of(&tensor.name).filter(|&layer| layer >= layers)?;
        Some((layer, tensor.name.as_str()))
    })
}
