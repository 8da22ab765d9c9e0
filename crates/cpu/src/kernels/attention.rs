//! Softmax attention over pages (NUMERICS.md section 3).
//!
//! A [`Block`] is some rows of one sequence and the query heads that share one head of keys and values: its queries. It
//! is walked chunk by chunk of 256 positions: scores of all its queries, softmax, weighted values, and then either the
//! merge into running totals, or the chunk's partial result stored for a later merge in order ([`Merge`]). Which of the
//! two, and which rows share a block, cannot change a bit.
//!
//! The products of `f32x32` run on tiles of queries. Where a block has several, keys and values are widened to f32 page by
//! page, once for all of them, into memory that stays in the first cache. Those of `amx3` run on matrix tiles ([`tiles`]).

mod products;
mod softmax;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::marker::PhantomData;
use std::ops::Range;

use ingle_graph::program::first_visible;
use ingle_graph::{ATTENTION_CHUNK, AttentionSpec, FloatArithmetic, Inputs, KvType, PAGE};

use super::kv::{F16, F32, Pages, Plain};
use crate::memory::Lines;
use crate::simd::{Isa, Kernel, MAX_LANES, Vector};
use products::{Ahead, COLUMNS, Scores, TILE, VALUE_STEPS, Values, score_steps};
pub use softmax::Merge;
use softmax::{Stats, finish, merge, rescale, soften};

/// Queries a block holds, at least: rows are added to it while they fit.
pub fn queries(float: FloatArithmetic) -> usize {
    match float {
        // Keys and values are split into terms for each block anew.
        FloatArithmetic::Amx3 => 128,
        _ => 64,
    }
}

/// Positions of values that are widened at a time.
const SPAN: usize = 2 * PAGE;

/// f32 between the largest scores of two queries, lane by lane.
const MAX_STRIDE: usize = MAX_LANES;

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

/// A worker's memory for one block.
#[derive(Default)]
pub struct Scratch {
    lines: Lines,
    /// For each query, the positions of a chunk it may look at, relative to the chunk.
    keys: Vec<Range<usize>>,
}

impl Scratch {
    /// Makes room for blocks of `queries` queries.
    pub fn reserve(&mut self, float: FloatArithmetic, queries: usize, head_dim: usize) {
        let (_, floats) = Memory::new(std::ptr::null_mut(), float, queries, head_dim);
        self.lines.reserve(floats * size_of::<f32>());
        if self.keys.len() < queries {
            self.keys.resize(queries, 0..0);
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
    /// Arithmetic of the products.
    pub float: FloatArithmetic,
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
    /// What the worker probably reads after them, to be asked for in time: row, head of keys and values, chunk.
    pub next: Option<(usize, usize, usize)>,
    /// Where the result goes.
    pub sink: Sink,
}

/// Pointers into [`Scratch`], each to whole lines.
struct Memory {
    /// A page of keys `[head_dim][PAGE]`, or some dims of values `[SPAN][COLUMNS]`; in `amx3` their terms.
    wide: *mut f32,
    /// `[queries][padded]`, dims in key order; in `amx3` their terms.
    q: *mut f32,
    /// In `amx3` tiles of the chunk's sums, else nothing.
    sums: *mut f32,
    /// `[queries][padded]` of the chunk.
    o: *mut f32,
    /// `[queries][padded]`, running.
    total: *mut f32,
    /// `[queries][ATTENTION_CHUNK]`: scores, then weights; in `amx3` in tiles.
    p: *mut f32,
    /// `[queries][MAX_STRIDE]`: largest scores of the chunk, lane by lane; in `amx3` nothing.
    max: *mut f32,
    /// `[queries]` each, of the chunk and running.
    chunk: Stats,
    running: Stats,
    /// `[queries]` each: factors of the running values and of the chunk's.
    old: *mut f32,
    new: *mut f32,
}

impl Memory {
    /// The parts from `base` on, and how many f32 they take.
    fn new(base: *mut f32, float: FloatArithmetic, queries: usize, head_dim: usize) -> (Self, usize) {
        let mut floats = 0;
        let mut take = |n: usize| {
            let at = base.wrapping_add(floats);
            floats += n.next_multiple_of(MAX_LANES);
            at
        };
        let padded = padded(head_dim);
        let (queries, [wide, q, sums, max]) = match float {
            #[cfg(target_arch = "x86_64")]
            FloatArithmetic::Amx3 => {
                let [terms, query, sums] = tiles::lens(head_dim);
                (tiles::rows(queries), [terms, query, sums, 0])
            }
            _ => (queries, [(PAGE * head_dim).max(SPAN * COLUMNS), padded, 0, MAX_STRIDE]),
        };
        let memory = Self {
            wide: take(wide),
            q: take(queries * q),
            sums: take(queries * sums),
            o: take(queries * padded),
            total: take(queries * padded),
            p: take(queries * ATTENTION_CHUNK),
            max: take(queries * max),
            chunk: Stats { max: take(queries), sum: take(queries) },
            running: Stats { max: take(queries), sum: take(queries) },
            old: take(queries),
            new: take(queries),
        };
        (memory, floats)
    }
}

/// One chunk of a block.
struct Chunk<'a> {
    block: &'a Block<'a>,
    memory: &'a Memory,
    /// For each query, the positions it may look at, relative to the chunk.
    keys: &'a [Range<usize>],
    /// The layer's part of each page that any query may look at.
    pages: [*const u8; ATTENTION_CHUNK / PAGE],
    /// Two pages of keys that are read after this chunk.
    next: Option<[*const u8; 2]>,
    padded: usize,
}

impl Block<'_> {
    /// The first two pages of keys that are read after a chunk of the block, as far as that is known.
    fn upcoming(&self, chunk: usize) -> Option<[*const u8; 2]> {
        let same = (chunk + 1 < self.chunks.end).then_some((self.rows.start, self.kv_head, chunk + 1));
        let (row, kv_head, chunk) = same.or(self.next)?;
        let allowed = allowed(self.spec, self.inputs.positions[row] as usize);
        let first = allowed.start.max(chunk * ATTENTION_CHUNK);
        if first >= allowed.end {
            return None;
        }
        let pages = [first, (first + PAGE).min(allowed.end - 1)];
        Some(pages.map(|at| {
            let page = self.inputs.kv[self.pages.group].page(self.inputs.sequences[row], at);
            // SAFETY: `Inputs::check` bounds the pages of positions that a row of the step may look at by the pool.
            let page = unsafe { self.pages.page(page) };
            page.wrapping_add(self.pages.layout.key_offset(kv_head)).cast_const()
        }))
    }

    fn group(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    /// Queries: rows times heads.
    fn queries(&self) -> usize {
        self.rows.len() * self.group()
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
    pub fn run(&self, isa: Isa, scratch: &mut Scratch) {
        let (head_dim, padded) = (self.spec.head_dim, padded(self.spec.head_dim));
        let queries = self.queries();
        scratch.reserve(self.float, queries, head_dim);
        let (memory, _) = Memory::new(scratch.lines.bytes(0).cast(), self.float, queries, head_dim);
        let keys = &mut scratch.keys[..queries];
        // SAFETY: `reserve` made room for all parts; q holds the rows and heads of the block, the sink too.
        unsafe {
            let q = |i| self.q.add(self.offset(i, self.spec.heads * head_dim));
            match self.float {
                #[cfg(target_arch = "x86_64")]
                FloatArithmetic::Amx3 => tiles::split_queries(&memory, queries, head_dim, q),
                _ => {
                    for i in 0..queries {
                        let (from, to) = (q(i), memory.q.add(i * padded));
                        for (at, &dim) in self.pages.layout.order.iter().enumerate() {
                            to.add(at).write(from.add(dim as usize).read());
                        }
                    }
                }
            }
            for i in 0..queries {
                memory.running.max.add(i).write(f32::NEG_INFINITY);
                memory.running.sum.add(i).write(0.0);
            }
            memory.total.write_bytes(0, queries * padded);
            #[cfg(target_arch = "x86_64")]
            let _tiles = (self.float == FloatArithmetic::Amx3).then(|| tiles::configure(queries));
            for chunk in self.chunks.clone() {
                let first = chunk * ATTENTION_CHUNK;
                for (i, keys) in keys.iter_mut().enumerate() {
                    let allowed = allowed(self.spec, self.inputs.positions[self.row(i)] as usize);
                    *keys = clip(&allowed, &(first..first + ATTENTION_CHUNK));
                }
                self.walk(isa, &memory, keys, first);
            }
            if let Sink::Rows { out, stride } = self.sink {
                isa.run(Rows { block: self, memory: &memory, out, stride });
            }
        }
    }

    /// Scores, softmax, weighted values of the chunk from position `first` on, of which `keys` are what each query may
    /// look at; then the merge, or the partial result.
    ///
    /// # Safety
    /// The memory is that of the block's queries; in `amx3` tiles are configured and the queries split.
    unsafe fn walk(&self, isa: Isa, memory: &Memory, keys: &[Range<usize>], first: usize) {
        // Queries with nothing to look at in this chunk, where others of the block have something, skip it.
        let wanted = || keys.iter().filter(|keys| !keys.is_empty());
        let (Some(from), Some(to)) = (wanted().map(|k| k.start).min(), wanted().map(|k| k.end).max()) else {
            return;
        };
        let mut pages = [std::ptr::null(); ATTENTION_CHUNK / PAGE];
        let tables = &self.inputs.kv[self.pages.group];
        let sequence = self.inputs.sequences[self.rows.start];
        for i in from / PAGE..to.div_ceil(PAGE) {
            // SAFETY: `Inputs::check` bounds the pages of positions that a row of the step may look at by the pool.
            pages[i] = unsafe { self.pages.page(tables.page(sequence, first + i * PAGE)) };
        }
        let next = self.upcoming(first / ATTENTION_CHUNK);
        let chunk = &Chunk { block: self, memory, keys, pages, next, padded: padded(self.spec.head_dim) };
        let (pages, keys) = (from / PAGE * PAGE..to.next_multiple_of(PAGE), from..to);
        #[cfg(target_arch = "x86_64")]
        if self.float == FloatArithmetic::Amx3 {
            // SAFETY: the caller's.
            unsafe { tiles::Walk::new(chunk, keys).run() };
            return isa.run(Put { chunk });
        }
        // One tile reads straight from pages of the plain types.
        let kind = Some(self.pages.layout.kind).filter(|_| chunk.keys.len() <= TILE);
        match kind {
            Some(KvType::F16) => isa.run(ScorePages::<F16, true>::new(chunk, pages)),
            Some(KvType::F32) => isa.run(ScorePages::<F32, true>::new(chunk, pages)),
            _ => isa.run(ScorePages::<F32, false>::new(chunk, pages)),
        }
        isa.run(Softmax { chunk });
        match kind {
            Some(KvType::F16) => isa.run(ValuePages::<F16, true>::new(chunk, keys)),
            Some(KvType::F32) => isa.run(ValuePages::<F32, true>::new(chunk, keys)),
            _ => isa.run(ValuePages::<F32, false>::new(chunk, keys)),
        }
        isa.run(Put { chunk });
    }
}

/// The part of `keys` that is in `span`, relative to it.
#[inline(always)]
fn clip(keys: &Range<usize>, span: &Range<usize>) -> Range<usize> {
    keys.start.clamp(span.start, span.end) - span.start..keys.end.clamp(span.start, span.end) - span.start
}

/// Calls `run` of one of the two products with the number of queries of a tile as a constant.
macro_rules! sized {
    ($product:ident, $n:expr, $ahead:ident, $($argument:expr),*) => {
        match $n {
            1 => $product.run::<V, 1, $ahead>($($argument),*),
            2 => $product.run::<V, 2, $ahead>($($argument),*),
            3 => $product.run::<V, 3, $ahead>($($argument),*),
            _ => $product.run::<V, TILE, $ahead>($($argument),*),
        }
    };
}

impl Chunk<'_> {
    /// Whether all queries may look at all of `span`.
    fn open(&self, span: &Range<usize>) -> bool {
        self.keys.iter().all(|keys| keys.start <= span.start && span.end <= keys.end)
    }

    /// Queries that may look at anything here.
    fn queries(&self) -> impl Iterator<Item = usize> {
        self.keys.iter().enumerate().filter(|(_, keys)| !keys.is_empty()).map(|(i, _)| i)
    }

    /// Keys of the block's head in the page that holds position `at` of the chunk.
    #[inline(always)]
    fn page_keys(&self, at: usize) -> *const u8 {
        self.pages[at / PAGE].wrapping_add(self.block.pages.layout.key_offset(self.block.kv_head))
    }

    /// Values of the block's head in the page that holds position `at` of the chunk.
    #[inline(always)]
    fn page_values(&self, at: usize) -> *const u8 {
        self.pages[at / PAGE].wrapping_add(self.block.pages.layout.value_offset(self.block.kv_head))
    }
}

/// Scores of all queries with the keys of some pages of a chunk, which are of type `E`, or were widened to it unless
/// they are read `DIRECT`ly, by one tile.
struct ScorePages<'a, E, const DIRECT: bool> {
    chunk: &'a Chunk<'a>,
    pages: Range<usize>,
    element: PhantomData<E>,
}

impl<'a, E, const DIRECT: bool> ScorePages<'a, E, DIRECT> {
    fn new(chunk: &'a Chunk<'a>, pages: Range<usize>) -> Self {
        Self { chunk, pages, element: PhantomData }
    }
}

impl<E: Plain, const DIRECT: bool> Kernel for ScorePages<'_, E, DIRECT> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { chunk, pages, element } = self;
        let Chunk { memory, padded, .. } = *chunk;
        let layout = chunk.block.pages.layout;
        // SAFETY: pages of the chunk; memory of the block.
        unsafe {
            for i in 0..chunk.keys.len() {
                for lane in (0..MAX_STRIDE).step_by(V::LANES) {
                    V::splat(f32::NEG_INFINITY).store(memory.max.add(i * MAX_STRIDE + lane));
                }
            }
            for page in pages.clone().step_by(PAGE) {
                let mut block = chunk.page_keys(page);
                // The values of the first page follow the keys of the last.
                let (next, bytes) = if page + PAGE == pages.end {
                    (chunk.page_values(pages.start), layout.value_bytes)
                } else {
                    (chunk.page_keys(page + PAGE), layout.key_bytes)
                };
                let ahead = Ahead::new(next, bytes, score_steps::<V>(layout));
                if !DIRECT {
                    layout.widen_keys::<V>(block, memory.wide);
                    block = memory.wide.cast();
                }
                let span = page..page + PAGE;
                let open = chunk.open(&span);
                for tile in (0..chunk.keys.len()).step_by(TILE) {
                    let keys = &chunk.keys[tile..chunk.keys.len().min(tile + TILE)];
                    let mut inside = [const { 0..0 }; TILE];
                    if !open {
                        for (inside, keys) in inside.iter_mut().zip(keys) {
                            *inside = clip(keys, &span);
                        }
                        if inside.iter().all(|inside| inside.is_empty()) {
                            continue;
                        }
                    }
                    let inside = Some(&inside[..keys.len()]).filter(|_| !open);
                    let scores = Scores {
                        element,
                        spec: chunk.block.spec,
                        layout,
                        keys: block,
                        q: memory.q.add(tile * padded),
                        padded,
                        out: memory.p.add(tile * ATTENTION_CHUNK + page),
                        max: memory.max.add(tile * MAX_STRIDE),
                    };
                    sized!(scores, keys.len(), DIRECT, inside, ahead);
                }
            }
        }
    }
}

/// Weights from the scores of a chunk.
struct Softmax<'a> {
    chunk: &'a Chunk<'a>,
}

impl Kernel for Softmax<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Chunk { memory, keys, .. } = *self.chunk;
        // SAFETY: memory of the block, with scores of all pages that a query looks at.
        unsafe {
            for (i, keys) in keys.iter().enumerate() {
                let (p, max) = (memory.p.add(i * ATTENTION_CHUNK), memory.max.add(i * MAX_STRIDE));
                let (m, l) = if keys.is_empty() { (0.0, 0.0) } else { soften::<V>(p, keys, max) };
                memory.chunk.max.add(i).write(m);
                memory.chunk.sum.add(i).write(l);
            }
        }
    }
}

/// Weighted values of some positions of a chunk for all queries; types as in [`ScorePages`].
struct ValuePages<'a, E, const DIRECT: bool> {
    chunk: &'a Chunk<'a>,
    keys: Range<usize>,
    element: PhantomData<E>,
}

impl<'a, E, const DIRECT: bool> ValuePages<'a, E, DIRECT> {
    fn new(chunk: &'a Chunk<'a>, keys: Range<usize>) -> Self {
        Self { chunk, keys, element: PhantomData }
    }
}

impl<E: Plain, const DIRECT: bool> Kernel for ValuePages<'_, E, DIRECT> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { chunk, keys, element } = self;
        let Chunk { memory, padded, .. } = *chunk;
        let layout = chunk.block.pages.layout;
        // SAFETY: pages of the chunk; memory of the block.
        unsafe {
            memory.o.write_bytes(0, chunk.keys.len() * padded);
            // Pages are apart in the pool, but not where they are widened.
            let span = if DIRECT { PAGE } else { SPAN };
            for first in (keys.start / span * span..keys.end).step_by(span) {
                let span = first..first + span;
                let open = chunk.open(&span);
                for d in (0..padded).step_by(COLUMNS) {
                    let width = COLUMNS.min(padded - d);
                    let (values, stride, ahead) = if DIRECT {
                        let block = chunk.page_values(first);
                        let more = span.end < keys.end;
                        let next = if more {
                            chunk.page_values(span.end)
                        } else {
                            chunk.next.map_or(block, |[first, _]| first)
                        };
                        let bytes = layout.value_bytes * width / padded;
                        let ahead = Ahead::new(next.wrapping_add(E::BYTES * PAGE * d), bytes, VALUE_STEPS);
                        (block.add(E::BYTES * d), padded, ahead)
                    } else {
                        for page in span.clone().step_by(PAGE) {
                            let wanted = clip(&keys, &(page..page + PAGE));
                            if !wanted.is_empty() {
                                let block = chunk.page_values(page);
                                let out = memory.wide.add((page - first) * COLUMNS);
                                layout.widen_values::<V>(block, wanted, d..d + width, out, COLUMNS);
                            }
                        }
                        (memory.wide.cast_const().cast(), COLUMNS, Ahead::NOTHING)
                    };
                    let values = |i: usize| Values {
                        element,
                        values,
                        stride,
                        width,
                        p: memory.p.add(i * ATTENTION_CHUNK + first),
                        o: memory.o.add(i * padded + d),
                        padded,
                    };
                    for tile in (0..chunk.keys.len()).step_by(TILE) {
                        let all = &chunk.keys[tile..chunk.keys.len().min(tile + TILE)];
                        let tile_values = values(tile);
                        if open {
                            sized!(tile_values, all.len(), DIRECT, 0..span.len(), ahead);
                            continue;
                        }
                        // What all queries of the tile look at in the span, and around it what only some do.
                        let parts = || all.iter().map(|keys| clip(keys, &span));
                        let start = parts().map(|k| k.start).max().unwrap_or(0);
                        let end = parts().map(|k| k.end).min().unwrap_or(0).max(start);
                        for (i, keys) in parts().enumerate().filter(|(_, keys)| keys.start < start) {
                            values(tile + i).run::<V, 1, false>(keys.start..keys.end.min(start), ahead);
                        }
                        if start < end {
                            sized!(tile_values, all.len(), DIRECT, start..end, ahead);
                        }
                        for (i, keys) in parts().enumerate().filter(|(_, keys)| keys.end > end) {
                            values(tile + i).run::<V, 1, false>(keys.start.max(end)..keys.end, ahead);
                        }
                    }
                }
            }
        }
    }
}

/// Merges a chunk into the running values, or writes its partial results.
struct Put<'a> {
    chunk: &'a Chunk<'a>,
}

impl Kernel for Put<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let chunk = self.chunk;
        let Chunk { memory, keys, padded, .. } = *chunk;
        // SAFETY: memory of the block; the sink's.
        unsafe {
            match chunk.block.sink {
                Sink::Rows { .. } => {
                    for i in (0..keys.len()).step_by(V::LANES) {
                        let (old, new) = (memory.old.add(i), memory.new.add(i));
                        merge::<V>(memory.chunk.at(i), memory.running.at(i), old, new);
                    }
                    for i in chunk.queries() {
                        let (old, new) = (memory.old.add(i).read(), memory.new.add(i).read());
                        let (o, total) = (memory.o.add(i * padded), memory.total.add(i * padded));
                        rescale::<V>(total, old, o, new, padded);
                    }
                }
                Sink::Partial { out, stride } => {
                    for i in chunk.queries() {
                        let out = out.add(i * stride);
                        out.write(memory.chunk.max.add(i).read());
                        out.add(1).write(memory.chunk.sum.add(i).read());
                        memory.o.add(i * padded).copy_to_nonoverlapping(out.add(MAX_LANES), padded);
                    }
                }
            }
        }
    }
}

/// Writes the finished rows.
struct Rows<'a> {
    block: &'a Block<'a>,
    memory: &'a Memory,
    out: *mut f32,
    stride: usize,
}

impl Kernel for Rows<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { block, memory, out, stride } = self;
        let head_dim = block.spec.head_dim;
        for i in 0..block.queries() {
            // SAFETY: memory of the block; the sink's.
            unsafe {
                let (total, sum) = (memory.total.add(i * padded(head_dim)), memory.running.sum.add(i).read());
                finish::<V>(total, sum, out.add(block.offset(i, stride)), head_dim);
            }
        }
    }
}
