//! A backend that watches what attention may look at: every row must find, in every cell its window sees, what its own
//! sequence wrote there, and in every group the same past. A page read after it was let go, or overwritten while still
//! wanted, is an error whether or not it would change a bit.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ingle_graph::backend::PathCount;
use ingle_graph::{
    Backend, Error, Graph, Inputs, KvPlan, PAGE, PlanOptions, Prepared, Profile, Program, Result,
};
use ingle_tensor::Checkpoint;

/// What was last written to a cell.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Written {
    position: u32,
    /// Hash of all tokens before this one.
    before: u64,
    /// Hash of all tokens up to this one.
    here: u64,
}

/// Watches a backend.
pub struct Witness {
    backend: Box<dyn Backend>,
    programs: Vec<Arc<Program>>,
    /// By group and cell.
    cells: HashMap<(usize, u32), Written>,
    /// Pages of a table, by group: the first step says them, and no other may say something else.
    strides: Vec<usize>,
}

impl Witness {
    /// Watches `backend`.
    pub fn new(backend: Box<dyn Backend>) -> Box<Self> {
        Box::new(Self { backend, programs: Vec::new(), cells: HashMap::new(), strides: Vec::new() })
    }

    fn watch(&mut self, program: &Program, inputs: &Inputs) -> Result<()> {
        let strides: Vec<usize> = inputs.kv.iter().map(|kv| kv.table_stride).collect();
        if self.strides.is_empty() {
            self.strides = strides.clone();
        }
        if strides != self.strides {
            return Err(Error::Inputs(format!("tables of {strides:?} pages after {:?}", self.strides)));
        }
        let mut pasts: Vec<Option<u64>> = vec![None; inputs.tokens.len()];
        for (g, group) in program.kv_groups.iter().enumerate() {
            let kv = &inputs.kv[g];
            let cell = |row: usize, position: usize| {
                (kv.page(inputs.sequences[row], position) * PAGE + position % PAGE) as u32
            };
            for (row, &position) in inputs.positions.iter().enumerate() {
                let at = position as usize;
                if kv.cells[row] != cell(row, at) {
                    let (wrote, reads) = (kv.cells[row], cell(row, at));
                    return Err(Error::Inputs(format!("row {row} writes cell {wrote} and reads {reads}")));
                }
                let past = at.checked_sub(1).filter(|&past| past >= group.first_visible(at));
                let before =
                    past.map_or(0, |past| self.cells.get(&(g, cell(row, past))).map_or(1, |c| c.here));
                let mut hasher = DefaultHasher::new();
                (before, position, inputs.tokens[row]).hash(&mut hasher);
                let here = hasher.finish();
                self.cells.insert((g, kv.cells[row]), Written { position, before, here });
                // A window of one position knows no past.
                if group.window != Some(1) && *pasts[row].get_or_insert(here) != here {
                    return Err(Error::Inputs(format!(
                        "stale: group {g}, row {row} at {position}: another past"
                    )));
                }
            }
            for (row, &position) in inputs.positions.iter().enumerate() {
                let mut last = None;
                for seen in group.first_visible(position as usize)..=position as usize {
                    let written = self.cells.get(&(g, cell(row, seen))).copied();
                    let is_own = written.is_some_and(|w| {
                        w.position as usize == seen && last.is_none_or(|last: Written| last.here == w.before)
                    });
                    if !is_own {
                        return Err(Error::Inputs(format!(
                            "stale: group {g}, row {row} at {position} sees {written:?} as position {seen}"
                        )));
                    }
                    last = written;
                }
            }
        }
        Ok(())
    }
}

impl Backend for Witness {
    fn describe(&self) -> String {
        self.backend.describe()
    }

    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()> {
        self.backend.load(graph, checkpoint, options, kv)
    }

    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared> {
        let prepared = self.backend.prepare(program.clone())?;
        assert_eq!(prepared.0, self.programs.len());
        self.programs.push(program);
        Ok(prepared)
    }

    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()> {
        // First the backend's own check of the inputs, then the watch that trusts it.
        self.backend.run(prepared, inputs)?;
        self.watch(&self.programs[prepared.0].clone(), inputs)
    }

    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        self.backend.read(prepared, output)
    }

    fn set_profile(&mut self, on: bool) {
        self.backend.set_profile(on);
    }

    fn profile(&self) -> Option<&Profile> {
        self.backend.profile()
    }

    fn paths(&self) -> Vec<PathCount> {
        self.backend.paths()
    }
}
