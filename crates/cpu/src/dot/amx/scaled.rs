//! Units of 256 columns with sub-scales, and sub-minima in some formats.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::avx512::Avx512;
use super::super::engine::Engine;
use super::super::kernel::read_codes;
use super::super::pack::{RESIDUES, units_of};
use super::super::spec::{self, Format, Min, Spec, TILE};
use super::super::{Activations, Packed};
use super::{BLOCK, Blocks, Expand, Plan, Records, Segment, TILE_BYTES, add_totals};
use ingle_graph::quantize::SUM;
use ingle_tensor::DType;

/// Tiles of one digit of a unit: 64 columns each.
const PARTS: usize = 4;
/// Bytes of a row's sums, `[sub-unit][high, low]` bf16, and as many zeros: all tiles have one shape.
const SUM_BYTES: usize = 64;
/// Bits of the lower digit of code times sub-scale.
const RADIX: u32 = 6;

/// Tiles of activations that meet each tile of weights: with one digit two runs of 16 rows, with two the digits of one run.
const GROUPS: usize = 2;
/// Activations of one group: four tiles `[row][column]` int8, and 16 rows of sums.
const X_GROUP: usize = PARTS * TILE_BYTES + BLOCK * SUM_BYTES;
/// Activations of a unit: the groups, and the scales of up to 32 rows.
const X_BYTES: usize = GROUPS * X_GROUP + GROUPS * 64;
/// Weights: four tiles `[word][output row][column of the word]` int8 of the upper digit, four of the lower, sub-minima
/// `[sub-unit][output row][twice]` bf16 and 8 rows of zeros, scales and minima of 16 rows.
const W_MINS: usize = 2 * PARTS * TILE_BYTES;
const W_SCALES: usize = W_MINS + TILE_BYTES;
const W_BYTES: usize = W_SCALES + 2 * 64;

/// Bytes of the integers of one group: upper, lower, minimum.
const GROUP_RESULTS: usize = 3 * TILE_BYTES;
/// Bytes of running sums of a block.
const SUMS: usize = GROUPS * TILE_BYTES;
/// Room for the integers of two units, and for running sums.
pub(super) const RESULT_BYTES: usize = 2 * GROUPS * GROUP_RESULTS + SUMS;

/// The plan of a format.
pub(super) fn plan(spec: &Spec, digits: usize) -> Option<Plan> {
    let expand: Expand = match spec.dtype {
        DType::Q4K => expand::<spec::Q4K>,
        DType::Q5K => expand::<spec::Q5K>,
        DType::Q6K => expand::<spec::Q6K>,
        DType::IQ4XS => expand::<spec::IQ4XS>,
        _ => return None,
    };
    let multiply = match (spec.min, digits) {
        (Min::None, 1) => multiply::<false, 1>,
        (Min::None, _) => multiply::<false, 2>,
        (_, 1) => multiply::<true, 1>,
        (_, _) => multiply::<true, 2>,
    };
    let write = if digits == 1 { write::<1> } else { write::<2> };
    let block = GROUPS * BLOCK / digits;
    Some(Plan { block, tiles: 1, x_bytes: X_BYTES, w_bytes: W_BYTES, write, expand, multiply })
}

/// Arranges a block of activations.
///
/// # Safety
/// AVX-512 is present; `rows`, not empty and at most a block, lie within the activations' layout, which is that of the matrix;
/// `to` has room for the units of a row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn write<const D: usize>(packed: &Packed, x: &Activations<'_>, rows: Range<usize>, to: *mut u8) {
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
            for residue in 0..RESIDUES {
                for i in 0..units_of(units, residue) {
                    let u = residue + RESIDUES * i;
                    for digit in 0..D {
                        let (group, r) = if D == 2 { (digit, r) } else { (r / BLOCK, r % BLOCK) };
                        let to = to.add(group * X_GROUP);
                        let digits = from.add(layout.digit_offset(digit, row) + 256 * u);
                        for part in 0..PARTS {
                            let line = digits.add(64 * part).cast::<__m512i>().read_unaligned();
                            to.add(part * TILE_BYTES + 64 * r).cast::<__m512i>().write_unaligned(line);
                        }
                        let sums = from.add(layout.sum_offset(digit, row)).cast::<i16>();
                        let sums = _mm256_loadu_si256(sums.add(256 / SUM * u).cast());
                        let to = to.add(PARTS * TILE_BYTES + SUM_BYTES * r);
                        to.cast::<__m512i>().write_unaligned(_mm512_zextsi256_si512(split_sums(sums)));
                    }
                    to.add(GROUPS * X_GROUP).cast::<f32>().add(r).write(scales.add(u).read());
                    to = to.add(X_BYTES);
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
            let after = to.add(W_SCALES).cast::<f32>();
            Avx512::store(Avx512::from_f16(scales), after);
            if spec.min != Min::None {
                Avx512::store(Avx512::from_f16(scales.add(2 * TILE)), after.add(TILE));
                let sub_mins = scales.add(spec.sub_min_at());
                for pair in 0..spec.pairs() {
                    let both = _mm512_cvtepi8_epi32(_mm_loadu_si128(sub_mins.add(2 * TILE * pair).cast()));
                    let more =
                        _mm512_cvtepi8_epi32(_mm_loadu_si128(sub_mins.add(2 * TILE * pair + 16).cast()));
                    sub_minima(both, more, to.add(W_MINS + 128 * pair));
                }
                to.add(W_MINS + TILE_BYTES / 2).write_bytes(0, TILE_BYTES / 2);
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

/// Multiplies a segment with blocks: adds to their totals, or begins them.
///
/// # Safety
/// AVX-512 is present and tiles are configured; the segment's units are those of each block.
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const MIN: bool, const D: usize>(segment: &Segment, blocks: &Blocks) {
    for b in 0..blocks.count {
        let x = blocks.x.wrapping_add(b * blocks.stride);
        let totals = blocks.totals.wrapping_add(b * GROUPS * BLOCK / D);
        // SAFETY: the caller's duty.
        unsafe { multiply_block::<MIN, D>(segment, x, blocks.results, totals) };
    }
}

/// Multiplies a segment with one block.
///
/// # Safety
/// AVX-512 is present and tiles are configured; the segment's units follow `x`; `results` has room for
/// [`RESULT_BYTES`].
#[target_feature(enable = "avx512f")]
unsafe fn multiply_block<const MIN: bool, const D: usize>(
    segment: &Segment,
    mut x: *const u8,
    results: *mut u8,
    totals: *mut [f32; TILE],
) {
    let mut w = segment.weights;
    let mut left: usize = segment.counts.iter().sum();
    let (mut now, mut next) = (results, results.wrapping_add(GROUPS * GROUP_RESULTS));
    let sums = results.wrapping_add(2 * GROUPS * GROUP_RESULTS).cast::<[f32; TILE]>();
    // SAFETY: the caller's duty: as many units as counted follow each pointer.
    unsafe {
        if left > 0 {
            issue::<MIN>(x, w, now);
        }
        for residue in 0..segment.residues {
            let begins = segment.first && residue == 0;
            let count = segment.counts[residue];
            for i in 0..count {
                left -= 1;
                let scales = x.add(GROUPS * X_GROUP).cast::<f32>();
                let factors = w.add(W_SCALES).cast::<f32>();
                x = x.add(X_BYTES);
                w = w.add(W_BYTES);
                if left > 0 {
                    issue::<MIN>(x, w, next);
                }
                tails::<MIN, D>(now, scales, factors, sums, totals, (i == 0, i + 1 == count, begins));
                (now, next) = (next, now);
            }
            if count == 0 {
                // An accumulator without units is zero and is added all the same: it turns -0 into +0. More of them,
                // and no others follow, change nothing.
                for run in 0..GROUPS / D {
                    add_totals(&[_mm512_setzero_ps(); BLOCK], totals.add(run * BLOCK), begins);
                }
                break;
            }
        }
    }
}

/// The float tails of a unit, for the rows of a block: into their running sums, which are zero for the first unit of an
/// accumulator, and with the last into their totals, which begin with the row's first accumulator.
///
/// # Safety
/// AVX-512 is present; the unit's integers are at `now`, the scales of its rows, and the scales and minima of its outputs
/// at `scales` and `factors`; `sums` and `totals` are those of a block.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tails<const MIN: bool, const D: usize>(
    now: *const u8,
    scales: *const f32,
    factors: *const f32,
    sums: *mut [f32; TILE],
    totals: *mut [f32; TILE],
    (first, last, begins): (bool, bool, bool),
) {
    let by_128 = _mm512_set1_ps(128.0);
    let kept = if first { 0 } else { 0xFFFF };
    // SAFETY: the caller's duty.
    unsafe {
        let d = _mm512_loadu_ps(factors);
        let min = if MIN { _mm512_loadu_ps(factors.add(TILE)) } else { d };
        for r in 0..GROUPS * BLOCK / D {
            let mut acc = _mm512_maskz_loadu_ps(kept, sums.add(r).cast());
            let scale = _mm512_set1_ps(scales.add(r).read());
            let s = _mm512_mul_ps(d, scale);
            let at = now.add(r / BLOCK * GROUP_RESULTS + r % BLOCK * 64);
            let low = at.add((D - 1) * GROUP_RESULTS);
            if D == 2 {
                acc = _mm512_fmadd_ps(_mm512_mul_ps(by_128, s), ints(at), acc);
            }
            acc = _mm512_fmadd_ps(s, ints(low), acc);
            if MIN {
                let t = _mm512_mul_ps(min, scale);
                let minimum = |at: *const u8| at.add(2 * TILE_BYTES).cast();
                if D == 2 {
                    acc = _mm512_fnmadd_ps(_mm512_mul_ps(by_128, t), _mm512_loadu_ps(minimum(at)), acc);
                }
                acc = _mm512_fnmadd_ps(t, _mm512_loadu_ps(minimum(low)), acc);
            }
            let total = totals.add(r).cast::<f32>();
            if !last {
                _mm512_storeu_ps(sums.add(r).cast(), acc);
            } else if begins {
                _mm512_storeu_ps(total, acc);
            } else {
                _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), acc));
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
        let low = _mm512_loadu_si512(at.add(TILE_BYTES).cast());
        _mm512_cvtepi32_ps(_mm512_add_epi32(high, low))
    }
}

/// Multiplies one unit; its integers are in memory when a later one is under way. Each tile that is loaded enters two
/// products.
///
/// # Safety
/// Tiles are configured; `x` and `w` hold a unit; `to` has room for its results.
#[inline(always)]
unsafe fn issue<const MIN: bool>(x: *const u8, w: *const u8, to: *mut u8) {
    macro_rules! parts {
        ($($at:literal)*) => {
            concat!($(
                "tileloadd tmm4, [{x} + {stride} + ", $at, "]\n",
                "tileloadd tmm6, [{w} + {stride} + ", $at, "]\n",
                "tdpbssd tmm0, tmm4, tmm6\n",
                "tileloadd tmm5, [{x} + {stride} + {group} + ", $at, "]\n",
                "tdpbssd tmm1, tmm5, tmm6\n",
                "tileloadd tmm7, [{w} + {stride} + 4096 + ", $at, "]\n",
                "tdpbssd tmm2, tmm4, tmm7\n",
                "tdpbssd tmm3, tmm5, tmm7\n",
            )*)
        };
    }
    // SAFETY: reads and writes are inside a unit of each layout; tiles are not used by the compiler.
    unsafe {
        if MIN {
            asm!(
                "tilezero tmm2",
                "tilezero tmm3",
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{w} + {stride}]",
                "tdpbf16ps tmm2, tmm4, tmm6",
                "tileloadd tmm5, [{x} + {stride} + {group}]",
                "tdpbf16ps tmm3, tmm5, tmm6",
                "tilestored [{to} + {stride}], tmm2",
                "tilestored [{to} + {stride} + {results}], tmm3",
                x = in(reg) x.wrapping_add(PARTS * TILE_BYTES),
                w = in(reg) w.wrapping_add(W_MINS),
                to = in(reg) to.wrapping_add(2 * TILE_BYTES),
                stride = in(reg) 64usize,
                group = const X_GROUP,
                results = const GROUP_RESULTS,
                out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack, preserves_flags),
            );
        }
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            parts!(0 1024 2048 3072),
            "tilestored [{to} + {stride}], tmm0",
            "tilestored [{to} + {stride} + {results}], tmm1",
            "tilestored [{to} + {stride} + 1024], tmm2",
            "tilestored [{to} + {stride} + {results} + 1024], tmm3",
            x = in(reg) x,
            w = in(reg) w,
            to = in(reg) to,
            stride = in(reg) 64usize,
            group = const X_GROUP,
            results = const GROUP_RESULTS,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags),
        );
    }
}
