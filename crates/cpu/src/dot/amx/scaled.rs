//! Units of 256 columns with sub-scales, and sub-minima in some formats.
//!
//! A product of tiles is followed at once by others: each result is stored late, just before its register is needed
//! again, and the rows of the float tail of the unit before lie between the products (measured: three quarters of the time
//! of the plain order). A block of activations meets two tiles of weights while it is in the L1 cache, and the next
//! block is asked for meanwhile, since tiles loaded from the L2 cache take as long as their products, and twice that while
//! another thread uses the same core (together half to two thirds of the time).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::avx512::Avx512;
use super::super::engine::Engine;
use super::super::kernel::read_codes;
use super::super::pack::{RESIDUES, units_of};
use super::super::spec::{self, Format, Min, Spec, TILE};
use super::super::{Activations, Packed};
use super::{
    BLOCK, Blocks, Expand, Multiply, Plan, Records, Segment, TILE_BYTES, Write, add_nothing, begin_totals,
};
use ingle_graph::quantize::SUM;
use ingle_tensor::DType;

/// Tiles of one digit of a unit: 64 columns each.
const PARTS: usize = 4;
/// Bits of the lower digit of code times sub-scale.
const RADIX: u32 = 6;

/// Runs of 16 rows of activations that meet each tile of weights: with one digit those of 32 rows, with two the digits of 16.
const GROUPS: usize = 2;

/// Where in a unit of activations the sums lie that sub-minima multiply; before them `[group][part]` tiles
/// `[row][column]` int8.
const X_SUMS: usize = GROUPS * PARTS * TILE_BYTES;

/// Where in a unit of activations the scales of up to 32 rows lie. With a minimum, sums are a tile before them:
/// `[row][group][sub-unit][high, low]` bf16.
const fn x_scales_at(min: bool) -> usize {
    X_SUMS + if min { TILE_BYTES } else { 0 }
}

/// Bytes of a unit of activations.
const fn x_bytes(min: bool) -> usize {
    x_scales_at(min) + GROUPS * BLOCK * size_of::<f32>()
}

/// Where in a unit of weights sub-minima lie, if there are any: `[sub-unit][output row][twice]` bf16 between 8 rows of
/// zeros before and 8 after, so that they can meet the sums of either group. Before them are four tiles
/// `[word][output row][column of the word]` int8 of the upper digit and four of the lower.
const W_MINS: usize = 2 * PARTS * TILE_BYTES;

/// Where in a unit of weights the scales of 16 rows lie; their minima follow.
const fn scales_at(min: bool) -> usize {
    W_MINS + if min { 3 * TILE_BYTES / 2 } else { 0 }
}

/// Bytes of a unit of weights.
const fn w_bytes(min: bool) -> usize {
    scales_at(min) + if min { 128 } else { 64 }
}

/// Tiles of weights that meet a block one after the other.
const TILES: usize = 2;

/// Bytes of what the registers collect.
const RING: usize = 4 * TILE_BYTES;
/// Room for the integers of a unit, twice for the minima of both tiles, and for running sums.
pub(super) const RESULT_BYTES: usize = 4 * RING;

/// The plan of a format.
pub(super) fn plan(spec: &Spec, digits: usize) -> Option<Plan> {
    let expand: Expand = match spec.dtype {
        DType::Q4K => expand::<spec::Q4K>,
        DType::Q5K => expand::<spec::Q5K>,
        DType::Q6K => expand::<spec::Q6K>,
        DType::IQ4XS => expand::<spec::IQ4XS>,
        _ => return None,
    };
    let min = spec.min != Min::None;
    let (write, multiply): (Write, Multiply) = match (min, digits) {
        (false, 1) => (write::<false, 1>, multiply::<false, 1>),
        (false, _) => (write::<false, 2>, multiply::<false, 2>),
        (true, 1) => (write::<true, 1>, multiply::<true, 1>),
        (true, _) => (write::<true, 2>, multiply::<true, 2>),
    };
    Some(Plan {
        block: GROUPS * BLOCK / digits,
        tiles: TILES,
        x_bytes: x_bytes(min),
        w_bytes: w_bytes(min),
        write,
        expand,
        multiply,
    })
}

/// Arranges the units of these accumulators of a block of activations.
///
/// # Safety
/// AVX-512 is present; `rows`, not empty and at most a block, lie within the activations' layout, which is that of the matrix;
/// `to` has room for these units of the block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn write<const MIN: bool, const D: usize>(
    packed: &Packed,
    x: &Activations<'_>,
    rows: Range<usize>,
    accumulators: Range<usize>,
    to: *mut u8,
) {
    let layout = x.layout();
    let units = packed.units();
    for r in 0..GROUPS * BLOCK / D {
        let row = (rows.start + r).min(rows.end - 1);
        // SAFETY: the layout places digits, scales and sums of the row inside the activations; writes are to row `r` of
        // each unit.
        unsafe {
            let from = x.bytes.as_ptr();
            let scales = from.add(layout.scale_offset(row)).cast::<f32>();
            let mut to = to;
            for residue in accumulators.clone() {
                for i in 0..units_of(units, residue) {
                    let u = residue + RESIDUES * i;
                    for digit in 0..D {
                        let (group, r) = if D == 2 { (digit, r) } else { (r / BLOCK, r % BLOCK) };
                        let digits = from.add(layout.digit_offset(digit, row) + 256 * u);
                        for part in 0..PARTS {
                            let line = digits.add(64 * part).cast::<__m512i>().read_unaligned();
                            let at = (group * PARTS + part) * TILE_BYTES + 64 * r;
                            to.add(at).cast::<__m512i>().write_unaligned(line);
                        }
                        if MIN {
                            let sums = from.add(layout.sum_offset(digit, row)).cast::<i16>();
                            let sums = split_sums(_mm256_loadu_si256(sums.add(256 / SUM * u).cast()));
                            to.add(X_SUMS + 64 * r + 32 * group).cast::<__m256i>().write_unaligned(sums);
                        }
                    }
                    to.add(const { x_scales_at(MIN) }).cast::<f32>().add(r).write(scales.add(u).read());
                    to = to.add(const { x_bytes(MIN) });
                }
            }
        }
    }
}

/// Sums of 16 columns to sums of 32, each as two bf16 that are exact: a multiple of 128 and the rest.
#[inline]
#[target_feature(enable = "avx2")]
fn split_sums(sums: __m256i) -> __m256i {
    let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    let low = _mm256_and_si256(sums, _mm256_set1_epi32(127));
    let high = _mm256_sub_epi32(sums, low);
    let low = _mm256_castps_si256(_mm256_cvtepi32_ps(low));
    let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(_mm256_cvtepi32_ps(high)));
    _mm256_or_si256(high, low)
}

/// Expands units of a tile of weights.
///
/// # Safety
/// AVX-512 is present; the records are the format's; `to` has room for their units, `stride` bytes apart.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,avx2,fma")]
unsafe fn expand<F: Format>(from: Records, mut to: *mut u8, stride: usize) {
    let Records { mut codes, mut scales, count } = from;
    let spec = &const { F::SPEC };
    // SAFETY: offsets are inside one record of each layout; the engine's instruction set is enabled here.
    unsafe {
        for _ in 0..count {
            let sub_scales = scales.add(spec.sub_scale_at());
            for group in 0..8 {
                let codes = codes.add(group * spec.group_bytes());
                let pair = group * 32 / spec.sub / 2;
                let both = _mm512_cvtepi8_epi16(_mm256_loadu_si256(sub_scales.add(2 * TILE * pair).cast()));
                let first = _mm512_mask_blend_epi16(0xAAAA_AAAA, both, _mm512_slli_epi32::<16>(both));
                let second = _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(both), both);
                macro_rules! word {
                    ($($g:literal)*) => {$(
                        let is_second = if spec.sub == 32 { group % 2 == 1 } else { $g / 4 == 1 };
                        let w = read_codes::<Avx512, F>($g, codes);
                        let w = _mm512_sub_epi8(w, _mm512_set1_epi8(spec.offset as i8));
                        let (high, low) = digits(w, if is_second { second } else { first });
                        let at = to.add(512 * group + 64 * $g);
                        at.cast::<__m512i>().write_unaligned(high);
                        at.add(PARTS * TILE_BYTES).cast::<__m512i>().write_unaligned(low);
                    )*};
                }
                word!(0 1 2 3 4 5 6 7);
            }
            let after = to.add(const { scales_at(!matches!(F::SPEC.min, Min::None)) }).cast::<f32>();
            Avx512::store(Avx512::from_f16(scales), after);
            if spec.min != Min::None {
                Avx512::store(Avx512::from_f16(scales.add(2 * TILE)), after.add(TILE));
                let sub_mins = scales.add(spec.sub_min_at());
                for pair in 0..spec.pairs() {
                    let both = _mm512_cvtepi8_epi32(_mm_loadu_si128(sub_mins.add(2 * TILE * pair).cast()));
                    let more =
                        _mm512_cvtepi8_epi32(_mm_loadu_si128(sub_mins.add(2 * TILE * pair + 16).cast()));
                    sub_minima(both, more, to.add(W_MINS + TILE_BYTES / 2 + 128 * pair));
                }
                to.add(W_MINS).write_bytes(0, TILE_BYTES / 2);
                to.add(W_MINS + TILE_BYTES).write_bytes(0, TILE_BYTES / 2);
            }
            codes = codes.add(spec.code_bytes());
            scales = scales.add(spec.scale_bytes());
            to = to.wrapping_add(stride);
        }
    }
}

/// Code times sub-scale, `|product| <= 4096`, as `64 * high + low` with both in int8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn digits(w: __m512i, scale: __m512i) -> (__m512i, __m512i) {
    let half = _mm512_set1_epi16(1 << (RADIX - 1));
    let even = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(w)), scale);
    let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(w), scale);
    let even_high = _mm512_srai_epi16::<RADIX>(_mm512_add_epi16(even, half));
    let odd_high = _mm512_srai_epi16::<RADIX>(_mm512_add_epi16(odd, half));
    let even_low = _mm512_sub_epi16(even, _mm512_slli_epi16::<RADIX>(even_high));
    let odd_low = _mm512_sub_epi16(odd, _mm512_slli_epi16::<RADIX>(odd_high));
    let merge = |even, odd| _mm512_mask_blend_epi8(0xAAAA_AAAA_AAAA_AAAA, even, _mm512_slli_epi16::<8>(odd));
    (merge(even_high, odd_high), merge(even_low, odd_low))
}

/// Writes a pair of sub-minima of 16 rows as tile rows: `low` are those of the first 8 output rows, alternating.
///
/// # Safety
/// AVX-512 is present; `to` has room for 128 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn sub_minima(low: __m512i, high: __m512i, to: *mut u8) {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    for (i, order) in [even, odd].into_iter().enumerate() {
        let mins = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low, order, high));
        let mins = _mm512_castps_si512(mins);
        let twice = _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(mins), mins);
        // SAFETY: the caller's duty.
        unsafe { to.add(64 * i).cast::<__m512i>().write_unaligned(twice) };
    }
}

/// Multiplies a segment with blocks, all units in one stream: adds to their totals, or begins them.
///
/// # Safety
/// AVX-512 is present and tiles are configured; the segment's units are those of each block.
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const MIN: bool, const D: usize>(segment: &Segment, blocks: &Blocks) {
    let rows = const { GROUPS * BLOCK / D };
    let ring = blocks.results;
    let mins = |odd: bool| ring.wrapping_add((1 + usize::from(odd)) * RING);
    let sums = ring.wrapping_add(3 * RING).cast::<f32>();
    let (x_bytes, w_bytes) = const { (x_bytes(MIN), w_bytes(MIN)) };
    // SAFETY: the caller's duty: results have room for all that is placed in them, totals for all blocks, and as many
    // units as counted follow each pointer.
    unsafe {
        if segment.first {
            begin_totals(blocks.totals, blocks.count * rows * TILES);
        }
        let mut odd = false;
        let mut pending: Option<Tail> = None;
        for block in 0..blocks.count {
            let mut x = blocks.x.add(block * blocks.stride);
            let mut w = segment.weights;
            let totals = blocks.totals.add(block * rows * TILES).cast::<f32>();
            for residue in 0..segment.residues {
                let count = segment.counts[residue];
                for unit in 0..count {
                    // What the next stores take to memory: integers of a unit, or the minima of both tiles.
                    let mut to = ring;
                    if MIN {
                        minima(x, w, to);
                        odd = !odd;
                        to = mins(odd);
                    }
                    // The activations that are multiplied next, on the way into the L1 cache meanwhile.
                    let is_last = residue + 1 == segment.residues && unit + 1 == count;
                    let next = if is_last {
                        blocks.x.wrapping_add((block + 1) * blocks.stride)
                    } else {
                        x.add(x_bytes)
                    };
                    for tile in 0..TILES {
                        let ahead = next.wrapping_add(tile * x_bytes / TILES);
                        stage::<MIN, D>(x, w, to, ring, pending.as_ref(), ahead);
                        to = ring;
                        pending = Some(Tail {
                            x: x.add(const { x_scales_at(MIN) }).cast(),
                            w: w.add(scales_at(MIN)).cast(),
                            mins: mins(odd).add(tile * GROUPS * TILE_BYTES).cast(),
                            sums: sums.add(tile * rows * TILE),
                            totals: totals.add(tile * BLOCK * TILE),
                            first: unit == 0,
                            last: unit + 1 == count,
                        });
                        w = w.add(w_bytes);
                    }
                    x = x.add(x_bytes);
                }
                if count == 0 {
                    break;
                }
            }
        }
        if let Some(tail) = &pending {
            store_all(ring);
            match (tail.first, tail.last) {
                (false, false) => tail.rows::<MIN, D, false, false>(ring),
                (false, true) => tail.rows::<MIN, D, false, true>(ring),
                (true, false) => tail.rows::<MIN, D, true, false>(ring),
                (true, true) => tail.rows::<MIN, D, true, true>(ring),
            }
        }
        if segment.counts[..segment.residues].contains(&0) {
            add_nothing(blocks.totals, blocks.count * rows * TILES);
        }
    }
}

/// What the float tails of a unit read and write, for the rows of a block.
struct Tail {
    /// Scales of the rows.
    x: *const f32,
    /// Scales of the outputs, and their minima.
    w: *const f32,
    /// What the minima multiply: `[group][row][output]`.
    mins: *const f32,
    /// Running sums, `[row][output]`.
    sums: *mut f32,
    /// The same of all accumulators together.
    totals: *mut f32,
    /// Whether the unit is its accumulator's first, and its last.
    first: bool,
    last: bool,
}

impl Tail {
    /// The tail of one row. `factors` are the outputs' scales and minima.
    ///
    /// # Safety
    /// AVX-512 is present; the unit's integers are in the ring, its minima where they belong.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn row<const MIN: bool, const D: usize, const FIRST: bool, const LAST: bool>(
        &self,
        r: usize,
        ring: *const u8,
        [d, min]: [__m512; 2],
    ) {
        let by_128 = _mm512_set1_ps(128.0);
        // SAFETY: the caller's duty.
        unsafe {
            let sums = self.sums.add(r * TILE);
            let scale = _mm512_set1_ps(self.x.add(r).read());
            let s = _mm512_mul_ps(d, scale);
            let mut acc = if FIRST { _mm512_setzero_ps() } else { _mm512_loadu_ps(sums) };
            if D == 2 {
                acc = _mm512_fmadd_ps(_mm512_mul_ps(by_128, s), ints(ring.add(r * 64)), acc);
            }
            let low = (D - 1) * BLOCK + r;
            acc = _mm512_fmadd_ps(s, ints(ring.add(low * 64)), acc);
            if MIN {
                let t = _mm512_mul_ps(min, scale);
                if D == 2 {
                    let m = _mm512_loadu_ps(self.mins.add(r * TILE));
                    acc = _mm512_fnmadd_ps(_mm512_mul_ps(by_128, t), m, acc);
                }
                acc = _mm512_fnmadd_ps(t, _mm512_loadu_ps(self.mins.add(low * TILE)), acc);
            }
            if LAST {
                let total = self.totals.add((r / BLOCK * TILES * BLOCK + r % BLOCK) * TILE);
                _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), acc));
            } else {
                _mm512_storeu_ps(sums, acc);
            }
        }
    }

    /// Scales and minima of the outputs.
    ///
    /// # Safety
    /// AVX-512 is present; those of 16 outputs follow `w`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn factors<const MIN: bool>(&self) -> [__m512; 2] {
        // SAFETY: the caller's duty.
        unsafe {
            let d = _mm512_loadu_ps(self.w);
            [d, if MIN { _mm512_loadu_ps(self.w.add(TILE)) } else { d }]
        }
    }

    /// The tails of all rows.
    ///
    /// # Safety
    /// As [`Tail::row`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn rows<const MIN: bool, const D: usize, const FIRST: bool, const LAST: bool>(
        &self,
        ring: *const u8,
    ) {
        // SAFETY: the caller's duty.
        unsafe {
            let factors = self.factors::<MIN>();
            for r in 0..GROUPS * BLOCK / D {
                self.row::<MIN, D, FIRST, LAST>(r, ring, factors);
            }
        }
    }
}

/// The integers of one row: 64 * upper + lower, converted once.
///
/// # Safety
/// AVX-512 is present; both tiles were stored.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn ints(at: *const u8) -> __m512 {
    // SAFETY: the caller's duty.
    unsafe {
        let high = _mm512_slli_epi32::<RADIX>(_mm512_loadu_si512(at.cast()));
        let low = _mm512_loadu_si512(at.add(GROUPS * TILE_BYTES).cast());
        _mm512_cvtepi32_ps(_mm512_add_epi32(high, low))
    }
}

/// Multiplies one unit, does the float tail of another meanwhile, and asks for activations from `ahead` on.
///
/// # Safety
/// As [`tiles`]; the tail's duties too.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn stage<const MIN: bool, const D: usize>(
    x: *const u8,
    w: *const u8,
    to: *mut u8,
    ring: *const u8,
    tail: Option<&Tail>,
    ahead: *const u8,
) {
    // SAFETY: the caller's duty.
    unsafe {
        match tail {
            None => tiles(x, w, to, |_| ()),
            Some(tail) => match (tail.first, tail.last) {
                (false, false) => woven::<MIN, D, false, false>(x, w, to, ring, tail, ahead),
                (false, true) => woven::<MIN, D, false, true>(x, w, to, ring, tail, ahead),
                (true, false) => woven::<MIN, D, true, false>(x, w, to, ring, tail, ahead),
                (true, true) => woven::<MIN, D, true, true>(x, w, to, ring, tail, ahead),
            },
        }
    }
}

/// [`tiles`] and between its products the rows of a tail.
///
/// # Safety
/// As [`stage`].
#[target_feature(enable = "avx512f")]
unsafe fn woven<const MIN: bool, const D: usize, const FIRST: bool, const LAST: bool>(
    x: *const u8,
    w: *const u8,
    to: *mut u8,
    ring: *const u8,
    tail: &Tail,
    ahead: *const u8,
) {
    // SAFETY: the caller's duty.
    unsafe {
        let factors = tail.factors::<MIN>();
        tiles(x, w, to, |gap| {
            let lines = const { x_bytes(MIN) / 64 / TILES / GAPS };
            for i in lines * gap..lines * (gap + 1) {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * i).cast());
            }
            let rows = GROUPS * BLOCK / D;
            for r in rows * gap / GAPS..rows * (gap + 1) / GAPS {
                tail.row::<MIN, D, FIRST, LAST>(r, ring, factors);
            }
        });
    }
}

/// Stores what the registers collected.
///
/// # Safety
/// Tiles are configured; `to` has room for four tiles.
#[inline(always)]
unsafe fn store_all(to: *mut u8) {
    // SAFETY: the caller's duty.
    unsafe {
        asm!(
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilestored [{to} + {stride} + 3072], tmm3",
            to = in(reg) to,
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
    }
}

/// Multiplies the sums of a block with the sub-minima of a unit of both tiles, into all four registers; what was in
/// them is stored.
///
/// # Safety
/// Tiles are configured; `x` holds a unit, `w` one of each tile; `to` has room for four tiles.
#[inline(always)]
unsafe fn minima(x: *const u8, w: *const u8, to: *mut u8) {
    // SAFETY: the caller's duty; tiles are not used by the compiler.
    unsafe {
        asm!(
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm5, [{w} + {stride} + 512]",
            "tilestored [{to} + {stride}], tmm0",
            "tilezero tmm0",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{w} + {stride}]",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilezero tmm1",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {stride} + {bytes} + 512]",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilezero tmm2",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm5, [{w} + {stride} + {bytes}]",
            "tilestored [{to} + {stride} + 3072], tmm3",
            "tilezero tmm3",
            "tdpbf16ps tmm3, tmm4, tmm5",
            x = in(reg) x.wrapping_add(X_SUMS),
            w = in(reg) w.wrapping_add(W_MINS),
            to = in(reg) to,
            stride = in(reg) 64usize,
            bytes = const w_bytes(true),
            options(nostack, preserves_flags),
        );
    }
}

/// Places among the products of a unit where other work is done.
const GAPS: usize = 12;

/// Multiplies one unit; what was in the registers is stored just before they are needed. Each tile that is loaded enters
/// two products. `between` is called when all is stored, and then after each product, [`GAPS`] times.
///
/// # Safety
/// Tiles are configured; `x` and `w` hold a unit; `to` has room for four tiles.
#[inline(always)]
unsafe fn tiles(x: *const u8, w: *const u8, to: *mut u8, between: impl Fn(usize)) {
    macro_rules! part {
        ($gap:literal $at:literal) => {
            asm!(
                concat!("tileloadd tmm4, [{x} + {stride} + ", $at, "]"),
                concat!("tileloadd tmm6, [{w} + {stride} + ", $at, "]"),
                "tdpbssd tmm0, tmm4, tmm6",
                x = in(reg) x, w = in(reg) w, stride = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
            between($gap);
            asm!(
                concat!("tileloadd tmm5, [{x} + {stride} + 4096 + ", $at, "]"),
                "tdpbssd tmm1, tmm5, tmm6",
                x = in(reg) x, stride = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
            between($gap + 1);
            asm!(
                concat!("tileloadd tmm7, [{w} + {stride} + 4096 + ", $at, "]"),
                "tdpbssd tmm2, tmm4, tmm7",
                w = in(reg) w, stride = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
            between($gap + 2);
            asm!(
                "tdpbssd tmm3, tmm5, tmm7",
                options(nostack, preserves_flags),
            );
            between($gap + 3);
        };
    }
    // SAFETY: the caller's duty; tiles are not used by the compiler.
    unsafe {
        asm!(
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm6, [{w} + {stride}]",
            "tilestored [{to} + {stride}], tmm0",
            "tilezero tmm0",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{x} + {stride} + 4096]",
            "tilestored [{to} + {stride} + 1024], tmm1",
            "tilezero tmm1",
            "tdpbssd tmm1, tmm5, tmm6",
            "tileloadd tmm7, [{w} + {stride} + 4096]",
            "tilestored [{to} + {stride} + 2048], tmm2",
            "tilezero tmm2",
            "tdpbssd tmm2, tmm4, tmm7",
            "tilestored [{to} + {stride} + 3072], tmm3",
            "tilezero tmm3",
            "tdpbssd tmm3, tmm5, tmm7",
            x = in(reg) x,
            w = in(reg) w,
            to = in(reg) to,
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        );
        part!(0 1024);
        part!(4 2048);
        part!(8 3072);
    }
}
