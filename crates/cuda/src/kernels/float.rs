//! Products with float weights, in the contract's f32x32: how the kernels of `float.cuh` are launched.

use ingle_graph::{Activation, Rows};

use super::linear::{self, Input, LARGER, OTHER, Part, SHARED_MAX};
use super::{Issue, Source};
use crate::driver::Param::{F32 as Float, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::weights::{FLOAT_BLOCK, Limits, MatrixLayout};

const STREAM: &[Param] = &[
    Memory, U32, U32, U32, U32, U32, // step, rows, room, cols, slab, stages
    Memory, Memory, Float, Memory, U32, // x, norm, eps, residual, gated unit
    Memory, U32, Memory, Float, Memory, // weights, rows, bias, scale, y
    Memory, U32, Memory, Float, Memory, //
    Memory, U32, Memory, Float, Memory,
];
const MANY: &[Param] = &[
    Memory, U32, U32, Memory, Memory, // step, rows, cols, x, residual
    Memory, U32, Memory, Float, Memory, //
    Memory, U32, Memory, Float, Memory, //
    Memory, U32, Memory, Float, Memory,
];

/// Kernels of a form: for up to 1, 2, 4 and 8 rows of activations and so many of the matrix at a time; for up to 8 rows that do
/// not fit into shared memory; for many.
macro_rules! floats {
    ($name:literal, $struct:literal) => {
        Source {
            name: concat!("linear_", $name),
            text: concat!("#include \"float.cuh\"\n\nFLOAT(linear_", $name, ", ", $struct, ")\n"),
            entries: &[
                Entry { name: concat!("linear_", $name, "_x1_w1"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x1_w2"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x1_w4"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x2_w2"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x2_w4"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x4_w2"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x4_w4"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x8_w2"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_x8_w4"), params: STREAM },
                Entry { name: concat!("linear_", $name, "_few"), params: linear::FEW },
                Entry { name: concat!("linear_", $name, "_many"), params: MANY },
            ],
        }
    };
}

/// Files of float forms.
pub const F32: Source = floats!("f32", "FloatWeights");
/// As above.
pub const F16: Source = floats!("f16", "HalfWeights");
/// As above.
pub const BF16: Source = floats!("bf16", "BrainWeights");

/// Rows of activations from which products are made eight by eight.
pub(super) const MANY_ROWS: usize = 16;

/// Most rows of activations whose product streams its weights.
const STREAM_ROWS: usize = 8;

/// Warps of a block, and most of them for one row of activations; most stages of a warp (float.cuh).
const WARPS: usize = 8;
const WARPS_MAX: usize = 12;
const STAGES_MAX: usize = 4;

/// Bytes that a copy has at least, where a row has as many.
const COPY_BYTES: usize = 1 << 10;

/// Rows of activations and of a matrix that a warp of `few` makes, and blocks of weights it loads ahead (float.cuh).
const FEW_ROWS: usize = 8;
const FEW_WEIGHTS: usize = 4;
const FEW_AHEAD: usize = 2;

/// How a product that streams its weights is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Rows of activations, and of the matrix that a warp makes at a time.
    x: usize,
    weights: usize,
    warps: usize,
    /// Blocks of a launch.
    blocks: usize,
    /// Blocks of columns of a stage, and stages of a warp.
    slab: usize,
    stages: usize,
    shared_bytes: usize,
}

impl Plan {
    /// Of matrices like `layout` with so many rows each; `gated`: the first two are gate and up. `None` where activations do
    /// not fit.
    fn new(
        layout: &MatrixLayout,
        rows: &[usize],
        gated: bool,
        room: usize,
        norm: bool,
        limits: Limits,
    ) -> Option<Self> {
        if room > STREAM_ROWS || layout.unit().is_some() {
            return None;
        }
        let x = room.next_power_of_two();
        let blocks = layout.cols.div_ceil(FLOAT_BLOCK);
        let block = layout.row_bytes()[0] / blocks;
        let activations = x * blocks * FLOAT_BLOCK * size_of::<f32>();
        let processors = limits.multiprocessors.max(1) as usize;
        let taken = if gated { &rows[..1] } else { rows };
        let turns = |weights: usize| taken.iter().map(|rows| rows.div_ceil(weights)).sum::<usize>();
        let each = |weights: usize| turns(weights).div_ceil(processors);
        // As few rows at a time as leave each warp one turn; of larger matrices, the most.
        let (choices, warps_max): (&[usize], _) =
            if x == 1 { (&[4, 2, 1], WARPS_MAX) } else { (&[4, 2], WARPS) };
        let most = choices.iter().rev().find(|&&weights| each(weights) <= warps_max).copied().unwrap_or(4);
        // Two sizes of blocks, as the streams of integer weights have. Here those that norm their row are the small ones: a
        // product after attention finds multiprocessors empty, and two small blocks would go to one of them.
        let half = limits.shared_bytes / 2;
        let is_large = x == 1 && !norm;
        let size = if is_large { half + LARGER } else { half.saturating_sub(LARGER + OTHER) };
        [size, limits.shared_bytes].into_iter().find_map(|have| {
            let ring = have.saturating_sub(OTHER).checked_sub(activations)?;
            let tries = choices.iter().filter(|&&weights| weights <= most);
            let tries = tries.flat_map(|&weights| [(weights, WARPS), (weights, WARPS / 2)]);
            tries.into_iter().find_map(|(weights, warps)| {
                let each = each(weights);
                let warps = if each <= warps_max && warps == WARPS { each.max(WARPS) } else { warps };
                // The ring is shared by those that have work.
                let takers = each.min(warps);
                let all = weights * blocks * block * if gated { 2 } else { 1 } * each.div_ceil(takers);
                // What fills most of the ring, in stages as long as may be: each costs a warp some hundred cycles.
                let stages = |slab: usize| (ring / takers / (weights * slab * block)).min(STAGES_MAX);
                let flight = |slab: usize| (stages(slab) * weights * slab * block).min(all);
                let slabs = (1..=blocks).map(|parts| blocks.div_ceil(parts));
                let fits = |&slab: &usize| {
                    let long = slab == blocks || slab * block >= COPY_BYTES;
                    long && (stages(slab) >= 2 || stages(slab) == 1 && flight(slab) == all)
                };
                let slab = slabs.rev().filter(fits).max_by_key(|&slab| flight(slab))?;
                let least = if is_large { size - OTHER } else { 0 };
                let shared_bytes = (activations + takers * stages(slab) * weights * slab * block).max(least);
                let blocks = turns(weights).min(processors);
                Some(Self { x, weights, warps, blocks, slab, stages: stages(slab), shared_bytes })
            })
        })
    }

    fn of(parts: &[&Part<'_>], gated: bool, room: usize) -> Option<Self> {
        let rows: Vec<usize> = parts.iter().map(|part| part.matrix.layout().rows).collect();
        let norm = matches!(parts[0].x, Input::Made(..));
        Self::new(&parts[0].matrix.layout(), &rows, gated, room, norm, parts[0].matrix.limits())
    }

    fn issue<'a>(
        &self,
        step: Span<'a>,
        which: Rows,
        room: usize,
        parts: &[&Part<'a>],
        gated: Option<Activation>,
    ) -> Issue<'a> {
        let first = parts[0];
        let layout = first.matrix.layout();
        let shape = Launch {
            shared_bytes: self.shared_bytes as u32,
            ..Launch::new([self.blocks as u32, 1], 32 * self.warps as u32)
        };
        let (norm, eps) = match first.x {
            Input::Made(made, _) => made.norm.map_or((None, 0.0), |(weights, eps)| (Some(weights), eps)),
            _ => (None, 0.0),
        };
        let mut arguments = vec![Arg::Memory(step), super::rows(which)];
        arguments.extend([room, layout.cols, self.slab, self.stages].map(|n| Arg::U32(n as u32)));
        arguments.extend([Arg::Memory(first.x.span()), super::optional(norm), Arg::F32(eps)]);
        arguments.extend([super::optional(first.residual), Arg::U32(linear::act(gated))]);
        arguments.extend(linear::parts_arguments(parts));
        let choice = match self.x {
            1 => self.weights.ilog2(),
            x => 2 * x.ilog2() + self.weights.ilog2(),
        };
        let entry = linear::source(layout.form).entries[choice as usize];
        Issue { entry, shape, arguments }
    }
}

/// Whether products with matrices like this, however many rows they have, have the kernel that streams their weights, and
/// norms its row itself where there is one.
pub(super) fn streams(layout: &MatrixLayout, room: usize, limits: Limits) -> bool {
    Plan::new(layout, &[i32::MAX as usize], false, room, room == 1, limits).is_some()
}

/// The launch that writes act(gate) * up for up to `room` rows, where both stream.
pub(super) fn gated<'a>(
    step: Span<'a>,
    which: Rows,
    room: usize,
    act: Activation,
    both: [&Part<'a>; 2],
) -> Option<Issue<'a>> {
    Some(Plan::of(&both, true, room)?.issue(step, which, room, &both, Some(act)))
}

/// One launch, of parts that join.
pub(super) fn issue<'a>(step: Span<'a>, which: Rows, room: usize, parts: &[&Part<'a>]) -> Issue<'a> {
    if let Some(plan) = Plan::of(parts, false, room) {
        return plan.issue(step, which, room, parts, None);
    }
    let first = parts[0];
    let MatrixLayout { form, cols, .. } = first.matrix.layout();
    let outputs = |part: &&Part<'_>| part.matrix.layout().rows as u32;
    let all: u32 = parts.iter().map(outputs).sum();
    let many = room >= MANY_ROWS;
    let (per_warp, rows) = if many { (8, 8) } else { (FEW_WEIGHTS as u32, FEW_ROWS) };
    let threads = linear::threads(all.div_ceil(per_warp), first.matrix.limits().multiprocessors);
    let blocks = parts.iter().map(|part| outputs(part).div_ceil(threads / 32 * per_warp)).sum();
    let grid = Launch::new([blocks, room.div_ceil(rows) as u32], threads);
    let entries = linear::source(form).entries;
    if many {
        let mut arguments = vec![Arg::Memory(step), super::rows(which), Arg::U32(cols as u32)];
        arguments.extend([Arg::Memory(first.x.span()), super::optional(first.residual)]);
        arguments.extend(linear::parts_arguments(parts));
        return Issue { entry: entries[10], shape: grid, arguments };
    }
    let (round, one) = (FLOAT_BLOCK * FEW_AHEAD, FEW_ROWS * size_of::<f32>());
    let slab = cols.next_multiple_of(round).min(SHARED_MAX / one / round * round);
    let arguments = linear::arguments(step, which, room as u32, slab as u32, parts);
    Issue { entry: entries[9], shape: Launch { shared_bytes: (slab * one) as u32, ..grid }, arguments }
}
