//! Sixteen lanes: AVX-512 F, BW, DQ and VL.
//!
//! SAFETY of every block below: these functions are inlined only into code compiled for the instruction set, which
//! [`super::Isa::run`] enters only where the processor has it; pointers are the caller's duty, as [`Vector`] says.

#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use ingle_graph::math::{Lanes, SQRT_HALF_BITS};

use super::Vector;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
const DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub struct F32x16(pub(crate) __m512);

#[inline(always)]
fn bits(x: F32x16) -> __m512i {
    unsafe { _mm512_castps_si512(x.0) }
}

#[inline(always)]
fn from_bits(x: __m512i) -> F32x16 {
    unsafe { F32x16(_mm512_castsi512_ps(x)) }
}

impl Lanes for F32x16 {
    type Mask = __mmask16;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        unsafe { Self(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
    }
    #[inline(always)]
    fn neg(self) -> Self {
        unsafe { from_bits(_mm512_xor_si512(bits(self), _mm512_set1_epi32(i32::MIN))) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe { from_bits(_mm512_and_si512(bits(self), _mm512_set1_epi32(i32::MAX))) }
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        unsafe {
            let sign = _mm512_and_si512(bits(sign), _mm512_set1_epi32(i32::MIN));
            from_bits(_mm512_or_si512(bits(self.abs()), sign))
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        unsafe { Self(_mm512_roundscale_ps::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    fn lt(self, other: Self) -> Self::Mask {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0) }
    }
    #[inline(always)]
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        unsafe { Self(_mm512_mask_blend_ps(mask, no.0, yes.0)) }
    }
    #[inline(always)]
    fn exponent_add(self, n: Self) -> Self {
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n.0));
            from_bits(_mm512_add_epi32(bits(self), n))
        }
    }
    #[inline(always)]
    fn exponent_split(self) -> (Self, Self) {
        unsafe {
            let above = _mm512_sub_epi32(bits(self), _mm512_set1_epi32(SQRT_HALF_BITS));
            let e = _mm512_srai_epi32::<23>(above);
            let m = _mm512_sub_epi32(bits(self), _mm512_slli_epi32::<23>(e));
            (from_bits(m), Self(_mm512_cvtepi32_ps(e)))
        }
    }
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    debug_assert!(n < 16);
    (1 << n) - 1
}

impl Vector for F32x16 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        unsafe { Self(_mm512_maskz_loadu_ps(first(n), from)) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        unsafe { _mm512_mask_storeu_ps(to, first(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        unsafe {
            let (a, b) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            (Self(_mm512_permutex2var_ps(a, even, b)), Self(_mm512_permutex2var_ps(a, odd, b)))
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut f32) {
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(even.0, low, odd.0));
            _mm512_storeu_ps(to.add(16), _mm512_permutex2var_ps(even.0, high, odd.0));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // Without the hint to raise no exceptions, which are masked anyway, it reads memory itself: one operation less.
        unsafe { Self(_mm512_cvt_roundph_ps::<_MM_FROUND_CUR_DIRECTION>(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        unsafe {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            from_bits(_mm512_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u8) {
        unsafe {
            let x = bits(self);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(x), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7FFF)), odd);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x0040_0000));
            let y = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(y));
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut u8) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }

    #[inline(always)]
    unsafe fn transpose(matrix: *mut f32) {
        unsafe {
            let mut m = [_mm512_setzero_ps(); 16];
            for (i, m) in m.iter_mut().enumerate() {
                *m = _mm512_loadu_ps(matrix.add(16 * i));
            }
            // Inside each quarter of a row: pairs, then fours change places.
            let mut n = m;
            for i in (0..16).step_by(2) {
                n[i] = _mm512_unpacklo_ps(m[i], m[i + 1]);
                n[i + 1] = _mm512_unpackhi_ps(m[i], m[i + 1]);
            }
            for i in (0..16).step_by(4) {
                for j in 0..2 {
                    m[i + 2 * j] = _mm512_shuffle_ps::<0b01_00_01_00>(n[i + j], n[i + j + 2]);
                    m[i + 2 * j + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(n[i + j], n[i + j + 2]);
                }
            }
            // Then the quarters: quarter q of row 4p + i is quarter p of row 4q + i.
            for i in 0..4 {
                let (a, b, c, d) = (m[i], m[i + 4], m[i + 8], m[i + 12]);
                let ab_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let ab_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let cd_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
                let cd_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
                let row = |q: usize| matrix.add(16 * (4 * q + i));
                _mm512_storeu_ps(row(0), _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_even, cd_even));
                _mm512_storeu_ps(row(1), _mm512_shuffle_f32x4::<0b10_00_10_00>(ab_odd, cd_odd));
                _mm512_storeu_ps(row(2), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_even, cd_even));
                _mm512_storeu_ps(row(3), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab_odd, cd_odd));
            }
        }
    }

    #[inline(always)]
    fn ramp() -> Self {
        unsafe {
            Self(_mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
            ))
        }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        unsafe { Self(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn floor(self) -> Self {
        unsafe { Self(_mm512_roundscale_ps::<DOWN>(self.0)) }
    }
    #[inline(always)]
    fn le(self, other: Self) -> Self::Mask {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(self.0, other.0) }
    }
    #[inline(always)]
    fn both(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        a & b
    }
    #[inline(always)]
    fn count(mask: Self::Mask) -> usize {
        mask.count_ones() as usize
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        unsafe {
            let s = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            super::avx2::sum(s)
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}
