//! Products of many rows on matrix tiles (AMX).
//!
//! A block of activation rows meets a tile of sixteen output rows, one unit at a time, because each unit has scales of
//! its own: the tile products give a unit's exact integers, they pass through memory, and the float tail of the `int`
//! arithmetic (NUMERICS.md section 2) runs on vectors whose lanes are output rows, as everywhere in this room. While the
//! tail of one unit runs, the tiles of the next are multiplied.
//!
//! - [`plain`]: units of 32 columns, as bf16: integers up to 256 are exact in it, and so are sums of
//!   32 products in f32, which spares the conversion.
//! - [`scaled`]: units of 256 columns with sub-scales, as int8: code times sub-scale is cut into two digits of radix 64,
//!   so that nothing has to be scaled inside a unit.
//! - [`few`]: units of 32 columns with fewer rows, as int8.
//!
//! With tiles in flight one of the two ports for 512-bit multiplications is idle (measured), but in both kinds it is loads
//! and stores that decide: see docs/performance.md.

pub(super) mod few;
mod plain;
mod scaled;

use std::ops::Range;

use super::pack::{RESIDUES, units_of};
use super::spec::TILE;
use super::{OutPtr, Packed, Scratch, Tail};
use crate::dot::Activations;
use crate::simd::amx::Tiles;
use crate::simd::{Isa, prefetch_write};

/// Rows of a tile.
const BLOCK: usize = 16;

/// Activation rows from which tiles pay: a started block costs as much as a full one, and expanding weights as much as a
/// few blocks.
const ROWS_LEAST: usize = 24;
/// The same for [`plain`], which gains less, and for codes of 8 bits in it, which take longest to expand.
const ROWS_LEAST_PLAIN: usize = 40;
const ROWS_LEAST_BYTES: usize = 96;

/// Bytes of activations that are arranged at once; they stay in the L2 cache while weights pass by.
const PANEL_SHARE: usize = 1200 << 10;

/// Bytes of expanded weights that are multiplied with all blocks before the next; they stay in the L1 cache, with room
/// for activations that pass by.
const WEIGHTS_SHARE: usize = 18 << 10;

/// Bytes of one tile in memory.
const TILE_BYTES: usize = 16 * 64;

/// Bytes for integers on their way from tiles to vectors.
const RESULT_BYTES: usize =
    if scaled::RESULT_BYTES > plain::RESULT_BYTES { scaled::RESULT_BYTES } else { plain::RESULT_BYTES };

/// How a format's units are laid out for tiles, and the functions that make and use that layout.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// Rows of a block of activations.
    block: usize,
    /// Tiles of weights that meet a block together.
    tiles: usize,
    /// Bytes of one unit of a block.
    x_bytes: usize,
    /// Bytes of one unit of one tile of weights.
    w_bytes: usize,
    write: Write,
    expand: Expand,
    multiply: Multiply,
}

/// Arranges the units of these accumulators of the rows of a block: `(packed, x, rows, accumulators, to)`.
type Write = unsafe fn(&Packed, &Activations<'_>, Range<usize>, Range<usize>, *mut u8);

/// Multiplies one segment with blocks.
type Multiply = unsafe fn(&Segment, &Blocks);

/// Expands units of a tile of weights, to here, so many bytes apart.
type Expand = unsafe fn(Records, *mut u8, usize);

/// Packed units of a tile of weights: what of codes and of scales follows these addresses.
pub(super) struct Records {
    codes: *const u8,
    scales: *const u8,
    count: usize,
}

/// Blocks of activations, as a segment meets them.
pub(super) struct Blocks {
    /// The segment's first unit of the first block; the same of the next is `stride` bytes on.
    x: *const u8,
    stride: usize,
    count: usize,
    /// Room for [`RESULT_BYTES`].
    results: *mut u8,
    /// `[count][rows of a block / 16][tiles][16]`.
    totals: *mut [f32; TILE],
}

/// A run of accumulators of the tiles that meet a block together, expanded.
pub(super) struct Segment {
    /// Its units, in packed order, and of each the tiles.
    weights: *const u8,
    /// Units of each accumulator, from the first on.
    counts: [usize; RESIDUES],
    /// How many accumulators.
    residues: usize,
    /// Whether the first of them is the row's first.
    first: bool,
}

/// The plan for products of this matrix with so many rows; none if tiles do not pay, or cannot serve it.
pub(super) fn plan(packed: &Packed, digits: usize, rows: usize) -> Option<Plan> {
    let spec = packed.spec;
    let (least, plan) = match (spec.sub, spec.bits) {
        (0, 8) => (ROWS_LEAST_BYTES, plain::plan(spec, digits)),
        (0, _) => (ROWS_LEAST_PLAIN, plain::plan(spec, digits)),
        _ => (ROWS_LEAST, scaled::plan(spec, digits)),
    };
    plan.filter(|_| rows >= least && packed.units() > 0)
}

/// Accumulators of a segment.
fn residues_of(plan: &Plan, units: usize) -> usize {
    (WEIGHTS_SHARE / (units.div_ceil(RESIDUES) * plan.tiles * plan.w_bytes)).clamp(1, RESIDUES)
}

/// The accumulators of each segment, and its units in packed order: up to the first accumulator without units.
fn segments(plan: &Plan, units: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let residues = residues_of(plan, units);
    let mut unit = 0;
    (0..RESIDUES.min(units + 1)).step_by(residues).map(move |first| {
        let accumulators = first..RESIDUES.min(first + residues);
        let here: usize = accumulators.clone().map(|residue| units_of(units, residue)).sum();
        unit += here;
        (accumulators, unit - here..unit)
    })
}

/// The most blocks that are arranged at once.
fn blocks_most(plan: &Plan, units: usize) -> usize {
    (PANEL_SHARE / (units * plan.x_bytes)).max(1)
}

/// Rows that are arranged at once, when there are `rows`: parts of about equal size.
pub(super) fn rows_at_once(packed: &Packed, plan: &Plan, rows: usize) -> usize {
    let blocks = rows.div_ceil(plan.block);
    plan.block * blocks.div_ceil(blocks.div_ceil(blocks_most(plan, packed.units())))
}

/// Bytes of scratch for at most `rows` rows.
pub(super) fn scratch_bytes(packed: &Packed, digits: usize, rows: usize) -> usize {
    let few = few::scratch_bytes(packed, digits, rows);
    let Some(plan) = plan(packed, digits, rows) else { return few };
    let blocks = rows.div_ceil(plan.block).min(blocks_most(&plan, packed.units()));
    Places::of(&plan, packed.units(), blocks).bytes.max(few)
}

/// Where the parts of scratch begin.
struct Places {
    weights: usize,
    results: usize,
    totals: usize,
    bytes: usize,
}

impl Places {
    fn of(plan: &Plan, units: usize, blocks: usize) -> Places {
        let weights = blocks * units * plan.x_bytes;
        let segment = residues_of(plan, units) * units.div_ceil(RESIDUES) * plan.tiles * plan.w_bytes;
        // A multiple of 4 KiB apart, as running sums want it.
        let results = weights + segment;
        let totals = results + RESULT_BYTES.next_multiple_of(4096);
        let bytes = totals + blocks * plan.block * plan.tiles * TILE * size_of::<f32>();
        Places { weights, results, totals, bytes }
    }
}

/// As [`Packed::product`], on tiles.
///
/// # Safety
/// That of [`Packed::product`], with matrix tiles available.
pub(super) unsafe fn product(
    packed: &Packed,
    plan: &Plan,
    x: &Activations<'_>,
    x_rows: Range<usize>,
    tiles: Range<usize>,
    out: OutPtr,
    tail: Tail<'_>,
    scratch: &mut Scratch,
) {
    let units = packed.units();
    let at_once = rows_at_once(packed, plan, x_rows.len());
    let places = Places::of(plan, units, at_once / plan.block);
    let panel = scratch.lines.bytes(places.bytes);
    // SAFETY: scratch has room for all places; see the contracts of the functions called.
    unsafe {
        let (weights, results) = (panel.add(places.weights), panel.add(places.results));
        let totals = panel.add(places.totals).cast::<[f32; TILE]>();
        let _tiles = Tiles::configure();
        for first in x_rows.clone().step_by(at_once) {
            let rows = first..x_rows.end.min(first + at_once);
            let blocks = rows.len().div_ceil(plan.block);
            let arranges = scratch.arranges(x, &rows, packed.spec.dtype, Isa::Amx);
            // All blocks' units of a segment lie together, since they are read together.
            for (accumulators, here) in segments(plan, units).take_while(|_| arranges) {
                for b in 0..blocks {
                    let rows = first + b * plan.block..rows.end.min(first + (b + 1) * plan.block);
                    let to = panel.add((here.start * blocks + b * here.len()) * plan.x_bytes);
                    (plan.write)(packed, x, rows, accumulators.clone(), to);
                }
            }
            for tile in tiles.clone().step_by(plan.tiles) {
                let together = plan.tiles.min(tiles.end - tile);
                let outputs = TILE * tile..packed.rows().min(TILE * (tile + together));
                prefetch_outputs(outputs.clone(), rows.clone(), out);
                for (accumulators, here) in segments(plan, units) {
                    let mut segment = Segment {
                        weights,
                        counts: [0; RESIDUES],
                        residues: accumulators.len(),
                        first: accumulators.start == 0,
                    };
                    for (count, residue) in segment.counts.iter_mut().zip(accumulators) {
                        *count = units_of(units, residue);
                    }
                    for i in 0..plan.tiles {
                        // Where one tile is missing, another takes its place, and its results are not used.
                        let tile = tile + i.min(together - 1);
                        let codes = packed.tile_codes(tile).add(here.start * packed.spec.code_bytes());
                        let scales = packed.tile_scales(tile).add(here.start * packed.spec.scale_bytes());
                        let records = Records { codes, scales, count: here.len() };
                        (plan.expand)(records, weights.add(i * plan.w_bytes), plan.tiles * plan.w_bytes);
                    }
                    let x = panel.add(here.start * blocks * plan.x_bytes);
                    let stride = here.len() * plan.x_bytes;
                    (plan.multiply)(&segment, &Blocks { x, stride, count: blocks, results, totals });
                }
                for i in 0..together {
                    let first = TILE * (tile + i);
                    let lanes = TILE.min(packed.rows() - first);
                    let totals = totals.add(i * BLOCK);
                    finish(totals, plan.tiles * BLOCK, out, rows.clone(), first, lanes, &tail);
                }
            }
        }
    }
}

/// Asks for the lines that results go to: rows of a large output lie on pages of their own.
fn prefetch_outputs(cols: Range<usize>, rows: Range<usize>, out: OutPtr) {
    for row in rows {
        for col in cols.clone().step_by(TILE) {
            prefetch_write(out.at(row, col).cast());
        }
    }
}

/// [`Tail::finish`] for the rows of a tile, compiled for AVX-512.
///
/// # Safety
/// AVX-512 is present; `totals` holds 16 of these rows, and 16 more each `stride` on; the rest is that of [`Tail::finish`].
#[target_feature(enable = "avx512f")]
unsafe fn finish(
    totals: *const [f32; TILE],
    stride: usize,
    out: OutPtr,
    rows: Range<usize>,
    first: usize,
    lanes: usize,
    tail: &Tail<'_>,
) {
    for (r, row) in rows.enumerate() {
        // SAFETY: the caller's duty.
        unsafe { tail.finish(&*totals.add(r / BLOCK * stride + r % BLOCK), out, row, first, lanes) };
    }
}

/// Begins totals, so many rows of them: added to -0, every number is itself, and the additions are then the same for all
/// accumulators.
///
/// # Safety
/// AVX-512 is present; there is room for the rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn begin_totals(totals: *mut [f32; TILE], rows: usize) {
    use std::arch::x86_64::*;
    for r in 0..rows {
        // SAFETY: the caller's duty.
        unsafe { _mm512_storeu_ps(totals.add(r).cast(), _mm512_set1_ps(-0.0)) };
    }
}

/// Adds an accumulator without units: it is zero, and turns -0 into +0. More of them, and no others follow, change nothing.
///
/// # Safety
/// AVX-512 is present; `totals` are so many rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_nothing(totals: *mut [f32; TILE], rows: usize) {
    use std::arch::x86_64::*;
    for r in 0..rows {
        // SAFETY: the caller's duty.
        unsafe {
            let total = totals.add(r).cast::<f32>();
            _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), _mm512_setzero_ps()));
        }
    }
}
