//! The AVX-512 engine: sixteen rows at once, products by VNNI.

use std::arch::x86_64::*;

use super::engine::Engine;
use super::spec::TILE;

/// AVX-512 F, BW, DQ, VL and VNNI.
pub(super) struct Avx512;

/// `acc + a * b` by pairs of int16: one instruction. The compiler would make a multiplication and an addition of the
/// intrinsic, for the sake of latency where throughput is what counts.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dpwssd(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
    let mut sum = acc;
    // SAFETY: the instruction reads and writes these registers and nothing else.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

// SAFETY (for every block below): the trait's duty, that the instruction set is present and the pointers are good.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Engine for Avx512 {
    const LANES: usize = TILE;
    const WIDE: bool = true;
    type Codes = __m512i;
    type Piece = __m512i;
    type Int = __m512i;
    type Float = __m512;
    /// The sub-scale in the low half of each lane, zero in the high half.
    type SubScale = __m512i;

    #[inline(always)]
    unsafe fn codes(bits: usize, g: usize, group: *const u8) -> __m512i {
        unsafe {
            // A macro: a closure would be compiled without the instruction set.
            macro_rules! plane {
                ($p:expr) => {
                    _mm512_loadu_si512(group.add(64 * $p).cast())
                };
            }
            if bits == 8 {
                return plane!(g);
            }
            let both = plane!(g / 2);
            let low = if g.is_multiple_of(2) { both } else { _mm512_srli_epi16::<4>(both) };
            let low = _mm512_and_si512(low, _mm512_set1_epi8(0x0F));
            let high = match (bits, g) {
                (5, 0) => _mm512_slli_epi16::<4>(plane!(4)),
                (5, 1) => _mm512_slli_epi16::<3>(plane!(4)),
                (5, 2) => _mm512_slli_epi16::<2>(plane!(4)),
                (5, 3) => _mm512_slli_epi16::<1>(plane!(4)),
                (5, 4) => plane!(4),
                (5, 5) => _mm512_srli_epi16::<1>(plane!(4)),
                (5, 6) => _mm512_srli_epi16::<2>(plane!(4)),
                (5, _) => _mm512_srli_epi16::<3>(plane!(4)),
                (6, 0 | 4) => _mm512_slli_epi16::<4>(plane!(4 + g / 4)),
                (6, 1 | 5) => _mm512_slli_epi16::<2>(plane!(4 + g / 4)),
                (6, 2 | 6) => plane!(4 + g / 4),
                (6, _) => _mm512_srli_epi16::<2>(plane!(4 + g / 4)),
                _ => return low,
            };
            let mask = if bits == 5 { 0x10 } else { 0x30 };
            _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(mask)))
        }
    }

    #[inline(always)]
    unsafe fn levels(codes: __m512i, levels: &'static [i8; 16]) -> __m512i {
        unsafe {
            let levels = _mm_xor_si128(_mm_loadu_si128(levels.as_ptr().cast()), _mm_set1_epi8(-128));
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), codes)
        }
    }

    #[inline(always)]
    unsafe fn bytes(g: usize, group: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(group.add(64 * g).cast()) }
    }

    #[inline(always)]
    unsafe fn store_bytes(codes: __m512i, g: usize, group: *mut u8) {
        unsafe { _mm512_storeu_si512(group.add(64 * g).cast(), codes) }
    }

    #[inline(always)]
    unsafe fn start(at: *const i32) -> __m512i {
        unsafe { _mm512_set1_epi32(at.read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn empty() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn step(_bits: usize, piece: __m512i, codes: __m512i, digits: *const i8) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(piece, codes, _mm512_set1_epi32(digits.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn total(piece: __m512i) -> __m512i {
        piece
    }

    #[inline(always)]
    unsafe fn sub_scale(pairs: *const u8, second: bool) -> __m512i {
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(pairs.cast()));
            if second {
                _mm512_srli_epi32::<16>(pairs)
            } else {
                _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF))
            }
        }
    }

    /// The piece fits in the low half of its lane: `Spec::piece_words` and the start see to it.
    #[inline(always)]
    unsafe fn add_scaled(int: __m512i, piece: __m512i, scale: __m512i) -> __m512i {
        unsafe { dpwssd(int, piece, scale) }
    }

    #[inline(always)]
    unsafe fn add_scaled_long(int: __m512i, piece: __m512i, pairs: *const u8, second: bool) -> __m512i {
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(pairs.cast()));
            let pairs = if second { pairs } else { _mm512_slli_epi32::<16>(pairs) };
            _mm512_add_epi32(int, _mm512_mullo_epi32(piece, _mm512_srai_epi32::<16>(pairs)))
        }
    }

    #[inline(always)]
    unsafe fn add_pairs(int: __m512i, pairs: *const u8, sums: *const i32) -> __m512i {
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(pairs.cast()));
            dpwssd(int, pairs, _mm512_set1_epi32(sums.read_unaligned()))
        }
    }

    #[inline(always)]
    unsafe fn int(at: *const i32) -> __m512i {
        unsafe { _mm512_set1_epi32(at.read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn int_zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn int_add(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn int_times(a: __m512i, factor: i32) -> __m512i {
        unsafe { _mm512_mullo_epi32(a, _mm512_set1_epi32(factor)) }
    }

    #[inline(always)]
    unsafe fn from_int(a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn from_exponent(at: *const u8) -> __m512 {
        unsafe {
            // The exponent's place in a number is 2^(e - 127), but for e = 0, for which half of the next stands.
            let e = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())));
            let e = _mm512_castsi512_ps(_mm512_max_epu32(e, _mm512_set1_epi32(1 << 22)));
            _mm512_mul_ps(e, _mm512_set1_ps(0.5))
        }
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> __m512 {
        unsafe { _mm512_set1_ps(at.read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn times_128(a: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, _mm512_set1_ps(128.0)) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn store(a: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, a) }
    }

    // The address passes through; nothing is read.
    #[allow(clippy::pointers_in_nomem_asm_block)]
    #[inline(always)]
    unsafe fn in_register(mut at: *const u8) -> *const u8 {
        unsafe { std::arch::asm!("/* {} */", inout(reg) at, options(pure, nomem, nostack, preserves_flags)) };
        at
    }

    #[inline(always)]
    unsafe fn prefetch_l2(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
