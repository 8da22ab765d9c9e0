//! The AVX2 engine: eight rows at once, products by pairs in 16 bits.

use std::arch::x86_64::*;

use super::engine::Engine;

/// AVX2, FMA and F16C.
pub(super) struct Avx2;

// SAFETY (for every block below): the trait's duty, that the instruction set is present and the pointers are good.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Engine for Avx2 {
    const LANES: usize = 8;
    const WIDE: bool = false;
    type Codes = __m256i;
    /// Sums of pairs of columns, sixteen times 16 bits.
    type Piece = __m256i;
    type Int = __m256i;
    type Float = __m256;
    /// The sub-scale in both halves of each lane.
    type SubScale = __m256i;

    /// 255 * 127 * 2 does not fit in 16 bits, 128 * 127 * 2 does: the magnitude of a byte is multiplied with the
    /// activation that was given its sign.
    const SIGNED_BITS: usize = 8;

    #[inline(always)]
    unsafe fn codes(bits: usize, g: usize, group: *const u8) -> __m256i {
        unsafe {
            // A macro: a closure would be compiled without the instruction set.
            macro_rules! plane {
                ($p:expr) => {
                    _mm256_loadu_si256(group.add(64 * $p).cast())
                };
            }
            if bits == 8 {
                return _mm256_xor_si256(plane!(g), _mm256_set1_epi8(-128));
            }
            let both = plane!(g / 2);
            let low = if g.is_multiple_of(2) { both } else { _mm256_srli_epi16::<4>(both) };
            let low = _mm256_and_si256(low, _mm256_set1_epi8(0x0F));
            let high = match (bits, g) {
                (5, 0) => _mm256_slli_epi16::<4>(plane!(4)),
                (5, 1) => _mm256_slli_epi16::<3>(plane!(4)),
                (5, 2) => _mm256_slli_epi16::<2>(plane!(4)),
                (5, 3) => _mm256_slli_epi16::<1>(plane!(4)),
                (5, 4) => plane!(4),
                (5, 5) => _mm256_srli_epi16::<1>(plane!(4)),
                (5, 6) => _mm256_srli_epi16::<2>(plane!(4)),
                (5, _) => _mm256_srli_epi16::<3>(plane!(4)),
                (6, 0 | 4) => _mm256_slli_epi16::<4>(plane!(4 + g / 4)),
                (6, 1 | 5) => _mm256_slli_epi16::<2>(plane!(4 + g / 4)),
                (6, 2 | 6) => plane!(4 + g / 4),
                (6, _) => _mm256_srli_epi16::<2>(plane!(4 + g / 4)),
                _ => return low,
            };
            let mask = if bits == 5 { 0x10 } else { 0x30 };
            _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(mask)))
        }
    }

    #[inline(always)]
    unsafe fn levels(codes: __m256i, levels: &'static [i8; 16]) -> __m256i {
        unsafe {
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast())), codes)
        }
    }

    #[inline(always)]
    unsafe fn bytes(g: usize, group: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(group.add(64 * g).cast()) }
    }

    #[inline(always)]
    unsafe fn store_bytes(codes: __m256i, g: usize, group: *mut u8) {
        unsafe { _mm256_storeu_si256(group.add(64 * g).cast(), codes) }
    }

    #[inline(always)]
    unsafe fn start(at: *const i32) -> __m256i {
        // Pieces of this engine begin with zero; a start is added to the total.
        unsafe { Self::int(at) }
    }

    #[inline(always)]
    unsafe fn empty() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn step(bits: usize, piece: __m256i, codes: __m256i, digits: *const i8) -> __m256i {
        unsafe {
            let digits = _mm256_set1_epi32(digits.cast::<i32>().read_unaligned());
            let products = if bits == 8 {
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(digits, codes))
            } else {
                _mm256_maddubs_epi16(codes, digits)
            };
            _mm256_add_epi16(piece, products)
        }
    }

    #[inline(always)]
    unsafe fn total(piece: __m256i) -> __m256i {
        unsafe { _mm256_madd_epi16(piece, _mm256_set1_epi16(1)) }
    }

    #[inline(always)]
    unsafe fn sub_scale(pairs: *const u8, second: bool) -> __m256i {
        unsafe {
            let pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs.cast()));
            if second {
                _mm256_blend_epi16::<0xAA>(_mm256_srli_epi32::<16>(pairs), pairs)
            } else {
                _mm256_blend_epi16::<0xAA>(pairs, _mm256_slli_epi32::<16>(pairs))
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled(int: __m256i, piece: __m256i, scale: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(int, _mm256_madd_epi16(piece, scale)) }
    }

    #[inline(always)]
    unsafe fn add_pairs(int: __m256i, pairs: *const u8, sums: *const i32) -> __m256i {
        unsafe {
            let pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs.cast()));
            _mm256_add_epi32(int, _mm256_madd_epi16(pairs, _mm256_set1_epi32(sums.read_unaligned())))
        }
    }

    #[inline(always)]
    unsafe fn int(at: *const i32) -> __m256i {
        unsafe { _mm256_set1_epi32(at.read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn int_zero() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn int_add(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    unsafe fn int_times(a: __m256i, factor: i32) -> __m256i {
        unsafe { _mm256_mullo_epi32(a, _mm256_set1_epi32(factor)) }
    }

    #[inline(always)]
    unsafe fn from_int(a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn from_exponent(at: *const u8) -> __m256 {
        unsafe {
            // The exponent's place in a number is 2^(e - 127), but for e = 0, for which half of the next stands.
            let e = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())));
            let e = _mm256_castsi256_ps(_mm256_max_epu32(e, _mm256_set1_epi32(1 << 22)));
            _mm256_mul_ps(e, _mm256_set1_ps(0.5))
        }
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> __m256 {
        unsafe { _mm256_set1_ps(at.read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn times_128(a: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, _mm256_set1_ps(128.0)) }
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn fnma(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn store(a: __m256, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, a) }
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
