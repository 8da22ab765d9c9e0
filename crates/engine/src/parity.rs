//! Two devices compared: the same steps on both, every result as bits, and the tokens that the second chooses.
//!
//! In exact mode all that a program computes has the same bits on every device, so the first tensor that differs names the
//! op at fault: hidden states are results too.

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

/// Runs a prompt in chunks and `generated` greedy tokens on two devices, and compares hidden states and logits of every
/// step until one differs. `watch` gets tokens done, and of how many.
///
/// # Errors
/// What a device cannot serve.
pub fn devices(
    checkpoint: &Arc<Checkpoint>,
    options: PlanOptions,
    generated: usize,
    open: [&mut Open<'_>; 2],
    watch: &mut dyn FnMut(u64, u64),
) -> Result<Parity> {
    let model = Arc::new(Model::open(checkpoint)?);
    let options = PlanOptions { numerics: Numerics::Exact, taps: true, sample: true, ..options };
    let prompt = PROMPT.min(model.config.context / 2).max(1);
    let total = (prompt + generated).min(model.config.context);
    let kv = kv_plan_of_all(&model.graph, total, 1);
    let [first, second] = open;
    let runner = |open: &mut Open<'_>| {
        let mut options = options.clone();
        let buckets = buckets_of_all_rows(CHUNK);
        let backend = open(Plan { graph: &model.graph, options: &mut options, kv: &kv, buckets })?;
        Runner::new(backend, model.clone(), checkpoint.clone(), options, kv.clone())
    };
    let (mut first, mut second) = (runner(first)?, runner(second)?);
    // Any tokens will do, as long as they differ.
    let mut state = 1u32;
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((u64::from(state) * model.config.vocabulary as u64) >> 32) as u32
    };
    let tokens: Vec<u32> = (0..prompt).map(|_| token()).collect();
    let mut feeds = [Feed::new(&mut first, tokens.clone()), Feed::new(&mut second, tokens)];
    let mut parity = Parity::default();
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
            let logits = feeds[0].output("logits")?;
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
