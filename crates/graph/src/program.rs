//! A compiled graph: plain data that a backend runs step by step.

use crate::op::{Op, RopeSpec, ValueType, Weight};
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
    /// `logits`, `hidden.3`.
    pub name: String,
    /// Type.
    pub ty: ValueType,
}

/// Keys and values of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvLayer {
    /// Key and value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// A compiled graph for one [`PlanKey`].
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// Its name.
    pub key: PlanKey,
    /// Segments in order.
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

    /// Bytes of weights one run reads.
    pub fn weight_bytes(&self) -> u64 {
        self.steps().map(|s| s.cost.weight_bytes).sum()
    }
}
