//! The waist between programs and devices: a backend takes whole programs, never single ops.

use std::sync::Arc;

use ingle_tensor::Checkpoint;

use crate::builder::Graph;
use crate::op::Rows;
use crate::options::PlanOptions;
use crate::program::Program;
use crate::sample::Sampling;
use crate::{Error, PAGE, Result};

/// Size of the KV pools: one for each [`crate::KvGroup`], since groups keep different positions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvPlan {
    /// Pages of each group's pool, shared by all sequences; page 0 takes the writes of padding rows and is never handed
    /// out.
    pub pages: Vec<usize>,
    /// Longest sequence in tokens; bounds positions and rope tables.
    pub context: usize,
}

impl KvPlan {
    /// `pages` pages for each of the graph's groups.
    pub fn uniform(graph: &Graph, pages: usize, context: usize) -> Self {
        Self { pages: vec![pages; graph.kv_groups.len()], context }
    }

    /// Checks that there is a pool for each of the graph's groups.
    ///
    /// # Errors
    /// [`Error::Inputs`] with both counts.
    pub fn check(&self, graph: &Graph) -> Result<()> {
        match (self.pages.len(), graph.kv_groups.len()) {
            (pools, groups) if pools == groups => Ok(()),
            (pools, groups) => {
                Err(Error::Inputs(format!("{pools} KV pools for a graph of {groups} KV groups")))
            }
        }
    }
}

/// Where keys and values of one group of layers lie in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvInputs {
    /// Cell (page * [`PAGE`] + offset) each row's key and value are written to.
    pub cells: Vec<u32>,
    /// Page tables `[sequences, table_stride]`, each a ring: the page of `position` is entry
    /// `position / PAGE % table_stride`.
    pub tables: Vec<u32>,
    /// Pages per page table.
    pub table_stride: usize,
}

impl KvInputs {
    /// Page that holds `position` of a sequence, for a position that is kept.
    #[inline]
    pub fn page(&self, sequence: u32, position: usize) -> usize {
        // 32 bits: a table has fewer entries than positions, and the division is the only slow instruction here.
        let entry = (position / PAGE) as u32 % self.table_stride as u32;
        self.tables[sequence as usize * self.table_stride + entry as usize] as usize
    }
}

/// The data of one step. Everything that changes from step to step is here and nowhere else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inputs {
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Row of the page tables each token row reads.
    pub sequences: Vec<u32>,
    /// Cells and page tables, by KV group.
    pub kv: Vec<KvInputs>,
    /// Rows whose result is wanted.
    pub wanted: Vec<u32>,
    /// How the tokens of wanted rows are chosen, in a program that chooses; none for rows whose tokens the host chooses, and
    /// those that are not listed.
    pub sampling: Vec<Option<Sampling>>,
    /// What other parts of a program for several devices computed for this one, `[rows, cols]` each.
    pub carried: Vec<Vec<f32>>,
}

impl Inputs {
    /// Row count this symbol stands for.
    pub fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::T => self.tokens.len(),
            Rows::R => self.wanted.len(),
        }
    }

    /// How the token of a wanted row is chosen, if the program is to choose it.
    pub fn sampling(&self, row: usize) -> Option<&Sampling> {
        self.sampling.get(row).and_then(Option::as_ref)
    }

    /// Sequences of the step.
    pub fn sequence_count(&self) -> usize {
        self.sequences.iter().max().map_or(0, |&s| s as usize + 1)
    }

    /// Checks every index against the program and the pools, so that kernels may trust them: tokens, positions, cells,
    /// and of each page table what the step's rows may look at, which must not wrap onto itself.
    ///
    /// # Errors
    /// [`Error::Inputs`] with the row, the value and the limit.
    pub fn check(&self, program: &Program, kv: &KvPlan) -> Result<()> {
        let bad = |what: String| Err(Error::Inputs(what));
        let t = self.tokens.len();
        let bucket = program.key.bucket;
        if t == 0 || t > bucket.t || self.wanted.len() > bucket.r {
            return bad(format!(
                "{t} tokens and {} wanted rows for a program of {bucket:?}",
                self.wanted.len()
            ));
        }
        if self.positions.len() != t || self.sequences.len() != t {
            return bad(format!(
                "{t} tokens, {} positions, {} sequence indices",
                self.positions.len(),
                self.sequences.len()
            ));
        }
        let sequences = self.sequence_count();
        if sequences > bucket.s {
            return bad(format!("{sequences} sequences for a program of {bucket:?}"));
        }
        let vocabulary = program
            .steps()
            .find_map(|s| match s.op {
                crate::Op::Embed { table, .. } => Some(program.weights[table.0 as usize].rows),
                _ => None,
            })
            .unwrap_or(usize::MAX);
        for row in 0..t {
            let (token, position) = (self.tokens[row] as usize, self.positions[row] as usize);
            if token >= vocabulary {
                return bad(format!("row {row}: token {token} of a vocabulary of {vocabulary}"));
            }
            if position >= kv.context {
                return bad(format!("row {row}: position {position} of a context of {}", kv.context));
            }
        }
        if let Some(w) = self.wanted.iter().find(|&&w| w as usize >= t) {
            return bad(format!("wanted row {w} of {t}"));
        }
        let sampled = program.steps().find(|step| matches!(step.op, crate::Op::Sample { .. }));
        if let Some(logits) = sampled.and_then(|step| step.inputs.first()) {
            let rows = self.sampling.iter().enumerate();
            let of = |(row, sampling): (usize, &Option<Sampling>)| {
                Some((row, sampling.as_ref()?.problem(logits.ty().cols)?))
            };
            if let Some((row, what)) = rows.filter_map(of).next() {
                return bad(format!("sampling of wanted row {row}: {what}"));
            }
            if self.sampling.len() > self.wanted.len() {
                return bad(format!("sampling of {} of {} rows", self.sampling.len(), self.wanted.len()));
            }
        }
        for step in program.steps() {
            let (crate::Op::Carried { index }, [to]) = (&step.op, step.outputs.as_slice()) else { continue };
            let wanted = self.rows(to.ty().rows) * to.ty().cols;
            let found = self.carried.get(*index).map_or(0, Vec::len);
            if found != wanted {
                return bad(format!("{}: {found} carried values for {wanted}", step.name));
            }
        }
        let groups = program.kv_groups.len();
        if groups > 0 && (self.kv.len() != groups || kv.pages.len() != groups) {
            return bad(format!(
                "tables of {} KV groups and pools of {} for a program of {groups}",
                self.kv.len(),
                kv.pages.len()
            ));
        }
        for (g, group) in program.kv_groups.iter().enumerate() {
            let (inputs, pages) = (&self.kv[g], kv.pages[g]);
            let tables = inputs.tables.len().checked_div(inputs.table_stride).unwrap_or(0);
            if inputs.cells.len() != t || tables < sequences || u32::try_from(inputs.table_stride).is_err() {
                return bad(format!(
                    "KV group {g}: {} cells and {tables} tables of {} pages for {t} rows of {sequences} sequences",
                    inputs.cells.len(),
                    inputs.table_stride
                ));
            }
            if let Some(row) = inputs.cells.iter().position(|&cell| cell as usize >= pages * PAGE) {
                return bad(format!(
                    "KV group {g}, row {row}: cell {} of {}",
                    inputs.cells[row],
                    pages * PAGE
                ));
            }
            for sequence in 0..sequences as u32 {
                let rows = self.sequences.iter().zip(&self.positions).filter(|(s, _)| **s == sequence);
                let span = rows.fold(None, |span: Option<(u32, u32)>, (_, &position)| {
                    Some(span.map_or((position, position), |(a, b)| (a.min(position), b.max(position))))
                });
                let Some((earliest, latest)) = span else { continue };
                let first = group.first_visible(earliest as usize);
                let touched = first / PAGE..latest as usize / PAGE + 1;
                if touched.len() > inputs.table_stride {
                    return bad(format!(
                        "KV group {g}, sequence {sequence}: positions {first} to {latest} are on {} pages, a table holds {}",
                        touched.len(),
                        inputs.table_stride
                    ));
                }
                let mut ids = touched.map(|page| inputs.page(sequence, page * PAGE));
                if let Some(page) = ids.find(|&page| page >= pages) {
                    return bad(format!("KV group {g}, sequence {sequence}: page {page} of {pages}"));
                }
            }
        }
        Ok(())
    }
}

/// Handle of a prepared program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prepared(pub usize);

/// Time one step took, as the caller's thread saw it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StepTime {
    /// Seconds from the end of the step before to the end of this one.
    pub seconds: f64,
    /// Of those, seconds this thread had nothing left to do and waited for others.
    pub waited: f64,
}

/// A profiled run.
#[derive(Clone, Debug)]
pub struct Profile {
    /// What ran.
    pub program: Arc<Program>,
    /// What it ran on.
    pub inputs: Inputs,
    /// Times of the program's steps, in order.
    pub times: Vec<StepTime>,
    /// Nodes they ran as: a step, with those that one worker did alone after it.
    pub nodes: usize,
}

/// How often an optional path ran, or why it did not. A path that declines on the default configuration is a failure.
#[derive(Clone, Debug, PartialEq)]
pub struct PathCount {
    /// Path name: `linear.int.avx512vnni`.
    pub path: String,
    /// `None` when engaged, else the reason.
    pub declined: Option<String>,
    /// Times.
    pub count: u64,
}

impl PathCount {
    /// Of the keys and values that were too large for their type and became its largest: no path, but counted like one.
    pub const SATURATED: &str = "kv.saturated";

    /// Why the graph of a step that adds one token to each sequence is not used: `graph.t4s4r4`, a segment's number behind.
    pub fn declined_graph(&self) -> Option<&str> {
        let (t, rest) = self.path.strip_prefix("graph.t")?.split_once('s')?;
        self.declined.as_deref().filter(|_| rest.split('.').next() == Some(&format!("{t}r{t}")))
    }
}

/// A device that runs programs.
pub trait Backend: Send {
    /// Device and instruction set, for people.
    fn describe(&self) -> String;

    /// Brings a graph's weights to the device and sizes the KV pools. Called once, before any `prepare`.
    ///
    /// # Errors
    /// A weight the device cannot serve, or too little memory, with the numbers.
    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()>;

    /// Makes a program ready: afterwards running it allocates and compiles nothing.
    ///
    /// # Errors
    /// An op or option the device does not run, by name.
    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared>;

    /// Runs one step.
    ///
    /// # Errors
    /// Inputs that do not fit the program; a device failure. Outputs are then undefined and not readable.
    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()>;

    /// Output `output` of the last run of this program: `[rows, cols]` of f32, only the rows of that run.
    ///
    /// # Errors
    /// The program has not run, or its last run failed.
    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]>;

    /// Turns timing of every step on or off; the times of the last run are then in [`Backend::profile`].
    fn set_profile(&mut self, on: bool);

    /// The last profiled run; `None` before one, and on a device that times nothing.
    fn profile(&self) -> Option<&Profile>;

    /// Engaged and declined optional paths since load.
    fn paths(&self) -> Vec<PathCount>;
}
