//! Softmax attention over pages (NUMERICS.md section 3).
//!
//! A [`Block`] is some rows of one sequence and the query heads that share one head of keys and values. It is walked
//! chunk by chunk of 256 positions: scores of all its queries, softmax, weighted values, and then either the merge into
//! running totals, or the chunk's partial result stored for a later merge in order ([`Merge`]). Which of the two, and
//! which rows share a block, cannot change a bit.

use std::ops::Range;

use ingle_graph::math::{self, Lanes};
use ingle_graph::{ATTENTION_CHUNK, AttentionSpec, Inputs, KvType, PAGE};

use super::kv::{ACCUMULATORS, BF16, Element, F16, F32, PageLayout, Q8_0, leaf};
use super::tree;
use crate::simd::{Kernel, MAX_LANES, Vector};

/// Queries a block holds, at least: rows are added to it while they fit.
pub const QUERIES: usize = 32;

/// Queries that share one read of keys or values.
const TILE: usize = 4;

/// Vectors of dims that one pass over the values accumulates.
const COLUMNS: usize = 4;

/// Positions a row at `position` may look at.
pub fn allowed(spec: &AttentionSpec, position: usize) -> Range<usize> {
    spec.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
}

/// Chunks that hold any position a row may look at.
pub fn chunks(spec: &AttentionSpec, position: usize) -> Range<usize> {
    let keys = allowed(spec, position);
    keys.start / ATTENTION_CHUNK..(keys.end - 1) / ATTENTION_CHUNK + 1
}

/// Elements of a head in memory of this module: padded to whole vectors.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(MAX_LANES)
}

/// f32 of one partial result: maximum, sum, padding, and the weighted values.
pub fn partial_len(head_dim: usize) -> usize {
    MAX_LANES + padded(head_dim)
}

/// A worker's memory for one block: queries in key order, scores of a chunk, a chunk's values, running totals.
#[derive(Default)]
pub struct Scratch(Vec<Line>);

/// A whole vector, so that memory made of it is aligned for one.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Line {
    _lanes: [f32; MAX_LANES],
}

impl Scratch {
    /// Makes room for blocks of `queries` queries.
    pub fn reserve(&mut self, queries: usize, head_dim: usize) {
        let lines = (queries * (3 * padded(head_dim) + ATTENTION_CHUNK + 2)).div_ceil(MAX_LANES);
        if self.0.len() < lines {
            self.0.resize(lines, Line::default());
        }
    }
}

/// Where a block's result goes.
#[derive(Clone, Copy)]
pub enum Sink {
    /// The finished rows: row `r`, head `h` at `r * stride + h * head_dim`.
    Rows {
        /// First row of the step.
        out: *mut f32,
        /// Elements between rows.
        stride: usize,
    },
    /// The partial result of query `i` of the block's only chunk, at `i * stride` on: see [`partial_len`].
    Partial {
        /// First query of the block.
        out: *mut f32,
        /// Elements between queries.
        stride: usize,
    },
}

/// Attention of some rows of one sequence and the query heads of one head of keys and values.
pub struct Block<'a> {
    /// Shape and rules.
    pub spec: &'a AttentionSpec,
    /// Layout of the layer's pages.
    pub layout: &'a PageLayout,
    /// First byte of the layer's page 0.
    pub pool: *const u8,
    /// Positions and page tables.
    pub inputs: &'a Inputs,
    /// Queries `[T, heads * head_dim]`.
    pub q: *const f32,
    /// Rows, all of one sequence.
    pub rows: Range<usize>,
    /// Head of keys and values.
    pub kv_head: usize,
    /// Chunks to walk.
    pub chunks: Range<usize>,
    /// Where the result goes.
    pub sink: Sink,
    /// Memory reserved for the block's queries.
    pub scratch: &'a mut Scratch,
}

impl Kernel for Block<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        match self.layout.kind {
            KvType::F16 => self.walk::<V, F16>(),
            KvType::BF16 => self.walk::<V, BF16>(),
            KvType::F32 => self.walk::<V, F32>(),
            KvType::Q8_0 => self.walk::<V, Q8_0>(),
        }
    }
}

/// Pointers into [`Scratch`].
#[derive(Clone, Copy)]
struct Memory {
    /// `[queries][padded]`, dims in key order.
    q: *mut f32,
    /// `[queries][ATTENTION_CHUNK]`: scores, then weights.
    p: *mut f32,
    /// `[queries][padded]` of the chunk.
    o: *mut f32,
    /// `[queries][padded]`, running.
    total: *mut f32,
    /// `[queries][2]`: running maximum and sum.
    state: *mut f32,
}

/// What the kernels of one chunk need of a block.
struct Chunk<'a> {
    block: &'a Block<'a>,
    memory: Memory,
    /// First position.
    first: usize,
    /// Elements between queries in `q` and `o`.
    padded: usize,
}

impl Block<'_> {
    fn group(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    /// Row of query `i`.
    fn row(&self, i: usize) -> usize {
        self.rows.start + i / self.group()
    }

    /// Positions of a chunk that query `i` may look at, relative to the chunk.
    fn keys(&self, i: usize, first: usize) -> Range<usize> {
        let allowed = allowed(self.spec, self.inputs.positions[self.row(i)] as usize);
        let clip = |position: usize| position.clamp(first, first + ATTENTION_CHUNK) - first;
        clip(allowed.start)..clip(allowed.end)
    }

    /// First byte of the page that holds this position.
    fn page(&self, position: usize) -> *const u8 {
        let page = self.inputs.page(self.rows.start, position);
        // SAFETY: `Inputs::check` bounds pages by the pool.
        unsafe { self.pool.add(page * self.layout.page_bytes()) }
    }

    #[inline(always)]
    fn walk<V: Vector, E: Element>(self) {
        let (head_dim, padded) = (self.spec.head_dim, padded(self.spec.head_dim));
        let queries = self.rows.len() * self.group();
        self.scratch.reserve(queries, head_dim);
        let base = self.scratch.0.as_mut_ptr().cast::<f32>();
        // SAFETY: `reserve` made room for all parts.
        let memory = unsafe {
            Memory {
                q: base,
                o: base.add(queries * padded),
                total: base.add(2 * queries * padded),
                p: base.add(3 * queries * padded),
                state: base.add(queries * (3 * padded + ATTENTION_CHUNK)),
            }
        };
        // SAFETY: q holds the rows and heads of the block, the scratch its queries.
        unsafe {
            for i in 0..queries {
                let head = self.kv_head * self.group() + i % self.group();
                let q = self.q.add((self.row(i) * self.spec.heads + head) * head_dim);
                for (to, &dim) in self.layout.order.iter().enumerate() {
                    memory.q.add(i * padded + to).write(q.add(dim as usize).read());
                }
                begin(memory.state.add(2 * i), memory.total.add(i * padded), padded);
            }
            for chunk in self.chunks.clone() {
                let chunk = Chunk { block: &self, memory, first: chunk * ATTENTION_CHUNK, padded };
                for tile in (0..queries).step_by(TILE) {
                    match queries - tile {
                        1 => chunk.attend::<V, E, 1>(tile),
                        2 => chunk.attend::<V, E, 2>(tile),
                        3 => chunk.attend::<V, E, 3>(tile),
                        _ => chunk.attend::<V, E, TILE>(tile),
                    }
                }
            }
            if let Sink::Rows { out, stride } = self.sink {
                for i in 0..queries {
                    let head = self.kv_head * self.group() + i % self.group();
                    let out = out.add(self.row(i) * stride + head * head_dim);
                    let sum = memory.state.add(2 * i + 1).read();
                    finish::<V>(memory.total.add(i * padded), sum, out, head_dim);
                }
            }
        }
    }
}

/// out = total / sum
#[inline(always)]
unsafe fn finish<V: Vector>(total: *const f32, sum: f32, out: *mut f32, head_dim: usize) {
    let whole = head_dim / V::LANES * V::LANES;
    // SAFETY: total is padded to whole vectors, out holds head_dim.
    unsafe {
        for d in (0..whole).step_by(V::LANES) {
            V::load(total.add(d)).div(V::splat(sum)).store(out.add(d));
        }
        if whole < head_dim {
            V::load(total.add(whole)).div(V::splat(sum)).store_first(out.add(whole), head_dim - whole);
        }
    }
}

/// Running values before the first chunk.
#[inline(always)]
unsafe fn begin(state: *mut f32, total: *mut f32, padded: usize) {
    // SAFETY: state holds a maximum and a sum, total a padded head.
    unsafe {
        state.write(f32::NEG_INFINITY);
        state.add(1).write(0.0);
        total.write_bytes(0, padded);
    }
}

/// Merges one chunk's maximum, sum and values into the running ones.
#[inline(always)]
unsafe fn merge<V: Vector>(m: f32, l: f32, o: *const f32, state: *mut f32, total: *mut f32, padded: usize) {
    // SAFETY: state holds a maximum and a sum, o and total a padded head.
    unsafe {
        let (big_m, big_l) = (state.read(), state.add(1).read());
        let merged = ingle_graph::reference::max(big_m, m);
        let (a, b) = (math::exp(big_m - merged), math::exp(m - merged));
        state.write(merged);
        state.add(1).write(l.fma(b, big_l * a));
        for d in (0..padded).step_by(V::LANES) {
            let rescaled = V::load(total.add(d)).mul(V::splat(a));
            V::load(o.add(d)).fma(V::splat(b), rescaled).store(total.add(d));
        }
    }
}

impl Chunk<'_> {
    /// The chunk for queries `tile..tile + N` of the block.
    #[inline(always)]
    unsafe fn attend<V: Vector, E: Element, const N: usize>(&self, tile: usize) {
        let Memory { q, p, o, total, state } = self.memory;
        let keys: [Range<usize>; N] = std::array::from_fn(|i| self.block.keys(tile + i, self.first));
        // Those with nothing to look at here (others of the tile have) are skipped.
        let wanted = |keys: &Range<usize>| !keys.is_empty();
        let from = keys.iter().filter(|k| wanted(k)).map(|k| k.start).min();
        let to = keys.iter().filter(|k| wanted(k)).map(|k| k.end).max();
        let (Some(from), Some(to)) = (from, to) else { return };
        // SAFETY: the scratch holds the block's queries, pages those of the chunk.
        unsafe {
            let (q, p, o) =
                (q.add(tile * self.padded), p.add(tile * ATTENTION_CHUNK), o.add(tile * self.padded));
            for page in (from / PAGE..to.div_ceil(PAGE)).map(|page| page * PAGE) {
                let block = self.block.page(self.first + page);
                let block = block.add(self.block.layout.key_offset(self.block.kv_head));
                for at in (0..PAGE).step_by(V::LANES) {
                    self.scores::<V, E, N>(block, at, q, p.add(page + at));
                }
            }
            let mut outcome = [(0.0, 0.0); N];
            for i in 0..N {
                if wanted(&keys[i]) {
                    outcome[i] = softmax::<V>(p.add(i * ATTENTION_CHUNK), &keys[i]);
                }
            }
            o.write_bytes(0, N * self.padded);
            // Positions that all look at are read once for all; the ragged ends, in order, for each alone.
            let start = keys.iter().map(|k| k.start).max().unwrap_or(0);
            let end = keys.iter().map(|k| k.end).min().unwrap_or(0).max(start);
            for i in 0..N {
                let (p, o) = (p.add(i * ATTENTION_CHUNK), o.add(i * self.padded));
                self.values::<V, E, 1>(keys[i].start..keys[i].end.min(start), p, o);
            }
            self.values::<V, E, N>(start..end, p, o);
            for i in 0..N {
                let (p, o) = (p.add(i * ATTENTION_CHUNK), o.add(i * self.padded));
                self.values::<V, E, 1>(end.max(keys[i].start)..keys[i].end, p, o);
            }
            for i in 0..N {
                if !wanted(&keys[i]) {
                    continue;
                }
                let ((m, l), o, query) = (outcome[i], o.add(i * self.padded), tile + i);
                match self.block.sink {
                    Sink::Rows { .. } => {
                        let (state, total) = (state.add(2 * query), total.add(query * self.padded));
                        merge::<V>(m, l, o, state, total, self.padded);
                    }
                    Sink::Partial { out, stride } => {
                        let out = out.add(query * stride);
                        out.write(m);
                        out.add(1).write(l);
                        o.copy_to_nonoverlapping(out.add(MAX_LANES), self.padded);
                    }
                }
            }
        }
    }

    /// Scores of `N` queries with keys `at..at + LANES` of a page: scaled, capped, written to `out` of each query.
    #[inline(always)]
    unsafe fn scores<V: Vector, E: Element, const N: usize>(
        &self,
        block: *const u8,
        at: usize,
        q: *const f32,
        out: *mut f32,
    ) {
        let spec = self.block.spec;
        let mut walk = Walk {
            block,
            layout: self.block.layout,
            at,
            q,
            padded: self.padded,
            row: 0,
            whole: spec.head_dim / ACCUMULATORS,
            rest: spec.head_dim % ACCUMULATORS,
        };
        // SAFETY: the walk reads each of the head's rows of keys once, and as many elements of each query.
        unsafe {
            let mut parts = [[V::splat(0.0); N]; 4];
            for (i, part) in parts.iter_mut().enumerate() {
                *part = walk.eight::<V, E, N>(8 * i);
            }
            let [a, b, c, d] = parts;
            let sums = add(add(a, b), add(c, d));
            for i in 0..N {
                let mut s = sums[i].mul(V::splat(spec.scale));
                if let Some(cap) = spec.softcap {
                    let cap = V::splat(cap);
                    s = cap.mul(math::tanh(s.div(cap)));
                }
                s.store(out.add(i * ATTENTION_CHUNK));
            }
        }
    }

    /// Adds weighted values at positions `keys` of the chunk to `o` of `N` queries, in order.
    #[inline(always)]
    unsafe fn values<V: Vector, E: Element, const N: usize>(
        &self,
        keys: Range<usize>,
        p: *const f32,
        o: *mut f32,
    ) {
        let mut from = keys.start;
        // SAFETY: p and o hold N queries, the page its positions and the padded head.
        unsafe {
            while from < keys.end {
                let to = keys.end.min((from / PAGE + 1) * PAGE);
                let block = self.block.page(self.first + from);
                let block = block.add(self.block.layout.value_offset(self.block.kv_head));
                let mut d = 0;
                while d + COLUMNS * V::LANES <= self.padded {
                    self.columns::<V, E, N, COLUMNS>(block, from..to, p, o, d);
                    d += COLUMNS * V::LANES;
                }
                while d < self.padded {
                    self.columns::<V, E, N, 1>(block, from..to, p, o, d);
                    d += V::LANES;
                }
                from = to;
            }
        }
    }

    /// The same for `C` vectors of dims from `d` on and positions of one page.
    #[inline(always)]
    unsafe fn columns<V: Vector, E: Element, const N: usize, const C: usize>(
        &self,
        block: *const u8,
        keys: Range<usize>,
        p: *const f32,
        o: *mut f32,
        d: usize,
    ) {
        // SAFETY: as in `values`.
        unsafe {
            let mut sums = [[V::splat(0.0); C]; N];
            for i in 0..N {
                for c in 0..C {
                    sums[i][c] = V::load(o.add(i * self.padded + d + c * V::LANES));
                }
            }
            for key in keys {
                let mut values = [V::splat(0.0); C];
                for c in 0..C {
                    values[c] = E::value(block, self.block.layout, key % PAGE, d + c * V::LANES);
                }
                for i in 0..N {
                    let p = V::splat(p.add(i * ATTENTION_CHUNK + key).read());
                    for c in 0..C {
                        sums[i][c] = p.fma(values[c], sums[i][c]);
                    }
                }
            }
            for i in 0..N {
                for c in 0..C {
                    sums[i][c].store(o.add(i * self.padded + d + c * V::LANES));
                }
            }
        }
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
    layout: &'a PageLayout,
    at: usize,
    q: *const f32,
    padded: usize,
    row: usize,
    /// Dims of every accumulator.
    whole: usize,
    /// Accumulators that have one more.
    rest: usize,
}

impl Walk<'_> {
    /// Sum of eight accumulators that the tree adds first, from leaf `step` on.
    #[inline(always)]
    unsafe fn eight<V: Vector, E: Element, const N: usize>(&mut self, step: usize) -> [V; N] {
        // SAFETY: the caller's.
        unsafe {
            let a = self.four::<V, E, N>(step);
            let b = self.four::<V, E, N>(step + 4);
            add(a, b)
        }
    }

    #[inline(always)]
    unsafe fn four<V: Vector, E: Element, const N: usize>(&mut self, step: usize) -> [V; N] {
        // SAFETY: the caller's.
        unsafe {
            let a = self.two::<V, E, N>(step);
            let b = self.two::<V, E, N>(step + 2);
            add(a, b)
        }
    }

    #[inline(always)]
    unsafe fn two<V: Vector, E: Element, const N: usize>(&mut self, step: usize) -> [V; N] {
        // SAFETY: the caller's.
        unsafe {
            let a = self.one::<V, E, N>(step);
            let b = self.one::<V, E, N>(step + 1);
            add(a, b)
        }
    }

    /// One accumulator: an FMA chain from +0 over its dims, which are 32 apart.
    #[inline(always)]
    unsafe fn one<V: Vector, E: Element, const N: usize>(&mut self, step: usize) -> [V; N] {
        let mut sum = [V::splat(0.0); N];
        let dims = self.whole + usize::from(self.rest > 0 && leaf(step) < self.rest);
        for unit in 0..dims {
            // SAFETY: rows below head_dim, in the block and in each padded query.
            unsafe {
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

/// Turns the scores of a chunk into weights, +0 where `keys` does not reach in the pages it touches, and returns
/// their maximum and the sum of the weights.
#[inline(always)]
unsafe fn softmax<V: Vector>(p: *mut f32, keys: &Range<usize>) -> (f32, f32) {
    let (from, to) = (keys.start / PAGE * PAGE, keys.end.next_multiple_of(PAGE));
    let (start, end) = (V::splat(keys.start as f32), V::splat(keys.end as f32));
    let mut sums = [0.0f32; ACCUMULATORS];
    // SAFETY: p holds the chunk, of which the pages are whole; sums are whole vectors.
    unsafe {
        let mut max = V::splat(f32::NEG_INFINITY);
        let mut number = max.le(max);
        for j in (from..to).step_by(V::LANES) {
            let at = V::ramp().add(V::splat(j as f32));
            let inside = V::both(start.le(at), at.lt(end));
            let s = V::select(inside, V::load(p.add(j)), V::splat(f32::NEG_INFINITY));
            number = V::both(number, s.le(V::splat(f32::INFINITY)));
            max = max.max(s);
        }
        // NaN wins, as in every maximum of the contract.
        let m = if V::count(number) == V::LANES { max.largest() } else { f32::NAN };
        // Accumulator j % 32 takes the weights at j, j + 32, ... in order.
        for lane in (0..ACCUMULATORS).step_by(V::LANES) {
            let mut sum = V::splat(0.0);
            for j in (from + lane..to).step_by(ACCUMULATORS) {
                let at = V::ramp().add(V::splat(j as f32));
                let inside = V::both(start.le(at), at.lt(end));
                let weight = math::exp(V::load(p.add(j)).sub(V::splat(m)));
                let weight = V::select(inside, weight, V::splat(0.0));
                weight.store(p.add(j));
                sum = sum.add(weight);
            }
            sum.store(sums.as_mut_ptr().add(lane));
        }
        (m, tree::<V>(sums.as_mut_ptr(), ACCUMULATORS))
    }
}

/// Merges the partial results of one row in order and writes the finished heads.
pub struct Merge<'a> {
    /// Shape and rules.
    pub spec: &'a AttentionSpec,
    /// `[heads][1 + chunks]` of [`partial_len`] f32: room for the totals, then the row's partial results.
    pub partials: *mut f32,
    /// f32 between two heads.
    pub stride: usize,
    /// Chunks of the row.
    pub chunks: usize,
    /// `heads * head_dim` f32.
    pub out: *mut f32,
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let (head_dim, padded) = (self.spec.head_dim, padded(self.spec.head_dim));
        // SAFETY: the fields' own promise.
        unsafe {
            for head in 0..self.spec.heads {
                let state = self.partials.add(head * self.stride);
                let total = state.add(MAX_LANES);
                begin(state, total, padded);
                for chunk in 1..=self.chunks {
                    let partial = state.add(chunk * partial_len(head_dim));
                    let (m, l, o) = (partial.read(), partial.add(1).read(), partial.add(MAX_LANES));
                    merge::<V>(m, l, o, state, total, padded);
                }
                finish::<V>(total, state.add(1).read(), self.out.add(head * head_dim), head_dim);
            }
        }
    }
}
