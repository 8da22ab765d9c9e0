//! Every op but the matrix product, as kernels over a vector type. Each works on one row, head or span of columns, so
//! that a step can be cut anywhere between them.
//!
//! Kernels take raw pointers, because an output may share memory with an input and workers write disjoint parts of one
//! value. Each says what it reads and writes; whoever builds it answers for that memory.

pub mod attention;
pub mod elementwise;
pub mod float;
pub mod kv;
pub mod norm;
pub mod peaks;
pub mod quantize;
pub mod rope;

use crate::simd::Vector;

/// Sum of `n` accumulators, a power of two and at least a vector: the upper half onto the lower half until one is left.
///
/// # Safety
/// `s` is valid for `n` f32, which are overwritten.
#[inline(always)]
unsafe fn tree<V: Vector>(s: *mut f32, n: usize) -> f32 {
    let mut half = n / 2;
    // SAFETY: every index is below n, the caller's bound.
    unsafe {
        while half >= V::LANES {
            for i in (0..half).step_by(V::LANES) {
                V::load(s.add(i)).add(V::load(s.add(i + half))).store(s.add(i));
            }
            half /= 2;
        }
        V::load(s).sum()
    }
}
