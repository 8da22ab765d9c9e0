//! Rotary frequencies as the published models compute them: in f32 where Hugging Face's code does, so that angles agree
//! with the weights' training.

use std::f64::consts::PI;
use std::ops::RangeInclusive;

use ingle_tensor::json::Object;
use ingle_tensor::{Checkpoint, gguf::Metadata, quant};

use crate::{Error, Family, Result};

/// How frequencies were stretched to longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All divided by a factor.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// YaRN (arXiv 2309.00071): low frequencies divided, high ones kept, a ramp between.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Context of the original training, in tokens.
        original: f64,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations under which it is divided.
        beta_slow: f64,
        /// Factor on cos and sin; `None` = 0.1 ln(factor) + 1.
        attention: Option<f64>,
        /// Whether the ramp's ends are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// Llama 3.1's: long waves divided, short ones kept, a blend between.
    Llama3 {
        /// Divisor of the long waves.
        factor: f64,
        /// original / low = wavelength above which a wave is long.
        low: f64,
        /// original / high = wavelength under which it is short.
        high: f64,
        /// Context of the original training, in tokens.
        original: f64,
    },
    /// One divisor per frequency, from the file (`rope_freqs.weight`).
    Divisors(Vec<f32>),
}

pub(crate) fn setting(key: impl Into<String>, what: impl Into<String>) -> Error {
    Error::Setting { key: key.into(), what: what.into() }
}

/// YaRN's factor on cos and sin for contexts `factor` times as long.
fn yarn_scale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// Bases of config.json (of all layers or the global ones, then of sliding ones) and scaling: `rope_parameters`, flat or
/// with one entry per layer type, or the older `rope_theta`, `rope_local_base_freq` and `rope_scaling`. A base is `None`
/// where the file names none. All of these keys are read, so that one of the wrong type is seen where another one counts.
///
/// # Errors
/// See [`Scaling::from_json`]; a base that is none; an entry for layers of an unknown type; sliding layers whose settings
/// differ in more than the family knows of.
pub fn of_json(config: &Object<'_>, family: &Family) -> Result<(Option<f64>, Option<f64>, Scaling)> {
    const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
    let theta_at = |object: &Object<'_>, key: &str| {
        let theta = object.get::<f64>(key)?;
        theta.map(|theta| base(&object.name(key), theta)).transpose()
    };
    let parameters = config.object("rope_parameters")?;
    let older = config.object("rope_scaling")?;
    let (mut global, mut local) = (None, None);
    if let Some(parameters) = &parameters {
        (global, local) = (parameters.object(TYPES[0])?, parameters.object(TYPES[1])?);
    }
    let nested = global.is_some() || local.is_some();
    let global = global.or(parameters.clone().filter(|_| !nested));
    let of_object = |object: &Option<Object<'_>>| {
        object.as_ref().map_or(Ok(None), |object| theta_at(object, "rope_theta"))
    };
    let (theta, theta_local) = (of_object(&global)?, of_object(&local)?);
    let theta = theta_at(config, "rope_theta").map(|older| theta.or(older))?;
    let theta_local = theta_at(config, "rope_local_base_freq").map(|older| theta_local.or(older))?;
    let context = config.get::<f64>("max_position_embeddings")?.unwrap_or(0.0);
    let scaling_of = |object: &Option<Object<'_>>| match object {
        Some(object) => Scaling::from_json(object, context),
        None => Ok(Scaling::None),
    };
    let (scaling, of_local) = (scaling_of(&global.or(older))?, scaling_of(&local)?);
    if let Some(object) = &parameters
        && let Some(other) = object.keys_of_objects().find(|key| !TYPES.contains(key))
    {
        let what = format!("an entry for layers of this type; known are {}", TYPES.join(", "));
        return Err(setting(object.name(other), what));
    }
    let differs = match family.rope_theta_local {
        Some(_) => of_local != Scaling::None,
        None => local.is_some() && (theta_local != theta || of_local != scaling),
    };
    if differs {
        return Err(setting("rope_parameters.sliding_attention", "rope settings this family does not have"));
    }
    Ok((theta, theta_local, scaling))
}

/// A rotary base.
pub(crate) fn base(key: &str, theta: f64) -> Result<f64> {
    if theta > 1.0 && (theta as f32).is_finite() {
        Ok(theta)
    } else {
        Err(setting(key, format!("{theta:?}: want a rotary base above 1")))
    }
}

/// A number that is positive, also in f32.
pub(crate) fn positive(key: &str, value: f64) -> Result<f64> {
    if value > 0.0 && (value as f32).is_normal() {
        Ok(value)
    } else {
        Err(setting(key, format!("{value:?}: want a positive number")))
    }
}

/// A number of a size that it can have.
pub(crate) fn within(key: &str, value: f64, sizes: RangeInclusive<f64>) -> Result<f64> {
    if sizes.contains(&value) {
        Ok(value)
    } else {
        let what = format!("{value:?}: want a positive number from {:?} to {:?}", sizes.start(), sizes.end());
        Err(setting(key, what))
    }
}

/// YaRN's factor on cos and sin where a file names one.
fn attention_factor(key: &str, factor: Option<f64>) -> Result<Option<f64>> {
    factor.map(|factor| within(key, factor, 1e-3..=1e3)).transpose()
}

/// `fast`, above which YaRN keeps a frequency: no less than `slow`, under which it divides one.
fn ramp(key: &str, fast: f64, slow: f64) -> Result<f64> {
    match fast >= slow {
        true => Ok(fast),
        false => Err(setting(key, format!("{fast:?}: want no less than the slow one, {slow:?}"))),
    }
}

/// Numbers of config.json's rope settings, read in every kind of scaling for their type.
const NUMBERS: [&str; 9] = [
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
];

impl Scaling {
    /// From a GGUF file's `rope.scaling.*` keys and its `rope_freqs.weight` tensor.
    ///
    /// # Errors
    /// An unknown type or an impossible number, by its key.
    pub fn from_gguf(m: &Metadata, prefix: &str, checkpoint: &Checkpoint) -> Result<Self> {
        let key = |k: &str| format!("{prefix}.rope.scaling.{k}");
        let number = |k: &str| -> Result<Option<f64>> { Ok(m.f32_opt(&key(k))?.map(f64::from)) };
        // The older key of linear scaling.
        let factor = number("factor")?.or(m.f32_opt(&format!("{prefix}.rope.scale_linear"))?.map(f64::from));
        let kind = m.str_opt(&key("type"))?;
        let original = m.u32_opt(&key("original_context_length"))?.map(f64::from);
        let (fast, slow) = (number("yarn_beta_fast")?, number("yarn_beta_slow")?);
        let attention = number("yarn_attn_factor")?;
        if let Some(info) = checkpoint.get("rope_freqs.weight") {
            let mut divisors = vec![0.0; info.shape.iter().product()];
            if info.dtype.is_quantized() || divisors.len() > 512 {
                let what = format!("{} elements of {}", divisors.len(), info.dtype.name());
                return Err(setting("rope_freqs.weight", format!("{what}: want at most 512 floats")));
            }
            quant::decode_row(info.dtype, checkpoint.data(info), &mut divisors);
            if divisors.iter().any(|d| !(d.is_finite() && *d > 0.0)) {
                return Err(setting("rope_freqs.weight", "holds a divisor that is not positive"));
            }
            return Ok(Scaling::Divisors(divisors));
        }
        match kind.unwrap_or(if factor.is_some() { "linear" } else { "none" }) {
            "none" => Ok(Scaling::None),
            "linear" => match factor {
                Some(factor) if factor != 0.0 => {
                    Ok(Scaling::Linear { factor: positive(&key("factor"), factor)? })
                }
                _ => Ok(Scaling::None),
            },
            "yarn" => {
                let factor = positive(&key("factor"), factor.unwrap_or(1.0))?;
                let fast = positive(&key("yarn_beta_fast"), fast.unwrap_or(32.0))?;
                let slow = positive(&key("yarn_beta_slow"), slow.unwrap_or(1.0))?;
                Ok(Scaling::Yarn {
                    factor,
                    original: match original {
                        Some(n) => positive(&key("original_context_length"), n)?,
                        None => positive(
                            "context_length",
                            f64::from(m.u32(&format!("{prefix}.context_length"))?) / factor,
                        )?,
                    },
                    beta_fast: ramp(&key("yarn_beta_fast"), fast, slow)?,
                    beta_slow: slow,
                    attention: attention_factor(&key("yarn_attn_factor"), attention)?,
                    truncate: true,
                })
            }
            other => Err(setting(key("type"), format!("{other:?}: known are none, linear, yarn"))),
        }
    }

    /// From a `rope_parameters` or `rope_scaling` object of config.json; `context` is `max_position_embeddings`.
    ///
    /// # Errors
    /// An unknown type, a missing number, or a value of the wrong type, by its key.
    pub fn from_json(object: &Object<'_>, context: f64) -> Result<Self> {
        let number = |k: &str| match object.get(k)? {
            None => Ok(None),
            Some(n) => positive(&object.name(k), n).map(Some),
        };
        let bad = |k: &str, what: String| setting(object.name(k), what);
        let want = |k: &str| number(k)?.ok_or_else(|| bad(k, "is missing from the rope settings".into()));
        let original = || {
            let k = "original_max_position_embeddings";
            positive(&object.name(k), number(k)?.unwrap_or(context))
        };
        let (newer, older) = (object.get::<&str>("rope_type")?, object.get::<&str>("type")?);
        for k in NUMBERS {
            object.get::<f64>(k)?;
        }
        let truncate = object.get::<bool>("truncate")?.unwrap_or(true);
        let kind = match newer.or(older) {
            Some(kind) => kind,
            None if object.get::<f64>("factor")?.is_some() => {
                return Err(bad("rope_type", "is missing, but there is a factor".into()));
            }
            None => "default",
        };
        match kind {
            "default" | "mrope" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: want("factor")? }),
            "yarn" => {
                let original = original()?;
                let factor = number("factor")?.unwrap_or(context / original);
                let (fast, slow) =
                    (number("beta_fast")?.unwrap_or(32.0), number("beta_slow")?.unwrap_or(1.0));
                Ok(Scaling::Yarn {
                    factor: positive(&object.name("factor"), factor)?,
                    original,
                    beta_fast: ramp(&object.name("beta_fast"), fast, slow)?,
                    beta_slow: slow,
                    attention: match (
                        attention_factor(&object.name("attention_factor"), object.get("attention_factor")?)?,
                        number("mscale")?,
                        number("mscale_all_dim")?,
                    ) {
                        (None, Some(m), Some(all)) => Some(yarn_scale(factor, m) / yarn_scale(factor, all)),
                        (attention, ..) => attention,
                    },
                    truncate,
                })
            }
            "llama3" => {
                let (low, high) = (want("low_freq_factor")?, want("high_freq_factor")?);
                if low >= high {
                    let what = format!("{high:?}: want more than low_freq_factor, {low:?}");
                    return Err(bad("high_freq_factor", what));
                }
                Ok(Scaling::Llama3 { factor: want("factor")?, low, high, original: original()? })
            }
            other => Err(bad("rope_type", format!("{other:?}: known are default, linear, yarn, llama3"))),
        }
    }

    /// One frequency per pair of a rotary embedding over `dim` elements with this base, and the factor on cos and sin.
    ///
    /// # Errors
    /// A divisor tensor of another length; numbers that together leave f32.
    pub fn frequencies(&self, theta: f64, dim: usize) -> Result<(Vec<f32>, f32)> {
        // base^(2i/dim): exponent and power rounded to f32, as the training code does.
        let power = |i: usize| (f64::from(2.0 * i as f32 / dim as f32) * theta.ln()).exp() as f32;
        let plain: Vec<f32> = (0..dim / 2).map(|i| 1.0 / power(i)).collect();
        let (frequencies, scale) = match self {
            Scaling::None => (plain, 1.0),
            Scaling::Linear { factor } => (plain.iter().map(|f| f / *factor as f32).collect(), 1.0),
            Scaling::Divisors(divisors) => {
                if divisors.len() != plain.len() {
                    let what = format!("{} divisors for {} frequencies", divisors.len(), plain.len());
                    return Err(setting("rope_freqs.weight", what));
                }
                (plain.iter().zip(divisors).map(|(f, d)| f / d).collect(), 1.0)
            }
            Scaling::Llama3 { factor, low, high, original } => {
                let scaled = plain.iter().map(|&f| {
                    let wave = 2.0 * PI / f64::from(f);
                    let smooth = (original / wave - low) / (high - low);
                    if wave > original / low {
                        f / *factor as f32
                    } else if wave < original / high {
                        f
                    } else {
                        ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
                    }
                });
                (scaled.collect(), 1.0)
            }
            Scaling::Yarn { factor, original, beta_fast, beta_slow, attention, truncate } => {
                // Dimension at which a wave makes this many rotations over the original context.
                let at = |rotations: f64| {
                    dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
                };
                let (mut from, mut to) = (at(*beta_fast), at(*beta_slow));
                if *truncate {
                    (from, to) = (from.floor(), to.ceil());
                }
                let (from, mut to) = (from.max(0.0), to.min(dim as f64 - 1.0));
                if from == to {
                    to += 0.001;
                }
                let scaled = (0..dim / 2).map(|i| {
                    let ramp = ((i as f64 - from) / (to - from)).clamp(0.0, 1.0) as f32;
                    let keep = 1.0 - ramp;
                    let divided = 1.0 / (*factor as f32 * power(i));
                    divided * (1.0 - keep) + plain[i] * keep
                });
                (scaled.collect(), attention.unwrap_or_else(|| yarn_scale(*factor, 1.0)) as f32)
            }
        };
        // The angle of the last position there can be is a number then.
        const FASTEST: f32 = 1e6;
        match frequencies.iter().find(|&&f| !(0.0..=FASTEST).contains(&f)) {
            Some(f) => {
                let what = format!("give a frequency of {f:?} radians a token: want 0 to {FASTEST}");
                Err(setting("the rope scaling factors", what))
            }
            // Beyond, scores leave f32.
            None if !(1e-6..=1e6).contains(&scale) => {
                let what = format!("{scale:?} on cos and sin: want a positive number up to 1e6");
                Err(setting("attention_factor", what))
            }
            None => Ok((frequencies, scale)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn from_json(v: &Value, context: f64) -> Result<Scaling> {
        Scaling::from_json(&Object::of(Path::new("config.json"), v).expect("an object"), context)
    }

    #[test]
    fn scalings_meet_at_their_ends() {
        let (plain, _) = Scaling::None.frequencies(10000.0, 64).unwrap();
        assert_eq!((plain[0], plain.len()), (1.0, 32));
        let llama3 = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let (scaled, scale) = llama3.frequencies(10000.0, 64).unwrap();
        assert_eq!((scaled[0], scale), (plain[0], 1.0), "a short wave is kept");
        let long = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 16.0 };
        assert_eq!(long.frequencies(10000.0, 64).unwrap().0[31], plain[31] / 8.0, "a long wave is divided");
        let yarn = Scaling::Yarn {
            factor: 4.0,
            original: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention: None,
            truncate: true,
        };
        let (scaled, scale) = yarn.frequencies(10000.0, 64).unwrap();
        assert_eq!((scaled[0], scaled[31]), (plain[0], 1.0 / (4.0 * (1.0 / plain[31]))));
        assert!((scale - 1.1386295).abs() < 1e-6);
        assert!(Scaling::Divisors(vec![1.0; 3]).frequencies(10000.0, 64).is_err());
    }

    fn refused(v: &Value, words: &[&str]) {
        let error = from_json(v, 8192.0).expect_err("impossible settings").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
    }

    /// lablup/mlxcel#1355, vllm-project/vllm#7268: three regions, by either spelling of the type.
    #[test]
    fn mlxcel_1355_llama3_frequencies() {
        // 1 / 500000^(i/32), divided by 32 where a wave is longer than 8192, kept where it is shorter than 2048; between,
        // with s = (8192 / wave - 1) / 3, it is f * (s + (1 - s) / 32).
        #[rustfmt::skip]
        let want: [f64; 32] = [
            1.00000000e+00, 6.63601238e-01, 4.40366603e-01, 2.92227823e-01,
            1.93922745e-01, 1.28687373e-01, 8.53971003e-02, 5.66696214e-02,
            3.76060309e-02, 2.49554087e-02, 1.65604401e-02, 1.09895285e-02,
            7.29266474e-03, 4.83942135e-03, 3.21144599e-03, 1.29054793e-03,
            4.29556797e-04, 9.70828780e-05, 1.94616382e-05, 1.29147672e-05,
            8.57025549e-06, 5.68723215e-06, 3.77405429e-06, 2.50446710e-06,
            1.66196747e-06, 1.10288367e-06, 7.31874968e-07, 4.85673134e-07,
            3.22293293e-07, 2.13874228e-07, 1.41927203e-07, 9.41830673e-08,
        ];
        for key in ["rope_type", "type"] {
            let v = json!({
                key: "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192
            });
            let scaling = from_json(&v, 131_072.0).unwrap();
            let (got, scale) = scaling.frequencies(500_000.0, 64).unwrap();
            assert_eq!(scale, 1.0);
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert!(
                    (f64::from(*got) / want - 1.0).abs() < 1e-6,
                    "{key}, frequency {i}: {got}, want {want}"
                );
            }
            let (plain, _) = Scaling::None.frequencies(500_000.0, 64).unwrap();
            let count = |f: fn(f32, f32) -> bool| got.iter().zip(&plain).filter(|(a, b)| f(**a, **b)).count();
            assert_eq!((count(|a, b| a == b), count(|a, b| a == b / 32.0)), (15, 14));
        }
        let bad = |key: &str, value: Value| {
            let mut v = json!({
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            });
            v[key] = value;
            refused(&v, &[key]);
        };
        bad("factor", Value::Null);
        bad("factor", json!("32"));
        bad("factor", json!(0));
        bad("low_freq_factor", json!(-1));
        bad("high_freq_factor", json!(1));
        bad("original_max_position_embeddings", json!(0));
        refused(&json!({"rope_type": "lama3", "factor": 2.0}), &["rope_type", "lama3"]);
        refused(&json!({"rope_type": 3, "factor": 2.0}), &["rope_type", "3"]);
        refused(&json!({"factor": 2.0}), &["rope_type", "missing"]);
        assert_eq!(from_json(&json!({}), 8192.0).unwrap(), Scaling::None);
    }

    /// ml-explore/mlx-lm#1507, huggingface/transformers#33129: an explicit attention factor replaces the formula.
    #[test]
    fn mlx_lm_1507_explicit_yarn_attention_factor() {
        let scale = |more: Value| {
            let mut v = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
            v.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            from_json(&v, 16384.0).unwrap().frequencies(10000.0, 64).unwrap().1
        };
        assert_eq!(scale(json!({})), 1.138_629_4);
        assert_eq!(scale(json!({"attention_factor": null})), 1.138_629_4);
        assert_eq!(scale(json!({"attention_factor": 1.0})), 1.0);
        assert_eq!(scale(json!({"attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0})), 0.5);
        assert_eq!(scale(json!({"mscale": 1.0, "mscale_all_dim": 1.0})), 1.0);
        assert_eq!(scale(json!({"mscale": 2.0, "mscale_all_dim": 1.0})), (1.277_258_9 / 1.138_629_4) as f32);
        assert_eq!(scale(json!({"factor": null})), 1.138_629_4, "the ratio of the contexts");
        refused(&json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": "1"}), &["attention_factor"]);
        refused(&json!({"rope_type": "longrope", "short_factor": [1.0]}), &["rope_type", "longrope"]);
    }
}
