//! Rotary frequencies as the published models compute them: in f32 where Hugging Face's code does, so that angles agree
//! with the weights' training.

use std::f64::consts::PI;

use ingle_tensor::{Checkpoint, gguf::Metadata, quant};
use serde_json::Value;

use crate::{Error, Result};

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

fn setting(key: &str, what: String) -> Error {
    Error::Setting { key: key.into(), what }
}

fn positive(key: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(setting(key, format!("{value}: want a positive number")))
    }
}

impl Scaling {
    /// From a GGUF file's `rope.scaling.*` keys and its `rope_freqs.weight` tensor.
    ///
    /// # Errors
    /// An unknown type or an impossible number, by its key.
    pub fn from_gguf(m: &Metadata, prefix: &str, checkpoint: &Checkpoint) -> Result<Self> {
        if let Some(info) = checkpoint.get("rope_freqs.weight") {
            let mut divisors = vec![0.0; info.shape.iter().product()];
            if info.dtype.is_quantized() || divisors.len() > 512 {
                let what = format!("{} elements of {}", divisors.len(), info.dtype.name());
                return Err(setting("rope_freqs.weight", format!("{what}: want at most 512 floats")));
            }
            quant::decode_row(info.dtype, checkpoint.data(info), &mut divisors);
            if divisors.iter().any(|d| !(d.is_finite() && *d > 0.0)) {
                return Err(setting("rope_freqs.weight", "holds a divisor that is not positive".into()));
            }
            return Ok(Scaling::Divisors(divisors));
        }
        let key = |k: &str| format!("{prefix}.rope.scaling.{k}");
        let number = |k: &str| -> Result<Option<f64>> { Ok(m.f32_opt(&key(k))?.map(f64::from)) };
        let factor = number("factor")?;
        match m.str_opt(&key("type"))?.unwrap_or(if factor.is_some() { "linear" } else { "none" }) {
            "none" => Ok(Scaling::None),
            "linear" => match factor {
                Some(factor) if factor != 0.0 => {
                    Ok(Scaling::Linear { factor: positive(&key("factor"), factor)? })
                }
                _ => Ok(Scaling::None),
            },
            "yarn" => {
                let factor = positive(&key("factor"), factor.unwrap_or(1.0))?;
                Ok(Scaling::Yarn {
                    factor,
                    original: match m.u32_opt(&key("original_context_length"))? {
                        Some(n) => positive(&key("original_context_length"), f64::from(n))?,
                        None => positive(
                            "context_length",
                            f64::from(m.u32(&format!("{prefix}.context_length"))?) / factor,
                        )?,
                    },
                    beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
                    attention: None,
                    truncate: true,
                })
            }
            other => Err(setting(&key("type"), format!("{other:?}: known are none, linear, yarn"))),
        }
    }

    /// From a `rope_parameters` or `rope_scaling` object (or null) of config.json; `context` is
    /// `max_position_embeddings`.
    ///
    /// # Errors
    /// An unknown type or a missing number, by its key.
    pub fn from_json(v: &Value, context: f64) -> Result<Self> {
        let number = |k: &str| v.get(k).and_then(Value::as_f64);
        let want = |k: &str| {
            number(k)
                .ok_or_else(|| setting(k, "is missing from the rope settings".into()))
                .and_then(|n| positive(k, n))
        };
        let kind = v.get("rope_type").or(v.get("type")).and_then(Value::as_str).unwrap_or("default");
        let original = || {
            number("original_max_position_embeddings")
                .map_or(Ok(context), |n| positive("original_max_position_embeddings", n))
        };
        match kind {
            "default" | "mrope" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: want("factor")? }),
            "yarn" => Ok(Scaling::Yarn {
                factor: want("factor")?,
                original: original()?,
                beta_fast: number("beta_fast").unwrap_or(32.0),
                beta_slow: number("beta_slow").unwrap_or(1.0),
                attention: number("attention_factor"),
                truncate: v.get("truncate").and_then(Value::as_bool).unwrap_or(true),
            }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: want("factor")?,
                low: want("low_freq_factor")?,
                high: want("high_freq_factor")?,
                original: original()?,
            }),
            other => Err(setting("rope_type", format!("{other:?}: known are default, linear, yarn, llama3"))),
        }
    }

    /// One frequency per pair of a rotary embedding over `dim` elements with this base, and the factor on cos and sin.
    ///
    /// # Errors
    /// A divisor tensor of another length.
    pub fn frequencies(&self, theta: f64, dim: usize) -> Result<(Vec<f32>, f32)> {
        // base^(2i/dim): exponent and power rounded to f32, as the training code does.
        let power = |i: usize| (f64::from(2.0 * i as f32 / dim as f32) * theta.ln()).exp() as f32;
        let plain: Vec<f32> = (0..dim / 2).map(|i| 1.0 / power(i)).collect();
        Ok(match self {
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
                let scale =
                    attention.unwrap_or_else(|| if *factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 });
                (scaled.collect(), scale as f32)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
