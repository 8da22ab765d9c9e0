//! The waist between programs and devices: a backend takes whole programs, never single ops.

use std::sync::Arc;

use ingle_tensor::Checkpoint;

use crate::builder::Graph;
use crate::op::Rows;
use crate::options::PlanOptions;
use crate::program::Program;
use crate::{Error, PAGE, Result};

/// Size of the KV pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvPlan {
    /// Pages shared by all sequences; page 0 takes the writes of padding rows and is never handed out.
    pub pages: usize,
    /// Longest sequence in tokens; bounds positions and rope tables.
    pub context: usize,
}

/// The data of one step. Everything that changes from step to step is here and nowhere else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inputs {
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Cell (page * [`PAGE`] + offset) each row's key and value are written to.
    pub cells: Vec<u32>,
    /// Row of `tables` each token row reads.
    pub sequences: Vec<u32>,
    /// Page tables `[sequences, table_stride]`.
    pub tables: Vec<u32>,
    /// Pages per page table.
    pub table_stride: usize,
    /// Rows whose result is wanted.
    pub wanted: Vec<u32>,
}

impl Inputs {
    /// Row count this symbol stands for.
    pub fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::T => self.tokens.len(),
            Rows::R => self.wanted.len(),
        }
    }

    /// Page that holds `position` of the sequence of token row `row`.
    pub fn page(&self, row: usize, position: usize) -> usize {
        self.tables[self.sequences[row] as usize * self.table_stride + position / PAGE] as usize
    }

    /// Checks every index against the program and the pool, so that kernels may trust them.
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
        if self.positions.len() != t || self.cells.len() != t || self.sequences.len() != t {
            return bad(format!(
                "{t} tokens, {} positions, {} cells, {} sequence indices",
                self.positions.len(),
                self.cells.len(),
                self.sequences.len()
            ));
        }
        let tables = self.tables.len().checked_div(self.table_stride).unwrap_or(0);
        if tables > bucket.s {
            return bad(format!("{tables} sequences for a program of {bucket:?}"));
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
            if program.kv.is_empty() {
                continue;
            }
            if self.sequences[row] as usize >= tables || position / PAGE >= self.table_stride {
                return bad(format!(
                    "row {row}: sequence {} position {position} with {tables} tables of {} pages",
                    self.sequences[row], self.table_stride
                ));
            }
            if self.cells[row] as usize >= kv.pages * PAGE {
                return bad(format!("row {row}: cell {} of {}", self.cells[row], kv.pages * PAGE));
            }
            if let Some(page) =
                (0..=position / PAGE).map(|p| self.page(row, p * PAGE)).find(|&page| page >= kv.pages)
            {
                return bad(format!("row {row}: page {page} of {}", kv.pages));
            }
        }
        match self.wanted.iter().find(|&&w| w as usize >= t) {
            Some(w) => bad(format!("wanted row {w} of {t}")),
            None => Ok(()),
        }
    }
}

/// Handle of a prepared program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Prepared(pub usize);

/// Time one step took, from a profiled run.
#[derive(Clone, Debug)]
pub struct StepTime {
    /// Step name.
    pub name: String,
    /// Op name.
    pub op: &'static str,
    /// Seconds.
    pub seconds: f64,
}

/// How often an optional path ran, or why it did not. A path that declines on the default configuration is a failure.
#[derive(Clone, Debug, PartialEq)]
pub struct PathCount {
    /// Path name: `linear.int.avx512vnni`.
    pub path: String,
    /// `None` when engaged, else the reason.
    pub declined: Option<&'static str>,
    /// Times.
    pub count: u64,
}

/// A device that runs programs.
pub trait Backend: Send {
    /// Device and instruction set, for people.
    fn describe(&self) -> String;

    /// Brings a graph's weights to the device and sizes the KV pool. Called once, before any `prepare`.
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

    /// Times of the last profiled run, step by step.
    fn profile(&self) -> &[StepTime];

    /// Engaged and declined optional paths since load.
    fn paths(&self) -> Vec<PathCount>;
}
