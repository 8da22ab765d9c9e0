//! From logits to one token.
//!
//! A token's weight is an integer ([`sample::weight`]), so a sum of weights is exact whatever its order, and only tokens
//! that may be chosen are put in order. Tokens less likely than 2^-44 of the likeliest are never chosen.

use ingle_graph::sample::{self, Draw, ONE};
use ingle_graph::{LOGITS_SPAN, math};

use super::params::{Mirostat, Params};
use super::rank::{self, Ranking};

/// Below this (logit - largest) / temperature the weight is 0; -31 is enough, the rest is for rounding.
const NEGLIGIBLE: f32 = -32.0;

/// Turns logits into weights.
#[derive(Clone, Copy)]
struct Scale {
    largest: f32,
    temperature: f32,
}

impl Scale {
    fn weight(self, logit: f32) -> u64 {
        sample::weight(logit, self.largest, self.temperature)
    }

    fn weight_of(self, key: u64) -> u64 {
        self.weight(rank::value(key))
    }

    fn total(self, keys: &[u64]) -> u64 {
        keys.iter().map(|&key| self.weight_of(key)).sum()
    }
}

/// Logits to choose from.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) logits: &'a [f32],
    /// The largest of each [`LOGITS_SPAN`] of them, none NaN.
    pub(super) peaks: Option<&'a [f32]>,
}

impl<'a> Row<'a> {
    /// Tokens with their logits, by id, but for spans of which `keeps` refuses the largest.
    fn spans(self, keeps: impl Fn(f32) -> bool) -> impl Iterator<Item = (usize, f32)> {
        let peaks = self.peaks.map(|peaks| peaks.iter().copied());
        let mut kept = peaks.map(|peaks| peaks.map(keeps));
        let wanted = move |_: &(usize, &'a [f32])| kept.as_mut().is_none_or(|kept| kept.next() == Some(true));
        self.logits.chunks(LOGITS_SPAN).enumerate().filter(wanted).flat_map(|(span, logits)| {
            logits.iter().enumerate().map(move |(i, &logit)| (span * LOGITS_SPAN + i, logit))
        })
    }
}

/// A token by the fixed order: temperature, min-p, top-k, typical, top-p, XTC, draw; with Mirostat: temperature,
/// Mirostat's cut, draw. `None` if all logits are NaN or negative infinity. `largest` is the largest of them, and
/// `surprise_limit` Mirostat's state.
pub(super) fn choose(
    row: Row<'_>,
    largest: f32,
    params: &Params,
    draw: Draw,
    surprise_limit: &mut f32,
) -> Option<u32> {
    if largest == f32::NEG_INFINITY {
        return None;
    }
    if params.is_greedy() {
        let is_largest = |logit: f32| logit == largest;
        return row.spans(is_largest).find(|&(_, logit)| is_largest(logit)).map(|(id, _)| id as u32);
    }
    let scale = Scale { largest, temperature: params.temperature };
    if let Some(mirostat) = params.mirostat {
        let ranking = Ranking::new(candidates(row, scale, 0.0));
        return choose_mirostat(ranking, scale, mirostat, draw, surprise_limit);
    }
    let mut ranking = Ranking::new(candidates(row, scale, params.min_p));
    if params.top_k > 0 {
        ranking.truncate(params.top_k);
    }
    if params.typical_p < 1.0 {
        ranking = typical(ranking, scale, params.typical_p);
    }
    let mut total = scale.total(ranking.keys());
    let mut kept = 0..ranking.len();
    if params.top_p < 1.0 {
        (kept.end, total) = reach(&mut ranking, scale, f64::from(params.top_p) * total as f64);
    }
    if let Some(xtc) = params.xtc {
        let least = f64::from(xtc.threshold) * total as f64;
        let is_top = |key: u64| scale.weight_of(key) as f64 >= least;
        let mut tops = 0;
        while tops < kept.end && ranking.get(tops).is_some_and(is_top) {
            tops += 1;
        }
        if tops >= 2 && f64::from(draw.coin) < f64::from(xtc.probability) * 2_f64.powi(32) {
            kept.start = tops - 1;
            total -= scale.total(&ranking.keys()[..kept.start]);
        }
    }
    pick(&mut ranking, scale, kept.start, total, draw)
}

/// The keys of all tokens that weigh something and at least `min_p` of the likeliest.
fn candidates(row: Row<'_>, scale: Scale, min_p: f32) -> Vec<u64> {
    // A bound in logits spares most exponentials; it is a little too low, and weights decide.
    let bound = if min_p > 0.0 { math::ln(min_p).max(NEGLIGIBLE) - 0.01 } else { NEGLIGIBLE };
    let bound = bound * scale.temperature;
    let least = f64::from(min_p) * ONE as f64;
    let reaches = |logit: f32| logit == scale.largest || logit - scale.largest >= bound;
    let weighs = |logit: f32| logit == scale.largest || min_p == 0.0 || scale.weight(logit) as f64 >= least;
    row.spans(reaches)
        .filter(|&(_, logit)| reaches(logit) && weighs(logit))
        .map(|(id, logit)| rank::key(logit, id))
        .collect()
}

/// The shortest beginning that weighs at least `goal`, never empty: its length and weight.
fn reach(ranking: &mut Ranking, scale: Scale, goal: f64) -> (usize, u64) {
    let (mut count, mut sum) = (0, 0);
    while let Some(key) = ranking.get(count) {
        count += 1;
        sum += scale.weight_of(key);
        if sum as f64 >= goal {
            break;
        }
    }
    (count, sum)
}

/// Locally typical sampling (Meister, Pimentel, Wiher, Cotterell, 2022): keeps the tokens whose surprise is nearest to
/// the expected one, until they weigh `mass` of the whole.
fn typical(mut ranking: Ranking, scale: Scale, mass: f32) -> Ranking {
    let total = scale.total(ranking.keys()) as f64;
    ranking.get(ranking.len());
    let surprise = |key: u64| -math::ln((scale.weight_of(key) as f64 / total) as f32);
    let weighing = ranking.keys().iter().filter(|&&key| scale.weight_of(key) > 0);
    let mut tokens: Vec<(f32, u64)> = weighing.map(|&key| (surprise(key), key)).collect();
    let expected: f64 =
        tokens.iter().map(|&(surprise, key)| scale.weight_of(key) as f64 / total * f64::from(surprise)).sum();
    for (surprise, _) in &mut tokens {
        *surprise = (*surprise - expected as f32).abs();
    }
    tokens.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut count, mut sum) = (0, 0);
    while count < tokens.len() && (count == 0 || (sum as f64) < f64::from(mass) * total) {
        sum += scale.weight_of(tokens[count].1);
        count += 1;
    }
    Ranking::new(tokens[..count].iter().map(|&(_, key)| key).collect())
}

/// Mirostat 2.0 (Basu, Ramachandran, Keskar, Varshney, 2021): keeps tokens up to a surprise, which follows the surprise
/// observed towards its target.
fn choose_mirostat(
    mut ranking: Ranking,
    scale: Scale,
    mirostat: Mirostat,
    draw: Draw,
    surprise_limit: &mut f32,
) -> Option<u32> {
    let bits =
        |weight: u64, total: u64| -math::ln((weight as f64 / total as f64) as f32) * std::f32::consts::LOG2_E;
    let all = scale.total(ranking.keys());
    let (mut count, mut total) = (0, 0);
    while let Some(key) = ranking.get(count) {
        let weight = scale.weight_of(key);
        if count > 0 && bits(weight, all) > *surprise_limit {
            break;
        }
        total += weight;
        count += 1;
    }
    let token = pick(&mut ranking, scale, 0, total, draw)?;
    let chosen = ranking.keys()[..count].iter().find(|&&key| rank::id(key) == token)?;
    let observed = bits(scale.weight_of(*chosen), total);
    *surprise_limit -= mirostat.eta * (observed - mirostat.tau);
    Some(token)
}

/// The token at a random point of the `total` weight that starts at rank `start`.
fn pick(ranking: &mut Ranking, scale: Scale, start: usize, total: u64, draw: Draw) -> Option<u32> {
    let mut left = ((u128::from(draw.token) * u128::from(total)) >> 64) as u64;
    let mut at = start;
    while let Some(key) = ranking.get(at) {
        let weight = scale.weight_of(key);
        if left < weight {
            return Some(rank::id(key));
        }
        left -= weight;
        at += 1;
    }
    None
}
