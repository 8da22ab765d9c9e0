//! How many layers of a model a device's memory holds: from exact bytes, before any of them is taken.
//!
//! The sizes are those that the backend allocates, each rounded up as the driver does ([`occupied`]); a loaded model is one
//! allocation, since it is most of the memory and its rounding should be little. Layers fill the device
//! from the first on; what follows the last, the output, counts as one more.

use std::fmt;

use ingle_graph::op::{RopeSpec, Weight, WeightUse};
use ingle_graph::options::Placement;
use ingle_graph::split::{Part, Share};
use ingle_graph::{Activations, Bucket, Graph, KvLayer, KvPlan, PlanKey, PlanOptions, passes};

use crate::Result;
use crate::backend::Demand;
use crate::kernels::kv;
use crate::weights::MatrixLayout;

/// Most that is left to the driver: code of kernels, captured graphs, what it keeps for itself.
const RESERVE: u64 = 256 << 20;

/// Memory of which a share of this size, if smaller, is the reserve.
const RESERVE_SHARE: u64 = 32;

/// What is left to the driver on a device with so much memory.
pub fn reserve(all: u64) -> u64 {
    RESERVE.min(all / RESERVE_SHARE)
}

/// Pieces of a model's memory begin at multiples of this.
const ALIGN: usize = 256;

/// Allocations from this size on have pages of their own; smaller ones share them.
const LARGE: u64 = 1 << 20;

/// Bytes of such a page, and what smaller allocations are multiples of.
const PAGE: u64 = 2 << 20;
const SMALL: u64 = 512;

/// Bytes that an allocation takes of the device's memory.
pub fn occupied(bytes: usize) -> u64 {
    (bytes.max(1) as u64).next_multiple_of(if bytes as u64 >= LARGE { PAGE } else { SMALL })
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that nobody has taken.
    pub free: u64,
    /// Bytes of them that are left to the driver.
    pub reserve: u64,
    /// Bytes of which a growing range is a multiple.
    pub granularity: usize,
}

impl Room {
    /// Bytes for a model; `limit` where less was asked for.
    pub fn bytes(&self, limit: Option<u64>) -> u64 {
        self.free.saturating_sub(self.reserve).min(limit.unwrap_or(u64::MAX))
    }
}

/// Bytes of each piece of what a loaded model holds on a device, in one allocation: large ones take whole pages, so as many
/// allocations would take more.
pub(crate) struct Held {
    /// By weight; 0 for those that are not on the device.
    pub(crate) weights: Vec<usize>,
    /// By rotary embedding.
    pub(crate) ropes: Vec<usize>,
    /// By layer: its keys, and as much for its values.
    pub(crate) pools: Vec<usize>,
}

impl Held {
    /// Of a model, or of the share of it that is on the device.
    pub(crate) fn of(graph: &Graph, options: &PlanOptions, kv: &KvPlan) -> Result<Self> {
        let integers = options.activations != Activations::F32;
        let weight = |weight: &Weight| {
            Ok(match weight.used {
                WeightUse::Vector => weight.cols * size_of::<f32>(),
                WeightUse::Matrix => {
                    MatrixLayout::new(weight.dtype, weight.rows, weight.cols, integers)?.bytes()
                }
                // Rows are decoded on the host.
                WeightUse::Rows => 0,
            })
        };
        let weights = graph.weights.iter().map(weight).collect::<Result<Vec<usize>>>()?;
        let rope = |spec: &RopeSpec| kv.context * 2 * spec.inv_freq.len() * size_of::<f32>();
        let pool = |layer: &KvLayer| kv.pages[layer.group] * kv::page_bytes(layer, options.kv);
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGN);
        Ok(Self {
            weights: weights.into_iter().map(aligned).collect(),
            ropes: graph.ropes.iter().map(rope).map(aligned).collect(),
            pools: graph.kv.iter().map(pool).map(aligned).collect(),
        })
    }

    fn parts(&self) -> [usize; 3] {
        [self.weights.iter().sum(), 2 * self.pools.iter().sum::<usize>(), self.ropes.iter().sum()]
    }

    /// All of it.
    pub(crate) fn total(&self) -> usize {
        self.parts().iter().sum()
    }
}

/// Bytes of device memory that a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Matrices and vectors.
    pub weights: u64,
    /// Keys and values.
    pub kv: u64,
    /// Tables of rotary embeddings.
    pub ropes: u64,
    /// Data and results of steps.
    pub steps: u64,
    /// Values between a step's ops, and scratch.
    pub scratch: u64,
    /// What rounding each allocation up to the driver's sizes takes.
    pub rounding: u64,
}

impl Needs {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.ropes + self.steps + self.scratch + self.rounding
    }

    /// What `device` of the placement in `options` takes of `graph` with programs for `buckets`, the last of which is as
    /// large in everything as any.
    ///
    /// # Errors
    /// A matrix that kernels cannot take; a rule of the language broken by a pass.
    pub fn of(
        graph: &Graph,
        device: usize,
        options: &PlanOptions,
        kv: &KvPlan,
        buckets: &[Bucket],
        granularity: usize,
    ) -> ingle_graph::Result<Self> {
        let share = Share::of(graph, &options.placement, device);
        let held = Held::of(&share.graph, options, kv)?;
        let [weights, kv_bytes, ropes] = held.parts().map(|bytes| bytes as u64);
        let mut needs = Self { weights, kv: kv_bytes, ropes, ..Self::default() };
        let rounding = |bytes: usize| occupied(bytes) - bytes as u64;
        needs.rounding = rounding(held.total());
        let Some(&bucket) = buckets.last() else { return Ok(needs) };
        let program = passes::compile(graph, &PlanKey { bucket, options: options.clone() })?;
        let (mut arena, mut spare) = (0, 0);
        for at in (0..program.segments.len()).filter(|&at| program.segments[at].device == device) {
            let part = Part::of(&program, at, &share)?.program;
            for bucket in buckets {
                let demand = Demand::of(&part, bucket, kv.context)?;
                for bytes in demand.outputs.into_iter().chain([demand.data]) {
                    needs.steps += bytes as u64;
                    needs.rounding += rounding(bytes);
                }
                arena = arena.max(demand.arena);
                spare = spare.max(demand.spare);
            }
        }
        let range = |bytes: usize| bytes.next_multiple_of(granularity.max(1)) - bytes;
        needs.scratch = (arena + spare) as u64;
        needs.rounding += (range(arena) + range(spare)) as u64;
        Ok(needs)
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weights, kv, ropes, steps, scratch, rounding } = self;
        write!(
            f,
            "{} bytes: weights {weights}, keys and values {kv}, rope tables {ropes}, steps {steps}, scratch {scratch}, \
             rounded up by {rounding}",
            self.total()
        )
    }
}

/// How a model lies on a device and the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Layers of the model.
    pub layers: usize,
    /// Layers on the device, from the first on; one more than there are when the output is there too.
    pub held: usize,
    /// What those take.
    pub needs: Needs,
    /// What the first layer alone would take.
    pub least: Needs,
    /// What the whole model would take.
    pub most: Needs,
}

impl Fit {
    /// As many layers of a model as take at most `bytes`.
    ///
    /// # Errors
    /// As [`Needs::of`].
    pub fn new(
        graph: &Graph,
        options: &PlanOptions,
        kv: &KvPlan,
        buckets: &[Bucket],
        granularity: usize,
        bytes: u64,
    ) -> ingle_graph::Result<Self> {
        let layers = graph.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last + 1);
        let needs = |held: usize| {
            let options = PlanOptions { placement: placement(layers, held), ..options.clone() };
            Needs::of(graph, 0, &options, kv, buckets, granularity)
        };
        let (least, most) = (needs(1)?, needs(layers + 1)?);
        let fits = |needs: &Needs| needs.total() <= bytes;
        let (mut held, mut taken) = (0, Needs::default());
        if fits(&most) {
            (held, taken) = (layers + 1, most);
        } else if fits(&least) {
            // The most that fits; what is taken grows with the layers.
            (held, taken) = (1, least);
            let mut above = layers + 1;
            while held + 1 < above {
                let middle = (held + above) / 2;
                let wanted = needs(middle)?;
                match fits(&wanted) {
                    true => (held, taken) = (middle, wanted),
                    false => above = middle,
                }
            }
        }
        Ok(Self { layers, held, needs: taken, least, most })
    }

    /// Whether the device holds all of the model.
    pub fn is_whole(&self) -> bool {
        self.held > self.layers
    }

    /// The placement: device 0 is the one, device 1 the host.
    pub fn placement(&self) -> Placement {
        placement(self.layers, self.held)
    }
}

fn placement(layers: usize, held: usize) -> Placement {
    match held {
        0 => Placement::of(&[(0, 1)]),
        held if held > layers => Placement::default(),
        held => Placement::of(&[(0, 0), (held, 1)]),
    }
}
