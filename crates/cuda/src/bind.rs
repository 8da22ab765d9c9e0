//! Binds a program's steps to launches, with the addresses of all they read and write.

use ingle_graph::op::{Emit, Gated, RopeId};
use ingle_graph::quantize::Layout;
use ingle_graph::{Bucket, FloatArithmetic, LinearPart, Op, Program, Slot, Step, WeightId};

use crate::backend::{Brought, Model, Source, Stored};
use crate::driver::{Arg, Buffer, Span};
use crate::kernels::linear::{self, Input};
use crate::kernels::{Issue, attention, elementwise, kv, norm, quantize, sample};
use crate::weights::{Limits, Matrix};
use crate::{Error, Result, fuse};

/// Values and rows begin at multiples of this.
pub(crate) const ALIGN: usize = 256;

/// Bytes of f32 rows of a slot.
pub(crate) fn f32_bytes(slot: &Slot, bucket: &Bucket) -> usize {
    (bucket.rows(slot.ty().rows) * slot.ty().cols * size_of::<f32>()).next_multiple_of(ALIGN)
}

/// Memory that a step needs besides its values: results that are only wanted quantized, products of a gated unit, parts of
/// attention.
pub(crate) fn spare_bytes(step: &Step, bucket: &Bucket, context: usize) -> usize {
    let result = step.outputs.first().map_or(0, |slot| f32_bytes(slot, bucket));
    match &step.op {
        Op::RmsNorm { .. } => result,
        Op::Linear { gated: Some(_), .. } => 2 * result,
        Op::Attention { spec, .. } => result + attention::parts_bytes(spec, bucket.t, context),
        _ => 0,
    }
}

/// Name of the path a step takes.
pub(crate) fn path_name(step: &Step, program: &Program, model: &Model, left: bool) -> String {
    let bucket = &program.key.bucket;
    match &step.op {
        Op::Linear { parts, .. } => {
            let names = parts.iter().enumerate().map(|(i, part)| {
                let elem = step.inputs[part.input].ty().elem;
                let streams = model.streams(step, i, bucket);
                linear::path(program.weights[part.weight.0 as usize].dtype, elem, bucket.t, streams)
            });
            let mut names: Vec<String> = names.collect();
            names.dedup();
            names.join("+")
        }
        Op::Attention { .. } => format!("attention.{}.cuda", program.key.options.float),
        op if left => format!("{}.in_readers.cuda", op.name()),
        op => format!("{}.cuda", op.name()),
    }
}

/// Turns steps into launches with addresses.
pub(crate) struct Binder<'a> {
    pub(crate) bucket: Bucket,
    pub(crate) float: FloatArithmetic,
    pub(crate) model: &'a Model,
    pub(crate) step: Span<'a>,
    pub(crate) arena: Span<'a>,
    pub(crate) spare: Span<'a>,
    pub(crate) outputs: &'a [Buffer],
    pub(crate) saturated: Span<'a>,
    pub(crate) counters: Span<'a>,
    pub(crate) limits: Limits,
    pub(crate) blob: Span<'a>,
    pub(crate) brought: &'a [Brought],
    pub(crate) left: fuse::Rows<'a>,
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
        let bytes = slot.ty().bytes(self.bucket.rows(slot.ty().rows));
        match *slot {
            Slot::Arena { offset, .. } => self.arena.part(offset, bytes),
            Slot::Output { index, .. } => self.outputs[index].span(0, bytes),
        }
    }

    fn matrix(&self, id: WeightId) -> Result<&'a Matrix> {
        match &self.model.weights[id.0 as usize] {
            Stored::Matrix(matrix) => Ok(matrix),
            _ => Err(Error::Refused(format!("{} is no matrix", self.model.declared[id.0 as usize].name))),
        }
    }

    fn vector(&self, id: WeightId) -> Result<Span<'a>> {
        match &self.model.weights[id.0 as usize] {
            Stored::Vector(buffer) => Ok(buffer.all()),
            _ => Err(Error::Refused(format!("{} is no vector", self.model.declared[id.0 as usize].name))),
        }
    }

    fn layout(&self, slot: &Slot) -> Option<Layout> {
        let ty = slot.ty();
        let (unit, digits) = ty.elem.digits()?;
        Some(Layout::new(self.bucket.rows(ty.rows), ty.cols, unit, digits))
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

    /// Where an op's result goes.
    fn outputs(&self, slots: &[Slot], emit: &Emit) -> Result<quantize::Outputs<'a>> {
        let (plain, quantized) = slots.split_at(usize::from(emit.f32));
        let f32 = plain.first().map(|slot| self.span(slot)).transpose()?;
        Ok(quantize::Outputs { f32, quantized: self.quantized(quantized)? })
    }

    fn quantized(&self, slots: &[Slot]) -> Result<Vec<(Span<'a>, Layout)>> {
        let one = |slot: &Slot| {
            let layout = self.layout(slot);
            let layout = layout.ok_or_else(|| Error::Refused("an output that is not quantized".into()))?;
            Ok((self.span(slot)?, layout))
        };
        slots.iter().map(one).collect()
    }

    /// The launches of step `at` of the program, and what they write without reading it before: results, rows that wait for
    /// their readers, scratch.
    pub(crate) fn issues(&self, at: usize, step: &Step) -> Result<(Vec<Issue<'a>>, Vec<Span<'a>>)> {
        let mut read = step.inputs.iter().map(|slot| self.span(slot)).collect::<Result<Vec<_>>>()?;
        read.extend(step.inputs.iter().filter_map(|slot| Some(self.left.of(slot)?.x)));
        let left = self.left.left(at);
        let issues = self.issues_of(step, left)?;
        if !left {
            self.left.written(&step.outputs, &self.bucket);
        }
        let result = |slot: &Slot| match left {
            true => Ok(self.left.of(slot).map(|made| made.x)),
            false => self.span(slot).map(Some),
        };
        let results = step.outputs.iter().map(result).collect::<Result<Vec<_>>>()?;
        let scratch = self.spare.part(0, spare_bytes(step, &self.bucket, self.model.kv.context))?;
        let mut written: Vec<Span<'a>> = results.into_iter().flatten().chain([scratch]).collect();
        written.retain(|span| span.bytes() > 0 && !read.iter().any(|read| read.overlaps(span)));
        Ok((issues, written))
    }

    /// The launches of a step; `left`: its quantized result is left to its readers.
    fn issues_of(&self, step: &Step, left: bool) -> Result<Vec<Issue<'a>>> {
        let inputs = step.inputs.iter().map(|slot| self.span(slot)).collect::<Result<Vec<_>>>()?;
        let mut spare = Spare { all: self.spare, used: 0 };
        let other = |what: &str| Err(Error::Refused(format!("{} with {what}", step.op.name())));
        let Some(first) = step.outputs.first().or(step.inputs.first()) else { return other("no values") };
        let (kind, cols) = (first.ty().rows, first.ty().cols as u32);
        let rows = self.bucket.rows(kind) as u32;
        let at = self.step;
        let elementwise = |entry, arguments: Vec<Arg<'a>>| {
            vec![Issue { entry, shape: elementwise::shape(rows, cols), arguments }]
        };
        let sizes = [rows as usize, cols as usize];
        Ok(match (&step.op, inputs.as_slice()) {
            (Op::Embed { .. } | Op::Carried { .. }, []) => {
                let from = Source::of(&step.op);
                let Some(from) = self.brought.iter().find(|rows| Some(rows.from) == from) else {
                    return other("no rows");
                };
                let scale = if let Op::Embed { scale, .. } = step.op { scale } else { 1.0 };
                let x = self.blob.part(from.offset, rows as usize * from.cols * size_of::<f32>())?;
                let y = self.span(first)?;
                elementwise(elementwise::SCALE, elementwise::one(at, kind, cols, x, scale, y).into())
            }
            (Op::RmsNorm { weight, eps, group, emit }, &[x]) => {
                let (outputs, weight) = (self.outputs(&step.outputs, emit)?, self.vector(*weight)?);
                if left {
                    self.left.leave(&step.outputs, linear::Made { x, norm: Some((weight, *eps)) });
                    return Ok(Vec::new());
                }
                if *group == sizes[1] && !outputs.quantized.is_empty() {
                    return Ok(vec![quantize::norm(at, kind, sizes, *eps, [x, weight], &outputs)?]);
                }
                let y = match outputs.f32 {
                    Some(y) => y,
                    None => spare.take(f32_bytes(first, &self.bucket))?,
                };
                let group = *group as u32;
                let shape = norm::norm_shape(rows, cols / group, group);
                let arguments = norm::norm(at, kind, group, *eps, x, weight, y).into();
                let mut issues = vec![Issue { entry: norm::RMS_NORM, shape, arguments }];
                issues.extend(quantize::issues(at, kind, sizes[0], sizes[1], y, &outputs.quantized)?);
                issues
            }
            (Op::Quantize { .. }, &[x]) if left => {
                self.left.leave(&step.outputs, linear::Made { x, norm: None });
                Vec::new()
            }
            (Op::Quantize { .. }, &[x]) => {
                quantize::issues(at, kind, sizes[0], sizes[1], x, &self.quantized(&step.outputs)?)?
            }
            (Op::Linear { parts, residual, gated }, _) => {
                let residual = residual.then(|| inputs.last().copied()).flatten();
                match gated {
                    None => {
                        let y =
                            step.outputs.iter().map(|slot| self.span(slot)).collect::<Result<Vec<_>>>()?;
                        let made = self.parts(step, parts, &inputs, &y, residual)?;
                        let rows = step.inputs[parts[0].input].ty().rows;
                        linear::issues(at, rows, self.bucket.rows(rows), &made)?
                    }
                    Some(Gated { act, emit }) => {
                        let mut outputs = self.outputs(&step.outputs, emit)?;
                        if left {
                            let y = self.left.keep(self.spare, f32_bytes(first, &self.bucket))?;
                            outputs = quantize::Outputs { f32: Some(y), quantized: Vec::new() };
                            self.left.leave(&step.outputs, linear::Made { x: y, norm: None });
                        }
                        let mut take = || spare.take(f32_bytes(first, &self.bucket));
                        let both = [take()?, take()?];
                        let mut made = self.parts(step, parts, &inputs, &both, None)?;
                        let room = sizes[0];
                        if let (Some(y), true, [gate, up]) =
                            (outputs.f32, outputs.quantized.is_empty(), &mut made[..])
                            && linear::gates(gate, up, room)
                        {
                            gate.y = y;
                            return Ok(vec![linear::gated(at, kind, room, *act, [gate, up])?]);
                        }
                        let mut issues = linear::issues(at, kind, room, &made)?;
                        issues.push(quantize::glu(at, kind, sizes, *act, both, &outputs)?);
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
            (Op::Sample { span }, &[logits, peaks]) => {
                let from = step.inputs[0].ty().cols;
                let shape = sample::shape(rows, from, *span)?;
                let arguments = sample::arguments(at, from as u32, logits, peaks, self.span(first)?).into();
                vec![Issue { entry: sample::SAMPLE, shape, arguments }]
            }
            (Op::Glu(Gated { act, emit }), &[gate, up]) => {
                let outputs = self.outputs(&step.outputs, emit)?;
                vec![quantize::glu(at, kind, sizes, *act, [gate, up], &outputs)?]
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
                let made = [&step.inputs[0], &step.inputs[1]].map(|slot| self.left.of(slot));
                let norms = made.map(|made| made?.norm);
                let [q, k] = [(q, made[0]), (k, made[1])].map(|(x, made)| made.map_or(x, |made| made.x));
                let rope = self.rope(*rope);
                let arguments = kv::rope_store(at, pools, sizes, rope, [q, k, v], norms, y);
                let entry = kv::rope_store_kernel(self.model.kv_type);
                vec![Issue { entry, shape: kv::rope_store_shape(rows, heads, &shape), arguments }]
            }
            (Op::Attention { spec, emit }, &[q]) => {
                let mut outputs = self.outputs(&step.outputs, emit)?;
                let y = match outputs.f32 {
                    Some(y) => y,
                    None if left => self.left.keep(self.spare, f32_bytes(first, &self.bucket))?,
                    None => spare.take(f32_bytes(first, &self.bucket))?,
                };
                if left {
                    outputs.quantized.clear();
                    self.left.leave(&step.outputs, linear::Made { x: y, norm: None });
                }
                let context = self.model.kv.context;
                let parts = spare.take(attention::parts_bytes(spec, sizes[0], context))?;
                let (kv_type, pools) = (self.model.kv_type, self.pools(spec.layer));
                let call =
                    attention::Call { step: at, spec: spec.clone(), pools, kind: kv_type, context, q, y };
                let room = attention::Room { parts, counters: self.counters };
                let issue = attention::issue(&call, self.float, self.bucket, room, self.limits)?;
                let mut issues = vec![issue];
                issues.extend(quantize::issues(at, kind, sizes[0], sizes[1], y, &outputs.quantized)?);
                issues
            }
            (Op::TakeRows, &[x]) => {
                let arguments = elementwise::take(at, cols, x, self.span(first)?).into();
                elementwise(elementwise::TAKE_ROWS, arguments)
            }
            (_, inputs) => return other(&format!("{} inputs does not run here", inputs.len())),
        })
    }

    /// The parts of a product, into `y`.
    fn parts(
        &self,
        step: &Step,
        parts: &[LinearPart],
        inputs: &[Span<'a>],
        y: &[Span<'a>],
        residual: Option<Span<'a>>,
    ) -> Result<Vec<linear::Part<'a>>> {
        let one = |(part, &y): (&LinearPart, &Span<'a>)| {
            let slot = &step.inputs[part.input];
            let x = match (self.layout(slot), self.left.of(slot)) {
                (None, None) => Input::Floats(inputs[part.input]),
                (Some(layout), None) => Input::Quantized(inputs[part.input], layout),
                (layout, Some(made)) => Input::Made(made, layout),
            };
            let bias = part.bias.map(|bias| self.vector(bias)).transpose()?;
            Ok(linear::Part { matrix: self.matrix(part.weight)?, scale: part.scale, bias, x, residual, y })
        };
        parts.iter().zip(y).map(one).collect()
    }
}
