//! An NVIDIA GPU as a device: loads a model, prepares programs, runs them.
//!
//! Everything a step needs is bound when its program is prepared: each launch with its arguments, which are addresses that
//! never change. A step then fills one blob of host memory, copies it once, and issues the launches.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use ingle_graph::backend::PathCount;
use ingle_graph::op::{Emit, Gated, RopeId, RopeStyle};
use ingle_graph::{
    Backend, Bucket, FloatArithmetic, Graph, Inputs, KvLayer, KvPlan, KvType, LinearPart, Op, PAGE,
    PlanOptions, Prepared, Profile, Program, Rows, Slot, Step, StepTime, WeightId,
};
use ingle_tensor::Checkpoint;

use crate::capture::{self, State};
use crate::compile::{Compiler, Search};
use crate::driver::{
    Arg, Buffer, Call, Context, Driver, Entry, Event, Function, Module, Pinned, Reservation, Span, Stream,
};
use crate::kernels::quantize::RowRange;
use crate::kernels::{self, Issue, attention, call, elementwise, embed, kv, linear, norm, quantize};
use crate::step::StepLayout;
use crate::weights::{Stored, Weights};
use crate::{Error, Result};

/// Blobs of host memory that take turns: the device may still copy from the one before while the next is filled.
const BLOBS: usize = 3;

/// Values and rows begin at multiples of this.
const ALIGN: usize = 256;

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
}

/// A GPU.
pub struct Cuda {
    // Fields are dropped in this order: what runs on the device before what it runs in.
    programs: Vec<Ready>,
    model: Option<Model>,
    arena: Reservation,
    spare: Reservation,
    saturated: Buffer,
    functions: Functions,
    stream: Stream,
    context: Context,
    eager: bool,
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
    weights: Weights,
    ropes: Vec<RopeTable>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) kv: KvPlan,
    pub(crate) kv_type: KvType,
}

/// A rotary embedding.
struct RopeTable {
    table: Buffer,
    pairs: u32,
    style: RopeStyle,
}

/// Keys and values of a layer.
pub(crate) struct Pool {
    shape: KvLayer,
    group: u32,
    cells: u32,
    pub(crate) keys: Buffer,
    pub(crate) values: Buffer,
}

impl Pool {
    pub(crate) fn page_bytes(&self, kind: KvType) -> usize {
        kv::page_bytes(&self.shape, kind)
    }
}

/// What `prepare` makes.
pub(crate) struct Ready {
    pub(crate) program: Arc<Program>,
    /// By step of the program: its launches, and its path.
    steps: Vec<(Vec<Call>, usize)>,
    pub(crate) outputs: Vec<Buffer>,
    /// Results on the host, by output.
    read: Vec<Vec<f32>>,
    layout: StepLayout,
    device: Buffer,
    blobs: Vec<(Pinned, Event)>,
    next: usize,
    /// Rows (of kind T and R) of the last run, unless it failed.
    rows: Option<(usize, usize)>,
    state: State,
}

impl Cuda {
    /// Opens a GPU and compiles nothing yet.
    ///
    /// # Errors
    /// What of CUDA is missing, by name; a device of no use.
    pub fn new(options: &CudaOptions) -> Result<Self> {
        let context = Context::new(Driver::get()?, options.device)?;
        context.device().check()?;
        let functions = Functions::new(&context, options)?;
        let stream = Stream::new(&context)?;
        let (_, all) = context.memory_bytes()?;
        let saturated = Buffer::new(&context, size_of::<u64>())?;
        stream.write(saturated.all(), &[0; size_of::<u64>()])?;
        Ok(Self {
            programs: Vec::new(),
            model: None,
            arena: Reservation::new(&context, all)?,
            spare: Reservation::new(&context, all)?,
            saturated,
            functions,
            stream,
            context,
            eager: options.eager,
            paths: Vec::new(),
            profiling: false,
            profile: None,
        })
    }

    /// What became of each program's graph: bucket, and state in words.
    pub fn graphs(&self) -> Vec<(Bucket, String)> {
        self.programs.iter().map(|ready| (ready.program.key.bucket, ready.state.describe())).collect()
    }

    /// Bytes of device memory that are free, and all.
    ///
    /// # Errors
    /// A call that failed.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        self.context.memory_bytes()
    }

    fn upload(context: &Context, stream: &Stream, bytes: &[u8]) -> Result<Buffer> {
        let buffer = Buffer::new(context, bytes.len())?;
        stream.write(buffer.all(), bytes)?;
        Ok(buffer)
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
        let (context, stream) = (&self.context, &self.stream);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let weights = Weights::load(context, stream, graph, &checkpoint, options.activations, threads)?;
        let ropes = graph.ropes.iter().map(|spec| {
            let table = Self::upload(context, stream, &bytes_of(&kv::rope_table(spec, kv.context)))?;
            Ok(RopeTable { table, pairs: spec.inv_freq.len() as u32, style: spec.style })
        });
        let ropes = ropes.collect::<Result<Vec<_>>>()?;
        let pools = graph.kv.iter().map(|layer| {
            let pages = kv.pages[layer.group];
            let bytes = pages * kv::page_bytes(layer, options.kv);
            Ok(Pool {
                shape: *layer,
                group: layer.group as u32,
                cells: (pages * PAGE) as u32,
                keys: Buffer::new(context, bytes)?,
                values: Buffer::new(context, bytes)?,
            })
        });
        let pools = pools.collect::<Result<Vec<_>>>()?;
        self.model = Some(Model { weights, ropes, pools, kv, kv_type: options.kv });
        Ok(())
    }

    fn prepare_program(&mut self, program: Arc<Program>) -> Result<Prepared> {
        let model = self.model.as_ref().ok_or_else(|| Error::Refused("no model is loaded".into()))?;
        let float = program.key.options.float;
        if float != FloatArithmetic::F32x32 {
            return Err(Error::Refused(format!("attention in {float} is the CPU's alone")));
        }
        if !model.weights.serve(&program.weights) || program.kv.len() != model.pools.len() {
            return Err(Error::Refused("a program of another graph than the loaded one".into()));
        }
        let bucket = program.key.bucket;
        let strides: Vec<usize> = program.kv_groups.iter().map(|_| model.kv.context.div_ceil(PAGE)).collect();
        let layout = StepLayout::new(bucket, &strides)?;
        let bytes = layout.bytes();
        let device = Buffer::new(&self.context, bytes)?;
        let outputs = program
            .outputs
            .iter()
            .map(|output| Buffer::new(&self.context, output.ty.bytes(room(output.ty.rows, &bucket))));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        self.arena.grow(program.arena_bytes.iter().copied().max().unwrap_or(0).max(1))?;
        let needs = program.steps().map(|step| spare_bytes(step, &bucket, model.kv.context)).max();
        self.spare.grow(needs.unwrap_or(0).max(1))?;
        let binder = Binder {
            bucket,
            model,
            step: device.all(),
            arena: self.arena.span(0, self.arena.backed_bytes())?,
            spare: self.spare.span(0, self.spare.backed_bytes())?,
            outputs: &outputs,
            saturated: self.saturated.all(),
            multiprocessors: self.context.device().multiprocessors as u32,
        };
        let mut steps = Vec::new();
        for step in program.steps() {
            let issues = binder.issues(step).map_err(|error| match error {
                Error::Refused(what) => Error::Refused(format!("step {}: {what}", step.name)),
                error => error,
            })?;
            let mut calls = Vec::with_capacity(issues.len());
            for Issue { entry, shape, arguments } in issues {
                let function = self.functions.get(&self.context, entry)?;
                if shape.shared_bytes > 48 << 10 {
                    function.allow_shared(shape.shared_bytes)?;
                }
                calls.push(Call::new(function, shape, &arguments)?);
            }
            steps.push((calls, path_name(step, &program)));
        }
        let steps =
            steps.into_iter().map(|(calls, path)| (calls, path_index(&mut self.paths, path))).collect();
        let blobs =
            (0..BLOBS).map(|_| Ok((Pinned::new(&self.context, bytes)?, Event::new(&self.context, false)?)));
        let blobs = blobs.collect::<Result<Vec<_>>>()?;
        let read = program.outputs.iter().map(|o| vec![0.0; room(o.ty.rows, &bucket) * o.ty.cols]).collect();
        let state = State::Eager("not captured yet".into());
        let mut ready =
            Ready { program, steps, outputs, read, layout, device, blobs, next: 0, rows: None, state };
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
        ready.upload(&self.stream, inputs)?;
        if self.profiling {
            self.profile = Some(profiled(&self.context, &self.stream, ready, inputs)?);
        } else {
            ready.replay_or_issue(&self.stream)?;
        }
        for &(_, path) in &ready.steps {
            self.paths[path].count += 1;
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
        let mut bytes = vec![0u8; values * size_of::<f32>()];
        let from = buffer.span(0, bytes.len())?;
        self.stream.read(&mut bytes, from)?;
        let to = &mut ready.read[output][..values];
        for (to, bytes) in to.iter_mut().zip(bytes.chunks_exact(4)) {
            *to = f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(to)
    }
}

impl Ready {
    /// Writes a step's data and begins its copy to the device.
    pub(crate) fn upload(&mut self, stream: &Stream, inputs: &Inputs) -> Result<()> {
        self.fill(inputs)?;
        let (blob, event) = &self.blobs[self.next];
        stream.upload(self.device.all(), blob, 0)?;
        event.record(stream)?;
        self.next = (self.next + 1) % BLOBS;
        Ok(())
    }

    /// Issues every launch.
    pub(crate) fn issue(&self, stream: &Stream) -> Result<()> {
        self.steps.iter().flat_map(|(calls, _)| calls).try_for_each(|call| stream.issue(call))
    }

    /// Runs the step whose data is under way: as the graph, where there is one. Now and then the graph is compared with
    /// eager execution again.
    fn replay_or_issue(&mut self, stream: &Stream) -> Result<()> {
        let State::Trusted { graph, replays } = &mut self.state else { return self.issue(stream) };
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

    /// Writes a step's data into the blob whose turn it is, once the device has copied what was in it.
    fn fill(&mut self, inputs: &Inputs) -> Result<()> {
        let (blob, event) = &mut self.blobs[self.next];
        event.synchronize()?;
        self.layout.fill(inputs, None, blob.bytes()?)
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
    for (calls, _) in &ready.steps {
        calls.iter().try_for_each(|call| stream.issue(call))?;
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
    let nodes = ready.steps.iter().map(|(calls, _)| calls.len()).sum();
    Ok(Profile { program: ready.program.clone(), inputs: inputs.clone(), times, nodes })
}

/// Rows of a value in a bucket.
pub(crate) fn room(rows: Rows, bucket: &Bucket) -> usize {
    match rows {
        Rows::T => bucket.t,
        Rows::R => bucket.r,
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

/// Bytes of f32 rows of a slot.
fn f32_bytes(slot: &Slot, bucket: &Bucket) -> usize {
    (room(slot.ty().rows, bucket) * slot.ty().cols * size_of::<f32>()).next_multiple_of(ALIGN)
}

/// Memory that a step needs besides its values: results that are only wanted quantized, products of a gated unit, parts of
/// attention.
fn spare_bytes(step: &Step, bucket: &Bucket, context: usize) -> usize {
    let result = step.outputs.first().map_or(0, |slot| f32_bytes(slot, bucket));
    match &step.op {
        Op::RmsNorm { .. } | Op::Glu(_) => result,
        Op::Linear { gated: Some(_), .. } => 3 * result,
        Op::Attention { spec, .. } => result + attention::parts_bytes(spec, bucket.t, context),
        _ => 0,
    }
}

/// Name of the path a step takes.
fn path_name(step: &Step, program: &Program) -> String {
    match &step.op {
        Op::Linear { parts, .. } => {
            let names = parts.iter().map(|part| {
                let kind = step.inputs[part.input].ty().elem.digits().map_or("f32x32", |_| "int");
                format!("linear.{kind}.cuda.{}", program.weights[part.weight.0 as usize].dtype)
            });
            let mut names: Vec<String> = names.collect();
            names.dedup();
            names.join("+")
        }
        Op::Attention { .. } => "attention.f32x32.cuda".into(),
        op => format!("{}.cuda", op.name()),
    }
}

/// Turns steps into launches with addresses.
struct Binder<'a> {
    bucket: Bucket,
    model: &'a Model,
    step: Span<'a>,
    arena: Span<'a>,
    spare: Span<'a>,
    outputs: &'a [Buffer],
    saturated: Span<'a>,
    multiprocessors: u32,
}

/// Takes memory from the spare, piece by piece.
struct Spare<'a> {
    all: Span<'a>,
    used: usize,
}

impl<'a> Spare<'a> {
    fn take(&mut self, bytes: usize) -> Result<Span<'a>> {
        let span = self.all.part(self.used, bytes)?;
        self.used += bytes.next_multiple_of(ALIGN);
        Ok(span)
    }
}

impl<'a> Binder<'a> {
    fn span(&self, slot: &Slot) -> Result<Span<'a>> {
        let bytes = slot.ty().bytes(room(slot.ty().rows, &self.bucket));
        match *slot {
            Slot::Arena { offset, .. } => self.arena.part(offset, bytes),
            Slot::Output { index, .. } => self.outputs[index].span(0, bytes),
        }
    }

    fn weight(&self, id: WeightId, want: &str) -> Result<(Stored, Span<'a>)> {
        let (stored, span) = self.model.weights.get(id)?;
        let is = match stored {
            Stored::Matrix(_) => "matrix",
            Stored::Table(_) => "table",
            Stored::Vector => "vector",
        };
        match is == want {
            true => Ok((stored, span)),
            false => Err(Error::Refused(format!("{} is a {is}", self.model.weights.declared(id).name))),
        }
    }

    fn vector(&self, id: WeightId) -> Result<Span<'a>> {
        Ok(self.weight(id, "vector")?.1)
    }

    fn pools(&self, layer: usize) -> kv::Pools<'a> {
        let pool = &self.model.pools[layer];
        kv::Pools {
            group: pool.group,
            cells: pool.cells,
            keys: pool.keys.all(),
            values: pool.values.all(),
            saturated: self.saturated,
        }
    }

    fn rope(&self, id: RopeId) -> kv::Rope<'a> {
        let rope = &self.model.ropes[id.0 as usize];
        kv::Rope { table: rope.table.all(), pairs: rope.pairs, style: rope.style }
    }

    /// Where the f32 result of an op with these outputs goes, and the launch that quantizes it.
    fn emitted(&self, step: &Step, spare: &mut Spare<'a>, emit: &Emit) -> Result<(Span<'a>, Vec<Issue<'a>>)> {
        let (f32s, quantized) = step.outputs.split_at(usize::from(emit.f32));
        let first = step.outputs.first().ok_or_else(|| Error::Refused("no output".into()))?;
        let y = match f32s.first() {
            Some(slot) => self.span(slot)?,
            None => spare.take(f32_bytes(first, &self.bucket))?,
        };
        Ok((y, self.quantized(y, first, quantized)?))
    }

    fn quantized(&self, x: Span<'a>, like: &Slot, slots: &[Slot]) -> Result<Vec<Issue<'a>>> {
        let outputs = slots.iter().map(|slot| Ok((self.span(slot)?, slot.ty().elem)));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        let calls = outputs.chunks(quantize::OUTPUTS_MAX);
        let cols = like.ty().cols as u32;
        calls
            .map(|outputs| bound(quantize::quantize(self.step, self.range(like), cols, x, outputs)))
            .collect()
    }

    fn range(&self, slot: &Slot) -> RowRange {
        let rows = slot.ty().rows;
        RowRange { rows, room: room(rows, &self.bucket) as u32 }
    }

    /// The launches of a step.
    fn issues(&self, step: &Step) -> Result<Vec<Issue<'a>>> {
        let inputs = step.inputs.iter().map(|slot| self.span(slot)).collect::<Result<Vec<_>>>()?;
        let mut spare = Spare { all: self.spare, used: 0 };
        let other = |what: &str| Err(Error::Refused(format!("{} with {what}", step.op.name())));
        let Some(first) = step.outputs.first().or(step.inputs.first()) else { return other("no values") };
        let (kind, cols) = (first.ty().rows, first.ty().cols as u32);
        let rows = room(kind, &self.bucket) as u32;
        let at = self.step;
        let elementwise = |entry, arguments: Vec<Arg<'a>>| {
            vec![Issue { entry, shape: elementwise::shape(rows, cols), arguments }]
        };
        let mut quantized = Vec::new();
        let mut issues = match (&step.op, inputs.as_slice()) {
            (Op::Embed { table, scale }, []) => {
                let (stored, memory) = self.weight(*table, "table")?;
                let Stored::Table(dtype) = stored else { return other("no table") };
                let sizes = [self.model.weights.declared(*table).rows as u32, cols];
                // No token is sampled on the device yet.
                let arguments = embed::arguments(at, at, memory, sizes, *scale, self.span(first)?).into();
                let entry = embed::kernel(dtype).map_err(|error| Error::Refused(error.to_string()))?;
                vec![Issue { entry, shape: embed::shape(rows, cols), arguments }]
            }
            (Op::RmsNorm { weight, eps, group, emit }, &[x]) => {
                let (y, then) = self.emitted(step, &mut spare, emit)?;
                quantized = then;
                let (group, weight) = (*group as u32, self.vector(*weight)?);
                let shape = norm::norm_shape(rows, cols / group, group);
                let arguments = norm::norm(at, kind, group, *eps, x, weight, y).into();
                vec![Issue { entry: norm::RMS_NORM, shape, arguments }]
            }
            (Op::Quantize { .. }, &[x]) => self.quantized(x, &step.inputs[0], &step.outputs)?,
            (Op::Linear { parts, residual, gated }, _) => {
                let residual = residual.then(|| inputs.last().copied()).flatten();
                match gated {
                    None => {
                        let y =
                            step.outputs.iter().map(|slot| self.span(slot)).collect::<Result<Vec<_>>>()?;
                        self.products(step, parts, &inputs, &y, residual)?
                    }
                    Some(Gated { act, emit }) => {
                        let (y, then) = self.emitted(step, &mut spare, emit)?;
                        quantized = then;
                        let mut take = || spare.take(f32_bytes(first, &self.bucket));
                        let both = [take()?, take()?];
                        let mut issues = self.products(step, parts, &inputs, &both, None)?;
                        let arguments = elementwise::two(at, kind, cols, both[0], both[1], y).into();
                        issues.extend(elementwise(elementwise::glu(*act), arguments));
                        issues
                    }
                }
            }
            (Op::Add, &[a, b]) => {
                let y = self.span(first)?;
                elementwise(elementwise::ADD, elementwise::two(at, kind, cols, a, b, y).into())
            }
            (Op::Scale(factor), &[x]) => {
                let y = self.span(first)?;
                elementwise(elementwise::SCALE, elementwise::one(at, kind, cols, x, *factor, y).into())
            }
            (Op::Softcap(cap), &[x]) => {
                let y = self.span(first)?;
                elementwise(elementwise::SOFTCAP, elementwise::one(at, kind, cols, x, *cap, y).into())
            }
            (Op::Peaks { span }, &[x]) => {
                let (from, span) = (step.inputs[0].ty().cols as u32, *span as u32);
                let shape = norm::peaks_shape(rows, from, span);
                let arguments = norm::peaks(at, kind, from, span, x, self.span(first)?).into();
                vec![Issue { entry: norm::PEAKS, shape, arguments }]
            }
            (Op::Glu(Gated { act, emit }), &[gate, up]) => {
                let (y, then) = self.emitted(step, &mut spare, emit)?;
                quantized = then;
                elementwise(elementwise::glu(*act), elementwise::two(at, kind, cols, gate, up, y).into())
            }
            (Op::Rope { rope, head_dim }, &[x]) => {
                let (rope, head_dim) = (self.rope(*rope), *head_dim as u32);
                let shape = kv::rope_shape(rows, cols / head_dim, head_dim);
                let arguments = kv::rope(at, head_dim, rope, x, self.span(first)?).into();
                vec![Issue { entry: kv::ROPE, shape, arguments }]
            }
            (Op::KvStore { layer }, &[k, v]) => {
                let (shape, pools) = (self.model.pools[*layer].shape, self.pools(*layer));
                let arguments = kv::store(at, pools, shape.head_dim as u32, k, v).into();
                let entry = kv::store_kernel(self.model.kv_type);
                vec![Issue { entry, shape: kv::store_shape(rows, &shape), arguments }]
            }
            (Op::RopeStore { rope, head_dim, layer }, &[q, k, v]) => {
                let (shape, pools) = (self.model.pools[*layer].shape, self.pools(*layer));
                let heads = cols / *head_dim as u32;
                let sizes = [heads, shape.heads as u32, *head_dim as u32];
                let y = self.span(first)?;
                let arguments = kv::rope_store(at, pools, sizes, self.rope(*rope), [q, k, v], y).into();
                let entry = kv::rope_store_kernel(self.model.kv_type);
                vec![Issue { entry, shape: kv::rope_store_shape(rows, heads, &shape), arguments }]
            }
            (Op::Attention { spec, emit }, &[q]) => {
                let (y, then) = self.emitted(step, &mut spare, emit)?;
                quantized = then;
                let sizes = [rows as usize, self.model.kv.context];
                let parts = spare.take(attention::parts_bytes(spec, sizes[0], sizes[1]))?;
                let pools = self.pools(spec.layer);
                attention::issues(at, spec, self.model.kv_type, pools, sizes, [q, y, parts])?
            }
            (Op::TakeRows, &[x]) => {
                let arguments = elementwise::take(at, cols, x, self.span(first)?).into();
                elementwise(elementwise::TAKE_ROWS, arguments)
            }
            (_, inputs) => return other(&format!("{} inputs does not run here", inputs.len())),
        };
        issues.extend(quantized);
        Ok(issues)
    }

    /// The products of the parts of a step, into `y`.
    fn products(
        &self,
        step: &Step,
        parts: &[LinearPart],
        inputs: &[Span<'a>],
        y: &[Span<'a>],
        residual: Option<Span<'a>>,
    ) -> Result<Vec<Issue<'a>>> {
        let mut products = Vec::new();
        for (part, &y) in parts.iter().zip(y) {
            let (Stored::Matrix(layout), weights) = self.weight(part.weight, "matrix")? else {
                return Err(Error::Refused("no matrix".into()));
            };
            let bias = part.bias.map(|bias| self.vector(bias)).transpose()?;
            products.push(linear::Part { layout, weights, input: part.input, bias, scale: part.scale, y });
        }
        let input = |(slot, &memory): (&Slot, &Span<'a>)| linear::Input { memory, elem: slot.ty().elem };
        let inputs: Vec<_> = step.inputs.iter().zip(inputs).map(input).collect();
        let range = self.range(&step.inputs[parts[0].input]);
        let calls = linear::launches(self.step, range, &inputs, &products, residual, self.multiprocessors);
        let calls = calls.map_err(|error| Error::Refused(error.to_string()))?;
        calls.into_iter().map(|call| bound(Ok(call))).collect()
    }
}

/// A launch with addresses.
fn bound<'a>(call: ingle_graph::Result<call::Call<Span<'a>>>) -> Result<Issue<'a>> {
    let call = call.map_err(|error| Error::Refused(error.to_string()))?;
    Ok(Issue { entry: call.entry, shape: call.shape, arguments: call.args() })
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
            let path = format!("graph.t{}s{}r{}", bucket.t, bucket.s, bucket.r);
            match &ready.state {
                State::Trusted { replays, .. } => {
                    paths.push(PathCount { path, declined: None, count: *replays })
                }
                State::Eager(_) if !capture::is_captured(&bucket) => {
                    paths.push(PathCount { path, declined: Some("a prompt runs once"), count: 1 });
                }
                State::Eager(_) => paths.push(PathCount { path, declined: Some("not proved"), count: 1 }),
            }
        }
        let mut count = [0; 8];
        if self.stream.read(&mut count, self.saturated.all()).is_ok() && count != [0; 8] {
            let count = u64::from_ne_bytes(count);
            paths.push(PathCount { path: PathCount::SATURATED.into(), declined: None, count });
        }
        paths
    }
}
