//! One step of a program, resolved against the loaded model, and how a team runs it.
//!
//! A task cuts its work into items (rows, tiles, heads, spans of columns) that no sum crosses, and the workers of the
//! team share them out. Everything a task needs was allocated when its program was prepared.

mod attend;
mod linear;

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use ingle_graph::op::{Emit, Gated, RopeId, UNITS};
use ingle_graph::quantize::Layout;
use ingle_graph::reference::IntRow;
use ingle_graph::{
    ATTENTION_CHUNK, Activation, AttentionSpec, Bucket, FloatArithmetic, Inputs, LinearPart, Op, Slot, Step,
    WeightId,
};
use ingle_tensor::quant;

use crate::dot;
use crate::kernels::attention;
use crate::kernels::elementwise::{Factor, Glu, Softcap, Sum, Zip};
use crate::kernels::float::panels;
use crate::kernels::kv::Pool;
use crate::kernels::norm::RmsNorm;
use crate::kernels::peaks::Peak;
use crate::kernels::quantize::{Quantize, Quantized};
use crate::kernels::rope::{Rope, RopeTable};
use crate::memory::{Aligned, Lines};
use crate::simd::Isa;
use crate::threads::Worker;
use crate::weights::Weights;

/// Columns of one item of work on a row: whole units of every format, and few enough for the first cache.
const SPAN: usize = 256;

/// Quantized forms that a value may have: any unit, with one digit and with two.
const ELEMS: usize = 2 * UNITS.len();

/// f32 of one item of work on plain elements.
const ELEMENTS: usize = 2048;

/// Elements up to which one worker does what follows a product, which is then sooner done than shared out: it takes about
/// as long as the wait for the others that sharing costs.
const ALONE: usize = 4096;

/// What a run gives its tasks: memory, inputs, the model.
pub struct Frame<'a> {
    /// Instruction set of all kernels.
    pub isa: Isa,
    /// Values between steps.
    pub arena: *mut u8,
    /// Results of the program, by index.
    pub outputs: &'a [Aligned],
    /// Attention's f32 result where only its quantized form is a value; partial results of chunks.
    pub spare: &'a Spare,
    /// The step's data, checked against the program and the pool.
    pub inputs: &'a Inputs,
    /// The model's weights.
    pub weights: &'a Weights,
    /// Filled up to the highest position of the step.
    pub ropes: &'a [RopeTable],
    /// Keys and values.
    pub pool: &'a Pool,
    /// Elements the KV type could not hold.
    pub saturated: &'a AtomicU64,
}

// SAFETY: workers write through these pointers only where their items say, and items do not overlap.
unsafe impl Sync for Frame<'_> {}

/// Memory attention needs besides values.
#[derive(Default)]
pub struct Spare {
    /// f32 rows of one attention.
    pub rows: Option<Aligned>,
    /// Partial results of one attention.
    pub partials: Option<Aligned>,
}

/// A worker's own memory.
#[derive(Default)]
pub struct Scratch {
    /// A row whose f32 form is not a value, or a head.
    row: Vec<f32>,
    /// A row of a quantized matrix without a packed form.
    integers: IntRow,
    product: dot::Scratch,
    /// What a gated unit reads.
    gated: Lines,
    floats: panels::Scratch,
    attention: attention::Scratch,
}

/// A value in memory.
#[derive(Clone, Copy, Debug)]
struct Value {
    slot: Slot,
    /// Layout of a quantized value.
    layout: Option<Layout>,
}

impl Value {
    fn new(slot: &Slot, bucket: &Bucket) -> Self {
        let ty = slot.ty();
        let room = bucket.rows(ty.rows);
        let layout = ty.elem.digits().map(|(unit, digits)| Layout::new(room, ty.cols, unit, digits));
        Self { slot: *slot, layout }
    }

    fn cols(&self) -> usize {
        self.slot.ty().cols
    }

    /// Rows there is room for.
    fn room(&self, bucket: &Bucket) -> usize {
        bucket.rows(self.slot.ty().rows)
    }

    fn rows(&self, frame: &Frame<'_>) -> usize {
        frame.inputs.rows(self.slot.ty().rows)
    }

    fn bytes(&self, frame: &Frame<'_>) -> *mut u8 {
        match self.slot {
            // SAFETY: the arena holds the largest program's bytes.
            Slot::Arena { offset, .. } => unsafe { frame.arena.add(offset) },
            Slot::Output { index, .. } => frame.outputs[index].as_mut_ptr(),
        }
    }

    /// First element of a row of f32.
    fn row(&self, frame: &Frame<'_>, row: usize) -> *mut f32 {
        // SAFETY: a row of the value, by its caller's count.
        unsafe { self.bytes(frame).cast::<f32>().add(row * self.cols()) }
    }
}

/// Outputs of an op that may quantize its result.
#[derive(Clone, Debug)]
struct Emission {
    f32: Option<Value>,
    quantized: Vec<Value>,
}

/// The quantized outputs of an emission, resolved.
struct Targets {
    all: [Quantized; ELEMS],
    len: usize,
}

impl std::ops::Deref for Targets {
    type Target = [Quantized];

    fn deref(&self) -> &[Quantized] {
        &self.all[..self.len]
    }
}

impl Emission {
    fn new(emit: &Emit, outputs: &[Value]) -> Self {
        let (plain, quantized) = outputs.split_at(usize::from(emit.f32));
        Self { f32: plain.first().copied(), quantized: quantized.to_vec() }
    }

    fn targets(&self, frame: &Frame<'_>) -> Targets {
        let nowhere = Quantized { ptr: std::ptr::null_mut(), layout: Layout::new(0, 0, 1, 1) };
        let mut all = [nowhere; ELEMS];
        for (to, value) in all.iter_mut().zip(&self.quantized) {
            if let Some(layout) = value.layout {
                *to = Quantized { ptr: value.bytes(frame), layout };
            }
        }
        Targets { all, len: self.quantized.len() }
    }
}

/// One matrix of a product.
struct Part {
    weight: WeightId,
    /// Factor of the product, before the bias.
    scale: Option<f32>,
    bias: Option<WeightId>,
    x: Value,
}

/// A step that can run.
pub struct Task {
    /// Position of the step's path in the backend's counters.
    pub path: usize,
    work: Work,
}

enum Work {
    Embed { table: WeightId, scale: f32, y: Value },
    Norm { weight: WeightId, eps: f32, x: Value, emit: Emission },
    Quantize { x: Value, emit: Emission },
    Linear { parts: Vec<Part>, y: Vec<Value>, residual: Option<Value> },
    Gated { parts: Vec<Part>, act: Activation, emit: Emission },
    Add { a: Value, b: Value, y: Value },
    Scale { factor: f32, x: Value, y: Value },
    Softcap { cap: f32, x: Value, y: Value },
    Peaks { span: usize, x: Value, y: Value },
    Glu { act: Activation, gate: Value, up: Value, emit: Emission },
    Rope { rope: RopeId, head_dim: usize, x: Value, y: Value },
    Store { layer: usize, k: Value, v: Value, rotate: Option<(RopeId, Value, Value)> },
    Attention { spec: AttentionSpec, float: FloatArithmetic, q: Value, emit: Emission },
    TakeRows { x: Value, y: Value },
    Carried { index: usize, y: Value },
}

/// How much memory a prepared program needs besides its arena.
#[derive(Clone, Copy, Default, Debug)]
pub struct Needs {
    /// f32 of a worker's row.
    row: usize,
    /// Columns of a worker's row of integers.
    integers: usize,
    /// Bytes of a worker's product scratch.
    product: usize,
    /// Bytes of a worker's products that a gated unit reads.
    gated: usize,
    /// Bytes of a worker's scratch for products of floats.
    floats: usize,
    /// Arithmetic, queries and head size of a worker's attention scratch.
    float: FloatArithmetic,
    queries: usize,
    head_dim: usize,
    /// Bytes of [`Spare::rows`].
    pub spare_rows: usize,
    /// Bytes of [`Spare::partials`].
    pub spare_partials: usize,
}

impl Needs {
    /// Enough for both.
    pub fn and(self, other: Self) -> Self {
        Self {
            row: self.row.max(other.row),
            integers: self.integers.max(other.integers),
            product: self.product.max(other.product),
            gated: self.gated.max(other.gated),
            floats: self.floats.max(other.floats),
            float: self.float.max(other.float),
            queries: self.queries.max(other.queries),
            head_dim: self.head_dim.max(other.head_dim),
            spare_rows: self.spare_rows.max(other.spare_rows),
            spare_partials: self.spare_partials.max(other.spare_partials),
        }
    }
}

impl Scratch {
    /// Makes room for every task with these needs.
    pub fn reserve(&mut self, needs: &Needs) {
        if self.row.len() < needs.row {
            self.row.resize(needs.row, 0.0);
        }
        self.integers.reserve(needs.integers);
        self.product.reserve(needs.product);
        self.gated.reserve(needs.gated);
        self.floats.reserve(needs.floats);
        self.attention.reserve(needs.float, needs.queries, needs.head_dim);
    }
}

impl Task {
    /// Resolves a step. An op that needs another device has no task: the error says which.
    pub fn new(step: &Step, bucket: &Bucket, float: FloatArithmetic) -> Result<Self, String> {
        let inputs: Vec<Value> = step.inputs.iter().map(|slot| Value::new(slot, bucket)).collect();
        let outputs: Vec<Value> = step.outputs.iter().map(|slot| Value::new(slot, bucket)).collect();
        let work = match (&step.op, inputs.as_slice(), outputs.as_slice()) {
            (Op::Embed { table, scale }, [], &[y]) => Work::Embed { table: *table, scale: *scale, y },
            (Op::RmsNorm { weight, eps, emit, .. }, &[x], _) => {
                Work::Norm { weight: *weight, eps: *eps, x, emit: Emission::new(emit, &outputs) }
            }
            (Op::Quantize { emit }, &[x], _) => Work::Quantize { x, emit: Emission::new(emit, &outputs) },
            (Op::Linear { parts, gated: Some(Gated { act, emit }), .. }, _, _) => Work::Gated {
                parts: linear_parts(parts, &inputs)?,
                act: *act,
                emit: Emission::new(emit, &outputs),
            },
            (Op::Linear { parts, residual, .. }, _, _) => Work::Linear {
                parts: linear_parts(parts, &inputs)?,
                y: outputs,
                residual: inputs.last().copied().filter(|_| *residual),
            },
            (Op::Add, &[a, b], &[y]) => Work::Add { a, b, y },
            (Op::Scale(factor), &[x], &[y]) => Work::Scale { factor: *factor, x, y },
            (Op::Softcap(cap), &[x], &[y]) => Work::Softcap { cap: *cap, x, y },
            (Op::Peaks { span }, &[x], &[y]) => Work::Peaks { span: *span, x, y },
            (Op::Glu(Gated { act, emit }), &[gate, up], _) => {
                Work::Glu { act: *act, gate, up, emit: Emission::new(emit, &outputs) }
            }
            (Op::Rope { rope, head_dim }, &[x], &[y]) => {
                Work::Rope { rope: *rope, head_dim: *head_dim, x, y }
            }
            (Op::KvStore { layer }, &[k, v], []) => Work::Store { layer: *layer, k, v, rotate: None },
            (Op::RopeStore { rope, layer, .. }, &[q, k, v], &[y]) => {
                Work::Store { layer: *layer, k, v, rotate: Some((*rope, q, y)) }
            }
            (Op::Attention { spec, emit }, &[q], _) => {
                Work::Attention { spec: spec.clone(), float, q, emit: Emission::new(emit, &outputs) }
            }
            (Op::TakeRows, &[x], &[y]) => Work::TakeRows { x, y },
            (Op::Carried { index }, [], &[y]) => Work::Carried { index: *index, y },
            (op, i, o) => {
                return Err(format!(
                    "step {}: {} with {} inputs and {} outputs does not run here",
                    step.name,
                    op.name(),
                    i.len(),
                    o.len()
                ));
            }
        };
        Ok(Self { path: 0, work })
    }

    /// Memory this task needs, for at most `context` positions of a sequence and a team of this size.
    pub fn needs(&self, weights: &Weights, bucket: &Bucket, context: usize, workers: usize) -> Needs {
        let mut needs = Needs::default();
        match &self.work {
            Work::Norm { x, emit, .. } if emit.f32.is_none() => needs.row = x.cols(),
            Work::Glu { .. } => needs.row = SPAN,
            Work::Store { k, .. } => needs.row = k.cols(),
            Work::Linear { parts, .. } | Work::Gated { parts, .. } => {
                if let Work::Gated { emit, .. } = &self.work {
                    let rows = parts.first().map_or(0, |part| part.x.room(bucket));
                    needs.gated = linear::gated_bytes(rows, emit);
                }
                for part in parts {
                    match (weights.packed(part.weight), &part.x.layout) {
                        (Some(packed), Some(layout)) => {
                            let bytes = packed.scratch_bytes(layout.digits, layout.rows);
                            needs.product = needs.product.max(bytes);
                        }
                        (None, Some(layout)) => needs.integers = needs.integers.max(layout.cols),
                        (_, None) if weights.floats(part.weight, 0..0).is_some() => {
                            let (cols, rows) = (part.x.cols(), part.x.room(bucket));
                            if rows >= panels::ROWS_LEAST {
                                let rows = panels::rows_at_once(cols, rows);
                                needs.floats = needs.floats.max(panels::scratch_bytes(cols, rows));
                            }
                        }
                        (_, None) => needs.row = needs.row.max(linear::DECODED * part.x.cols()),
                    }
                }
            }
            Work::Attention { spec, float, q, emit } => {
                let group = spec.heads / spec.kv_heads;
                needs.float = *float;
                needs.queries = group.max(attention::queries(*float));
                needs.head_dim = spec.head_dim;
                if emit.f32.is_none() {
                    needs.spare_rows = 4 * bucket.t * q.cols();
                }
                let rows = bucket.t.min(attend::few(workers).div_ceil(spec.kv_heads));
                let chunks = context.div_ceil(ATTENTION_CHUNK);
                needs.spare_partials =
                    4 * rows * spec.heads * (1 + chunks) * attention::partial_len(spec.head_dim);
            }
            _ => {}
        }
        needs
    }

    /// Elements of an op that works row by row on what came before, and needs no more than a worker's scratch row.
    fn row_work(&self, frame: &Frame<'_>) -> Option<usize> {
        let elements = |value: &Value| value.rows(frame) * value.cols();
        match &self.work {
            Work::Norm { x, .. } | Work::Quantize { x, .. } => Some(elements(x)),
            Work::Add { y, .. } | Work::Scale { y, .. } | Work::Rope { y, .. } | Work::TakeRows { y, .. } => {
                Some(elements(y))
            }
            Work::Store { k, v, rotate, .. } => {
                let rotated = rotate.as_ref().map_or(0, |(_, q, _)| elements(q));
                Some(elements(k) + elements(v) + rotated)
            }
            _ => None,
        }
    }

    /// The nodes of a step: a task, and those after it that one worker should do alone as soon as it is done.
    pub fn nodes(tasks: &[Task], frame: &Frame<'_>) -> impl Iterator<Item = Range<usize>> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = next;
            let task = tasks.get(start)?;
            next += 1;
            // Attention has several phases.
            if !matches!(task.work, Work::Attention { .. }) {
                let mut elements = 0;
                let small = |task: &&Task| {
                    elements += task.row_work(frame).unwrap_or(ALONE + 1);
                    elements <= ALONE
                };
                next += tasks[next..].iter().take_while(small).count();
            }
            Some(start..next)
        })
    }

    /// Runs this worker's share and returns when the whole team is done.
    pub fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>, scratch: &mut Scratch) {
        match &self.work {
            Work::Embed { table, scale, y } => embed(frame, worker, *table, *scale, y),
            Work::Norm { weight, eps, x, emit } => norm(frame, worker, scratch, *weight, *eps, x, emit),
            Work::Quantize { x, emit } => {
                let x = x.row(frame, 0);
                quantize(frame, worker, x, emit);
            }
            Work::Linear { parts, y, residual } => {
                linear::linear(frame, worker, scratch, parts, y, residual.as_ref())
            }
            Work::Gated { parts, act, emit } => linear::gated(frame, worker, scratch, parts, *act, emit),
            Work::Add { a, b, y } => {
                each(worker, y.rows(frame) * y.cols(), |span| {
                    // SAFETY: spans of equal values.
                    let (a, b, y) = unsafe {
                        let at = span.start;
                        (a.row(frame, 0).add(at), b.row(frame, 0).add(at), y.row(frame, 0).add(at))
                    };
                    frame.isa.run(Zip { a, b, y, n: span.len(), f: Sum });
                });
            }
            Work::Scale { factor, x, y } => {
                each(worker, y.rows(frame) * y.cols(), |span| {
                    // SAFETY: as above.
                    let (a, y) =
                        unsafe { (x.row(frame, 0).add(span.start), y.row(frame, 0).add(span.start)) };
                    frame.isa.run(Zip { a, b: a, y, n: span.len(), f: Factor(*factor) });
                });
            }
            Work::Softcap { cap, x, y } => {
                each(worker, y.rows(frame) * y.cols(), |span| {
                    // SAFETY: as above.
                    let (a, y) =
                        unsafe { (x.row(frame, 0).add(span.start), y.row(frame, 0).add(span.start)) };
                    frame.isa.run(Zip { a, b: a, y, n: span.len(), f: Softcap(*cap) });
                });
            }
            Work::Peaks { span, x, y } => {
                let cols = x.cols();
                spread(worker, y.rows(frame) * y.cols(), |item| {
                    let (row, at) = (item / y.cols(), item % y.cols() * span);
                    // SAFETY: a span of a row, and its place in the result.
                    let (x, to) = unsafe { (x.row(frame, row).add(at), y.row(frame, 0).add(item)) };
                    frame.isa.run(Peak { x, n: (*span).min(cols - at), y: to });
                });
            }
            Work::Glu { act, gate, up, emit } => glu(frame, worker, scratch, *act, gate, up, emit),
            Work::Rope { rope, head_dim, x, y } => {
                spread(worker, y.rows(frame), |row| {
                    frame.isa.run(Rope {
                        table: &frame.ropes[rope.0 as usize],
                        position: frame.inputs.positions[row] as usize,
                        x: x.row(frame, row),
                        y: y.row(frame, row),
                        heads: x.cols() / head_dim,
                        head_dim: *head_dim,
                    });
                });
            }
            Work::Store { layer, k, v, rotate } => {
                attend::store(frame, worker, scratch, frame.pool.layer(*layer), k, v, rotate.as_ref());
            }
            Work::Attention { spec, float, q, emit } => {
                attend::attend(frame, worker, scratch, spec, *float, q, emit);
            }
            Work::TakeRows { x, y } => {
                spread(worker, y.rows(frame), |row| {
                    let wanted = frame.inputs.wanted[row] as usize;
                    // SAFETY: rows of two different values.
                    unsafe { x.row(frame, wanted).copy_to_nonoverlapping(y.row(frame, row), y.cols()) };
                });
            }
            Work::Carried { index, y } => {
                let rows = frame.inputs.carried[*index].chunks_exact(y.cols());
                spread(worker, y.rows(frame), |row| {
                    let Some(x) = rows.clone().nth(row) else { return };
                    // SAFETY: a row of the value, as long as the other.
                    unsafe { x.as_ptr().copy_to_nonoverlapping(y.row(frame, row), y.cols()) };
                });
            }
        }
    }
}

fn linear_parts(parts: &[LinearPart], inputs: &[Value]) -> Result<Vec<Part>, String> {
    let part = |part: &LinearPart| {
        let x = *inputs.get(part.input).ok_or("a product reads an input that is not there")?;
        Ok(Part { weight: part.weight, scale: part.scale, bias: part.bias, x })
    };
    parts.iter().map(part).collect()
}

/// Shares out `items` in runs of neighbours: few enough claims for small items, enough for an even end.
fn runs(worker: &mut Worker<'_>, items: usize, mut f: impl FnMut(Range<usize>)) {
    let length = (items / (8 * worker.workers())).max(1);
    worker.share(items.div_ceil(length), |i| f(i * length..items.min((i + 1) * length)));
}

/// [`runs`], one item at a time.
fn spread(worker: &mut Worker<'_>, items: usize, mut f: impl FnMut(usize)) {
    runs(worker, items, |range| range.for_each(&mut f));
}

/// Spans of plain elements.
fn each(worker: &mut Worker<'_>, elements: usize, mut f: impl FnMut(Range<usize>)) {
    worker.share(elements.div_ceil(ELEMENTS), |i| f(i * ELEMENTS..elements.min((i + 1) * ELEMENTS)));
}

/// Spans of columns of every row: row, first column, columns.
fn spans(worker: &mut Worker<'_>, rows: usize, cols: usize, mut f: impl FnMut(usize, usize, usize)) {
    let per_row = cols.div_ceil(SPAN);
    spread(worker, rows * per_row, |i| {
        let col = i % per_row * SPAN;
        f(i / per_row, col, SPAN.min(cols - col));
    });
}

fn embed(frame: &Frame<'_>, worker: &mut Worker<'_>, table: WeightId, scale: f32, y: &Value) {
    let weight = frame.weights.declared(table);
    let bytes = frame.weights.bytes(table);
    let row_bytes = weight.bytes() / weight.rows;
    spread(worker, y.rows(frame), |row| {
        let token = frame.inputs.tokens[row] as usize;
        let a = y.row(frame, row);
        // SAFETY: this item's row, and nothing else refers to it.
        let out = unsafe { std::slice::from_raw_parts_mut(a, weight.cols) };
        quant::decode_row(weight.dtype, &bytes[token * row_bytes..(token + 1) * row_bytes], out);
        if scale != 1.0 {
            frame.isa.run(Zip { a, b: a, y: a, n: weight.cols, f: Factor(scale) });
        }
    });
}

fn norm(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    weight: WeightId,
    eps: f32,
    x: &Value,
    emit: &Emission,
) {
    let weight = frame.weights.vector(weight);
    let targets = emit.targets(frame);
    spread(worker, x.rows(frame), |row| {
        frame.isa.run(RmsNorm {
            x: x.row(frame, row),
            y: emit.f32.map_or(scratch.row.as_mut_ptr(), |y| y.row(frame, row)),
            weight,
            eps,
            groups: x.cols() / weight.len(),
            quantized: &targets,
            row,
            col: 0,
        });
    });
}

/// Quantizes rows `[rows, cols]` from `x` on.
fn quantize(frame: &Frame<'_>, worker: &mut Worker<'_>, x: *const f32, emit: &Emission) {
    let Some(first) = emit.quantized.first() else { return };
    let targets = emit.targets(frame);
    spans(worker, first.rows(frame), first.cols(), |row, col, n| {
        // SAFETY: a span of the rows.
        let x = unsafe { x.add(row * first.cols() + col) };
        frame.isa.run(Quantize { x, n, to: &targets, row, col });
    });
}

fn glu(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    act: Activation,
    gate: &Value,
    up: &Value,
    emit: &Emission,
) {
    let targets = emit.targets(frame);
    spans(worker, gate.rows(frame), gate.cols(), |row, col, n| {
        // SAFETY: a span of each row.
        let (gate, up, y) = unsafe {
            let y = emit.f32.map_or(scratch.row.as_mut_ptr(), |y| y.row(frame, row).add(col));
            (gate.row(frame, row).add(col), up.row(frame, row).add(col), y)
        };
        let rows = row..row + 1;
        frame.isa.run(Glu { act, gate, up, stride: 0, y, y_stride: 0, n, quantized: &targets, rows, col });
    });
}
