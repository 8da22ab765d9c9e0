//! The host processor as a device: loads a model, prepares programs, runs them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ingle_graph::backend::PathCount;
use ingle_graph::op::{Elem, WeightId};
use ingle_graph::{
    Activations, Backend, Error, FloatArithmetic, Graph, Inputs, KvPlan, KvType, Op, PlanOptions, Prepared,
    Profile, Program, Result, Rows, Step,
};
use ingle_tensor::Checkpoint;

use crate::dot::Packed;
use crate::kernels::kv::Pool;
use crate::kernels::rope::RopeTable;
use crate::memory::Aligned;
use crate::simd::Isa;
use crate::task::{Frame, Needs, Scratch, Spare, Task};
use crate::threads::{Team, Worker, physical_cores, processors};
use crate::times::Times;
use crate::weights::Weights;

/// How the host runs programs. No choice changes a bit of a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuOptions {
    /// Workers; 0 for one on each physical core the process may use.
    pub threads: usize,
    /// Instruction set; `None` for the widest there is.
    pub isa: Option<Isa>,
}

/// The host processor.
pub struct Cpu {
    team: Team,
    isa: Isa,
    model: Option<Model>,
    programs: Vec<Ready>,
    arena: Aligned,
    spare: Spare,
    scratch: Vec<Mutex<Scratch>>,
    paths: Vec<PathCount>,
    saturated: AtomicU64,
    profiling: bool,
    profile: Option<Profile>,
}

/// What `load` makes.
struct Model {
    weights: Weights,
    ropes: Vec<RopeTable>,
    pool: Pool,
    kv: KvPlan,
    kv_type: KvType,
    activations: Activations,
}

/// What `prepare` makes.
struct Ready {
    program: Arc<Program>,
    tasks: Vec<Task>,
    /// By index: room for the bucket's rows.
    outputs: Vec<Aligned>,
    /// Rows (of kind T and R) of the last run, unless it failed.
    rows: Option<(usize, usize)>,
}

fn device(what: impl Into<String>) -> Error {
    Error::Device { device: "cpu".into(), what: what.into() }
}

impl Cpu {
    /// Starts a team of threads.
    ///
    /// # Errors
    /// An instruction set this processor lacks; many times more threads than processors.
    pub fn new(options: &CpuOptions) -> Result<Self> {
        let isa = options.isa.unwrap_or_else(Isa::detect);
        if !isa.available() {
            let best = Isa::detect();
            return Err(device(format!("this processor has no {isa}; the widest it has is {best}")));
        }
        let threads = if options.threads == 0 { physical_cores() } else { options.threads };
        let limit = threads_max();
        if threads > limit {
            return Err(device(format!(
                "{threads} threads: at most {limit} here, and as many as there are cores is best"
            )));
        }
        let team = Team::new(threads).map_err(|error| {
            device(format!(
                "{threads} threads cannot be started ({error}): choose fewer, or raise the system's limits \
                 (ulimit -u and -v)"
            ))
        })?;
        Ok(Self {
            team,
            isa,
            model: None,
            programs: Vec::new(),
            arena: reserve(0)?,
            spare: Spare::default(),
            scratch: (0..threads).map(|_| Mutex::default()).collect(),
            paths: Vec::new(),
            saturated: AtomicU64::new(0),
            profiling: false,
            profile: None,
        })
    }

    /// Workers, the caller's thread included.
    pub fn threads(&self) -> usize {
        self.team.size()
    }

    /// Instruction set of all kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Position of a path's counter.
    fn path(&mut self, path: String) -> usize {
        let found = self.paths.iter().position(|p| p.path == path);
        found.unwrap_or_else(|| {
            self.paths.push(PathCount { path, declined: None, count: 0 });
            self.paths.len() - 1
        })
    }

    /// Grows what all programs share to these needs.
    fn grow(&mut self, needs: &Needs, arena_bytes: usize) -> Result<()> {
        if self.arena.len() < arena_bytes {
            self.arena = reserve(arena_bytes)?;
        }
        let grow = |memory: &mut Option<Aligned>, bytes: usize| -> Result<()> {
            if memory.as_ref().map_or(0, |memory| memory.len()) < bytes {
                *memory = Some(reserve(bytes)?);
            }
            Ok(())
        };
        grow(&mut self.spare.rows, needs.spare_rows)?;
        grow(&mut self.spare.partials, needs.spare_partials)?;
        for scratch in &mut self.scratch {
            scratch.get_mut().unwrap_or_else(PoisonError::into_inner).reserve(needs);
        }
        Ok(())
    }
}

fn reserve(bytes: usize) -> Result<Aligned> {
    Aligned::new(bytes).map_err(|error| device(format!("no memory for {bytes} bytes: {error}")))
}

/// Most threads of a team here: four for each processor that this process may use, and at least 16.
pub fn threads_max() -> usize {
    (4 * processors()).max(16)
}

/// Name of the path a step takes.
fn path_name(step: &Step, weights: &Weights, isa: Isa, float: FloatArithmetic) -> String {
    let packed = |weight: WeightId| weights.packed(weight).is_some();
    match &step.op {
        Op::Linear { parts, .. } if parts.iter().all(|part| packed(part.weight)) => {
            format!("linear.{}", Packed::engaged_name(isa))
        }
        Op::Linear { parts, .. } if parts.iter().any(|part| packed(part.weight)) => {
            format!("linear.mixed.{isa}")
        }
        Op::Linear { .. } if step.inputs.iter().any(|x| x.ty().elem != Elem::F32) => "linear.int.view".into(),
        Op::Linear { .. } => format!("linear.f32x32.{isa}"),
        Op::Attention { .. } if float == FloatArithmetic::Amx3 => format!("attention.{float}"),
        op => format!("{}.{isa}", op.name()),
    }
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        let plural = if self.threads() == 1 { "" } else { "s" };
        format!("cpu ({}, {} thread{plural})", self.isa, self.threads())
    }

    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()> {
        let weights = Weights::load(graph, checkpoint, options.activations, &self.team)?;
        let rope = |spec| {
            RopeTable::new(spec, kv.context)
                .map_err(|error| device(format!("no rope table for a context of {}: {error}", kv.context)))
        };
        kv.check(graph)?;
        let pool = Pool::new(&graph.kv, options.kv, &kv.pages).map_err(|error| {
            device(format!("no memory for {:?} pages of keys and values: {error}", kv.pages))
        })?;
        self.programs.clear();
        self.paths.clear();
        self.saturated = AtomicU64::new(0);
        self.model = Some(Model {
            weights,
            ropes: graph.ropes.iter().map(rope).collect::<Result<_>>()?,
            pool,
            kv,
            kv_type: options.kv,
            activations: options.activations,
        });
        Ok(())
    }

    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared> {
        let model = self.model.as_ref().ok_or_else(|| device("no model is loaded: call load first"))?;
        let (bucket, options) = (program.key.bucket, &program.key.options);
        if options.kv != model.kv_type {
            return Err(device(format!("a program for {} keys, loaded for {}", options.kv, model.kv_type)));
        }
        if (options.activations == Activations::F32) != (model.activations == Activations::F32) {
            let (program, loaded) = (options.activations, model.activations);
            return Err(device(format!("a program for {program} activations, loaded for {loaded}")));
        }
        let lacks = match options.float {
            FloatArithmetic::F32x32 => None,
            FloatArithmetic::Amx3 => (self.isa < Isa::Amx).then_some("matrix tiles"),
            FloatArithmetic::Mma => Some("tensor cores"),
        };
        if let Some(lacks) = lacks {
            return Err(device(format!(
                "a program in {}, which needs {lacks}: this is {}",
                options.float, self.isa
            )));
        }
        if !model.weights.serve(&program.weights)
            || program.ropes.len() != model.ropes.len()
            || program.kv_groups.len() != model.kv.pages.len()
        {
            return Err(device("the program is not of the loaded graph"));
        }
        if let Some(segment) = program.segments.iter().find(|segment| segment.device != 0) {
            let step = segment.steps.first().map_or("", |step| &step.name);
            return Err(device(format!("step {step} is placed on device {}", segment.device)));
        }
        let (mut tasks, mut paths, mut needs) = (Vec::new(), Vec::new(), Needs::default());
        for step in program.steps() {
            let task = Task::new(step, &bucket, options.float).map_err(device)?;
            needs = needs.and(task.needs(&model.weights, &bucket, model.kv.context, self.team.size()));
            tasks.push(task);
            paths.push(path_name(step, &model.weights, self.isa, options.float));
        }
        let outputs = program.outputs.iter().map(|o| reserve(o.ty.bytes(bucket.rows(o.ty.rows))));
        let outputs = outputs.collect::<Result<_>>()?;
        self.grow(&needs, program.arena_bytes.first().copied().unwrap_or(0))?;
        for (task, path) in tasks.iter_mut().zip(paths) {
            task.path = self.path(path);
        }
        self.programs.push(Ready { program, tasks, outputs, rows: None });
        Ok(Prepared(self.programs.len() - 1))
    }

    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()> {
        let unknown = || device(format!("program {} is not prepared", prepared.0));
        let ready = self.programs.get_mut(prepared.0).ok_or_else(unknown)?;
        let model = self.model.as_mut().ok_or_else(unknown)?;
        ready.rows = None;
        inputs.check(&ready.program, &model.kv)?;
        let positions = inputs.positions.iter().max().map_or(0, |&position| position as usize + 1);
        for rope in &mut model.ropes {
            rope.fill(positions);
        }
        let frame = Frame {
            isa: self.isa,
            arena: self.arena.as_mut_ptr(),
            outputs: &ready.outputs,
            spare: &self.spare,
            inputs,
            weights: &model.weights,
            ropes: &model.ropes,
            pool: &model.pool,
            saturated: &self.saturated,
        };
        let times = self.profiling.then(|| Times::new(ready.tasks.len()));
        self.team.work(&|worker| {
            let mut scratch = self.scratch[worker.index()].lock().unwrap_or_else(PoisonError::into_inner);
            worker.time_waits(times.is_some() && worker.index() == 0);
            let timed =
                |step, within, worker: &mut Worker<'_>, run: &mut dyn FnMut(&mut Worker<'_>)| match &times {
                    None => run(worker),
                    Some(times) => times.step(step, within, worker, run),
                };
            for Range { start: node, end: next } in Task::nodes(&ready.tasks, &frame) {
                let task = |step: usize, within, worker: &mut Worker<'_>, scratch: &mut Scratch| {
                    timed(step, within, worker, &mut |worker| ready.tasks[step].run(&frame, worker, scratch));
                };
                if next == node + 1 {
                    task(node, None, worker, &mut scratch);
                    continue;
                }
                timed(node, None, worker, &mut |worker| {
                    worker.then(
                        true,
                        &mut *scratch,
                        |worker, scratch| ready.tasks[node].run(&frame, worker, scratch),
                        |worker, scratch| {
                            (node + 1..next).for_each(|step| task(step, Some(node), worker, scratch))
                        },
                    );
                });
            }
        });
        if let Some(times) = times {
            let nodes = Task::nodes(&ready.tasks, &frame).count();
            let (program, inputs) = (ready.program.clone(), inputs.clone());
            self.profile = Some(Profile { program, inputs, times: times.into_inner(), nodes });
        }
        for task in &ready.tasks {
            self.paths[task.path].count += 1;
        }
        ready.rows = Some((inputs.tokens.len(), inputs.wanted.len()));
        Ok(())
    }

    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        let ready = self.programs.get(prepared.0);
        let Some((ready, (t, r))) = ready.and_then(|ready| Some((ready, ready.rows?))) else {
            return Err(device("this program has not run, or its last run failed"));
        };
        let (Some(memory), Some(of)) = (ready.outputs.get(output), ready.program.outputs.get(output)) else {
            return Err(device(format!("output {output} of {}", ready.outputs.len())));
        };
        let rows = if of.ty.rows == Rows::T { t } else { r };
        // SAFETY: room for the bucket's rows, of which these were written; the memory is aligned, and nothing writes it
        // while the slice borrows the backend.
        Ok(unsafe { std::slice::from_raw_parts(memory.as_mut_ptr().cast(), rows * of.ty.cols) })
    }

    fn set_profile(&mut self, on: bool) {
        self.profiling = on;
    }

    fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn paths(&self) -> Vec<PathCount> {
        let count = self.saturated.load(Ordering::Relaxed);
        let saturated = PathCount { path: PathCount::SATURATED.into(), declined: None, count };
        self.paths.iter().cloned().chain([saturated]).collect()
    }
}

#[cfg(test)]
mod tests;
