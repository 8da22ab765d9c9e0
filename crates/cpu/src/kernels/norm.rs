//! Root-mean-square norm.

use super::quantize::{Quantized, quantize};
use super::tree;
use crate::simd::{Kernel, Vector};

/// Accumulators of the sum of squares (NUMERICS.md section 3).
const ACCUMULATORS: usize = 256;

/// Norm of `groups` neighbouring groups of one row: y = (x * r) * w with r = 1 / sqrt(sum(x^2) / n + eps).
pub struct RmsNorm<'a> {
    /// `groups * n` f32.
    pub x: *const f32,
    /// `groups * n` f32; may be `x`.
    pub y: *mut f32,
    /// `n` f32.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Groups.
    pub groups: usize,
    /// Where the result goes quantized: whole units in `groups * n`, or none.
    pub quantized: &'a [Quantized],
    /// Row of the result.
    pub row: usize,
    /// First column of the result.
    pub col: usize,
}

impl Kernel for RmsNorm<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let n = self.weight.len();
        // SAFETY: the fields' own promise.
        unsafe {
            for group in 0..self.groups {
                norm::<V>(self.x.add(group * n), self.y.add(group * n), self.weight, self.eps);
            }
            for to in self.quantized {
                quantize::<V>(to, self.row, self.col, self.y, self.groups * n);
            }
        }
    }
}

#[repr(align(64))]
struct Sums([f32; ACCUMULATORS]);

#[inline(always)]
unsafe fn norm<V: Vector>(x: *const f32, y: *mut f32, weight: &[f32], eps: f32) {
    let n = weight.len();
    let whole = n / V::LANES * V::LANES;
    let rest = n - whole;
    let weight = weight.as_ptr();
    let mut sums = Sums([0.0; ACCUMULATORS]);
    let s = sums.0.as_mut_ptr();
    // SAFETY: x, y and weight hold n elements, s holds ACCUMULATORS, which is a multiple of LANES.
    unsafe {
        let mut k = 0;
        while k < whole {
            let end = whole.min(k + ACCUMULATORS);
            for at in (k..end).step_by(V::LANES) {
                let x = V::load(x.add(at));
                let s = s.add(at - k);
                x.fma(x, V::load(s)).store(s);
            }
            k = end;
        }
        if rest > 0 {
            // The lanes beyond the row add +0 to a sum that is never -0.
            let x = V::load_first(x.add(whole), rest);
            let s = s.add(whole % ACCUMULATORS);
            x.fma(x, V::load(s)).store(s);
        }
        let mean = tree::<V>(s, ACCUMULATORS) / n as f32;
        let r = V::splat(1.0 / (mean + eps).sqrt());
        for k in (0..whole).step_by(V::LANES) {
            V::load(x.add(k)).mul(r).mul(V::load(weight.add(k))).store(y.add(k));
        }
        if rest > 0 {
            let w = V::load_first(weight.add(whole), rest);
            V::load_first(x.add(whole), rest).mul(r).mul(w).store_first(y.add(whole), rest);
        }
    }
}
