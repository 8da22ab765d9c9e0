//! An NVIDIA GPU as a device: loads a model, prepares programs, runs them.
//!
//! Everything a step needs is bound when its program is prepared: each launch with its arguments, which are addresses that
//! never change. A step then fills one blob of host memory, copies it once, and issues the launches.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use ingle_graph::backend::PathCount;
use ingle_graph::op::{RopeStyle, Weight, WeightUse};
use ingle_graph::{
    Activations, Backend, Bucket, FloatArithmetic, Graph, Inputs, KvLayer, KvPlan, KvType, Op, PAGE,
    PlanOptions, Prepared, Profile, Program, Rows, Step, StepTime,
};
use ingle_tensor::{Checkpoint, TensorInfo, quant};

use crate::bind::{Binder, f32_bytes, path_name, spare_bytes};
use crate::budget::{self, Held, Room};
use crate::capture::{self, State};
use crate::compile::{Compiler, Search};
use crate::driver::{
    Buffer, Call, Context, Driver, Entry, Event, Function, Launch, Module, Pinned, Reservation, Span, Stream,
};
use crate::kernels::{self, Issue, attention, kv, linear};
use crate::step::StepLayout;
use crate::weights::{Limits, Matrix, Staging};
use crate::{Error, Result, fuse};

/// Blobs of host memory that take turns: the device may still copy from the one before while the next is filled.
const BLOBS: usize = 3;

/// Which GPU, and where compiled kernels are kept.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Number of the GPU, from 0.
    pub device: usize,
    /// Folder of the cache of compiled kernels; `None` for no cache.
    pub cache: Option<PathBuf>,
    /// Where NVRTC is looked for.
    pub search: Search,
    /// Nothing is captured: every step is issued launch by launch.
    pub eager: bool,
    /// What an op writes is NaN before its launches, in builds with debug assertions always: a launch that leaves out a part of
    /// it, or all, is not covered by what was there before.
    pub poison: bool,
}

/// A GPU.
pub struct Cuda {
    // Fields are dropped in this order: what runs on the device before what it runs in.
    programs: Vec<Ready>,
    model: Option<Model>,
    arena: Reservation,
    spare: Reservation,
    saturated: Buffer,
    counters: Buffer,
    functions: Functions,
    stream: Stream,
    context: Context,
    eager: bool,
    poison: bool,
    paths: Vec<PathCount>,
    profiling: bool,
    profile: Option<Profile>,
}

/// Kernels by name, compiled and brought to the device when first asked for.
pub(crate) struct Functions {
    compiler: Compiler,
    arch: String,
    modules: HashMap<&'static str, Module>,
    functions: HashMap<&'static str, Arc<Function>>,
}

impl Functions {
    pub(crate) fn new(context: &Context, options: &CudaOptions) -> Result<Self> {
        let compiler = Compiler::new(options.search.open()?, options.cache.clone());
        Ok(Self {
            compiler,
            arch: context.device().arch(),
            modules: HashMap::new(),
            functions: HashMap::new(),
        })
    }

    pub(crate) fn get(&mut self, context: &Context, entry: Entry) -> Result<Arc<Function>> {
        if let Some(function) = self.functions.get(entry.name) {
            return Ok(function.clone());
        }
        let holds = |source: &&&kernels::Source| source.entries.iter().any(|e| e.name == entry.name);
        let source = kernels::SOURCES
            .iter()
            .find(holds)
            .ok_or_else(|| Error::Refused(format!("{}: in no file of kernels", entry.name)))?;
        if !self.modules.contains_key(source.name) {
            let cubin = self.compiler.cubin(source, &self.arch)?;
            self.modules.insert(source.name, Module::load(context, &cubin.bytes)?);
        }
        let function = Arc::new(self.modules[source.name].function(entry)?);
        self.functions.insert(entry.name, function.clone());
        Ok(function)
    }
}

/// What `load` makes.
pub(crate) struct Model {
    checkpoint: Arc<Checkpoint>,
    pub(crate) declared: Vec<Weight>,
    pub(crate) weights: Vec<Stored>,
    pub(crate) ropes: Vec<RopeTable>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) kv: KvPlan,
    pub(crate) kv_type: KvType,
}

impl Model {
    /// Whether a part of a product can make its activations.
    pub(crate) fn streams(&self, step: &Step, part: usize, bucket: &Bucket) -> bool {
        let Op::Linear { parts, .. } = &step.op else { return false };
        let (part, ty) = (&parts[part], step.inputs[parts[part].input].ty());
        let digits = ty.elem.digits().map_or(0, |(_, digits)| digits);
        match &self.weights[part.weight.0 as usize] {
            Stored::Matrix(matrix) => linear::streams(matrix, bucket.rows(ty.rows), digits),
            _ => false,
        }
    }
}

/// A weight.
pub(crate) enum Stored {
    /// For products.
    Matrix(Matrix),
    /// f32.
    Vector(Buffer),
    /// Rows of it are decoded from the file and travel with a step's data: a table in f32 would take several times the
    /// memory of a quantized one.
    Rows(TensorInfo),
}

/// A rotary embedding.
pub(crate) struct RopeTable {
    pub(crate) table: Buffer,
    pub(crate) pairs: u32,
    pub(crate) style: RopeStyle,
}

/// Keys and values of a layer.
pub(crate) struct Pool {
    pub(crate) shape: KvLayer,
    pub(crate) group: u32,
    pub(crate) cells: u32,
    pub(crate) keys: Buffer,
    pub(crate) values: Buffer,
}

impl Pool {
    pub(crate) fn page_bytes(&self, kind: KvType) -> usize {
        kv::page_bytes(&self.shape, kind)
    }
}

/// Memory of which a model takes pieces, one after the other.
struct Slab {
    memory: Buffer,
    end: usize,
}

impl Slab {
    fn take(&mut self, bytes: usize) -> Result<Buffer> {
        let piece = self.memory.piece(self.end, bytes)?;
        self.end += bytes;
        Ok(piece)
    }

    /// A piece of `bytes` that begins with these.
    fn upload(&mut self, stream: &Stream, bytes: usize, from: &[u8]) -> Result<Buffer> {
        let piece = self.take(bytes)?.piece(0, from.len())?;
        stream.write(piece.all(), from)?;
        Ok(piece)
    }
}

/// What `prepare` makes.
pub(crate) struct Ready {
    pub(crate) program: Arc<Program>,
    /// By step of the program.
    steps: Vec<Bound>,
    pub(crate) outputs: Vec<Buffer>,
    /// Results on the host, by output.
    read: Vec<Vec<f32>>,
    /// By output: what it is copied through. A copy to other memory goes through the driver's, several times as slow.
    through: Vec<Pinned>,
    layout: StepLayout,
    /// Where in a step's data it is.
    at: usize,
    brought: Vec<Brought>,
    device: Buffer,
    blobs: Vec<(Pinned, Event)>,
    next: usize,
    /// Rows (of kind T and R) of the last run, unless it failed.
    rows: Option<(usize, usize)>,
    state: State,
    /// Steps that were not replays.
    runs: u64,
}

/// A step of a program, bound to addresses.
struct Bound {
    /// What is NaN before its launches.
    poisoned: Vec<Buffer>,
    calls: Vec<Call>,
    /// Position of its path's counter.
    path: usize,
}

impl Bound {
    fn issue(&self, stream: &Stream) -> Result<()> {
        self.poisoned.iter().try_for_each(|memory| stream.fill(memory.all(), capture::POISON))?;
        self.calls.iter().try_for_each(|call| stream.issue(call))
    }
}

/// Rows in a step's data, f32 `[rows, cols]` from `offset` on.
#[derive(Clone, Copy)]
pub(crate) struct Brought {
    pub(crate) from: Source,
    pub(crate) offset: usize,
    rows: Rows,
    pub(crate) cols: usize,
}

/// Where rows in a step's data come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The embedding table of this number: a row for each token.
    Table(usize),
    /// Another part of the program, on another device.
    Carried(usize),
}

impl Source {
    /// Of an op that reads such rows.
    pub(crate) fn of(op: &Op) -> Option<Self> {
        match op {
            Op::Embed { table, .. } => Some(Self::Table(table.0 as usize)),
            Op::Carried { index } => Some(Self::Carried(*index)),
            _ => None,
        }
    }
}

/// The device memory that a program takes.
pub(crate) struct Demand {
    layout: StepLayout,
    /// Where it is in a step's data: behind the rows that are brought, since of what is last there may be less.
    step: usize,
    brought: Vec<Brought>,
    /// Bytes of a step's data.
    pub(crate) data: usize,
    /// Bytes of each output.
    pub(crate) outputs: Vec<usize>,
    /// Bytes of the arena, which all programs share.
    pub(crate) arena: usize,
    /// Bytes of scratch, which all programs share.
    pub(crate) spare: usize,
    /// Where in it rows lie that wait for the products that read them.
    kept: usize,
}

impl Demand {
    /// Of a program's steps, in a bucket that need not be the program's own but for the arena.
    pub(crate) fn of(program: &Program, bucket: &Bucket, context: usize) -> Result<Self> {
        let strides: Vec<usize> = program.kv_groups.iter().map(|_| context.div_ceil(PAGE)).collect();
        let mut layout = StepLayout::new(*bucket, &strides)?;
        if program.steps().any(|step| matches!(step.op, Op::Sample { .. })) {
            layout = layout.with_samplers()?;
        }
        let mut step = 0;
        let rows = program.steps().filter_map(|step| Some((Source::of(&step.op)?, step.outputs.first()?)));
        let brought = rows.map(|(from, slot)| {
            let (offset, ty) = (step, slot.ty());
            step += f32_bytes(slot, bucket);
            Brought { from, offset, rows: ty.rows, cols: ty.cols }
        });
        let brought = brought.collect();
        let data = step + layout.bytes();
        let outputs = program.outputs.iter().map(|output| output.ty.bytes(bucket.rows(output.ty.rows)));
        let arena = program.arena_bytes.iter().copied().max().unwrap_or(0).max(1);
        let kept = program.steps().map(|step| spare_bytes(step, bucket, context)).max().unwrap_or(0);
        let waiting = program.steps().filter_map(|step| match step.op {
            Op::Attention { .. } | Op::Linear { gated: Some(_), .. } => step.outputs.first(),
            _ => None,
        });
        let one =
            waiting.filter(|slot| bucket.rows(slot.ty().rows) == 1 && slot.ty().elem.digits().is_some());
        let spare = kept + one.map(|slot| f32_bytes(slot, bucket)).sum::<usize>();
        let outputs = outputs.collect();
        Ok(Self { layout, step, brought, data, outputs, arena, spare: spare.max(1), kept })
    }
}

impl Cuda {
    /// Opens a GPU and compiles nothing yet.
    ///
    /// # Errors
    /// What of CUDA is missing, by name; a device of no use.
    pub fn new(options: &CudaOptions) -> Result<Self> {
        Self::on(Driver::get()?, options)
    }

    /// The same with a driver of one's own.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn on(driver: &'static Driver, options: &CudaOptions) -> Result<Self> {
        let context = Context::new(driver, options.device)?;
        context.device().check()?;
        let functions = Functions::new(&context, options)?;
        let stream = Stream::new(&context)?;
        let (_, all) = context.memory_bytes()?;
        let saturated = Buffer::new(&context, size_of::<u64>())?;
        stream.write(saturated.all(), &[0; size_of::<u64>()])?;
        let counters = Buffer::new(&context, attention::COUNTER_BYTES)?;
        stream.fill(counters.all(), 0)?;
        Ok(Self {
            programs: Vec::new(),
            model: None,
            arena: Reservation::new(&context, all)?,
            spare: Reservation::new(&context, all)?,
            saturated,
            counters,
            functions,
            stream,
            context,
            eager: options.eager,
            poison: options.poison || cfg!(debug_assertions),
            paths: Vec::new(),
            profiling: false,
            profile: None,
        })
    }

    /// Where it allocates.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Memory for a model: what is free on the device now, less a reserve for the driver.
    ///
    /// # Errors
    /// A call that failed.
    pub fn room(&self) -> Result<Room> {
        let (free, all) = self.context.memory_bytes()?;
        Ok(Room {
            free: free as u64,
            reserve: budget::reserve(all as u64),
            granularity: self.arena.granularity(),
        })
    }

    fn load_model(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> ingle_graph::Result<()> {
        kv.check(graph)?;
        self.programs.clear();
        self.model = None;
        // What was counted is of the model that was here before.
        self.paths.clear();
        let (context, stream) = (&self.context, &self.stream);
        stream.fill(self.saturated.all(), 0)?;
        let integers = options.activations != Activations::F32;
        let held = Held::of(graph, options, &kv)?;
        let mut slab = Slab { memory: Buffer::new(context, held.total())?, end: 0 };
        let sizes = graph.weights.iter().zip(&held.weights);
        let matrices = sizes.filter(|(weight, _)| weight.used == WeightUse::Matrix).map(|(_, &bytes)| bytes);
        let mut staging = Staging::new(context, matrices.max().unwrap_or(0))?;
        let mut weights = Vec::with_capacity(graph.weights.len());
        for (weight, &bytes) in graph.weights.iter().zip(&held.weights) {
            let (tensor, data) = weight.stored(&checkpoint)?;
            weights.push(match weight.used {
                WeightUse::Vector => {
                    Stored::Vector(slab.upload(stream, bytes, &bytes_of(&weight.vector(data)))?)
                }
                WeightUse::Rows => Stored::Rows(tensor.clone()),
                WeightUse::Matrix => {
                    let memory = slab.take(bytes)?;
                    let matrix = Matrix::load(context, stream, &mut staging, memory, weight, integers, data)?;
                    checkpoint.release(tensor);
                    Stored::Matrix(matrix)
                }
            });
        }
        drop(staging);
        let ropes = graph.ropes.iter().zip(&held.ropes).map(|(spec, &bytes)| {
            let table = slab.upload(stream, bytes, &bytes_of(&kv::rope_table(spec, kv.context)))?;
            Ok(RopeTable { table, pairs: spec.inv_freq.len() as u32, style: spec.style })
        });
        let ropes = ropes.collect::<Result<Vec<_>>>()?;
        let pools = graph.kv.iter().zip(&held.pools).map(|(layer, &bytes)| {
            let cells = (kv.pages[layer.group] * PAGE) as u32;
            let (keys, values) = (slab.take(bytes)?, slab.take(bytes)?);
            Ok(Pool { shape: *layer, group: layer.group as u32, cells, keys, values })
        });
        let pools = pools.collect::<Result<Vec<_>>>()?;
        let declared = graph.weights.clone();
        self.model = Some(Model { checkpoint, declared, weights, ropes, pools, kv, kv_type: options.kv });
        Ok(())
    }

    fn prepare_program(&mut self, program: Arc<Program>) -> Result<Prepared> {
        let model = self.model.as_ref().ok_or_else(|| Error::Refused("no model is loaded".into()))?;
        let float = program.key.options.float;
        if float == FloatArithmetic::Amx3 {
            return Err(Error::Refused(format!("attention in {float} is the CPU's alone")));
        }
        if program.weights != model.declared || program.kv.len() != model.pools.len() {
            return Err(Error::Refused("a program of another graph than the loaded one".into()));
        }
        let bucket = program.key.bucket;
        let Demand { layout, step: at, brought, data: bytes, outputs, arena, spare, kept } =
            Demand::of(&program, &bucket, model.kv.context)?;
        let device = Buffer::new(&self.context, bytes)?;
        let outputs = outputs.into_iter().map(|bytes| Buffer::new(&self.context, bytes));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        let list: Vec<&Step> = program.steps().collect();
        let streams = |step: &Step, part: usize| model.streams(step, part, &bucket);
        let left = fuse::Rows::new(&list, &bucket, &streams, kept);
        self.arena.grow(arena)?;
        self.spare.grow(spare)?;
        let binder = Binder {
            bucket,
            float,
            model,
            step: device.span(at, layout.bytes())?,
            blob: device.all(),
            brought: &brought,
            arena: self.arena.span(0, self.arena.backed_bytes())?,
            spare: self.spare.span(0, self.spare.backed_bytes())?,
            outputs: &outputs,
            saturated: self.saturated.all(),
            counters: self.counters.all(),
            limits: Limits::new(&self.context),
            left,
        };
        // A fill ahead of each kernel leaves nothing to overlap with.
        let overlap = self.context.device().overlaps() && !self.poison;
        let mut steps = Vec::new();
        for (at, step) in list.into_iter().enumerate() {
            let (issues, written) = binder.issues(at, step).map_err(|error| match error {
                Error::Refused(what) => Error::Refused(format!("step {}: {what}", step.name)),
                error => error,
            })?;
            let poisoned = written.iter().filter(|_| self.poison).map(Span::owned).collect();
            let mut calls = Vec::with_capacity(issues.len());
            for Issue { entry, shape, arguments } in issues {
                let function = self.functions.get(&self.context, entry)?;
                // Kernels have up to 16 KiB of their own besides.
                if shape.shared_bytes > 32 << 10 {
                    function.allow_shared(shape.shared_bytes)?;
                }
                calls.push(Call::new(function, Launch { overlap, ..shape }, &arguments)?);
            }
            let path = path_name(step, &program, model, binder.left.left(at));
            steps.push(Bound { poisoned, calls, path: path_index(&mut self.paths, path) });
        }
        let blobs =
            (0..BLOBS).map(|_| Ok((Pinned::new(&self.context, bytes)?, Event::new(&self.context, false)?)));
        let blobs = blobs.collect::<Result<Vec<_>>>()?;
        let read = program.outputs.iter().map(|o| vec![0.0; bucket.rows(o.ty.rows) * o.ty.cols]).collect();
        let through = outputs.iter().map(|buffer| Pinned::new(&self.context, buffer.all().bytes()));
        let through = through.collect::<Result<_>>()?;
        let state = State::Eager("not captured yet".into());
        let mut ready = Ready {
            program,
            steps,
            outputs,
            read,
            through,
            layout,
            at,
            brought,
            device,
            blobs,
            next: 0,
            rows: None,
            state,
            runs: 0,
        };
        ready.state = match self.eager {
            true => State::Eager("it was asked for".into()),
            false => capture::prove(&mut ready, model, &self.stream, &self.arena, &self.spare)?,
        };
        self.programs.push(ready);
        Ok(Prepared(self.programs.len() - 1))
    }

    fn run_step(&mut self, prepared: Prepared, inputs: &Inputs) -> ingle_graph::Result<()> {
        let unknown = || Error::Refused(format!("program {} is not prepared", prepared.0));
        let ready = self.programs.get_mut(prepared.0).ok_or_else(unknown)?;
        let model = self.model.as_ref().ok_or_else(unknown)?;
        ready.rows = None;
        inputs.check(&ready.program, &model.kv)?;
        ready.upload(model, &self.stream, inputs)?;
        if self.profiling {
            self.profile = Some(profiled(&self.context, &self.stream, ready, inputs)?);
        } else {
            ready.replay_or_issue(&self.stream)?;
        }
        for step in &ready.steps {
            self.paths[step.path].count += 1;
        }
        ready.rows = Some((inputs.tokens.len(), inputs.wanted.len()));
        Ok(())
    }

    fn read_output(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        let ready = self.programs.get_mut(prepared.0);
        let Some((ready, (t, r))) = ready.and_then(|ready| ready.rows.map(|rows| (ready, rows))) else {
            return Err(Error::Refused("this program has not run, or its last run failed".into()));
        };
        let (Some(buffer), Some(of)) = (ready.outputs.get(output), ready.program.outputs.get(output)) else {
            return Err(Error::Refused(format!("output {output} of {}", ready.outputs.len())));
        };
        let values = if of.ty.rows == Rows::T { t } else { r } * of.ty.cols;
        let from = buffer.span(0, values * size_of::<f32>())?;
        let to = &mut ready.read[output][..values];
        let through = &mut ready.through[output];
        self.stream.download(through, 0, from)?;
        let bytes = &through.bytes()?[..values * size_of::<f32>()];
        to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, &bytes)| *to = f32::from_ne_bytes(bytes));
        Ok(to)
    }
}

impl Ready {
    /// Values that other parts of the program bring: elements of each, in a step that fills the bucket.
    pub(crate) fn carried_sizes(&self, bucket: &Bucket) -> impl Iterator<Item = usize> {
        let carried = self.brought.iter().filter(|rows| matches!(rows.from, Source::Carried(_)));
        carried.map(|rows| bucket.rows(rows.rows) * rows.cols)
    }

    /// Writes a step's data and begins its copy to the device.
    pub(crate) fn upload(&mut self, model: &Model, stream: &Stream, inputs: &Inputs) -> Result<()> {
        let bytes = self.fill(model, inputs)?;
        let (blob, event) = &self.blobs[self.next];
        stream.upload(self.device.span(0, bytes)?, blob, 0)?;
        event.record(stream)?;
        self.next = (self.next + 1) % BLOBS;
        Ok(())
    }

    /// Issues every launch.
    pub(crate) fn issue(&self, stream: &Stream) -> Result<()> {
        self.steps.iter().try_for_each(|step| step.issue(stream))
    }

    /// Runs the step whose data is under way: as the graph, where there is one. Now and then the graph is compared with
    /// eager execution again.
    fn replay_or_issue(&mut self, stream: &Stream) -> Result<()> {
        let State::Trusted { graph, replays } = &mut self.state else {
            self.runs += 1;
            return self.issue(stream);
        };
        graph.launch(stream)?;
        *replays += 1;
        if *replays % capture::SAMPLE != 0 {
            return Ok(());
        }
        let replayed = self.results(stream)?;
        self.issue(stream)?;
        if self.results(stream)? != replayed {
            self.state = State::Eager("a sampled replay differs from eager execution".into());
        }
        Ok(())
    }

    /// The bytes of all outputs.
    fn results(&self, stream: &Stream) -> Result<Vec<Vec<u8>>> {
        let read = |output: &Buffer| {
            let mut bytes = vec![0; output.all().bytes()];
            stream.read(&mut bytes, output.all())?;
            Ok(bytes)
        };
        self.outputs.iter().map(read).collect()
    }

    /// Writes a step's data into the blob whose turn it is, once the device has copied what was in it. Returns how many bytes
    /// it is.
    fn fill(&mut self, model: &Model, inputs: &Inputs) -> Result<usize> {
        let (blob, event) = &mut self.blobs[self.next];
        event.synchronize()?;
        let bytes = blob.bytes()?;
        let used = self.layout.fill(inputs, None, &mut bytes[self.at..self.at + self.layout.bytes()])?;
        for &Brought { from, offset, rows, cols } in &self.brought {
            let to = bytes[offset..].chunks_exact_mut(4 * cols).take(inputs.rows(rows));
            let put = |to: &mut [u8], row: &[f32]| {
                to.as_chunks_mut().0.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_ne_bytes());
            };
            match from {
                Source::Table(table) => {
                    let (weight, Stored::Rows(tensor)) = (&model.declared[table], &model.weights[table])
                    else {
                        return Err(Error::Refused(format!("{} is no table", model.declared[table].name)));
                    };
                    let (data, row_bytes) = (model.checkpoint.data(tensor), weight.bytes() / weight.rows);
                    let mut row = vec![0.0; cols];
                    for (&token, to) in inputs.tokens.iter().zip(to) {
                        let at = token as usize * row_bytes;
                        quant::decode_row(weight.dtype, &data[at..at + row_bytes], &mut row);
                        put(to, &row);
                    }
                }
                Source::Carried(index) => {
                    let carried = inputs.carried[index].chunks_exact(cols);
                    to.zip(carried).for_each(|(to, row)| put(to, row));
                }
            }
        }
        Ok(self.at + used)
    }
}

/// Position of a path's counter.
fn path_index(paths: &mut Vec<PathCount>, path: String) -> usize {
    let found = paths.iter().position(|p| p.path == path);
    found.unwrap_or_else(|| {
        paths.push(PathCount { path, declined: None, count: 0 });
        paths.len() - 1
    })
}

/// A run with the time of each step, as events on the device tell it.
fn profiled(context: &Context, stream: &Stream, ready: &Ready, inputs: &Inputs) -> Result<Profile> {
    let mut events = vec![Event::new(context, true)?];
    events[0].record(stream)?;
    for step in &ready.steps {
        step.issue(stream)?;
        let event = Event::new(context, true)?;
        event.record(stream)?;
        events.push(event);
    }
    stream.synchronize()?;
    let time = |pair: &[Event]| {
        let seconds = f64::from(pair[1].elapsed_ms(&pair[0])?) / 1e3;
        Ok(StepTime { seconds, waited: 0.0 })
    };
    let times = events.windows(2).map(time).collect::<Result<_>>()?;
    let nodes = ready.steps.iter().map(|step| step.calls.len()).sum();
    Ok(Profile { program: ready.program.clone(), inputs: inputs.clone(), times, nodes })
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

impl Backend for Cuda {
    fn describe(&self) -> String {
        let device = self.context.device();
        format!("cuda ({}, {})", device.name, device.arch())
    }

    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> ingle_graph::Result<()> {
        self.load_model(graph, checkpoint, options, kv)
    }

    fn prepare(&mut self, program: Arc<Program>) -> ingle_graph::Result<Prepared> {
        Ok(self.prepare_program(program)?)
    }

    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> ingle_graph::Result<()> {
        self.run_step(prepared, inputs)
    }

    fn read(&mut self, prepared: Prepared, output: usize) -> ingle_graph::Result<&[f32]> {
        Ok(self.read_output(prepared, output)?)
    }

    fn set_profile(&mut self, on: bool) {
        self.profiling = on;
    }

    fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    fn paths(&self) -> Vec<PathCount> {
        let mut paths = self.paths.clone();
        for ready in &self.programs {
            let bucket = ready.program.key.bucket;
            let part = ready.program.part.map_or(String::new(), |part| format!(".segment{part}"));
            let path = format!("graph.t{}s{}r{}{part}", bucket.t, bucket.s, bucket.r);
            paths.push(match &ready.state {
                State::Trusted { replays, .. } => PathCount { path, declined: None, count: *replays },
                State::Eager(why) => PathCount { path, declined: Some(why.clone()), count: ready.runs },
            });
        }
        let mut count = [0; 8];
        if self.stream.read(&mut count, self.saturated.all()).is_ok() && count != [0; 8] {
            let count = u64::from_ne_bytes(count);
            paths.push(PathCount { path: PathCount::SATURATED.into(), declined: None, count });
        }
        paths
    }
}
