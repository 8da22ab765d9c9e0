//! Rows that no kernel makes for itself: where all that read one are products with one row, each of them quantizes it
//! ([`crate::kernels::linear::streams`]), and a norm before it too; f32 products make its norm. Norms of heads are made, for
//! any number of rows, by the rotation that reads them. That saves a kernel, and a round trip through memory.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;

use ingle_graph::{Bucket, Op, Slot, Step};

use crate::driver::Span;
use crate::kernels::linear::Made;

/// What products make for themselves, in the order of a program's steps.
pub(crate) struct Rows<'a> {
    /// By step: its result is left to its readers.
    left: Vec<bool>,
    /// Where each value that is left comes from, by its offset in the arena.
    made: RefCell<BTreeMap<usize, Made<'a>>>,
    /// Where in the scratch the next row lies that waits for its readers.
    kept: Cell<usize>,
}

/// Bytes that a value takes: of the arena, or, for a result, of a range that no other value has.
fn bytes(slot: &Slot, bucket: &Bucket) -> Range<usize> {
    let first = match *slot {
        Slot::Arena { offset, .. } => offset,
        Slot::Output { index, .. } => (index + 1) << 44,
    };
    first..first + slot.ty().bytes(bucket.rows(slot.ty().rows))
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Whether those that read a step's result can make it: `streams(step, part)` says which products can.
fn is_left(steps: &[&Step], at: usize, bucket: &Bucket, streams: &dyn Fn(&Step, usize) -> bool) -> bool {
    let step = steps[at];
    // Columns that a norm takes together.
    let group = match step.op {
        Op::RmsNorm { group, .. } => Some(group),
        Op::Quantize { .. } | Op::Attention { .. } | Op::Linear { gated: Some(_), .. } => None,
        _ => return false,
    };
    // What its readers read in its place must still be there.
    let source = matches!(step.op, Op::RmsNorm { .. } | Op::Quantize { .. });
    let source = source.then(|| bytes(&step.inputs[0], bucket));
    step.outputs.iter().all(|slot| {
        let (ty, own) = (slot.ty(), bytes(slot, bucket));
        let (floats, one) = (ty.elem.digits().is_none(), bucket.rows(ty.rows) == 1);
        if matches!(slot, Slot::Output { .. }) || (floats && group.is_none()) {
            return false;
        }
        let mut readers = 0;
        let mut source_is_there = true;
        for reader in &steps[at + 1..] {
            let writes = |of: &Range<usize>| reader.outputs.iter().any(|o| overlap(&bytes(o, bucket), of));
            let keeps = source.as_ref().is_none_or(|source| !writes(source));
            let reads =
                reader.inputs.iter().enumerate().filter(|(_, input)| overlap(&bytes(input, bucket), &own));
            for (input, read) in reads {
                let makes = match &reader.op {
                    Op::Linear { parts, .. } => {
                        let mut parts =
                            (0..parts.len()).filter(|&part| parts[part].input == input).peekable();
                        let whole = group.is_none_or(|group| group == ty.cols);
                        let any = parts.peek().is_some();
                        one && whole && keeps && any && parts.all(|part| streams(reader, part))
                    }
                    // A block reads a head of queries, or of keys, before it writes to the same place.
                    Op::RopeStore { head_dim, .. } => {
                        let same = |source: &Range<usize>| {
                            input == 0 && bytes(&reader.outputs[0], bucket) == *source
                        };
                        let keeps = keeps || source.as_ref().is_some_and(same);
                        floats && group == Some(*head_dim) && input < 2 && keeps
                    }
                    _ => false,
                };
                if read != slot || !source_is_there || !makes {
                    return false;
                }
                readers += 1;
            }
            source_is_there &= keeps;
            if writes(&own) {
                break;
            }
        }
        readers > 0
    })
}

impl<'a> Rows<'a> {
    /// Of a program's steps; rows that wait for their readers lie from byte `kept` of the scratch on.
    pub(crate) fn new(
        steps: &[&Step],
        bucket: &Bucket,
        streams: &dyn Fn(&Step, usize) -> bool,
        kept: usize,
    ) -> Self {
        let left = (0..steps.len()).map(|at| is_left(steps, at, bucket, streams)).collect();
        Self { left, made: RefCell::default(), kept: Cell::new(kept) }
    }

    /// Whether a step's result is left to its readers.
    pub(crate) fn left(&self, at: usize) -> bool {
        self.left[at]
    }

    /// A value's readers take this in its place.
    pub(crate) fn leave(&self, slots: &[Slot], from: Made<'a>) {
        for slot in slots {
            if let Slot::Arena { offset, .. } = *slot {
                self.made.borrow_mut().insert(offset, from);
            }
        }
    }

    /// A step writes these values.
    pub(crate) fn written(&self, slots: &[Slot], bucket: &Bucket) {
        let all: Vec<Range<usize>> = slots.iter().map(|slot| bytes(slot, bucket)).collect();
        self.made.borrow_mut().retain(|offset, _| !all.iter().any(|range| range.contains(offset)));
    }

    /// What a reader of a value takes in its place.
    pub(crate) fn of(&self, slot: &Slot) -> Option<Made<'a>> {
        match slot {
            Slot::Arena { offset, .. } => self.made.borrow().get(offset).copied(),
            Slot::Output { .. } => None,
        }
    }

    /// Memory for a row that waits for its readers.
    pub(crate) fn keep(&self, spare: Span<'a>, bytes: usize) -> crate::Result<Span<'a>> {
        let span = spare.part(self.kept.get(), bytes)?;
        self.kept.set(self.kept.get() + bytes);
        Ok(span)
    }
}

#[cfg(test)]
mod tests {
    use ingle_graph::op::{Emit, LinearPart, RopeId, ValueType};
    use ingle_graph::program::Cost;
    use ingle_graph::{Rows as Kind, WeightId};

    use super::*;

    fn slot(offset: usize, cols: usize) -> Slot {
        Slot::Arena { offset, ty: ValueType::f32(Kind::T, cols) }
    }

    fn step(op: Op, inputs: &[Slot], outputs: &[Slot]) -> Step {
        let (inputs, outputs) = (inputs.to_vec(), outputs.to_vec());
        Step { name: String::new(), op, inputs, outputs, layer: None, cost: Cost::default() }
    }

    fn norm(group: usize, x: Slot, y: Slot) -> Step {
        let op = Op::RmsNorm { weight: WeightId(0), eps: 1e-6, group, emit: Emit::plain() };
        step(op, &[x], &[y])
    }

    fn product(x: Slot, y: Slot) -> Step {
        let part = LinearPart { weight: WeightId(0), scale: None, bias: None, input: 0 };
        step(Op::Linear { parts: vec![part], residual: false, gated: None }, &[x], &[y])
    }

    fn store(q: Slot, k: Slot, y: Slot) -> Step {
        step(Op::RopeStore { rope: RopeId(0), head_dim: 64, layer: 0 }, &[q, k, slot(0x90000, 128)], &[y])
    }

    /// Which of these steps are left to their readers, in a bucket of `t` rows.
    fn left(t: usize, streams: bool, steps: &[Step]) -> Vec<bool> {
        let steps: Vec<&Step> = steps.iter().collect();
        let rows = Rows::new(&steps, &Bucket { t, s: 1, r: 1 }, &|_, _| streams, 0);
        (0..steps.len()).map(|at| rows.left(at)).collect()
    }

    #[test]
    fn a_norm_is_left_to_products_of_one_row() {
        let (x, y, z) = (slot(0, 128), slot(0x1000, 128), slot(0x2000, 256));
        let steps = [norm(128, x, y), product(y, z)];
        assert_eq!(left(1, true, &steps), [true, false]);
        assert_eq!(left(2, true, &steps), [false, false], "two rows");
        assert_eq!(left(1, false, &steps), [false, false], "a product that cannot");
        assert_eq!(left(1, true, &[norm(64, x, y), product(y, z)]), [false, false], "heads");
        let result = Slot::Output { index: 0, ty: ValueType::f32(Kind::T, 128) };
        assert_eq!(left(1, true, &[norm(128, result, y), product(y, z)]), [true, false], "of a result");
        assert_eq!(left(1, true, &[norm(128, x, result), product(result, z)]), [false, false], "a result");
        // Blocks would still read x while others write to it.
        assert_eq!(left(1, true, &[norm(128, x, y), product(y, x)]), [false, false], "in x's place");
        let steps = [norm(128, x, y), product(slot(0x3000, 128), x), product(y, z)];
        assert_eq!(left(1, true, &steps), [false; 3], "x is gone");
        let steps = [norm(128, x, y), product(y, z), step(Op::Add, &[y, z], &[z])];
        assert_eq!(left(1, true, &steps), [false; 3], "another reader");
    }

    #[test]
    fn norms_of_heads_are_left_to_the_rotation() {
        let (q, k, y) = (slot(0, 256), slot(0x10000, 128), slot(0x20000, 256));
        for t in [1, 8] {
            let steps = [norm(64, q, q), norm(64, k, k), store(q, k, q)];
            assert_eq!(left(t, false, &steps), [true, true, false], "in place, {t} rows");
            assert_eq!(
                left(t, false, &[norm(64, q, y), store(y, k, y)]),
                [true, false],
                "elsewhere, {t} rows"
            );
        }
        assert_eq!(left(1, false, &[norm(32, q, q), store(q, k, q)]), [false, false], "other groups");
        assert_eq!(
            left(1, false, &[norm(64, k, y), store(q, y, k)]),
            [false, false],
            "into what k is made from"
        );
    }
}
