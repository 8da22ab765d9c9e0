//! A loaded model on a device: inputs in, results out. Programs are compiled once per bucket and kept.

use std::collections::HashMap;
use std::sync::Arc;

use ingle_graph::{Backend, Bucket, Inputs, KvPlan, PAGE, PlanKey, PlanOptions, Prepared, Program, passes};
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

/// Pages for `sequences` sequences of `context` tokens, and the one that padding rows write to.
pub fn kv_plan(context: usize, sequences: usize) -> KvPlan {
    KvPlan { pages: 1 + sequences * context.div_ceil(PAGE), context }
}

/// Bytes of the KV pool: the graph's layers, `kv.pages` pages each.
pub fn kv_bytes(model: &Model, options: &PlanOptions, kv: &KvPlan) -> u64 {
    let per_cell: usize = model.graph.kv.iter().map(|l| 2 * l.heads * options.kv.bytes(l.head_dim)).sum();
    (kv.pages * PAGE) as u64 * per_cell as u64
}

impl Runner {
    /// Loads the model's weights on the backend and sizes the KV pool.
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
        backend.load(&model.graph, checkpoint, &options, kv)?;
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

    /// The KV pool.
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
        let sequences = inputs.tables.len().checked_div(inputs.table_stride).unwrap_or(0);
        let bucket = Bucket::holding(inputs.tokens.len(), sequences, inputs.wanted.len());
        self.last = None;
        self.prepare(bucket)?;
        self.backend.run(self.programs[&bucket].prepared, inputs)?;
        self.last = Some(bucket);
        Ok(())
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
