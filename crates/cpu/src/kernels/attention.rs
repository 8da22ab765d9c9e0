//! Softmax attention over pages (NUMERICS.md section 3).
//!
//! A [`Block`] is some rows of one sequence and the query heads that share one head of keys and values. It is walked
//! chunk by chunk of 256 positions: scores of all its queries, softmax, weighted values, and then either the merge into
//! running totals, or the chunk's partial result stored for a later merge in order ([`Merge`]). Which of the two, and
//! which rows share a block, cannot change a bit.

mod products;

use std::ops::Range;

use ingle_graph::math::{self, Lanes};
use ingle_graph::program::first_visible;
use ingle_graph::{ATTENTION_CHUNK, AttentionSpec, Inputs, KvInputs, PAGE};

use super::kv::{ACCUMULATORS, Pages};
use super::tree;
use crate::simd::{Isa, Kernel, MAX_LANES, Vector};
use products::{Scores, TILE, Values};

/// Queries a block holds, at least: rows are added to it while they fit.
pub const QUERIES: usize = 32;

/// Positions a row at `position` may look at.
pub fn allowed(spec: &AttentionSpec, position: usize) -> Range<usize> {
    first_visible(spec.window, position)..position + 1
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
    /// The layer's pages.
    pub pages: Pages<'a>,
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

/// Pointers into [`Scratch`].
#[derive(Clone, Copy)]
struct Memory {
    /// `[queries][padded]`, dims in key order.
    q: *mut f32,
    /// `[queries][padded]` of the chunk.
    o: *mut f32,
    /// `[queries][padded]`, running.
    total: *mut f32,
    /// `[queries][ATTENTION_CHUNK]`: scores, then weights.
    p: *mut f32,
    /// `[queries][2]`: running maximum and sum.
    state: *mut f32,
}

/// One chunk of a block.
pub struct Chunk<'a> {
    spec: &'a AttentionSpec,
    pages: Pages<'a>,
    inputs: &'a Inputs,
    /// Page tables of the layer's group.
    tables: &'a KvInputs,
    sequence: u32,
    kv_head: usize,
    /// First position.
    first: usize,
    /// Elements between queries in memory of this module.
    padded: usize,
}

impl Chunk<'_> {
    /// Keys of the block's head in the page that holds position `at` of the chunk.
    fn keys(&self, at: usize) -> *const u8 {
        // SAFETY: `Inputs::check` bounds the pages of positions that a row of the step may look at by the pool.
        unsafe { self.page(at).add(self.pages.layout.key_offset(self.kv_head)) }
    }

    /// Values of the block's head in the page that holds position `at` of the chunk.
    fn values(&self, at: usize) -> *const u8 {
        // SAFETY: as above.
        unsafe { self.page(at).add(self.pages.layout.value_offset(self.kv_head)) }
    }

    fn page(&self, at: usize) -> *const u8 {
        let page = self.tables.page(self.sequence, self.first + at);
        // SAFETY: as above.
        unsafe { self.pages.page(page) }
    }

    /// Positions of the chunk that a row may look at, relative to it.
    fn allowed(&self, row: usize) -> Range<usize> {
        let allowed = allowed(self.spec, self.inputs.positions[row] as usize);
        let clip = |position: usize| position.clamp(self.first, self.first + ATTENTION_CHUNK) - self.first;
        clip(allowed.start)..clip(allowed.end)
    }
}

impl Block<'_> {
    fn group(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    /// Row of query `i`.
    fn row(&self, i: usize) -> usize {
        self.rows.start + i / self.group()
    }

    /// Offset of query `i` in `[T, stride]`.
    fn offset(&self, i: usize, stride: usize) -> usize {
        let head = self.kv_head * self.group() + i % self.group();
        self.row(i) * stride + head * self.spec.head_dim
    }

    /// Walks the chunks.
    pub fn run(self, isa: Isa) {
        let (head_dim, padded) = (self.spec.head_dim, padded(self.spec.head_dim));
        let queries = self.rows.len() * self.group();
        self.scratch.reserve(queries, head_dim);
        let base = self.scratch.0.as_mut_ptr().cast::<f32>();
        // SAFETY: `reserve` made room for all parts; q holds the rows and heads of the block, the sink too.
        unsafe {
            let memory = Memory {
                q: base,
                o: base.add(queries * padded),
                total: base.add(2 * queries * padded),
                p: base.add(3 * queries * padded),
                state: base.add(queries * (3 * padded + ATTENTION_CHUNK)),
            };
            for i in 0..queries {
                let q = self.q.add(self.offset(i, self.spec.heads * head_dim));
                for (to, &dim) in self.pages.layout.order.iter().enumerate() {
                    memory.q.add(i * padded + to).write(q.add(dim as usize).read());
                }
                begin(memory.state.add(2 * i), memory.total.add(i * padded), padded);
            }
            for chunk in self.chunks.clone() {
                let chunk = Chunk {
                    spec: self.spec,
                    pages: self.pages,
                    inputs: self.inputs,
                    tables: &self.inputs.kv[self.pages.group],
                    sequence: self.inputs.sequences[self.rows.start],
                    kv_head: self.kv_head,
                    first: chunk * ATTENTION_CHUNK,
                    padded,
                };
                for tile in (0..queries).step_by(TILE) {
                    self.attend(isa, &chunk, &memory, tile..queries.min(tile + TILE));
                }
            }
            if let Sink::Rows { out, stride } = self.sink {
                for i in 0..queries {
                    isa.run(Finish {
                        total: memory.total.add(i * padded),
                        sum: memory.state.add(2 * i + 1).read(),
                        out: out.add(self.offset(i, stride)),
                        head_dim,
                    });
                }
            }
        }
    }

    /// One chunk for at most [`TILE`] queries.
    ///
    /// # Safety
    /// The memory is that of this block's queries.
    unsafe fn attend(&self, isa: Isa, chunk: &Chunk<'_>, memory: &Memory, tile: Range<usize>) {
        let (n, padded, kind) = (tile.len(), chunk.padded, self.pages.layout.kind);
        let mut keys = [const { 0..0 }; TILE];
        for (keys, query) in keys.iter_mut().zip(tile.clone()) {
            *keys = chunk.allowed(self.row(query));
        }
        let keys = &keys[..n];
        // Queries with nothing to look at in this chunk, where others of the tile have something, skip it.
        let wanted = || keys.iter().filter(|keys| !keys.is_empty());
        let (Some(from), Some(to)) = (wanted().map(|k| k.start).min(), wanted().map(|k| k.end).max()) else {
            return;
        };
        // SAFETY: offsets of these queries; pages of the chunk.
        unsafe {
            let q = memory.q.add(tile.start * padded);
            let p = memory.p.add(tile.start * ATTENTION_CHUNK);
            let o = memory.o.add(tile.start * padded);
            products::run(Scores { chunk, from, to, q, out: p }, isa, kind, n);
            let mut outcome = [(0.0, 0.0); TILE];
            for (i, keys) in keys.iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
                let (p, outcome) = (p.add(i * ATTENTION_CHUNK), &mut outcome[i]);
                isa.run(Softmax { p, keys: keys.clone(), outcome });
            }
            o.write_bytes(0, n * padded);
            // Positions that all look at are read once for all; the ragged ends, in order, for each query alone.
            let start = keys.iter().map(|k| k.start).max().unwrap_or(0);
            let end = keys.iter().map(|k| k.end).min().unwrap_or(0).max(start);
            let alone = |i: usize, from: usize, to: usize| {
                if from < to {
                    let (p, o) = (p.add(i * ATTENTION_CHUNK), o.add(i * padded));
                    products::run(Values { chunk, from, to, p, o }, isa, kind, 1);
                }
            };
            for (i, keys) in keys.iter().enumerate() {
                alone(i, keys.start, keys.end.min(start));
            }
            if start < end {
                products::run(Values { chunk, from: start, to: end, p, o }, isa, kind, n);
            }
            for (i, keys) in keys.iter().enumerate() {
                alone(i, keys.start.max(end), keys.end);
            }
            for (i, _) in keys.iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
                let ((m, l), o, query) = (outcome[i], o.add(i * padded), tile.start + i);
                match self.sink {
                    Sink::Rows { .. } => {
                        let (state, total) = (memory.state.add(2 * query), memory.total.add(query * padded));
                        isa.run(MergeOne { m, l, o, state, total, padded });
                    }
                    Sink::Partial { out, stride } => {
                        let out = out.add(query * stride);
                        out.write(m);
                        out.add(1).write(l);
                        o.copy_to_nonoverlapping(out.add(MAX_LANES), padded);
                    }
                }
            }
        }
    }
}

/// Running values before the first chunk.
unsafe fn begin(state: *mut f32, total: *mut f32, padded: usize) {
    // SAFETY: state holds a maximum and a sum, total a padded head.
    unsafe {
        state.write(f32::NEG_INFINITY);
        state.add(1).write(0.0);
        total.write_bytes(0, padded);
    }
}

/// Merges one chunk's maximum, sum and values into the running ones.
struct MergeOne {
    m: f32,
    l: f32,
    /// A padded head.
    o: *const f32,
    /// A maximum and a sum.
    state: *mut f32,
    /// A padded head.
    total: *mut f32,
    padded: usize,
}

impl Kernel for MergeOne {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { m, l, o, state, total, padded } = self;
        // SAFETY: the fields' own promise.
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
}

/// out = total / sum
struct Finish {
    /// A padded head.
    total: *const f32,
    sum: f32,
    /// A head.
    out: *mut f32,
    head_dim: usize,
}

impl Kernel for Finish {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { total, sum, out, head_dim } = self;
        let whole = head_dim / V::LANES * V::LANES;
        // SAFETY: the fields' own promise.
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
}

/// Turns the scores of a chunk into weights, +0 where `keys` does not reach in the pages it touches; the outcome is
/// their maximum and the sum of the weights.
struct Softmax<'a> {
    /// `[ATTENTION_CHUNK]`
    p: *mut f32,
    keys: Range<usize>,
    outcome: &'a mut (f32, f32),
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { p, keys, outcome } = self;
        let (from, to) = (keys.start / PAGE * PAGE, keys.end.next_multiple_of(PAGE));
        let (start, end) = (V::splat(keys.start as f32), V::splat(keys.end as f32));
        let mut sums = [0.0f32; ACCUMULATORS];
        // SAFETY: p holds the chunk, of which the pages are whole; sums are whole vectors.
        unsafe {
            let mut max = V::splat(f32::NEG_INFINITY);
            let mut number = max.le(max);
            let mut at = V::ramp().add(V::splat(from as f32));
            for j in (from..to).step_by(V::LANES) {
                let inside = V::both(start.le(at), at.lt(end));
                let s = V::select(inside, V::load(p.add(j)), V::splat(f32::NEG_INFINITY));
                number = V::both(number, s.le(V::splat(f32::INFINITY)));
                max = max.max(s);
                at = at.add(V::splat(V::LANES as f32));
            }
            // NaN wins, as in every maximum of the contract.
            let m = if V::count(number) == V::LANES { max.largest() } else { f32::NAN };
            // Accumulator j % 32 takes the weights at j, j + 32, ... in order.
            for lane in (0..ACCUMULATORS).step_by(V::LANES) {
                let mut sum = V::splat(0.0);
                let mut at = V::ramp().add(V::splat((from + lane) as f32));
                for j in (from + lane..to).step_by(ACCUMULATORS) {
                    let inside = V::both(start.le(at), at.lt(end));
                    let weight = math::exp(V::load(p.add(j)).sub(V::splat(m)));
                    let weight = V::select(inside, weight, V::splat(0.0));
                    weight.store(p.add(j));
                    sum = sum.add(weight);
                    at = at.add(V::splat(ACCUMULATORS as f32));
                }
                sum.store(sums.as_mut_ptr().add(lane));
            }
            *outcome = (m, tree::<V>(sums.as_mut_ptr(), ACCUMULATORS));
        }
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
                    MergeOne { m, l, o, state, total, padded }.run::<V>();
                }
                let (sum, out) = (state.add(1).read(), self.out.add(head * head_dim));
                Finish { total, sum, out, head_dim }.run::<V>();
            }
        }
    }
}
