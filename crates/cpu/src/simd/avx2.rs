//! Eight lanes: AVX2, FMA and F16C.
//!
//! SAFETY of every block below: these functions are inlined only into code compiled for the instruction set, which
//! [`super::Isa::run`] enters only where the processor has it; pointers are the caller's duty, as [`Vector`] says.

#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use ingle_graph::math::{Lanes, SQRT_HALF_BITS};

use super::Vector;

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Eight f32.
#[derive(Clone, Copy)]
pub struct F32x8(__m256);

/// Sum of eight lanes, the upper half onto the lower half until one is left.
#[inline(always)]
pub fn sum(x: __m256) -> f32 {
    unsafe {
        let s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
    }
}

#[inline(always)]
fn bits(x: F32x8) -> __m256i {
    unsafe { _mm256_castps_si256(x.0) }
}

#[inline(always)]
fn from_bits(x: __m256i) -> F32x8 {
    unsafe { F32x8(_mm256_castsi256_ps(x)) }
}

/// All bits of the first `n` lanes.
#[inline(always)]
fn first(n: usize) -> __m256i {
    debug_assert!(n < 8);
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// A shuffle of two vectors works inside their halves; this puts its four pairs in order.
#[inline(always)]
fn in_order(x: __m256) -> F32x8 {
    unsafe { F32x8(_mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x)))) }
}

impl Lanes for F32x8 {
    type Mask = __m256;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        unsafe { Self(_mm256_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        unsafe { Self(_mm256_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        unsafe { Self(_mm256_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        unsafe { Self(_mm256_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, term.0)) }
    }
    #[inline(always)]
    fn neg(self) -> Self {
        unsafe { from_bits(_mm256_xor_si256(bits(self), _mm256_set1_epi32(i32::MIN))) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        unsafe { from_bits(_mm256_and_si256(bits(self), _mm256_set1_epi32(i32::MAX))) }
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        unsafe {
            let sign = _mm256_and_si256(bits(sign), _mm256_set1_epi32(i32::MIN));
            from_bits(_mm256_or_si256(bits(self.abs()), sign))
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        unsafe { Self(_mm256_round_ps::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    fn lt(self, other: Self) -> Self::Mask {
        unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0) }
    }
    #[inline(always)]
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        unsafe { Self(_mm256_blendv_ps(no.0, yes.0, mask)) }
    }
    #[inline(always)]
    fn exponent_add(self, n: Self) -> Self {
        unsafe {
            let n = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n.0));
            from_bits(_mm256_add_epi32(bits(self), n))
        }
    }
    #[inline(always)]
    fn exponent_split(self) -> (Self, Self) {
        unsafe {
            let above = _mm256_sub_epi32(bits(self), _mm256_set1_epi32(SQRT_HALF_BITS));
            let e = _mm256_srai_epi32::<23>(above);
            let m = _mm256_sub_epi32(bits(self), _mm256_slli_epi32::<23>(e));
            (from_bits(m), Self(_mm256_cvtepi32_ps(e)))
        }
    }
}

impl Vector for F32x8 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        unsafe { Self(_mm256_maskload_ps(from, first(n))) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        unsafe { _mm256_maskstore_ps(to, first(n), self.0) }
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        unsafe {
            let (a, b) = (_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)));
            (
                in_order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
                in_order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(even: Self, odd: Self, to: *mut f32) {
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(even.0, odd.0), _mm256_unpackhi_ps(even.0, odd.0));
            _mm256_storeu_ps(to, _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(to.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        unsafe {
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            from_bits(_mm256_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        unsafe { Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u8) {
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u8) {
        unsafe {
            let x = bits(self);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(x), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7FFF)), odd);
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            let quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x0040_0000));
            let y = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256::<1>(y));
            _mm_storeu_si128(to.cast(), packed);
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut u8) {
        unsafe {
            let x = _mm256_cvtps_epi32(self.0);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(words, words));
        }
    }

    #[inline(always)]
    unsafe fn transpose(matrix: *mut f32) {
        unsafe {
            let mut m = [_mm256_setzero_ps(); 8];
            for (i, m) in m.iter_mut().enumerate() {
                *m = _mm256_loadu_ps(matrix.add(8 * i));
            }
            // Pairs, then fours, then halves change places.
            let mut n = m;
            for i in (0..8).step_by(2) {
                n[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
                n[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
            }
            for i in (0..8).step_by(4) {
                for j in 0..2 {
                    m[i + 2 * j] = _mm256_shuffle_ps::<0b01_00_01_00>(n[i + j], n[i + j + 2]);
                    m[i + 2 * j + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(n[i + j], n[i + j + 2]);
                }
            }
            for i in 0..4 {
                let (low, high) = (m[i], m[i + 4]);
                _mm256_storeu_ps(matrix.add(8 * i), _mm256_permute2f128_ps::<0x20>(low, high));
                _mm256_storeu_ps(matrix.add(8 * (i + 4)), _mm256_permute2f128_ps::<0x31>(low, high));
            }
        }
    }

    #[inline(always)]
    fn ramp() -> Self {
        unsafe { Self(_mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        unsafe { Self(_mm256_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn floor(self) -> Self {
        unsafe { Self(_mm256_floor_ps(self.0)) }
    }
    #[inline(always)]
    fn le(self, other: Self) -> Self::Mask {
        unsafe { _mm256_cmp_ps::<_CMP_LE_OQ>(self.0, other.0) }
    }
    #[inline(always)]
    fn both(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        unsafe { _mm256_and_ps(a, b) }
    }
    #[inline(always)]
    fn count(mask: Self::Mask) -> usize {
        unsafe { _mm256_movemask_ps(mask).count_ones() as usize }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        sum(self.0)
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        unsafe {
            let m = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
            _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
        }
    }
}
