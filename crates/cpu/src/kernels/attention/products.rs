//! The two products of attention over one page: queries with keys, weights with values.
//!
//! Elements are widened as they are read; where they were widened before, for many tiles of queries, they are read as
//! f32.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use ingle_graph::math;
use ingle_graph::{ATTENTION_CHUNK, AttentionSpec, PAGE};

use super::MAX_STRIDE;
use crate::kernels::kv::{ACCUMULATORS, PageLayout, Plain};
use crate::simd::{MAX_LANES, Vector, prefetch_far};

/// Queries that share one read of keys or values.
pub const TILE: usize = 4;

/// Dims of values that are widened at a time, so that a page of them stays in the first cache.
pub const COLUMNS: usize = 4 * MAX_LANES;

/// Accumulators that are added before their sum is put aside.
const FOUR: usize = 4;

/// Bytes that memory moves at once.
const LINE: usize = 64;

/// Parts of a score that are put aside.
const PARTS: usize = ACCUMULATORS / FOUR;

/// Memory that will be read next, asked for in equal steps meanwhile.
#[derive(Clone, Copy)]
pub struct Ahead {
    at: *const u8,
    /// Bytes of a step.
    step: usize,
}

impl Ahead {
    /// Nowhere, for calls that ask for nothing.
    pub const NOTHING: Self = Self { at: std::ptr::null(), step: 0 };

    /// `bytes` from `at` on, in `steps` steps. The memory need not be readable.
    pub fn new(at: *const u8, bytes: usize, steps: usize) -> Self {
        Self { at, step: bytes / steps }
    }

    #[inline(always)]
    fn step(&self, i: usize) {
        prefetch_far(self.at.wrapping_add(i * self.step));
    }
}

/// Scores of `N` neighbouring queries with all keys of a page: scaled and capped.
pub struct Scores<'a, E> {
    /// Type of the keys.
    pub element: PhantomData<E>,
    /// Shape and rules.
    pub spec: &'a AttentionSpec,
    /// Layout of the page.
    pub layout: &'a PageLayout,
    /// `[head_dim][PAGE]`, dims in key order.
    pub keys: *const u8,
    /// `[N][padded]`, dims in key order.
    pub q: *const f32,
    /// Elements between queries.
    pub padded: usize,
    /// `[N]` from here on, [`ATTENTION_CHUNK`] apart.
    pub out: *mut f32,
    /// `[N][MAX_STRIDE]`: the largest score so far, lane by lane.
    pub max: *mut f32,
}

/// Steps of [`Ahead`] that the scores of a page make.
pub fn score_steps<V: Vector>(layout: &PageLayout) -> usize {
    PAGE / V::LANES * layout.head_dim
}

impl<E: Plain> Scores<'_, E> {
    /// Computes the scores. Where a query may not look at all of the page, `inside` says where. With `AHEAD`, asks for
    /// what is read next.
    ///
    /// # Safety
    /// The fields hold what they say.
    #[inline(always)]
    pub unsafe fn run<V: Vector, const N: usize, const AHEAD: bool>(
        &self,
        inside: Option<&[Range<usize>]>,
        ahead: Ahead,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match self.layout.head_dim {
                64 if V::LANES == MAX_LANES => self.page::<V, N, 2, 2, AHEAD>(inside, ahead),
                128 if V::LANES == MAX_LANES => self.page::<V, N, 4, 2, AHEAD>(inside, ahead),
                256 if V::LANES == MAX_LANES => self.page::<V, N, 8, 2, AHEAD>(inside, ahead),
                64 if V::LANES > 1 => self.page::<V, N, 2, 1, AHEAD>(inside, ahead),
                128 if V::LANES > 1 => self.page::<V, N, 4, 1, AHEAD>(inside, ahead),
                256 if V::LANES > 1 => self.page::<V, N, 8, 1, AHEAD>(inside, ahead),
                _ => self.page::<V, N, 0, 1, AHEAD>(inside, ahead),
            }
        }
    }

    /// `C` vectors of keys at a time, with `DIMS` dims to each accumulator (0 where they differ).
    #[inline(always)]
    unsafe fn page<V: Vector, const N: usize, const DIMS: usize, const C: usize, const AHEAD: bool>(
        &self,
        inside: Option<&[Range<usize>]>,
        mut ahead: Ahead,
    ) {
        // SAFETY: the caller's.
        unsafe {
            for first in (0..PAGE).step_by(C * V::LANES) {
                let sums = self.dot::<V, N, DIMS, C, AHEAD>(first, &mut ahead);
                for i in 0..N {
                    let mut max = V::load(self.max.add(i * MAX_STRIDE));
                    for c in 0..C {
                        let at = first + c * V::LANES;
                        let mut s = sums[i][c].mul(V::splat(self.spec.scale));
                        if let Some(cap) = self.spec.softcap {
                            let cap = V::splat(cap);
                            s = cap.mul(math::tanh(s.div(cap)));
                        }
                        s.store(self.out.add(i * ATTENTION_CHUNK + at));
                        if let Some(inside) = inside {
                            s = V::select(within::<V>(&inside[i], at), s, V::splat(f32::NEG_INFINITY));
                        }
                        max = max.max(s);
                    }
                    max.store(self.max.add(i * MAX_STRIDE));
                }
            }
        }
    }

    /// Dot products of `N` queries with `C` vectors of keys from `at` on, in `f32x32`.
    #[inline(always)]
    unsafe fn dot<V: Vector, const N: usize, const DIMS: usize, const C: usize, const AHEAD: bool>(
        &self,
        at: usize,
        ahead: &mut Ahead,
    ) -> [[V; C]; N] {
        let mut parts = [const { MaybeUninit::<[[V; C]; N]>::uninit() }; PARTS];
        // SAFETY: the walk reads each row of keys once, and as many elements of each query; every part is written.
        unsafe {
            let mut walk = Walk { keys: self.keys.add(E::BYTES * at), q: self.q, ahead, scores: self };
            for (i, part) in parts.iter_mut().enumerate() {
                let a = walk.leaf::<V, N, DIMS, C, AHEAD>(FOUR * i);
                let b = walk.leaf::<V, N, DIMS, C, AHEAD>(FOUR * i + 1);
                let ab = add(a, b);
                let c = walk.leaf::<V, N, DIMS, C, AHEAD>(FOUR * i + 2);
                let d = walk.leaf::<V, N, DIMS, C, AHEAD>(FOUR * i + 3);
                part.write(add(ab, add(c, d)));
            }
            let [a, b, c, d, e, f, g, h] = parts.map(|part| part.assume_init());
            add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h)))
        }
    }
}

/// Positions `at..at + LANES` that are in `range`.
#[inline(always)]
pub fn within<V: Vector>(range: &Range<usize>, at: usize) -> V::Mask {
    let at = V::ramp().add(V::splat(at as f32));
    V::both(V::splat(range.start as f32).le(at), at.lt(V::splat(range.end as f32)))
}

/// Lane-wise sums of `N` queries.
#[inline(always)]
fn add<V: Vector, const N: usize, const C: usize>(a: [[V; C]; N], b: [[V; C]; N]) -> [[V; C]; N] {
    let mut sum = a;
    for i in 0..N {
        for c in 0..C {
            sum[i][c] = a[i][c].add(b[i][c]);
        }
    }
    sum
}

/// Position in the rows of keys, which are read once and in order.
struct Walk<'a, E> {
    keys: *const u8,
    q: *const f32,
    ahead: &'a mut Ahead,
    scores: &'a Scores<'a, E>,
}

impl<E: Plain> Walk<'_, E> {
    /// One accumulator: an FMA chain from +0 over its dims, which are 32 apart.
    #[inline(always)]
    unsafe fn leaf<V: Vector, const N: usize, const DIMS: usize, const C: usize, const AHEAD: bool>(
        &mut self,
        step: usize,
    ) -> [[V; C]; N] {
        let mut sum = [[V::splat(0.0); C]; N];
        let dims = if DIMS == 0 { self.scores.layout.leaves[step] } else { DIMS };
        for dim in 0..dims {
            // SAFETY: a row of the page, and an element of each padded query.
            unsafe {
                let mut k = [V::splat(0.0); C];
                for c in 0..C {
                    // Not twice for one line.
                    if AHEAD && E::BYTES * c * V::LANES % LINE == 0 {
                        self.ahead.step(C * dim + c);
                    }
                    k[c] = E::load(self.keys.add(E::BYTES * (dim * PAGE + c * V::LANES)));
                }
                for i in 0..N {
                    let q = V::splat(self.q.add(i * self.scores.padded + dim).read());
                    for c in 0..C {
                        sum[i][c] = q.fma(k[c], sum[i][c]);
                    }
                }
            }
        }
        // SAFETY: the next row, or the end.
        unsafe {
            self.keys = self.keys.add(E::BYTES * dims * PAGE);
            self.q = self.q.add(dims);
            if AHEAD {
                self.ahead.at = self.ahead.at.wrapping_add(C * dims * self.ahead.step);
            }
        }
        sum
    }
}

/// Adds the weighted values of some positions to the sums of `N` neighbouring queries, in order of positions.
pub struct Values<E> {
    /// Type of the values.
    pub element: PhantomData<E>,
    /// `[positions][stride]` of them from these dims on.
    pub values: *const u8,
    /// Elements between positions.
    pub stride: usize,
    /// Dims in use, whole vectors.
    pub width: usize,
    /// `[N]` weights of these positions from here on, [`ATTENTION_CHUNK`] apart.
    pub p: *const f32,
    /// `[N]` sums of these dims from here on, `padded` apart.
    pub o: *mut f32,
    /// Elements between queries.
    pub padded: usize,
}

/// Steps of [`Ahead`] that the values of a page make.
pub const VALUE_STEPS: usize = 2 * PAGE;

impl<E: Plain> Values<E> {
    /// Adds the values of `keys`, some of the positions. With `AHEAD`, asks for what is read next.
    ///
    /// # Safety
    /// The fields hold what they say.
    #[inline(always)]
    pub unsafe fn run<V: Vector, const N: usize, const AHEAD: bool>(&self, keys: Range<usize>, ahead: Ahead) {
        let mut d = 0;
        // SAFETY: the caller's.
        unsafe {
            if V::LANES == MAX_LANES && self.width == COLUMNS {
                return self.columns::<V, N, 4, AHEAD>(keys, d, ahead);
            }
            while d + 2 * V::LANES <= self.width {
                self.columns::<V, N, 2, AHEAD>(keys.clone(), d, ahead);
                d += 2 * V::LANES;
            }
            if d < self.width {
                self.columns::<V, N, 1, AHEAD>(keys, d, ahead);
            }
        }
    }

    /// `C` vectors of dims from `d` on.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize, const C: usize, const AHEAD: bool>(
        &self,
        keys: Range<usize>,
        d: usize,
        ahead: Ahead,
    ) {
        // SAFETY: as in `run`.
        unsafe {
            let o = |i: usize, c: usize| self.o.add(i * self.padded + d + c * V::LANES);
            let mut sums = [[V::splat(0.0); C]; N];
            for i in 0..N {
                for c in 0..C {
                    sums[i][c] = V::load(o(i, c));
                }
            }
            for key in keys {
                if AHEAD {
                    ahead.step(2 * key);
                    ahead.step(2 * key + 1);
                }
                let mut v = [V::splat(0.0); C];
                for c in 0..C {
                    v[c] = E::load(self.values.add(E::BYTES * (key * self.stride + d + c * V::LANES)));
                }
                for i in 0..N {
                    let p = V::splat(self.p.add(i * ATTENTION_CHUNK + key).read());
                    for c in 0..C {
                        sums[i][c] = p.fma(v[c], sums[i][c]);
                    }
                }
            }
            for i in 0..N {
                for c in 0..C {
                    sums[i][c].store(o(i, c));
                }
            }
        }
    }
}
