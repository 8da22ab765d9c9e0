//! A compiled graph: plain data that a backend runs step by step.

use crate::op::{Elem, Op, RopeSpec, ValueType, Weight, WeightId};
use crate::options::PlanKey;

/// Where a value lives.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Slot {
    /// In the device's arena, from this byte on; room for the bucket's rows.
    Arena {
        /// Byte offset, a multiple of 64.
        offset: usize,
        /// Type.
        ty: ValueType,
    },
    /// Output buffer `index`, outside the arena.
    Output {
        /// Index into [`Program::outputs`].
        index: usize,
        /// Type.
        ty: ValueType,
    },
}

impl Slot {
    /// Type of the value.
    pub fn ty(&self) -> ValueType {
        match *self {
            Slot::Arena { ty, .. } | Slot::Output { ty, .. } => ty,
        }
    }
}

/// What a step reads and computes, so that any run can print GB/s and its share of the peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// Bytes of weights read once per run of the step.
    pub weight_bytes: u64,
    /// Bytes of values read and written per row.
    pub row_bytes: u64,
    /// Multiplications and additions per row.
    pub row_flops: u64,
}

/// One op with its places.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// Name for people.
    pub name: String,
    /// Operation.
    pub op: Op,
    /// Places of the inputs.
    pub inputs: Vec<Slot>,
    /// Places of the outputs.
    pub outputs: Vec<Slot>,
    /// Layer, for per-layer reports.
    pub layer: Option<usize>,
    /// Bytes and flops.
    pub cost: Cost,
}

impl Step {
    /// The matrices that this step multiplies with, each with the element of what it is multiplied with.
    pub fn products(&self) -> impl Iterator<Item = (WeightId, Elem)> {
        let parts = match &self.op {
            Op::Linear { parts, .. } => parts.as_slice(),
            _ => &[],
        };
        parts.iter().map(|part| (part.weight, self.inputs[part.input].ty().elem))
    }
}

/// Steps that run on one device without a stop.
#[derive(Clone, PartialEq, Debug)]
pub struct Segment {
    /// Index into the placement's devices.
    pub device: usize,
    /// Steps in order.
    pub steps: Vec<Step>,
}

/// A named result of a program.
#[derive(Clone, PartialEq, Debug)]
pub struct Output {
    /// `logits`, `hidden.3`; [`CARRIED`] and the node that wrote it where only another segment wants it.
    pub name: String,
    /// Type.
    pub ty: ValueType,
}

/// What the names of outputs begin with that are no results, but what one segment computes for another.
pub const CARRIED: &str = "carried.";

impl Output {
    /// Whether only another segment wants it.
    pub fn is_carried(&self) -> bool {
        self.name.starts_with(CARRIED)
    }
}

/// Keys and values of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayer {
    /// Key and value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Index of its [`KvGroup`].
    pub group: usize,
}

/// Layers that keep the same positions, so that their pages are numbered together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KvGroup {
    /// A row at position p needs the positions in (p - window, p]; `None` for all up to p.
    pub window: Option<usize>,
}

impl KvGroup {
    /// The first position that a row at `position`, and so any later row, still needs.
    pub fn first_visible(&self, position: usize) -> usize {
        first_visible(self.window, position)
    }

    /// Whether what an attention with this window sees is kept.
    pub fn keeps(&self, window: Option<usize>) -> bool {
        self.window.is_none_or(|kept| window.is_some_and(|seen| seen <= kept))
    }

    /// Most pages of `page` positions that a sequence of up to `length` tokens needs at once when at most `chunk` of them
    /// are computed in a step: what the window and the chunk after it can touch, wherever they begin. A page table of so
    /// many entries can be a ring, in which no two positions of one step share an entry.
    pub fn ring(&self, chunk: usize, length: usize, page: usize) -> usize {
        let all = length.div_ceil(page);
        let Some(window) = self.window else { return all };
        // `span` positions in a row touch one page, and one more for every page boundary among them.
        let span = window.saturating_sub(1).saturating_add(chunk.clamp(1, length.max(1)));
        (span - 1).div_ceil(page).saturating_add(1).min(all)
    }
}

/// First position that a row at `position` sees under a window.
pub fn first_visible(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// A compiled graph for one [`PlanKey`].
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// Its name.
    pub key: PlanKey,
    /// Which of its segments this is, where it is a part of a program for several devices ([`crate::split`]).
    pub part: Option<usize>,
    /// Segments in order. What a segment reads of others it copies before all else.
    pub segments: Vec<Segment>,
    /// Results.
    pub outputs: Vec<Output>,
    /// Arena bytes of each device.
    pub arena_bytes: Vec<usize>,
    /// Weights of the graph, by [`crate::op::WeightId`].
    pub weights: Vec<Weight>,
    /// Rope tables of the graph, by [`crate::op::RopeId`].
    pub ropes: Vec<RopeSpec>,
    /// Attention layers of the graph.
    pub kv: Vec<KvLayer>,
    /// Groups of those layers.
    pub kv_groups: Vec<KvGroup>,
}

impl Program {
    /// Index of the output of this name.
    pub fn output(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|o| o.name == name)
    }

    /// All steps in order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.segments.iter().flat_map(|s| &s.steps)
    }

    /// As [`Step::products`], of all steps in order.
    pub fn products(&self) -> impl Iterator<Item = (WeightId, Elem)> {
        self.steps().flat_map(Step::products)
    }

    /// Bytes of weights one run reads.
    pub fn weight_bytes(&self) -> u64 {
        self.steps().map(|s| s.cost.weight_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;

    /// The bound is exact: the widest of all alignments, tried one by one.
    #[test]
    fn a_ring_holds_the_window_and_a_chunk_wherever_they_begin() {
        for (window, chunk) in
            [(1, 1), (1, 32), (8, 1), (8, 7), (32, 1), (33, 1), (34, 32), (512, 512), (70, 100)]
        {
            let group = KvGroup { window: Some(window) };
            let touched = |first: usize| {
                let last = first + chunk - 1;
                last / PAGE - group.first_visible(first) / PAGE + 1
            };
            let widest = (0..4096).map(touched).max().unwrap();
            assert_eq!(group.ring(chunk, 1 << 20, PAGE), widest, "window {window}, chunk {chunk}");
            assert_eq!(group.ring(chunk, 33, PAGE), widest.min(2), "no more than two pages of tokens");
        }
        assert_eq!(KvGroup { window: None }.ring(1, 100, PAGE), 4);
        assert_eq!(KvGroup { window: Some(usize::MAX) }.ring(usize::MAX, 100, PAGE), 4);
    }
}
