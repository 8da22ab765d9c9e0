//! Log-probabilities of the raw logits.

use ingle_graph::math;

use super::rank::{self, Ranking};

/// What is reported for a token that has no probability, so that every figure is finite.
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// The log-softmax of one row of logits, NaN counted as no probability.
pub(super) struct LogSoftmax<'l> {
    logits: &'l [f32],
    largest: f32,
    /// ln of the sum of exp(logit - largest).
    log_sum: f32,
}

impl<'l> LogSoftmax<'l> {
    /// The sum has 256 accumulators (index mod 256) and a tree 128, 64, ..., 1: NUMERICS.md section 3.
    pub(super) fn new(logits: &'l [f32]) -> LogSoftmax<'l> {
        let (largest, _) = rank::max(logits);
        let mut sums = [0.0_f32; 256];
        for chunk in logits.chunks(256) {
            for (sum, &logit) in sums.iter_mut().zip(chunk) {
                *sum += if logit.is_nan() { 0.0 } else { math::exp(logit - largest) };
            }
        }
        let mut half = 128;
        while half > 0 {
            for k in 0..half {
                sums[k] += sums[k + half];
            }
            half /= 2;
        }
        LogSoftmax { logits, largest, log_sum: math::ln(sums[0]) }
    }

    /// The log-probability of token `id`, at least [`LOGPROB_FLOOR`].
    pub(super) fn of(&self, id: u32) -> f32 {
        let logprob = self.logits[id as usize] - self.largest - self.log_sum;
        if logprob > LOGPROB_FLOOR { logprob } else { LOGPROB_FLOOR }
    }

    /// The `count` likeliest tokens in order, fewer where the vocabulary has fewer.
    pub(super) fn top(&self, count: usize) -> Vec<(u32, f32)> {
        let mut ranking =
            Ranking::new(self.logits.iter().enumerate().map(|(id, &logit)| rank::key(logit, id)).collect());
        ranking.truncate(count);
        ranking.keys().iter().map(|&key| (rank::id(key), self.of(rank::id(key)))).collect()
    }
}
