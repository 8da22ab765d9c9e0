//! Choosing the next token from a row of logits.
//!
//! The order of operations is fixed:
//!
//! 1. logit bias;
//! 2. repetition penalty over prompt and reply, then frequency and presence penalties over the reply;
//! 3. DRY;
//! 4. temperature (0 takes the likeliest token and skips the rest);
//! 5. min-p, top-k, typical, top-p, XTC; or Mirostat 2.0 in their place;
//! 6. the draw.
//!
//! Temperature comes before the cuts, as in the OpenAI API and transformers: a low temperature makes top-p keep fewer
//! tokens. Tokens are ordered by value descending, then id ascending, NaN last. Every random number is a pure function of
//! (seed, choice, position), so a token does not depend on what else is in the batch. Log-probabilities are those of the
//! raw logits, before step 1.
//!
//! A device does most of this itself and chooses the same tokens ([`ingle_graph::sample`]); what it does not do, or a row
//! with NaN, is done here.

mod choose;
mod device;
mod logprobs;
mod params;
mod penalties;
mod rank;

use std::borrow::Cow;

use ingle_graph::LOGITS_SPAN;
use ingle_graph::sample::Draw;
use thiserror::Error;

pub use logprobs::LOGPROB_FLOOR;
pub use params::{Dry, MAX_LOGPROBS, Mirostat, ParamError, Params, Settings, Xtc};

use choose::Row;
use logprobs::LogSoftmax;

/// A row of logits from which nothing can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no token can be chosen at position {position}: {}", no_number(*.logits, *.nan))]
pub struct SampleError {
    /// The position of the token that was to be chosen.
    pub position: usize,
    /// How many logits there were.
    pub logits: usize,
    /// How many of them were NaN.
    pub nan: usize,
}

fn no_number(logits: usize, nan: usize) -> String {
    match nan {
        0 => format!("all {logits} logits are negative infinity"),
        _ if nan == logits => format!("all {logits} logits are NaN"),
        _ => format!("of {logits} logits {nan} are NaN and the others negative infinity"),
    }
}

/// One chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The token.
    pub id: u32,
    /// Its log-probability under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens and their log-probabilities, likeliest first, if asked for.
    pub top: Vec<(u32, f32)>,
    /// How many of the raw logits were NaN.
    pub nan: usize,
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: Params,
    choice: u32,
    /// Tokens of the prompt.
    prompt: usize,
    /// Mirostat's surprise limit in bits: all that is carried from token to token.
    surprise_limit: f32,
}

impl Sampler {
    /// For choice number `choice` of a request with a prompt of `prompt` tokens.
    pub fn new(params: Params, choice: u32, prompt: usize) -> Sampler {
        let surprise_limit = params.mirostat.map_or(0.0, |mirostat| 2.0 * mirostat.tau);
        Sampler { params, choice, prompt, surprise_limit }
    }

    /// Chooses the token after `tokens` (prompt and reply so far) from `logits` `[vocabulary]`. With `logprobs`, reports
    /// its log-probability and those of so many of the likeliest tokens, at most [`MAX_LOGPROBS`] and the vocabulary.
    ///
    /// # Errors
    /// All logits NaN or negative infinity.
    pub fn sample(
        &mut self,
        logits: &[f32],
        tokens: &[u32],
        logprobs: Option<usize>,
    ) -> Result<Sample, SampleError> {
        self.sample_peaked(logits, None, tokens, logprobs)
    }

    /// As [`Sampler::sample`], and the same token. `peaks` are the largest of each [`LOGITS_SPAN`] logits, NaN where one
    /// is: spans in which nothing can be chosen are not looked at.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn sample_peaked(
        &mut self,
        logits: &[f32],
        peaks: Option<&[f32]>,
        tokens: &[u32],
        logprobs: Option<usize>,
    ) -> Result<Sample, SampleError> {
        let draw = Draw::new(self.params.seed, self.choice, tokens.len() as u64);
        let mut row = Cow::Borrowed(logits);
        if penalties::is_needed(&self.params) {
            penalties::apply(row.to_mut(), &self.params, tokens, self.prompt);
        }
        // Peaks of other logits than those to choose from, or that hide numbers behind a NaN, say nothing.
        let peaks = peaks.filter(|peaks| {
            debug_assert_eq!(peaks.len(), logits.len().div_ceil(LOGITS_SPAN));
            matches!(row, Cow::Borrowed(_)) && !peaks.iter().any(|peak| peak.is_nan())
        });
        // No penalty makes a number of what is NaN.
        let (largest, has_nan) = rank::max(peaks.unwrap_or(&row));
        let nan = if has_nan { logits.iter().filter(|logit| logit.is_nan()).count() } else { 0 };
        let row = Row { logits: &row, peaks };
        let id = choose::choose(row, largest, &self.params, draw, &mut self.surprise_limit);
        let id = id.ok_or(SampleError { position: tokens.len(), logits: logits.len(), nan })?;
        let (logprob, top) = match logprobs {
            None => (None, Vec::new()),
            Some(count) => {
                let softmax = LogSoftmax::new(logits);
                (Some(softmax.of(id)), softmax.top(count.min(MAX_LOGPROBS)))
            }
        };
        Ok(Sample { id, logprob, top, nan })
    }
}

#[cfg(test)]
mod tests;
