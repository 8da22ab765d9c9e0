//! A loaded model on a device: inputs in, results out. Programs are compiled once per bucket and kept.

use std::collections::HashMap;
use std::sync::Arc;

use ingle_graph::{
    Backend, Bucket, Graph, Inputs, KvGroup, KvPlan, KvType, PAGE, PlanKey, PlanOptions, Prepared, Program,
    passes,
};
use ingle_models::Model;
use ingle_tensor::Checkpoint;

use crate::Result;

/// A program made ready on the device.
struct Ready {
    prepared: Prepared,
    program: Arc<Program>,
}

/// A model loaded on one backend under one set of options.
pub struct Runner {
    backend: Box<dyn Backend>,
    model: Arc<Model>,
    options: PlanOptions,
    kv: KvPlan,
    programs: HashMap<Bucket, Ready>,
    last: Option<Bucket>,
}

/// What a model will ask of a device, known before one is opened.
pub struct Plan<'a> {
    /// The model.
    pub graph: &'a Graph,
    /// Options of every program. Who opens several devices says here what lies where.
    pub options: &'a mut PlanOptions,
    /// The KV pools.
    pub kv: &'a KvPlan,
    /// Buckets of the steps to come, one of which is as large in everything as any: the last.
    pub buckets: Vec<Bucket>,
}

/// Opens a device for a plan.
pub type Open<'a> = dyn FnMut(Plan<'_>) -> ingle_graph::Result<Box<dyn Backend>> + 'a;

/// Buckets of steps of up to `tokens` tokens and `sequences` sequences, of each of which the last row is wanted.
pub fn buckets(tokens: usize, sequences: usize) -> Vec<Bucket> {
    let sequences = sequences.min(tokens);
    let most = Bucket::holding(tokens, sequences, sequences);
    let powers = |to: usize| std::iter::successors(Some(1), move |n| (2 * n <= to).then_some(2 * n));
    let prompts = powers(most.t).flat_map(|t| [Bucket { t, s: 1, r: 1 }, Bucket { t, ..most }]);
    let others = powers(most.s).map(|n| Bucket { t: n, s: n, r: n });
    let mut all: Vec<Bucket> = Vec::new();
    for bucket in others.chain(prompts).chain([most]) {
        if bucket.s <= bucket.t {
            all.retain(|other| *other != bucket);
            all.push(bucket);
        }
    }
    all
}

/// Buckets of steps of up to `tokens` tokens of one sequence, all rows of which are wanted.
pub fn buckets_of_all_rows(tokens: usize) -> Vec<Bucket> {
    let most = Bucket::holding(tokens, 1, tokens);
    let sizes = std::iter::successors(Some(1), |n| (2 * n <= most.t).then_some(2 * n));
    sizes.map(|n| Bucket { t: n, s: 1, r: n }).collect()
}

/// Pages for `sequences` sequences of `context` tokens, and in each group the one that padding rows write to. A group with
/// a window gets what the window and `chunk` tokens of one step touch, twice: once to compute with, and once to keep for
/// prompts that go on from a prefix; never more than all positions would take.
pub fn kv_plan(graph: &Graph, context: usize, sequences: usize, chunk: usize) -> KvPlan {
    let pages = |group: &KvGroup| {
        let all = context.div_ceil(PAGE);
        1 + sequences * all.min(2 * group.ring(chunk, context, PAGE))
    };
    KvPlan { pages: graph.kv_groups.iter().map(pages).collect(), context }
}

/// Pages for every position of `sequences` sequences of `context` tokens in every group, as callers want that keep track of
/// pages themselves.
pub fn kv_plan_of_all(graph: &Graph, context: usize, sequences: usize) -> KvPlan {
    KvPlan::uniform(graph, 1 + sequences * context.div_ceil(PAGE), context)
}

/// Bytes of the pool of one group: all its layers' keys and values in `kv.pages` pages.
pub fn kv_group_bytes(graph: &Graph, kind: KvType, kv: &KvPlan, group: usize) -> u64 {
    let layers = graph.kv.iter().filter(|layer| layer.group == group);
    let per_position: usize = layers.map(|l| 2 * l.heads * kind.bytes(l.head_dim)).sum();
    (kv.pages[group] * PAGE) as u64 * per_position as u64
}

/// Bytes of all KV pools.
pub fn kv_bytes(graph: &Graph, kind: KvType, kv: &KvPlan) -> u64 {
    (0..kv.pages.len()).map(|group| kv_group_bytes(graph, kind, kv, group)).sum()
}

impl Runner {
    /// Loads the model's weights on the backend and sizes the KV pools.
    ///
    /// # Errors
    /// What the backend cannot serve.
    pub fn new(
        mut backend: Box<dyn Backend>,
        model: Arc<Model>,
        checkpoint: Arc<Checkpoint>,
        options: PlanOptions,
        kv: KvPlan,
    ) -> Result<Self> {
        backend.load(&model.graph, checkpoint, &options, kv.clone())?;
        Ok(Self { backend, model, options, kv, programs: HashMap::new(), last: None })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The options every program is compiled with.
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// The KV pools.
    pub fn kv(&self) -> &KvPlan {
        &self.kv
    }

    /// The device.
    pub fn backend(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    /// The program that serves `bucket`, compiled and prepared on first use.
    ///
    /// # Errors
    /// A rule of the language broken by a pass; an op the device does not run.
    pub fn prepare(&mut self, bucket: Bucket) -> Result<Arc<Program>> {
        if let Some(ready) = self.programs.get(&bucket) {
            return Ok(ready.program.clone());
        }
        let key = PlanKey { bucket, options: self.options.clone() };
        let program = Arc::new(passes::compile(&self.model.graph, &key)?);
        let prepared = self.backend.prepare(program.clone())?;
        self.programs.insert(bucket, Ready { prepared, program: program.clone() });
        Ok(program)
    }

    /// Runs one step; its results are then in [`Runner::output`].
    ///
    /// # Errors
    /// Inputs that do not fit; a device failure.
    pub fn run(&mut self, inputs: &Inputs) -> Result<()> {
        let bucket = Bucket::holding(inputs.tokens.len(), inputs.sequence_count(), inputs.wanted.len());
        self.last = None;
        self.prepare(bucket)?;
        self.backend.run(self.programs[&bucket].prepared, inputs)?;
        self.last = Some(bucket);
        Ok(())
    }

    /// Names of the last run's results.
    pub fn outputs(&self) -> Vec<String> {
        let ready = self.last.and_then(|bucket| self.programs.get(&bucket));
        let outputs = ready.into_iter().flat_map(|ready| &ready.program.outputs);
        outputs.filter(|output| !output.is_carried()).map(|output| output.name.clone()).collect()
    }

    /// The result of this name of the last run: `[rows, columns]`.
    ///
    /// # Errors
    /// Nothing has run, or the program has no such result.
    pub fn output(&mut self, name: &str) -> Result<&[f32]> {
        let missing = || crate::Error::Output { name: name.to_string() };
        let ready = self.last.and_then(|bucket| self.programs.get(&bucket)).ok_or_else(missing)?;
        let index = ready.program.output(name).ok_or_else(missing)?;
        Ok(self.backend.read(ready.prepared, index)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every step of one sequence, and every step that adds a token to each of several, is in a bucket of the list; none is
    /// there twice, and the last is as large in everything as any.
    #[test]
    fn buckets_to_come_hold_the_steps_to_come() {
        for (tokens, sequences) in [(1, 1), (40, 1), (512, 1), (512, 6), (300, 64), (8, 64)] {
            let all = buckets(tokens, sequences);
            let last = all[all.len() - 1];
            for (at, bucket) in all.iter().enumerate() {
                assert!(
                    bucket.t <= last.t && bucket.s <= last.s && bucket.r <= last.r,
                    "{bucket:?} of {all:?}"
                );
                assert!(!all[..at].contains(bucket) && bucket.s <= bucket.t, "{bucket:?} of {all:?}");
            }
            for (t, r) in (1..=tokens).flat_map(|t| [(t, 0), (t, 1)]) {
                assert!(all.contains(&Bucket::holding(t, 1, r)), "{t} tokens, {r} wanted: {all:?}");
            }
            for n in 1..=sequences.min(tokens) {
                assert!(all.contains(&Bucket::holding(n, n, n)), "{n} sequences: {all:?}");
            }
        }
        let all = buckets_of_all_rows(100);
        assert!((1..=100).all(|t| all.contains(&Bucket::holding(t, 1, t))) && all.len() == 8, "{all:?}");
    }
}
