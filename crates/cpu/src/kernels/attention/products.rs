//! The two products of attention over one chunk: queries with keys, weights with values.

use std::marker::PhantomData;
use std::ops::Range;

use ingle_graph::math;
use ingle_graph::{ATTENTION_CHUNK, KvType, PAGE};

use super::Chunk;
use crate::kernels::kv::{ACCUMULATORS, BF16, Element, F16, F32, PageLayout, Q8_0};
use crate::simd::{Isa, Kernel, Vector, prefetch};

/// Queries that share one read of keys or values.
pub const TILE: usize = 4;

/// Vectors of dims that one pass over the values accumulates.
const COLUMNS: usize = 4;

/// Accumulators that are added before their sum is put aside.
const FOUR: usize = 4;

/// One of the two products, for `N` neighbouring queries of a block and a stretch of positions.
pub trait Product: Copy {
    /// The product of one element type.
    fn run<V: Vector, E: Element, const N: usize>(self);
}

/// A product with its element type and number of queries.
struct Typed<P, E, const N: usize>(P, PhantomData<E>);

impl<P: Product, E: Element, const N: usize> Kernel for Typed<P, E, N> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        self.0.run::<V, E, N>();
    }
}

/// Runs a product for `queries` queries, 1 to [`TILE`].
pub fn run<P: Product>(product: P, isa: Isa, kind: KvType, queries: usize) {
    match kind {
        KvType::F16 => sized::<P, F16>(product, isa, queries),
        KvType::BF16 => sized::<P, BF16>(product, isa, queries),
        KvType::F32 => sized::<P, F32>(product, isa, queries),
        KvType::Q8_0 => sized::<P, Q8_0>(product, isa, queries),
    }
}

fn sized<P: Product, E: Element>(product: P, isa: Isa, queries: usize) {
    match queries {
        1 => isa.run(Typed::<P, E, 1>(product, PhantomData)),
        2 => isa.run(Typed::<P, E, 2>(product, PhantomData)),
        3 => isa.run(Typed::<P, E, 3>(product, PhantomData)),
        _ => isa.run(Typed::<P, E, TILE>(product, PhantomData)),
    }
}

/// Scores of queries with the keys of all pages that `keys` touches: scaled and capped.
#[derive(Clone, Copy)]
pub struct Scores<'a> {
    /// The chunk.
    pub chunk: &'a Chunk<'a>,
    /// First position, relative to the chunk.
    pub from: usize,
    /// One past the last.
    pub to: usize,
    /// `[N][padded]`, dims in key order.
    pub q: *const f32,
    /// `[N][ATTENTION_CHUNK]`
    pub out: *mut f32,
}

impl Product for Scores<'_> {
    #[inline(always)]
    fn run<V: Vector, E: Element, const N: usize>(self) {
        let spec = self.chunk.spec;
        let pages = self.from / PAGE * PAGE..self.to.next_multiple_of(PAGE);
        // SAFETY: pages of the chunk, and memory for N queries: the fields' promise.
        unsafe {
            for page in pages.clone().step_by(PAGE) {
                let block = self.chunk.keys(page);
                // The values of the first page follow the keys of the last.
                let last = page + PAGE == pages.end;
                let next = if last { self.chunk.values(pages.start) } else { self.chunk.keys(page + PAGE) };
                for at in (0..PAGE).step_by(V::LANES) {
                    let sums = match self.chunk.pages.layout.head_dim {
                        _ if V::LANES == 1 => self.dot::<V, E, N, 0>(block, next, at),
                        64 => self.dot::<V, E, N, 2>(block, next, at),
                        128 => self.dot::<V, E, N, 4>(block, next, at),
                        256 => self.dot::<V, E, N, 8>(block, next, at),
                        _ => self.dot::<V, E, N, 0>(block, next, at),
                    };
                    for i in 0..N {
                        let mut s = sums[i].mul(V::splat(spec.scale));
                        if let Some(cap) = spec.softcap {
                            let cap = V::splat(cap);
                            s = cap.mul(math::tanh(s.div(cap)));
                        }
                        s.store(self.out.add(i * ATTENTION_CHUNK + page + at));
                    }
                }
            }
        }
    }
}

impl Scores<'_> {
    /// Dot products of `N` queries with keys `at..at + LANES` of a page, in `f32x32`, with `DIMS` dims to each
    /// accumulator (0 where they differ). What is read next is asked for meanwhile.
    #[inline(always)]
    unsafe fn dot<V: Vector, E: Element, const N: usize, const DIMS: usize>(
        &self,
        block: *const u8,
        next: *const u8,
        at: usize,
    ) -> [V; N] {
        let layout = self.chunk.pages.layout;
        let mut walk = Walk { block, next, layout, at, q: self.q, padded: self.chunk.padded, row: 0 };
        let mut parts = [[V::splat(0.0); N]; ACCUMULATORS / FOUR];
        // SAFETY: the walk reads each of the head's rows of keys once, and as many elements of each query.
        unsafe {
            for (i, part) in parts.iter_mut().enumerate() {
                let a = walk.leaf::<V, E, N, DIMS>(FOUR * i);
                let b = walk.leaf::<V, E, N, DIMS>(FOUR * i + 1);
                let ab = add(a, b);
                let c = walk.leaf::<V, E, N, DIMS>(FOUR * i + 2);
                let d = walk.leaf::<V, E, N, DIMS>(FOUR * i + 3);
                *part = add(ab, add(c, d));
            }
        }
        let [a, b, c, d, e, f, g, h] = parts;
        add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h)))
    }
}

/// Lane-wise sums of `N` queries.
#[inline(always)]
fn add<V: Vector, const N: usize>(a: [V; N], b: [V; N]) -> [V; N] {
    let mut sum = a;
    for i in 0..N {
        sum[i] = a[i].add(b[i]);
    }
    sum
}

/// Position in the rows of keys of one head, which are read once and in order.
struct Walk<'a> {
    block: *const u8,
    next: *const u8,
    layout: &'a PageLayout,
    at: usize,
    q: *const f32,
    padded: usize,
    row: usize,
}

impl Walk<'_> {
    /// One accumulator: an FMA chain from +0 over its dims, which are 32 apart.
    #[inline(always)]
    unsafe fn leaf<V: Vector, E: Element, const N: usize, const DIMS: usize>(
        &mut self,
        step: usize,
    ) -> [V; N] {
        let mut sum = [V::splat(0.0); N];
        let dims = if DIMS == 0 { self.layout.leaves[step] } else { DIMS };
        for unit in 0..dims {
            // SAFETY: rows below head_dim, in the block and in each padded query.
            unsafe {
                prefetch(self.next.wrapping_add((self.row * PAGE + self.at) * E::BYTES));
                let k: V = E::keys(self.block, self.layout, self.row, unit, self.at);
                for i in 0..N {
                    sum[i] = V::splat(self.q.add(i * self.padded + self.row).read()).fma(k, sum[i]);
                }
            }
            self.row += 1;
        }
        sum
    }
}

/// Adds the weighted values of positions to the sums of `N` queries, in order of positions.
#[derive(Clone, Copy)]
pub struct Values<'a> {
    /// The chunk.
    pub chunk: &'a Chunk<'a>,
    /// First position, relative to the chunk.
    pub from: usize,
    /// One past the last.
    pub to: usize,
    /// `[N][ATTENTION_CHUNK]` weights.
    pub p: *const f32,
    /// `[N][padded]` sums.
    pub o: *mut f32,
}

impl Product for Values<'_> {
    #[inline(always)]
    fn run<V: Vector, E: Element, const N: usize>(self) {
        let padded = self.chunk.padded;
        let mut from = self.from;
        while from < self.to {
            let to = self.to.min((from / PAGE + 1) * PAGE);
            // SAFETY: a page of the chunk, and memory for N queries: the fields' promise.
            unsafe {
                let block = self.chunk.values(from);
                let next = if to < self.to { self.chunk.values(to) } else { block };
                let mut d = 0;
                while d + COLUMNS * V::LANES <= padded {
                    self.columns::<V, E, N, COLUMNS>(block, next, from..to, d);
                    d += COLUMNS * V::LANES;
                }
                while d < padded {
                    self.columns::<V, E, N, 1>(block, next, from..to, d);
                    d += V::LANES;
                }
            }
            from = to;
        }
    }
}

impl Values<'_> {
    /// `C` vectors of dims from `d` on, positions of one page. What is read next is asked for meanwhile.
    #[inline(always)]
    unsafe fn columns<V: Vector, E: Element, const N: usize, const C: usize>(
        &self,
        block: *const u8,
        next: *const u8,
        keys: Range<usize>,
        d: usize,
    ) {
        let (layout, padded) = (self.chunk.pages.layout, self.chunk.padded);
        // SAFETY: as in `run`.
        unsafe {
            let mut sums = [[V::splat(0.0); C]; N];
            for i in 0..N {
                for c in 0..C {
                    sums[i][c] = V::load(self.o.add(i * padded + d + c * V::LANES));
                }
            }
            for key in keys {
                let mut values = [V::splat(0.0); C];
                let line = (key % PAGE * padded + d) * E::BYTES;
                for byte in (0..C * V::LANES * E::BYTES).step_by(64) {
                    prefetch(next.wrapping_add(line + byte));
                }
                for c in 0..C {
                    values[c] = E::value(block, layout, key % PAGE, d + c * V::LANES);
                }
                for i in 0..N {
                    let p = V::splat(self.p.add(i * ATTENTION_CHUNK + key).read());
                    for c in 0..C {
                        sums[i][c] = p.fma(values[c], sums[i][c]);
                    }
                }
            }
            for i in 0..N {
                for c in 0..C {
                    sums[i][c].store(self.o.add(i * padded + d + c * V::LANES));
                }
            }
        }
    }
}
