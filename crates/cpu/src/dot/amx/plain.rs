//! Units of 32 columns with one scale. Formats with a minimum, whose float tail is twice as long, and those whose codes are
//! bytes already are quicker on vectors (measured: `cargo bench -p ingle-cpu --bench products`).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::avx512::Avx512;
use super::super::engine::Engine;
use super::super::pack::{RESIDUES, units_of};
use super::super::spec::{self, Format, Spec, TILE};
use super::super::{Activations, Packed};
use super::{BLOCK, Plan, Segment, TILE_BYTES, add_totals};
use ingle_tensor::DType;

/// A unit: a tile, then the scales of its 16 rows. Of activations `[row][column]` bf16; of weights
/// `[pair of columns][output row][column of the pair]` bf16.
const UNIT_BYTES: usize = TILE_BYTES + 64;

/// The plan of a format; none with two digits, which no format of this kind is given.
pub(super) fn plan(spec: &Spec, digits: usize) -> Option<Plan> {
    let expand: unsafe fn(*const u8, *const u8, usize, *mut u8) = match spec.dtype {
        DType::Q4_0 => expand::<spec::Q4_0>,
        DType::Q5_0 => expand::<spec::Q5_0>,
        _ => return None,
    };
    (digits == 1).then_some(Plan {
        block: BLOCK,
        x_bytes: UNIT_BYTES,
        w_bytes: UNIT_BYTES,
        write,
        expand,
        multiply,
    })
}

/// Sixteen signed bytes as bf16 pairs: bytes `2 * half` and `2 * half + 1` of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs(bytes: __m512i, half: usize) -> __m512i {
    let (even, odd) = match half {
        0 => (_mm512_slli_epi32::<24>(bytes), _mm512_slli_epi32::<16>(bytes)),
        _ => (_mm512_slli_epi32::<8>(bytes), bytes),
    };
    // Small integers need no more than the upper half of an f32.
    let even = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(even)));
    let odd = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(odd)));
    _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(even), odd)
}

/// Arranges a block of activations.
///
/// # Safety
/// AVX-512 is present; `rows`, not empty and at most 16, lie within the activations' layout, which is that of the matrix;
/// `to` has room for the units of a row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn write(packed: &Packed, x: &Activations<'_>, rows: Range<usize>, to: *mut u8) {
    let layout = x.layout();
    let units = packed.units();
    for r in 0..BLOCK {
        let row = (rows.start + r).min(rows.end - 1);
        // SAFETY: the layout places digits, scales and sums of the row inside the activations; writes are to row `r` of
        // each unit.
        unsafe {
            let from = x.bytes.as_ptr();
            let digits = from.add(layout.digit_offset(0, row));
            let scales = from.add(layout.scale_offset(row)).cast::<f32>();
            let mut to = to;
            for residue in 0..RESIDUES {
                for i in 0..units_of(units, residue) {
                    let u = residue + RESIDUES * i;
                    let words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(digits.add(32 * u).cast()));
                    let low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(words)));
                    let high =
                        _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(words)));
                    let both = _mm512_cvtne2ps_pbh(high, low);
                    to.add(64 * r).cast::<__m512bh>().write_unaligned(both);
                    to.add(TILE_BYTES).cast::<f32>().add(r).write(scales.add(u).read());
                    to = to.add(UNIT_BYTES);
                }
            }
        }
    }
}

/// Expands units of a tile of weights.
///
/// # Safety
/// AVX-512 is present; `units` records follow `codes` and `scales`; `to` has room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,avx2,fma")]
unsafe fn expand<F: Format>(mut codes: *const u8, mut scales: *const u8, units: usize, mut to: *mut u8) {
    let offset = const { F::SPEC.offset as u8 as i8 };
    // SAFETY: offsets are inside one record of each layout; the engine's instruction set is enabled here.
    unsafe {
        for _ in 0..units {
            macro_rules! word {
                ($($g:literal)*) => {$(
                    let code = Avx512::codes(F::SPEC.bits, $g, codes);
                    let w = _mm512_sub_epi8(code, _mm512_set1_epi8(offset));
                    to.add(128 * $g).cast::<__m512i>().write_unaligned(pairs(w, 0));
                    to.add(128 * $g + 64).cast::<__m512i>().write_unaligned(pairs(w, 1));
                )*};
            }
            word!(0 1 2 3 4 5 6 7);
            Avx512::store(Avx512::from_f16(scales), to.add(TILE_BYTES).cast());
            codes = codes.add(F::SPEC.code_bytes());
            scales = scales.add(F::SPEC.scale_bytes());
            to = to.add(UNIT_BYTES);
        }
    }
}

/// Multiplies a segment with a block: adds to its totals, or begins them.
///
/// # Safety
/// AVX-512 is present and tiles are configured; the segment's units follow `x`; `results` has room for two tiles.
#[target_feature(enable = "avx512f")]
unsafe fn multiply(segment: &Segment, mut x: *const u8, results: *mut u8, totals: *mut [f32; TILE]) {
    let mut w = segment.weights;
    let mut left: usize = segment.counts.iter().sum();
    let (mut now, mut next) = (results.cast::<f32>(), results.wrapping_add(TILE_BYTES).cast::<f32>());
    // Multiplies one unit; its integers are in memory when a later unit is under way.
    macro_rules! issue {
        ($to:expr) => {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm6, [{w} + {stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tilestored [{to} + {stride}], tmm0",
                x = in(reg) x,
                w = in(reg) w,
                to = in(reg) $to,
                stride = in(reg) 64usize,
                out("tmm0") _, out("tmm4") _, out("tmm6") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: the caller's duty: as many units as counted follow each pointer.
    unsafe {
        if left > 0 {
            issue!(now);
        }
        for residue in 0..segment.residues {
            let mut acc = [_mm512_setzero_ps(); BLOCK];
            for _ in 0..segment.counts[residue] {
                left -= 1;
                let (x_after, w_after) = (x.add(TILE_BYTES).cast::<f32>(), w.add(TILE_BYTES).cast::<f32>());
                x = x.add(UNIT_BYTES);
                w = w.add(UNIT_BYTES);
                if left > 0 {
                    issue!(next);
                }
                let d = _mm512_loadu_ps(w_after);
                macro_rules! row {
                    ($($r:literal)*) => {$(
                        let scale = _mm512_set1_ps(x_after.add($r).read());
                        let ints = _mm512_loadu_ps(now.add(16 * $r));
                        acc[$r] = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), ints, acc[$r]);
                    )*};
                }
                row!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                (now, next) = (next, now);
            }
            add_totals(&acc, totals, segment.first && residue == 0);
            if segment.counts[residue] == 0 {
                // Zero was added, which turns -0 into +0; more zeros, and nothing else follows, change nothing.
                break;
            }
        }
    }
}
