//! Weights from scores, and the merge of chunks in order.

use std::ops::Range;

use ingle_graph::math;
use ingle_graph::{AttentionSpec, PAGE};

use super::products::within;
use super::{padded, partial_len};
use crate::kernels::kv::ACCUMULATORS;
use crate::kernels::tree;
use crate::simd::{Kernel, MAX_LANES, Vector};

/// A page's position is also its accumulator.
const _: () = assert!(PAGE == ACCUMULATORS);

/// Maxima and sums of neighbouring queries.
#[derive(Clone, Copy)]
pub struct Stats {
    /// Largest scores.
    pub max: *mut f32,
    /// Sums of weights; 0 where there were no keys.
    pub sum: *mut f32,
}

impl Stats {
    /// Those from query `i` on.
    pub fn at(self, i: usize) -> Self {
        Self { max: self.max.wrapping_add(i), sum: self.sum.wrapping_add(i) }
    }
}

/// Turns the scores of a chunk into weights, +0 where `keys` does not reach in the pages it touches, and returns their
/// maximum and the sum of the weights. `largest` is the maximum lane by lane.
///
/// # Safety
/// `p` holds the scores of a chunk, `largest` a vector; `keys` are positions in the chunk, not none.
#[inline(always)]
pub unsafe fn soften<V: Vector>(p: *mut f32, keys: &Range<usize>, largest: *const f32) -> (f32, f32) {
    // SAFETY: the caller's; the pages that `keys` touches are whole.
    unsafe {
        let mut m = V::load(largest).largest();
        // NaN wins, as in every maximum of the contract. Vectors' maxima may lose it; a finite one shows it in the sum.
        if !m.is_finite() && keys.clone().any(|j| p.add(j).read().is_nan()) {
            m = f32::NAN;
        }
        let mut l = weights::<V>(p, keys, m);
        if l.is_nan() && m.is_finite() {
            m = f32::NAN;
            l = weights::<V>(p, keys, m);
        }
        (m, l)
    }
}

/// exp(s - m) of all scores, and their sum.
#[inline(always)]
unsafe fn weights<V: Vector>(p: *mut f32, keys: &Range<usize>, m: f32) -> f32 {
    let m = V::splat(m);
    // Accumulator j % 32 takes the weights at j, j + 32, ... in order.
    let mut sums = [V::splat(0.0); ACCUMULATORS];
    let mut memory = [0.0f32; ACCUMULATORS];
    // SAFETY: the caller's.
    unsafe {
        for page in (keys.start / PAGE * PAGE..keys.end).step_by(PAGE) {
            let whole = keys.start <= page && page + PAGE <= keys.end;
            for at in (0..PAGE).step_by(V::LANES) {
                let p = p.add(page + at);
                let mut weight = math::exp(V::load(p).sub(m));
                if !whole {
                    weight = V::select(within::<V>(keys, page + at), weight, V::splat(0.0));
                }
                weight.store(p);
                let sum = &mut sums[at / V::LANES];
                *sum = sum.add(weight);
            }
        }
        for lane in (0..ACCUMULATORS).step_by(V::LANES) {
            sums[lane / V::LANES].store(memory.as_mut_ptr().add(lane));
        }
        tree::<V>(memory.as_mut_ptr(), ACCUMULATORS)
    }
}

/// Merges the maxima and sums of a chunk into the running ones, `LANES` queries together. `old` and `new` become the
/// factors of the running values and of the chunk's, where it has keys.
///
/// # Safety
/// `LANES` f32 at every pointer.
#[inline(always)]
pub unsafe fn merge<V: Vector>(chunk: Stats, running: Stats, old: *mut f32, new: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let (m, l) = (V::load(chunk.max), V::load(chunk.sum));
        let (big_m, big_l) = (V::load(running.max), V::load(running.sum));
        let number = |x: V| x.le(V::splat(f32::INFINITY));
        let merged = V::select(number(m), big_m.max(m), m);
        let merged = V::select(number(big_m), merged, big_m);
        let (a, b) = (math::exp(big_m.sub(merged)), math::exp(m.sub(merged)));
        let none = l.le(V::splat(0.0));
        V::select(none, big_m, merged).store(running.max);
        V::select(none, big_l, l.fma(b, big_l.mul(a))).store(running.sum);
        a.store(old);
        b.store(new);
    }
}

/// total = o * b + fl(total * a)
///
/// # Safety
/// `padded` f32 at both pointers.
#[inline(always)]
pub unsafe fn rescale<V: Vector>(total: *mut f32, a: f32, o: *const f32, b: f32, padded: usize) {
    for d in (0..padded).step_by(V::LANES) {
        // SAFETY: the caller's.
        unsafe {
            let rescaled = V::load(total.add(d)).mul(V::splat(a));
            V::load(o.add(d)).fma(V::splat(b), rescaled).store(total.add(d));
        }
    }
}

/// out = total / sum
///
/// # Safety
/// `total` holds a padded head, `out` has room for one.
#[inline(always)]
pub unsafe fn finish<V: Vector>(total: *const f32, sum: f32, out: *mut f32, head_dim: usize) {
    let whole = head_dim / V::LANES * V::LANES;
    // SAFETY: the caller's.
    unsafe {
        for d in (0..whole).step_by(V::LANES) {
            V::load(total.add(d)).div(V::splat(sum)).store(out.add(d));
        }
        if whole < head_dim {
            let last = V::load(total.add(whole)).div(V::splat(sum));
            last.store_first(out.add(whole), head_dim - whole);
        }
    }
}

/// Merges the partial results of one head of one row in order and writes the finished head.
pub struct Merge<'a> {
    /// Shape and rules.
    pub spec: &'a AttentionSpec,
    /// `[1 + chunks]` of [`partial_len`] f32: room for the totals, then the partial results.
    pub partials: *mut f32,
    /// Chunks of the row.
    pub chunks: usize,
    /// `head_dim` f32.
    pub out: *mut f32,
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let (head_dim, padded) = (self.spec.head_dim, padded(self.spec.head_dim));
        // SAFETY: the fields' own promise.
        unsafe {
            let stats = |at: *mut f32| Stats { max: at, sum: at.wrapping_add(1) };
            let total = self.partials.add(MAX_LANES);
            self.partials.write(f32::NEG_INFINITY);
            self.partials.add(1).write(0.0);
            total.write_bytes(0, padded);
            for chunk in 1..=self.chunks {
                let partial = self.partials.add(chunk * partial_len(head_dim));
                let (mut a, mut b) = (0.0, 0.0);
                merge::<f32>(stats(partial), stats(self.partials), &mut a, &mut b);
                rescale::<V>(total, a, partial.add(MAX_LANES), b, padded);
            }
            finish::<V>(total, self.partials.add(1).read(), self.out, head_dim);
        }
    }
}
