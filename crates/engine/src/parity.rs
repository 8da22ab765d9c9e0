//! Two devices compared: the same steps on both, every result as bits, and the tokens that the second chooses.
//!
//! In exact mode all that a program computes has the same bits on every device, so the first tensor that differs names the
//! op at fault: hidden states are results too. In fast mode devices may compute attention differently, and how close they come
//! is measured: rounding to 8 bits makes a whole step of one last place, so that no bound for each value would say anything.

use std::sync::Arc;

use ingle_graph::backend::PathCount;
use ingle_graph::sample::choose;
use ingle_graph::{Numerics, PlanOptions};
use ingle_models::Model;
use ingle_tensor::Checkpoint;

use crate::Result;
use crate::runner::{Open, Plan, Runner, buckets_of_all_rows, kv_plan_of_all};
use crate::verify::{Feed, argmax};

/// Tokens of the prompt: over one attention chunk, so that chunks merge, and no whole number of pages.
const PROMPT: usize = 299;

/// Tokens of a prompt's step.
const CHUNK: usize = 128;

/// Where two devices differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Result: `hidden.3` is the input of layer 3.
    pub tensor: String,
    /// Position in the sequence.
    pub position: usize,
    /// Column.
    pub column: usize,
    /// What each device has.
    pub values: [f32; 2],
}

/// How close a device in fast mode comes to one in exact mode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Closeness {
    /// Positions whose logits were compared.
    pub positions: usize,
    /// KL divergence of their distributions in nats, from exact to fast: mean, and largest.
    pub mean: f64,
    /// As above.
    pub largest: f64,
    /// Positions with the same likeliest token, or another one within [`BAND`] of it in exact mode.
    pub likeliest: usize,
    /// Of the result of the first layer, the only one whose input is the same on both: the root of the mean square of what
    /// differs, as a share of that of the values.
    pub first_layer: f64,
}

/// Limits of [`Closeness`]: of the mean divergence and the largest. Random weights amplify most: 32 layers of them have 0.015 on an
/// H200, at every position about as much; int8 activations cost real models 0.01 (docs/numerics.md).
pub const MEAN_MAX: f64 = 0.02;
/// As above.
pub const LARGEST_MAX: f64 = 0.2;
/// Distance of logits within which another likeliest token is no difference: about three times what logits differ by at such a
/// divergence, the root of twice of it.
pub const BAND: f32 = 0.5;
/// Least share of positions with the same likeliest token.
pub const LIKELIEST_MIN: f64 = 0.95;
/// Largest difference of the first layer. Attention with 11 bits of queries and weights moves a few values over a rounding border
/// of int8, a step of nearly 1% each, four times a layer: small random models differ by 1.4%.
pub const FIRST_LAYER_MAX: f64 = 0.03;

impl Closeness {
    /// Whether all is within its limit; NaN is not.
    pub fn passed(&self) -> bool {
        let likeliest = self.likeliest as f64 >= LIKELIEST_MIN * self.positions as f64;
        let near =
            self.mean <= MEAN_MAX && self.largest <= LARGEST_MAX && self.first_layer <= FIRST_LAYER_MAX;
        self.positions > 0 && likeliest && near
    }

    /// Adds logits of some positions, `vocabulary` each.
    fn add(&mut self, exact: &[f32], fast: &[f32], vocabulary: usize) {
        for (exact, fast) in exact.chunks(vocabulary).zip(fast.chunks(vocabulary)) {
            let divergence = divergence(exact, fast);
            // A running mean; `max` would lose NaN.
            self.positions += 1;
            self.mean += (divergence - self.mean) / self.positions as f64;
            if self.largest <= divergence || divergence.is_nan() {
                self.largest = divergence;
            }
            let [a, b] = [exact, fast].map(|logits| exact[argmax(logits) as usize]);
            self.likeliest += usize::from(a - b <= BAND);
        }
    }
}

/// KL(p || q) of two rows of logits, in nats.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let normalizer = |x: &[f32]| {
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from(most) + x.iter().map(|&x| f64::from(x - most).exp()).sum::<f64>().ln()
    };
    let (of_p, of_q) = (normalizer(p), normalizer(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let (p, q) = (f64::from(p) - of_p, f64::from(q) - of_q);
        p.exp() * (p - q)
    };
    p.iter().zip(q).map(term).sum()
}

/// The root of the mean square of what differs, as a share of that of `want`.
fn distance(want: &[f32], got: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let differs: f64 = want.iter().zip(got).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    (differs / want.iter().map(|&a| square(f64::from(a))).sum::<f64>()).sqrt()
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parity {
    /// Steps made.
    pub steps: usize,
    /// Tensors compared.
    pub tensors: usize,
    /// Values in them.
    pub values: u64,
    /// Tokens that the second device chose, compared with the definition's.
    pub tokens: usize,
    /// The first difference, in order of computation.
    pub first: Option<Difference>,
    /// In place of bits, where the second device is in fast mode and the first is not.
    pub closeness: Option<Closeness>,
    /// Replays of graphs on the second device.
    pub replays: u64,
    /// Graphs of steps that add one token that the second device did not use, and why.
    pub declined: Vec<String>,
}

impl Parity {
    /// Counts what became of the second device's graphs.
    fn count_graphs(&mut self, paths: Vec<PathCount>) {
        for path in paths {
            match path.declined_graph() {
                Some(why) => self.declined.push(format!("{}: {why}", path.path)),
                None if path.path.starts_with("graph.") && path.declined.is_none() => {
                    self.replays += path.count
                }
                None => {}
            }
        }
    }
}

/// Runs a prompt in chunks and `generated` greedy tokens on two devices, in the `modes` of each, and compares hidden states and
/// logits of every step: as bits until one differs, or how close they are where only the second is in fast mode. `watch` gets
/// tokens done, and of how many.
///
/// # Errors
/// What a device cannot serve.
pub fn devices(
    checkpoint: &Arc<Checkpoint>,
    options: PlanOptions,
    modes: [Numerics; 2],
    generated: usize,
    open: [&mut Open<'_>; 2],
    watch: &mut dyn FnMut(u64, u64),
) -> Result<Parity> {
    let model = Arc::new(Model::open(checkpoint)?);
    let options = PlanOptions { taps: true, sample: true, ..options };
    let prompt = PROMPT.min(model.config.context / 2).max(1);
    let total = (prompt + generated).min(model.config.context);
    let kv = kv_plan_of_all(&model.graph, total, 1);
    let [first, second] = open;
    let runner = |open: &mut Open<'_>, numerics: Numerics| {
        let mut options = PlanOptions { numerics, ..options.clone() };
        let buckets = buckets_of_all_rows(CHUNK);
        let backend = open(Plan { graph: &model.graph, options: &mut options, kv: &kv, buckets })?;
        Runner::new(backend, model.clone(), checkpoint.clone(), options, kv.clone())
    };
    let (mut first, mut second) = (runner(first, modes[0])?, runner(second, modes[1])?);
    // Any tokens will do, as long as they differ.
    let mut state = 1u32;
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(state) * model.config.vocabulary as u64) >> 32) as u32
    };
    let tokens: Vec<u32> = (0..prompt).map(|_| token()).collect();
    let mut feeds = [Feed::new(&mut first, tokens.clone()), Feed::new(&mut second, tokens)];
    let closeness = (modes[0] != modes[1]).then(Closeness::default);
    let mut parity = Parity { closeness, ..Parity::default() };
    let mut done = 0;
    'steps: while done < total {
        let to = if done < prompt { prompt.min(done + CHUNK) } else { done + 1 };
        for feed in &mut feeds {
            feed.run(done, to)?;
        }
        parity.steps += 1;
        // Hidden states first, in order of computation; then what follows from them.
        let (hidden, rest): (Vec<_>, Vec<_>) =
            feeds[0].outputs().into_iter().partition(|name| name.starts_with("hidden."));
        for name in hidden.into_iter().chain(rest) {
            let want = feeds[0].output(&name)?.to_vec();
            let got = feeds[1].output(&name)?;
            parity.tensors += 1;
            parity.values += want.len() as u64;
            if let Some(closeness) = &mut parity.closeness {
                match name.as_str() {
                    "logits" => closeness.add(&want, got, model.config.vocabulary),
                    // The result of layer 0. `max` would lose NaN.
                    "hidden.1" => {
                        let distance = distance(&want, got);
                        if closeness.first_layer <= distance || distance.is_nan() {
                            closeness.first_layer = distance;
                        }
                    }
                    _ => {}
                }
                continue;
            }
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            if let Some(at) = want.iter().zip(got).position(|pair| !same(pair)) {
                let cols = want.len() / (to - done);
                let (position, column) = (done + at / cols, at % cols);
                let values = [want[at], got[at]];
                parity.first = Some(Difference { tensor: name, position, column, values });
                break 'steps;
            }
        }
        // Where the first device chooses none, the definition does.
        if feeds[1].outputs().iter().any(|name| name == "sampled") {
            let got = feeds[1].output("sampled")?.last().copied().unwrap_or(f32::NAN);
            let sampling = feeds[1].sampling(to - 1);
            // In fast mode its own logits are what it chooses by.
            let logits = feeds[usize::from(parity.closeness.is_some())].output("logits")?;
            let want = choose(&logits[logits.len() - model.config.vocabulary..], Some(&sampling));
            parity.tokens += 1;
            if got != want.number() {
                let (tensor, values) = ("sampled".into(), [want.number(), got]);
                parity.first = Some(Difference { tensor, position: to - 1, column: 0, values });
                break 'steps;
            }
        }
        if to >= prompt {
            let logits = feeds[0].output("logits")?;
            let next = argmax(&logits[logits.len() - model.config.vocabulary..]);
            feeds.iter_mut().for_each(|feed| feed.push(next));
        }
        done = to;
        watch(done as u64, total as u64);
    }
    drop(feeds);
    parity.count_graphs(second.backend().paths());
    Ok(parity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_close_does_not_pass() {
        let exact: Vec<f32> = (0..2000).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.1).collect();
        let close = |change: &dyn Fn(usize) -> f32, first_layer: f64| {
            let fast: Vec<f32> = exact.iter().enumerate().map(|(i, x)| x + change(i)).collect();
            let mut closeness = Closeness { first_layer, ..Closeness::default() };
            closeness.add(&exact, &fast, 1000);
            closeness
        };
        let same = close(&|_| 0.0, 0.0);
        assert!(same.passed() && same.mean.abs() < 1e-12 && same.likeliest == 2, "{same:?}");
        assert!(close(&|i| if i % 2 == 0 { 0.01 } else { -0.01 }, 0.001).passed());
        assert!(!close(&|_| 0.0, 0.05).passed(), "the first layer is far off");
        assert!(!close(&|_| 0.0, f64::NAN).passed(), "NaN in the first layer");
        assert!(!close(&|i| if i % 2 == 0 { 0.5 } else { -0.5 }, 0.0).passed(), "another distribution");
        assert!(!close(&|i| if i == 1003 { f32::NAN } else { 0.0 }, 0.0).passed(), "a NaN");
        let other = close(&|i| if i % 1000 == 0 { 15.0 } else { 0.0 }, 0.0);
        assert_eq!(other.likeliest, 0, "another token");
        assert!(!Closeness::default().passed(), "nothing was compared");
    }
}
