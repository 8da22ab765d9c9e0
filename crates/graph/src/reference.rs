//! The numeric contract in code: a plain scalar interpreter of programs. It is slow and obvious on purpose; every other
//! backend must give its bits. NUMERICS.md says the same in words.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use ingle_tensor::Checkpoint;
use ingle_tensor::quant::{self, Minimum};

use crate::amx3::{self, STEP, Terms};
use crate::backend::{Backend, Inputs, KvPlan, PathCount, Prepared, Profile};
use crate::builder::Graph;
use crate::op::*;
use crate::options::{FloatArithmetic, KvType, PlanOptions};
use crate::program::{KvLayer, Program, Slot, Step, first_visible};
use crate::quantize::{Layout, quantize_row};
use crate::{ATTENTION_CHUNK, Error, PAGE, Result, math, mma, sample};

/// `f32x32`: 32 accumulators (k mod 32) from +0, FMA in order of k, then s\[i\] += s\[i+16\], 8, 4, 2, 1.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut s = [0.0f32; 32];
    for (k, (&a, &b)) in a.iter().zip(b).enumerate() {
        s[k % 32] = a.mul_add(b, s[k % 32]);
    }
    tree(&mut s)
}

/// Sums a power of two of accumulators: the upper half onto the lower half, until one is left.
pub fn tree(s: &mut [f32]) -> f32 {
    let mut half = s.len() / 2;
    while half > 0 {
        for i in 0..half {
            s[i] += s[i + half];
        }
        half /= 2;
    }
    s[0]
}

/// Root-mean-square norm of one group: 256 accumulators of squares, r = 1 / sqrt(sum / n + eps), y = (x * r) * w.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut s = [0.0f32; 256];
    for (k, &x) in x.iter().enumerate() {
        s[k % 256] = x.mul_add(x, s[k % 256]);
    }
    let r = 1.0 / (tree(&mut s) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| (x * r) * w).collect()
}

/// `int`: one output of a product with a quantized weight row (its blocks in `weight`), for row `row` of `x`.
pub fn int_dot(weight: &[u8], format: &quant::Format, x: &[u8], layout: &Layout, row: usize) -> f32 {
    let mut integers = IntRow::default();
    integers.read(weight, format);
    integers.dot(x, layout, row)
}

/// A quantized weight row as `int` multiplies it: the format's integer view of all its units.
#[derive(Default)]
pub struct IntRow {
    /// Columns per unit.
    unit: usize,
    /// Integer weights, `[cols]`, and integer minima, `[cols]` or none.
    w: Vec<i16>,
    m: Vec<i16>,
    minimum: Minimum,
    /// Scale and minimum of each unit.
    scales: Vec<(f32, f32)>,
}

impl IntRow {
    /// Makes room for rows of this many columns in every format.
    pub fn reserve(&mut self, cols: usize) {
        let shortest = quant::FORMATS.iter().map(|format| format.unit).min().unwrap_or(1);
        self.clear();
        self.w.reserve(cols);
        self.m.reserve(cols);
        self.scales.reserve(cols / shortest);
    }

    fn clear(&mut self) {
        self.w.clear();
        self.m.clear();
        self.scales.clear();
    }

    /// Reads the row with these blocks. Only a row longer than any before, and than was reserved, takes memory.
    pub fn read(&mut self, weight: &[u8], format: &quant::Format) {
        self.clear();
        self.unit = format.unit;
        self.minimum = format.minimum;
        let mut view = quant::UnitView::default();
        for block in weight.chunks_exact(format.dtype.block_bytes()) {
            for unit in 0..format.dtype.block_len() / format.unit {
                (format.unit_view)(block, unit, &mut view);
                self.w.extend(&view.w[..view.len]);
                self.m.extend(&view.m[..if format.minimum == Minimum::None { 0 } else { view.len }]);
                self.scales.push((view.d, view.min));
            }
        }
    }

    /// The product with row `row` of `x`.
    ///
    /// Per unit the integers are exact; the float tail is one conversion, one scale and one FMA per term, into eight
    /// accumulators by unit index mod 8, added in order at the end. Activations have one scale per block, which is
    /// one unit, but for NVFP4, whose blocks hold four.
    pub fn dot(&self, x: &[u8], layout: &Layout, row: usize) -> f32 {
        let mut acc = [0.0f32; 8];
        for (u, &(d, min)) in self.scales.iter().enumerate() {
            let columns = u * self.unit..(u + 1) * self.unit;
            let at = layout.scale_offset(row) + columns.start / layout.unit * 4;
            let da = f32::from_le_bytes([x[at], x[at + 1], x[at + 2], x[at + 3]]);
            let sum = |w: &[i16], digit: usize| -> f32 {
                let digits = &x[layout.digit_offset(digit, row)..][columns.clone()];
                let products = w[columns.clone()].iter().zip(digits);
                products.map(|(&w, &q)| i32::from(w) * i32::from(q as i8)).sum::<i32>() as f32
            };
            let acc = &mut acc[u % 8];
            // What multiplies each digit's integers.
            let scales: &[f32] = if layout.digits == 1 { &[1.0] } else { &[128.0, 1.0] };
            for (digit, scale) in scales.iter().enumerate() {
                *acc = (scale * (d * da)).mul_add(sum(&self.w, digit), *acc);
            }
            for (digit, scale) in scales.iter().enumerate() {
                match self.minimum {
                    Minimum::None => {}
                    Minimum::OfUnit => *acc = min.mul_add(scale * da * sum(&self.m, digit), *acc),
                    Minimum::OfSubUnits => *acc = (scale * (min * da)).mul_add(sum(&self.m, digit), *acc),
                }
            }
        }
        acc.iter().skip(1).fold(acc[0], |total, a| total + a)
    }
}

/// Rotates one head in place by `position`.
pub fn rope(spec: &RopeSpec, position: u32, head: &mut [f32]) {
    let pairs = spec.inv_freq.len();
    for (i, &inv_freq) in spec.inv_freq.iter().enumerate() {
        let (c, s) = rope_entry(spec, position, inv_freq);
        let (i, j) = match spec.style {
            RopeStyle::Half => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (head[i], head[j]);
        head[i] = (-y).mul_add(s, x * c);
        head[j] = x.mul_add(s, y * c);
    }
}

/// cos and sin of fl(position * inv_freq), from f64 rounded to f32, times the table's factor.
pub fn rope_entry(spec: &RopeSpec, position: u32, inv_freq: f32) -> (f32, f32) {
    let angle = f64::from(position as f32 * inv_freq);
    (libm::cos(angle) as f32 * spec.scale, libm::sin(angle) as f32 * spec.scale)
}

/// What a KV store keeps of one head, widened back to f32; `saturated` counts elements that were too large.
pub fn kv_round(kind: KvType, head: &mut [f32], saturated: &mut u64) {
    let mut clamp = |x: f32, max: f32| {
        if x.abs() > max {
            *saturated += 1;
            max.copysign(x)
        } else {
            x
        }
    };
    match kind {
        KvType::F32 => {}
        KvType::F16 => {
            // Values up to half a step above the largest finite one round to it; larger ones would become infinite.
            head.iter_mut().for_each(|x| {
                let rounded = f16::from_f32(*x);
                *x = if rounded.is_infinite() { clamp(*x, 65504.0) } else { rounded.to_f32() };
            });
        }
        KvType::BF16 => head.iter_mut().for_each(|x| {
            let rounded = bf16::from_f32(*x);
            *x = if rounded.is_infinite() { clamp(*x, bf16::MAX.to_f32()) } else { rounded.to_f32() };
        }),
        KvType::Q8_0 => {
            for unit in head.chunks_mut(32) {
                let (d, q) = kv_q8_0(unit);
                for (x, q) in unit.iter_mut().zip(q) {
                    *x = d.to_f32() * f32::from(q);
                }
            }
        }
    }
}

/// `q8_0` keys and values: d = f16(max / 127), q = rne(x * fl(1 / d)) within -127..=127; a maximum under 2^-100 or a
/// scale that rounds to zero gives zeros; a scale too large for f16 saturates; a non-finite element gives a NaN scale.
pub fn kv_q8_0(unit: &[f32]) -> (f16, [i8; 32]) {
    let mut q = [0i8; 32];
    if unit.iter().any(|x| !x.is_finite()) {
        return (f16::NAN, q);
    }
    let a = unit.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let d = f16::from_f32((a / 127.0).min(65504.0));
    if a < crate::quantize::TINY || d == f16::ZERO {
        return (f16::ZERO, q);
    }
    let r = 1.0 / d.to_f32();
    for (q, &x) in q.iter_mut().zip(unit) {
        *q = (x * r).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    (d, q)
}

/// Maximum in which NaN wins.
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

/// Attention of one query head over `key(j)`, `value(j)`, which are elements of type `kv`, for positions `from..=position`.
pub fn attention<'a>(
    spec: &AttentionSpec,
    (float, kv): (FloatArithmetic, KvType),
    q: &[f32],
    position: usize,
    key: impl Fn(usize) -> &'a [f32],
    value: impl Fn(usize) -> &'a [f32],
) -> Vec<f32> {
    let from = first_visible(spec.window, position);
    let split = |x: &[f32]| x.iter().map(|&x| Terms::of(x)).collect::<Vec<_>>();
    let (terms, rounded) = (split(q), mma::query(kv, q));
    let (mut big_m, mut big_l) = (f32::NEG_INFINITY, 0.0f32);
    let mut big_o = vec![0.0f32; q.len()];
    for chunk in from / ATTENTION_CHUNK..=position / ATTENTION_CHUNK {
        let first = chunk * ATTENTION_CHUNK;
        let keys = first.max(from)..(first + ATTENTION_CHUNK).min(position + 1);
        let scores: Vec<f32> = keys
            .clone()
            .map(|j| {
                let s = match float {
                    FloatArithmetic::F32x32 => dot(q, key(j)),
                    FloatArithmetic::Amx3 => amx3::dot(&terms, &split(key(j))),
                    FloatArithmetic::Mma => mma::dot(&rounded, key(j)),
                } * spec.scale;
                spec.softcap.map_or(s, |cap| cap * math::tanh(s / cap))
            })
            .collect();
        let m = scores.iter().fold(f32::NEG_INFINITY, |m, &s| max(m, s));
        let mut sums = [0.0f32; 32];
        let weights: Vec<f32> = scores.iter().map(|s| math::exp(s - m)).collect();
        for (j, p) in keys.clone().zip(&weights) {
            sums[(j - first) % 32] += p;
        }
        let l = tree(&mut sums);
        let o = match float {
            FloatArithmetic::F32x32 => weigh(keys, &weights, q.len(), &value),
            FloatArithmetic::Amx3 => weigh_amx3(keys, &weights, q.len(), &value),
            FloatArithmetic::Mma => weigh_mma(keys, kv, &weights, q.len(), &value),
        };
        let merged = max(big_m, m);
        let (a, b) = (math::exp(big_m - merged), math::exp(m - merged));
        big_l = l.mul_add(b, big_l * a);
        for (big, o) in big_o.iter_mut().zip(o) {
            *big = o.mul_add(b, *big * a);
        }
        big_m = merged;
    }
    big_o.iter().map(|o| o / big_l).collect()
}

/// Weighted values of some positions of a chunk: one chain of fused multiply-adds for each dim.
fn weigh<'a>(
    keys: Range<usize>,
    weights: &[f32],
    dims: usize,
    value: impl Fn(usize) -> &'a [f32],
) -> Vec<f32> {
    let mut o = vec![0.0f32; dims];
    for (j, p) in keys.zip(weights) {
        for (o, &v) in o.iter_mut().zip(value(j)) {
            *o = p.mul_add(v, *o);
        }
    }
    o
}

/// The same in `amx3`. A step is 32 positions from a multiple of 32 on; where there is no weight, both operands are +0.
/// A sum of -0 becomes +0, so that it does not matter what else a product with zero might have been.
fn weigh_amx3<'a>(
    keys: Range<usize>,
    weights: &[f32],
    dims: usize,
    value: impl Fn(usize) -> &'a [f32],
) -> Vec<f32> {
    let mut o = vec![0.0f32; dims];
    for first in (keys.start / STEP * STEP..keys.end).step_by(STEP) {
        let here = first.max(keys.start)..(first + STEP).min(keys.end);
        let mut p = [Terms::default(); STEP];
        for j in here.clone() {
            p[j - first] = Terms::of(weights[j - keys.start]);
        }
        for (d, o) in o.iter_mut().enumerate() {
            let mut v = [Terms::default(); STEP];
            for j in here.clone() {
                v[j - first] = Terms::of(value(j)[d]);
            }
            *o = amx3::add_products(*o, &p, &v);
        }
    }
    o.iter().map(|o| o + 0.0).collect()
}

/// The same in `mma`. A step is 16 positions from a multiple of 16 on; where there is no weight, both operands are +0, and
/// a step without weights is left out.
fn weigh_mma<'a>(
    keys: Range<usize>,
    kv: KvType,
    weights: &[f32],
    dims: usize,
    value: impl Fn(usize) -> &'a [f32],
) -> Vec<f32> {
    let mut o = vec![0.0f32; dims];
    for first in (keys.start / mma::STEP * mma::STEP..keys.end).step_by(mma::STEP) {
        let here = first.max(keys.start)..(first + mma::STEP).min(keys.end);
        for (d, o) in o.iter_mut().enumerate() {
            let product = |j: usize| (mma::weight(kv, weights[j - keys.start]), value(j)[d]);
            *o = mma::step(*o, here.clone().map(product));
        }
    }
    o.iter().map(|o| o + 0.0).collect()
}

/// The function of a gated unit.
pub fn activate(act: Activation, x: f32) -> f32 {
    match act {
        Activation::Silu => math::silu(x),
        Activation::GeluTanh => math::gelu_tanh(x),
        Activation::GeluErf => math::gelu_erf(x),
    }
}

/// Keys and values of one layer, widened to f32: `[position slot][heads * head_dim]`.
struct KvStore {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// A prepared program and the results of its last run, if that succeeded.
struct Loaded {
    program: Arc<Program>,
    results: Option<Vec<Vec<f32>>>,
}

/// The scalar interpreter.
#[derive(Default)]
pub struct Interpreter {
    checkpoint: Option<Arc<Checkpoint>>,
    kv: Option<KvPlan>,
    kv_type: KvType,
    stores: Vec<KvStore>,
    programs: Vec<Loaded>,
    saturated: u64,
}

impl Interpreter {
    /// An interpreter with nothing loaded.
    pub fn new() -> Self {
        Self::default()
    }

    fn vector(&self, w: &Weight) -> Result<Vec<f32>> {
        let mut x = vec![0.0; w.cols];
        let checkpoint = self.checkpoint.as_ref().ok_or_else(not_loaded)?;
        quant::decode_row(w.dtype, checkpoint.data(checkpoint.require(&w.name)?), &mut x);
        if w.offset != 0.0 {
            x.iter_mut().for_each(|x| *x += w.offset);
        }
        Ok(x)
    }

    fn row(&self, w: &Weight, row: usize) -> Result<&[u8]> {
        let checkpoint = self.checkpoint.as_ref().ok_or_else(not_loaded)?;
        let bytes = w.bytes() / w.rows;
        Ok(&checkpoint.data(checkpoint.require(&w.name)?)[row * bytes..(row + 1) * bytes])
    }

    fn store(&mut self, layer: usize, kv: &KvLayer, cell: usize, k: &[f32], v: &[f32]) {
        let cols = kv.heads * kv.head_dim;
        let store = &mut self.stores[layer];
        for (x, to) in [(k, &mut store.keys), (v, &mut store.values)] {
            let to = &mut to[cell * cols..(cell + 1) * cols];
            to.copy_from_slice(x);
            to.chunks_mut(kv.head_dim).for_each(|head| kv_round(self.kv_type, head, &mut self.saturated));
        }
    }

    fn step(&mut self, program: &Program, step: &Step, inputs: &Inputs, memory: &mut Memory) -> Result<()> {
        let weight = |w: &WeightId| &program.weights[w.0 as usize];
        let cols_in = step.inputs.first().map_or(0, |s| s.ty().cols);
        let rows_of = |s: &Slot| inputs.rows(s.ty().rows);
        let mut f = step.inputs.iter().map(|s| memory.floats(s, rows_of(s))).collect::<Vec<_>>();
        let mut y: Vec<f32> = Vec::new();
        match &step.op {
            Op::Embed { table, scale } => {
                let w = weight(table);
                for &token in &inputs.tokens {
                    let mut row = vec![0.0; w.cols];
                    quant::decode_row(w.dtype, self.row(w, token as usize)?, &mut row);
                    y.extend(row.iter().map(|x| if *scale == 1.0 { *x } else { x * scale }));
                }
            }
            Op::RmsNorm { weight: w, eps, group, .. } => {
                let w = self.vector(weight(w))?;
                f[0].chunks(*group).for_each(|x| y.extend(rms_norm(x, &w, *eps)));
            }
            Op::Quantize { .. } => y = std::mem::take(&mut f[0]),
            Op::Linear { parts, residual, gated } => {
                let mut products = Vec::new();
                for part in parts {
                    let w = weight(&part.weight);
                    let bias = part.bias.map(|b| self.vector(weight(&b))).transpose()?;
                    let slot = &step.inputs[part.input];
                    let rows = rows_of(slot);
                    let mut y = vec![0.0; rows * w.rows];
                    for n in 0..w.rows {
                        let bytes = self.row(w, n)?;
                        let layout = memory.layout(slot);
                        let (mut decoded, mut integers) = (vec![0.0; w.cols], IntRow::default());
                        match quant::format(w.dtype).filter(|_| layout.is_some()) {
                            Some(format) => integers.read(bytes, format),
                            None => quant::decode_row(w.dtype, bytes, &mut decoded),
                        }
                        for row in 0..rows {
                            let mut v = match &layout {
                                Some(layout) => integers.dot(memory.bytes(slot), layout, row),
                                None => dot(&decoded, &f[part.input][row * w.cols..(row + 1) * w.cols]),
                            };
                            if let Some(scale) = part.scale {
                                v *= scale;
                            }
                            if let Some(bias) = &bias {
                                v += bias[n];
                            }
                            if *residual {
                                v += f[step.inputs.len() - 1][row * w.rows + n];
                            }
                            y[row * w.rows + n] = v;
                        }
                    }
                    products.push(y);
                }
                if gated.is_none() {
                    step.outputs.iter().zip(&products).for_each(|(out, y)| memory.write(out, y));
                    return Ok(());
                }
                if let (Some(unit), [gate, up]) = (gated, products.as_slice()) {
                    y.extend(gated_unit(unit.act, gate, up));
                }
            }
            Op::Add => y.extend(f[0].iter().zip(&f[1]).map(|(a, b)| a + b)),
            Op::Scale(factor) => y.extend(f[0].iter().map(|x| x * factor)),
            Op::Softcap(cap) => y.extend(f[0].iter().map(|x| cap * math::tanh(x / cap))),
            Op::Peaks { span } => {
                let rows = f[0].chunks(cols_in);
                y.extend(rows.flat_map(|row| row.chunks(*span)).map(peak));
            }
            Op::Sample { .. } => {
                let rows = f[0].chunks(cols_in).enumerate();
                y.extend(rows.map(|(row, logits)| sample::choose(logits, inputs.sampling(row)).number()));
            }
            Op::Glu(unit) => y.extend(gated_unit(unit.act, &f[0], &f[1])),
            Op::Rope { rope: id, head_dim } | Op::RopeStore { rope: id, head_dim, .. } => {
                let spec = &program.ropes[id.0 as usize];
                let rotate = |x: &mut [f32], cols: usize| {
                    for (row, x) in x.chunks_mut(cols).enumerate() {
                        x.chunks_mut(*head_dim).for_each(|head| rope(spec, inputs.positions[row], head));
                    }
                };
                rotate(&mut f[0], cols_in);
                if let Op::RopeStore { layer, .. } = &step.op {
                    let cols = step.inputs[1].ty().cols;
                    rotate(&mut f[1], cols);
                    let kv = &program.kv[*layer];
                    for (row, &cell) in inputs.kv[kv.group].cells.iter().enumerate() {
                        let at = row * cols..(row + 1) * cols;
                        self.store(*layer, kv, cell as usize, &f[1][at.clone()], &f[2][at]);
                    }
                }
                y = std::mem::take(&mut f[0]);
            }
            Op::KvStore { layer } => {
                let kv = &program.kv[*layer];
                for (row, &cell) in inputs.kv[kv.group].cells.iter().enumerate() {
                    let at = row * cols_in..(row + 1) * cols_in;
                    self.store(*layer, kv, cell as usize, &f[0][at.clone()], &f[1][at]);
                }
                return Ok(());
            }
            Op::Attention { spec, .. } => {
                let store = &self.stores[spec.layer];
                let kv = &inputs.kv[program.kv[spec.layer].group];
                let cols = spec.kv_heads * spec.head_dim;
                for (i, q) in f[0].chunks(spec.head_dim).enumerate() {
                    let (row, head) = (i / spec.heads, i % spec.heads);
                    let kv_head = head / (spec.heads / spec.kv_heads);
                    let page = |j: usize| kv.page(inputs.sequences[row], j);
                    let at = |j: usize| (page(j) * PAGE + j % PAGE) * cols + kv_head * spec.head_dim;
                    y.extend(attention(
                        spec,
                        (program.key.options.float, program.key.options.kv),
                        q,
                        inputs.positions[row] as usize,
                        |j| &store.keys[at(j)..at(j) + spec.head_dim],
                        |j| &store.values[at(j)..at(j) + spec.head_dim],
                    ));
                }
            }
            Op::TakeRows => {
                for &w in &inputs.wanted {
                    y.extend(&f[0][w as usize * cols_in..(w as usize + 1) * cols_in]);
                }
            }
            Op::Copy { .. } => return Err(Error::Inputs(format!("{}: a copy outside run", step.name))),
            Op::Carried { index } => y.extend(&inputs.carried[*index]),
        }
        step.outputs.iter().for_each(|slot| memory.write(slot, &y));
        Ok(())
    }
}

/// fl(act(gate) * up)
fn gated_unit(act: Activation, gate: &[f32], up: &[f32]) -> impl Iterator<Item = f32> {
    gate.iter().zip(up).map(move |(&g, u)| activate(act, g) * u)
}

/// The largest, or NaN where there is one.
fn peak(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
    values.iter().copied().fold(f32::NEG_INFINITY, larger) + 0.0
}

fn not_loaded() -> Error {
    Error::Device { device: "reference".into(), what: "no model is loaded: call load first".into() }
}

/// Arenas (one for each device of the placement) and results of one run.
struct Memory {
    arenas: Vec<Vec<u8>>,
    results: Vec<Vec<f32>>,
    device: usize,
    bucket: crate::Bucket,
}

impl Memory {
    fn layout(&self, slot: &Slot) -> Option<Layout> {
        let ty = slot.ty();
        ty.elem.digits().map(|(unit, digits)| Layout::new(self.bucket.rows(ty.rows), ty.cols, unit, digits))
    }

    fn bytes(&self, slot: &Slot) -> &[u8] {
        match *slot {
            Slot::Arena { offset, .. } => &self.arenas[self.device][offset..],
            Slot::Output { .. } => &[],
        }
    }

    /// Rows of an f32 value; nothing for a quantized one.
    fn floats(&self, slot: &Slot, rows: usize) -> Vec<f32> {
        let n = rows * slot.ty().cols;
        match *slot {
            _ if slot.ty().elem != Elem::F32 => Vec::new(),
            Slot::Output { index, .. } => self.results[index][..n].to_vec(),
            Slot::Arena { offset, .. } => {
                let bytes = self.arenas[self.device][offset..offset + 4 * n].chunks_exact(4);
                bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
        }
    }

    fn write(&mut self, slot: &Slot, y: &[f32]) {
        if let Slot::Output { index, .. } = *slot {
            self.results[index] = y.to_vec();
        }
        let layout = self.layout(slot);
        let Slot::Arena { offset, ty } = *slot else { return };
        let arena = &mut self.arenas[self.device][offset..];
        match layout {
            None => {
                for (to, y) in arena.chunks_exact_mut(4).zip(y) {
                    to.copy_from_slice(&y.to_le_bytes());
                }
            }
            Some(layout) => {
                for (row, y) in y.chunks(ty.cols).enumerate() {
                    quantize_row(&layout, y, row, arena);
                }
            }
        }
    }
}

impl Backend for Interpreter {
    fn describe(&self) -> String {
        "reference (scalar interpreter)".into()
    }

    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()> {
        for weight in &graph.weights {
            weight.check(checkpoint.data(checkpoint.require(&weight.name)?))?;
        }
        self.checkpoint = Some(checkpoint);
        self.kv_type = options.kv;
        kv.check(graph)?;
        // Poison: a position read before it is written shows as NaN.
        let store = |l: &KvLayer| {
            let n = kv.pages[l.group] * PAGE * l.heads * l.head_dim;
            KvStore { keys: vec![f32::NAN; n], values: vec![f32::NAN; n] }
        };
        self.stores = graph.kv.iter().map(store).collect();
        self.kv = Some(kv);
        Ok(())
    }

    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared> {
        self.programs.push(Loaded { program, results: None });
        Ok(Prepared(self.programs.len() - 1))
    }

    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()> {
        let kv = self.kv.as_ref().ok_or_else(not_loaded)?;
        let program = self.programs[prepared.0].program.clone();
        self.programs[prepared.0].results = None;
        inputs.check(&program, kv)?;
        let mut memory = Memory {
            // Poison: a value read before it is written shows as NaN.
            arenas: program.arena_bytes.iter().map(|&n| vec![0xFF; n]).collect(),
            results: vec![Vec::new(); program.outputs.len()],
            device: 0,
            bucket: program.key.bucket,
        };
        for segment in &program.segments {
            for step in &segment.steps {
                if let Op::Copy { from } = step.op {
                    memory.device = from;
                    let y = memory.floats(&step.inputs[0], inputs.rows(step.inputs[0].ty().rows));
                    memory.device = segment.device;
                    memory.write(&step.outputs[0], &y);
                    continue;
                }
                memory.device = segment.device;
                self.step(&program, step, inputs, &mut memory)?;
            }
        }
        self.programs[prepared.0].results = Some(memory.results);
        Ok(())
    }

    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        match &self.programs[prepared.0].results {
            Some(results) => Ok(&results[output]),
            None => Err(Error::Inputs("this program has not run, or its last run failed".into())),
        }
    }

    fn set_profile(&mut self, _on: bool) {}

    fn profile(&self) -> Option<&Profile> {
        None
    }

    fn paths(&self) -> Vec<PathCount> {
        vec![PathCount { path: PathCount::SATURATED.into(), declined: None, count: self.saturated }]
    }
}
