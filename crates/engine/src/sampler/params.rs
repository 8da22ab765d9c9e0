//! Sampling parameters: what a request or a model may say ([`Settings`]) and what is then true ([`Params`]).

use std::hash::{BuildHasher, Hasher, RandomState};

use ingle_tensor::gguf::Metadata;
use ingle_tensor::json::Object;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most alternatives reported with a token.
pub const MAX_LOGPROBS: usize = 20;

/// Sampling settings as they are given: everything optional, nothing checked. Absent means "as the model says, else the
/// default".
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct Settings {
    /// 0 is greedy; from 0 to 100.
    pub temperature: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 or -1 keeps all.
    pub top_k: Option<i64>,
    /// Keep the likeliest tokens that together reach this probability; from 0 (one token) to 1 (all).
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely as a share of the likeliest; from 0 (all) to 1.
    pub min_p: Option<f32>,
    /// Keep the most typical tokens that together reach this probability; from 0 to 1 (all).
    pub typical_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens seen; from 0.01 to 100, 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Subtracted for each time a token is in the reply; from -100 to 100, 0 is off.
    pub frequency_penalty: Option<f32>,
    /// Subtracted once if a token is in the reply; from -100 to 100, 0 is off.
    pub presence_penalty: Option<f32>,
    /// How many of the last tokens the three penalties look at; -1 is all.
    pub penalty_window: Option<i64>,
    /// Strength of the DRY penalty; from 0 (off) to 100.
    pub dry_multiplier: Option<f32>,
    /// Growth of the DRY penalty with each further repeated token; from 1 to 10.
    pub dry_base: Option<f32>,
    /// Longest repetition that DRY lets pass, in tokens; from 1 to 1024.
    pub dry_allowed_length: Option<i64>,
    /// How many of the last tokens DRY looks at; -1 is all.
    pub dry_window: Option<i64>,
    /// Tokens that end a repetition for DRY.
    pub dry_breakers: Option<Vec<u32>>,
    /// Chance that XTC acts on a token; from 0 (off) to 1.
    pub xtc_probability: Option<f32>,
    /// Tokens at least this likely, all but the least of them, are removed by XTC; from 0 to 1.
    pub xtc_threshold: Option<f32>,
    /// 2 for Mirostat 2.0, 0 for none.
    pub mirostat: Option<i64>,
    /// Mirostat's target surprise in bits; above 0, to 100.
    pub mirostat_tau: Option<f32>,
    /// Mirostat's learning rate; above 0, to 1.
    pub mirostat_eta: Option<f32>,
    /// (token, what is added to its logit); from -100 to 100.
    pub logit_bias: Option<Vec<(u32, f32)>>,
    /// Seed of the random numbers; drawn where absent.
    pub seed: Option<u64>,
}

impl Settings {
    /// A model's own settings from `generation_config.json`. An explicit `do_sample: false` is temperature 0.
    ///
    /// # Errors
    /// A key of the wrong type, by name.
    pub fn from_generation_config(config: &Object<'_>) -> Result<Settings, ingle_tensor::Error> {
        let float = |key: &str| Ok::<_, ingle_tensor::Error>(config.get::<f64>(key)?.map(|x| x as f32));
        let temperature = float("temperature")?;
        let greedy = config.get::<bool>("do_sample")? == Some(false);
        Ok(Settings {
            temperature: if greedy { Some(0.0) } else { temperature },
            top_k: config.get("top_k")?,
            top_p: float("top_p")?,
            min_p: float("min_p")?,
            typical_p: float("typical_p")?,
            repetition_penalty: float("repetition_penalty")?,
            ..Settings::default()
        })
    }

    /// A model's own settings from the `general.sampling.*` keys of a GGUF file.
    ///
    /// # Errors
    /// A key of the wrong type, by name.
    pub fn from_gguf(metadata: &Metadata) -> Result<Settings, ingle_tensor::Error> {
        let key = |name: &str| format!("general.sampling.{name}");
        let float = |name: &str| metadata.f32_opt(&key(name));
        let int = |name: &str| Ok(metadata.i32_opt(&key(name))?.map(i64::from));
        Ok(Settings {
            temperature: float("temp")?,
            top_k: int("top_k")?,
            top_p: float("top_p")?,
            min_p: float("min_p")?,
            repetition_penalty: float("penalty_repeat")?,
            penalty_window: int("penalty_last_n")?,
            xtc_probability: float("xtc_probability")?,
            xtc_threshold: float("xtc_threshold")?,
            mirostat: int("mirostat")?,
            mirostat_tau: float("mirostat_tau")?,
            mirostat_eta: float("mirostat_eta")?,
            ..Settings::default()
        })
    }

    /// Whether the model's makers chose how its tokens are cut off, so that our defaults must not be mixed in.
    fn shapes_the_distribution(&self) -> bool {
        self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some()
    }
}

/// A setting outside its range.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{field} is {value}; it must be {limit}")]
pub struct ParamError {
    /// The setting, by its name in [`Settings`].
    pub field: &'static str,
    /// What was given.
    pub value: String,
    /// What is allowed.
    pub limit: String,
}

/// DRY ("don't repeat yourself"): a token that would continue a repetition of `n` tokens, `n` at least
/// `allowed_length`, loses `multiplier * base^(n - allowed_length)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Dry {
    pub(super) multiplier: f32,
    pub(super) base: f32,
    pub(super) allowed_length: usize,
    pub(super) window: usize,
    /// Sorted.
    pub(super) breakers: Vec<u32>,
}

/// XTC ("exclude top choices").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xtc {
    pub(super) probability: f32,
    pub(super) threshold: f32,
}

/// Mirostat 2.0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    pub(super) tau: f32,
    pub(super) eta: f32,
}

/// Checked sampling parameters; see [`Settings`] for the meaning of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    pub(super) temperature: f32,
    pub(super) top_k: usize,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    pub(super) typical_p: f32,
    pub(super) repetition_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) presence_penalty: f32,
    pub(super) penalty_window: usize,
    pub(super) dry: Option<Dry>,
    pub(super) xtc: Option<Xtc>,
    pub(super) mirostat: Option<Mirostat>,
    pub(super) logit_bias: Vec<(u32, f32)>,
    pub(super) seed: u64,
}

impl Default for Params {
    /// Temperature 0.7, top-p 0.95, min-p 0.05, everything else off, seed 0.
    fn default() -> Params {
        Params { temperature: 0.7, top_p: 0.95, min_p: 0.05, ..Params::neutral() }
    }
}

impl Params {
    /// The likeliest token, always.
    pub fn greedy() -> Params {
        Params { temperature: 0.0, ..Params::neutral() }
    }

    /// The model's distribution as it is.
    fn neutral() -> Params {
        Params {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: usize::MAX,
            dry: None,
            xtc: None,
            mirostat: None,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }

    /// What holds for a request: its own settings, else the model's, else the defaults. Where the model sets any of
    /// temperature, top-k, top-p and min-p, those of them that nobody sets are neutral and not the defaults. A seed that
    /// nobody gives is drawn; [`Params::seed`] reports it.
    ///
    /// # Errors
    /// The first setting outside its range, and a token of `logit_bias` or `dry_breakers` at or above `vocabulary`.
    pub fn resolve(request: &Settings, model: &Settings, vocabulary: usize) -> Result<Params, ParamError> {
        let base = if model.shapes_the_distribution() { Params::neutral() } else { Params::default() };
        macro_rules! pick {
            ($field:ident) => {
                request.$field.clone().or_else(|| model.$field.clone())
            };
        }
        macro_rules! float {
            ($field:ident, $default:expr, $min:literal, $max:literal) => {
                between(stringify!($field), pick!($field).unwrap_or($default), $min, $max)?
            };
        }
        macro_rules! count {
            ($field:ident, $default:expr, $least:literal) => {
                count(stringify!($field), pick!($field), $default, $least)?
            };
        }

        let breakers = pick!(dry_breakers).unwrap_or_default();
        let dry = Dry {
            multiplier: float!(dry_multiplier, 0.0, 0.0, 100.0),
            base: float!(dry_base, 1.75, 1.0, 10.0),
            allowed_length: match pick!(dry_allowed_length).unwrap_or(2) {
                length @ 1..=1024 => length as usize,
                length => return Err(error("dry_allowed_length", length, "from 1 to 1024")),
            },
            window: count!(dry_window, usize::MAX, -1),
            breakers,
        };
        let xtc = Xtc {
            probability: float!(xtc_probability, 0.0, 0.0, 1.0),
            threshold: float!(xtc_threshold, 0.1, 0.0, 1.0),
        };
        let positive = |field, value: f32, max| match value > 0.0 {
            true => between(field, value, 0.0, max),
            false => Err(error(field, value, &format!("above 0 and at most {max}"))),
        };
        let mirostat = Mirostat {
            tau: positive("mirostat_tau", pick!(mirostat_tau).unwrap_or(5.0), 100.0)?,
            eta: positive("mirostat_eta", pick!(mirostat_eta).unwrap_or(0.1), 1.0)?,
        };
        let params = Params {
            temperature: float!(temperature, base.temperature, 0.0, 100.0),
            top_k: match count!(top_k, base.top_k, -1) {
                usize::MAX => 0,
                k => k,
            },
            top_p: float!(top_p, base.top_p, 0.0, 1.0),
            min_p: float!(min_p, base.min_p, 0.0, 1.0),
            typical_p: float!(typical_p, 1.0, 0.0, 1.0),
            repetition_penalty: float!(repetition_penalty, 1.0, 0.01, 100.0),
            frequency_penalty: float!(frequency_penalty, 0.0, -100.0, 100.0),
            presence_penalty: float!(presence_penalty, 0.0, -100.0, 100.0),
            penalty_window: count!(penalty_window, usize::MAX, -1),
            dry: (dry.multiplier > 0.0).then(|| {
                let mut dry = dry.clone();
                dry.breakers.sort_unstable();
                dry
            }),
            xtc: (xtc.probability > 0.0).then_some(xtc),
            mirostat: match pick!(mirostat).unwrap_or(0) {
                0 => None,
                2 => Some(mirostat),
                version => return Err(error("mirostat", version, "0 or 2")),
            },
            logit_bias: pick!(logit_bias).unwrap_or_default(),
            seed: pick!(seed).unwrap_or_else(drawn_seed),
        };
        for &(_, bias) in &params.logit_bias {
            between("logit_bias", bias, -100.0, 100.0)?;
        }
        let biased = params.logit_bias.iter().map(|&(token, _)| ("logit_bias", token));
        let breaking = dry.breakers.iter().map(|&token| ("dry_breakers", token));
        match biased.chain(breaking).find(|&(_, token)| token as usize >= vocabulary) {
            Some((field, token)) => {
                Err(error(field, format!("token {token}"), &format!("a token below {vocabulary}")))
            }
            None => Ok(params),
        }
    }

    /// What holds as settings that give it again, but for the seed; what is off and what it would be is absent.
    pub fn settings(&self) -> Settings {
        let window = |n: usize| Some(i64::try_from(n).unwrap_or(-1));
        let dry = self.dry.as_ref();
        Settings {
            temperature: Some(self.temperature),
            top_k: window(self.top_k),
            top_p: Some(self.top_p),
            min_p: Some(self.min_p),
            typical_p: Some(self.typical_p),
            repetition_penalty: Some(self.repetition_penalty),
            frequency_penalty: Some(self.frequency_penalty),
            presence_penalty: Some(self.presence_penalty),
            penalty_window: window(self.penalty_window),
            dry_multiplier: dry.map(|dry| dry.multiplier),
            dry_base: dry.map(|dry| dry.base),
            dry_allowed_length: dry.and_then(|dry| window(dry.allowed_length)),
            dry_window: dry.and_then(|dry| window(dry.window)),
            dry_breakers: dry.map(|dry| dry.breakers.clone()),
            xtc_probability: self.xtc.map(|xtc| xtc.probability),
            xtc_threshold: self.xtc.map(|xtc| xtc.threshold),
            mirostat: self.mirostat.map(|_| 2),
            mirostat_tau: self.mirostat.map(|mirostat| mirostat.tau),
            mirostat_eta: self.mirostat.map(|mirostat| mirostat.eta),
            logit_bias: (!self.logit_bias.is_empty()).then(|| self.logit_bias.clone()),
            seed: None,
        }
    }

    /// The seed, given or drawn.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

fn error(field: &'static str, value: impl ToString, limit: &str) -> ParamError {
    ParamError { field, value: value.to_string(), limit: limit.to_owned() }
}

/// `value` if it is in the range; NaN is in none.
fn between(field: &'static str, value: f32, min: f32, max: f32) -> Result<f32, ParamError> {
    match (min..=max).contains(&value) {
        true => Ok(value),
        false => Err(error(field, value, &format!("a number from {min} to {max}"))),
    }
}

/// A count where -1 stands for "all", given as `usize::MAX`.
fn count(field: &'static str, value: Option<i64>, default: usize, least: i64) -> Result<usize, ParamError> {
    match value {
        None => Ok(default),
        Some(-1) => Ok(usize::MAX),
        Some(value) if value < least => Err(error(field, value, "-1 (all), 0 or more")),
        Some(value) => Ok(usize::try_from(value).unwrap_or(usize::MAX)),
    }
}

/// A seed nobody chose, below 2^53, so that readers of JSON whose numbers are doubles give it back as it is. The standard
/// library's hash keys are drawn from the system's randomness.
fn drawn_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn settings(json: serde_json::Value) -> Settings {
        serde_json::from_value(json).unwrap()
    }

    fn model(config: &serde_json::Value) -> Settings {
        let file = std::path::Path::new("generation_config.json");
        Settings::from_generation_config(&Object::of(file, config).unwrap()).unwrap()
    }

    fn resolve(request: serde_json::Value) -> Result<Params, ParamError> {
        Params::resolve(&settings(request), &Settings::default(), 100)
    }

    /// (setting, given, what the message says).
    #[test]
    fn values_outside_their_range_are_named() {
        for (field, value, want) in [
            ("temperature", json!(-1.0), "temperature is -1; it must be a number from 0 to 100"),
            ("temperature", json!(1e300), "temperature is inf; it must be a number from 0 to 100"),
            ("top_k", json!(-2), "top_k is -2; it must be -1 (all), 0 or more"),
            ("top_p", json!(1.5), "top_p is 1.5; it must be a number from 0 to 1"),
            ("min_p", json!(-0.1), "min_p is -0.1; it must be a number from 0 to 1"),
            ("typical_p", json!(2), "typical_p is 2; it must be a number from 0 to 1"),
            ("repetition_penalty", json!(0), "repetition_penalty is 0; it must be a number from 0.01 to 100"),
            (
                "repetition_penalty",
                json!(-1),
                "repetition_penalty is -1; it must be a number from 0.01 to 100",
            ),
            (
                "frequency_penalty",
                json!(101),
                "frequency_penalty is 101; it must be a number from -100 to 100",
            ),
            (
                "presence_penalty",
                json!(-101),
                "presence_penalty is -101; it must be a number from -100 to 100",
            ),
            ("penalty_window", json!(-5), "penalty_window is -5; it must be -1 (all), 0 or more"),
            ("dry_base", json!(0.5), "dry_base is 0.5; it must be a number from 1 to 10"),
            ("dry_allowed_length", json!(0), "dry_allowed_length is 0; it must be from 1 to 1024"),
            ("dry_breakers", json!([1, 100]), "dry_breakers is token 100; it must be a token below 100"),
            ("xtc_probability", json!(1.1), "xtc_probability is 1.1; it must be a number from 0 to 1"),
            ("mirostat", json!(1), "mirostat is 1; it must be 0 or 2"),
            ("mirostat_tau", json!(0), "mirostat_tau is 0; it must be above 0 and at most 100"),
            ("mirostat_eta", json!(2), "mirostat_eta is 2; it must be a number from 0 to 1"),
            ("logit_bias", json!([[3, 101.0]]), "logit_bias is 101; it must be a number from -100 to 100"),
            ("logit_bias", json!([[100, 1.0]]), "logit_bias is token 100; it must be a token below 100"),
        ] {
            let error = resolve(json!({ field: value })).unwrap_err();
            assert_eq!(error.to_string(), want);
            assert_eq!(error.field, field);
        }
        let nan = Settings { top_p: Some(f32::NAN), ..Settings::default() };
        assert!(Params::resolve(&nan, &Settings::default(), 1).is_err());
    }

    #[test]
    fn values_at_their_limits_are_taken() {
        for request in [
            json!({"temperature": 0, "top_p": 0}),
            json!({"temperature": 1e-12}),
            json!({"top_k": 1_000_000_000}),
            json!({"top_p": 1e-9}),
            json!({"top_p": 0.9999999}),
            json!({"top_p": 1, "min_p": 1}),
            json!({"logit_bias": [[99, -100.0]], "dry_breakers": [99]}),
        ] {
            assert!(resolve(request.clone()).is_ok(), "{request}");
        }
        assert_eq!(resolve(json!({"top_k": -1})).unwrap().top_k, 0);
        assert_eq!(resolve(json!({"seed": 7})).unwrap().seed(), 7);
        assert!(resolve(json!({"temperature": 0})).unwrap().is_greedy());
    }

    /// (request, model, resulting temperature, top-k, top-p, min-p).
    #[test]
    fn the_request_wins_then_the_model_then_the_defaults() {
        for (request, config, want) in [
            (json!({}), json!({}), (0.7, 0, 0.95, 0.05)),
            (json!({"top_p": 0.5}), json!({"eos_token_id": 2}), (0.7, 0, 0.5, 0.05)),
            (json!({}), json!({"temperature": 0.6, "top_k": 20}), (0.6, 20, 1.0, 0.0)),
            (json!({"temperature": 0.1}), json!({"temperature": 0.6, "top_k": 20}), (0.1, 20, 1.0, 0.0)),
            (json!({"min_p": 0.2}), json!({"top_p": 0.9}), (1.0, 0, 0.9, 0.2)),
            (json!({}), json!({"do_sample": false, "temperature": 0.6}), (0.0, 0, 1.0, 0.0)),
            (json!({}), json!({"do_sample": true}), (0.7, 0, 0.95, 0.05)),
        ] {
            let params = Params::resolve(&settings(request.clone()), &model(&config), 10).unwrap();
            let got = (params.temperature, params.top_k, params.top_p, params.min_p);
            assert_eq!(got, want, "{request} {config}");
        }
    }
}
