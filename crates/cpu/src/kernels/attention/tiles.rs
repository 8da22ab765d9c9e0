//! Attention in `amx3`: bf16 matrix tiles, for blocks of any size.
//!
//! Queries are the rows of a tile: those of a generated row, the few heads that share keys, fill only some, and a product
//! takes less time then; a block of prompt rows has many tiles of 16. Keys and values are split into two bf16 terms as
//! they are read, once for all queries of the block. Scores stay in the tiles' own layout, where a page of a query is a
//! row of two tiles: its weights take the same place, as a row of upper and a row of lower terms.
//!
//! A tile that holds a sum is stored just before it is cleared for the next one, four products later: until a store ends
//! its tile is busy. Tile registers keep their contents from one `asm!` to the next, since nothing else uses them.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use ingle_graph::amx3::STEP;
use ingle_graph::math::{self, Lanes};
use ingle_graph::{ATTENTION_CHUNK, KvType, PAGE};

use super::products::within;
use super::{Chunk, Memory, clip};
use crate::kernels::kv::{BF16, Element, F16, F32, PageLayout, Q8_0};
use crate::simd::amx::Tiles;
use crate::simd::avx512::F32x16;
use crate::simd::{Vector, prefetch, prefetch_far};

/// A page is one step of weights and values, and two tiles of keys.
const _: () = assert!(PAGE == STEP && PAGE == 2 * SIDE);

/// Rows of a tile, and f32 of a row.
pub const SIDE: usize = 16;
/// Bytes of a tile, and of its rows.
const TILE: usize = SIDE * ROW;
const ROW: usize = 64;
/// Bytes that memory moves at once.
const LINE: usize = 64;
/// Two tiles: upper terms, then lower.
const PAIR: usize = 2 * TILE;

/// Queries that a block has room for: whole tiles; pairs of them when there are several.
pub fn rows(queries: usize) -> usize {
    if queries <= SIDE { SIDE } else { queries.next_multiple_of(2 * SIDE) }
}

/// Tiles for a block of so many queries.
///
/// # Safety
/// The processor has them.
pub unsafe fn configure(queries: usize) -> Tiles {
    // SAFETY: the caller's.
    unsafe { Tiles::with_rows(queries.min(SIDE)) }
}

/// f32 of the terms of each query.
fn query_len(head_dim: usize) -> usize {
    head_dim.next_multiple_of(STEP)
}

/// f32 of the sums of each query: what the tiles of a pass cover.
fn sums_len(head_dim: usize) -> usize {
    head_dim.next_multiple_of(4 * SIDE)
}

/// f32 of memory: of the terms of keys or values (a page of keys; two tiles of values of a chunk, which is more than the
/// steps of a few queries take); of each query's terms; of its sums.
pub fn lens(head_dim: usize) -> [usize; 3] {
    let query = query_len(head_dim);
    [(PAGE * query).max(ATTENTION_CHUNK * 2 * SIDE), query, sums_len(head_dim)]
}

/// Sixteen f32 of +0.
#[inline(always)]
fn zeros() -> F32x16 {
    F32x16::splat(0.0)
}

/// The terms of sixteen elements and of the sixteen after them in a step, as a row of upper ones and one of lower ones: a
/// pair of a row is an element of each half.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn split(first: F32x16, last: F32x16) -> (__m512i, __m512i) {
    let upper = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
    let bits = |x: F32x16| _mm512_castps_si512(x.0);
    let near = |x| _mm512_and_si512(_mm512_add_epi32(bits(x), _mm512_set1_epi32(0x8000)), upper);
    let (a, b) = (near(first), near(last));
    let lower = |x: F32x16, hi| bits(x.sub(F32x16(_mm512_castsi512_ps(hi))));
    let (c, d) = (lower(first, a), lower(last, b));
    let hi = _mm512_or_si512(_mm512_srli_epi32::<16>(a), b);
    // c or (d and upper)
    let lo = _mm512_ternarylogic_epi32::<0xF8>(_mm512_srli_epi32::<16>(c), d, upper);
    (hi, lo)
}

/// Writes one row of two neighbouring tiles.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put(to: *mut u8, (hi, lo): (__m512i, __m512i)) {
    // SAFETY: the caller's: the row is in the first of two tiles.
    unsafe {
        to.cast::<__m512i>().write(hi);
        to.add(TILE).cast::<__m512i>().write(lo);
    }
}

/// Splits the block's queries: `[tile][step]` pairs of tiles. `q(i)` is the head of query `i`.
///
/// # Safety
/// The processor has tiles; every `q(i)` points to a head; the memory is that of the block.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn split_queries(
    memory: &Memory,
    queries: usize,
    head_dim: usize,
    q: impl Fn(usize) -> *const f32,
) {
    let steps = head_dim.div_ceil(STEP);
    // SAFETY: the caller's; elements of a head, and rows of the terms.
    unsafe {
        let load = |q: *const f32, d: usize| match head_dim.saturating_sub(d) {
            0 => zeros(),
            n if n < SIDE => F32x16::load_first(q.add(d), n),
            _ => F32x16::load(q.add(d)),
        };
        for i in 0..rows(queries) {
            for step in 0..steps {
                let to = memory.q.cast::<u8>().add((i / SIDE * steps + step) * PAIR + i % SIDE * ROW);
                let (a, b) = match i < queries {
                    true => (load(q(i), step * STEP), load(q(i), step * STEP + SIDE)),
                    false => (zeros(), zeros()),
                };
                put(to, split(a, b));
            }
        }
    }
}

/// Calls a function with the element type of these pages, and with whether there are only a few queries.
macro_rules! typed {
    ($kind:expr, $few:expr, $function:ident($($argument:expr),*)) => {
        match $few {
            true => typed!(@ $kind, true, $function($($argument),*)),
            false => typed!(@ $kind, false, $function($($argument),*)),
        }
    };
    (@ $kind:expr, $few:literal, $function:ident($($argument:expr),*)) => {
        match $kind {
            KvType::F16 => $function::<F16, $few>($($argument),*),
            KvType::BF16 => $function::<BF16, $few>($($argument),*),
            KvType::F32 => $function::<F32, $few>($($argument),*),
            KvType::Q8_0 => $function::<Q8_0, $few>($($argument),*),
        }
    };
}

/// Asks for what is read next: with few queries that is soon, and much is under way; with many it is after their products.
#[inline(always)]
fn ask<const FEW: bool>(at: *const u8) {
    if FEW { prefetch_far(at) } else { prefetch(at) }
}

/// Splits a step of the keys of a page: `[keys 0..16, 16..32]` pairs of tiles of `[dim of each half][key][2]`. Asks for the
/// same step of the page at `next` meanwhile.
///
/// # Safety
/// `keys` is the keys of a head in a page of the layout, `to` has room for the terms.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn split_step<E: Element, const FEW: bool>(
    layout: &PageLayout,
    keys: *const u8,
    step: usize,
    to: *mut u8,
    next: *const u8,
) {
    let row_bytes = layout.key_bytes / layout.head_dim;
    let rows = layout.rows.as_ptr();
    let first = step * STEP;
    // SAFETY: the caller's; `rows` has an entry for each dim of the head.
    unsafe {
        let load =
            |dim: usize, at: usize| E::keys::<F32x16>(keys, layout, rows.add(dim).read() as usize, step, at);
        if first + STEP <= layout.head_dim {
            for i in 0..SIDE {
                let dim = first + i;
                ask::<FEW>(next.wrapping_add((first + 2 * i) * row_bytes));
                ask::<FEW>(next.wrapping_add((first + 2 * i + 1) * row_bytes));
                put(to.add(i * ROW), split(load(dim, 0), load(dim + SIDE, 0)));
                put(to.add(PAIR + i * ROW), split(load(dim, SIDE), load(dim + SIDE, SIDE)));
            }
            return;
        }
        let load = |dim, at| if dim < layout.head_dim { load(dim, at) } else { zeros() };
        for (i, dim) in (first..first + SIDE).enumerate() {
            for (at, to) in [(0, to), (SIDE, to.add(PAIR))] {
                put(to.add(i * ROW), split(load(dim, at), load(dim + SIDE, at)));
            }
        }
    }
}

/// Splits the values of some positions of a page, +0 at the others: for each 16 of `dims` a pair of tiles of
/// `[key of each half][dim][2]`. Returns whether all were finite. Asks for the memory at `next` meanwhile.
///
/// # Safety
/// `values` is the values of a head in a page of the layout, positions are inside, `to` has room for the terms.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn split_values<E: Element, const FEW: bool>(
    layout: &PageLayout,
    values: *const u8,
    keys: Range<usize>,
    dims: Range<usize>,
    to: *mut u8,
    next: *const u8,
) -> bool {
    let row_bytes = layout.value_bytes / PAGE;
    let mut largest = _mm512_setzero_si512();
    // SAFETY: the caller's; whole vectors of a padded head.
    unsafe {
        for (part, dim) in dims.step_by(SIDE).enumerate() {
            let to = to.add(part * PAIR);
            let mut pair = |i: usize, a: F32x16, b: F32x16| {
                let (hi, lo) = split(a, b);
                largest = _mm512_max_epu16(largest, _mm512_and_si512(lo, _mm512_set1_epi16(i16::MAX)));
                put(to.add(i * ROW), (hi, lo));
            };
            let load = |at: usize| E::value::<F32x16>(values, layout, at, dim);
            if keys == (0..PAGE) && dim + SIDE <= layout.head_dim {
                for i in 0..SIDE {
                    ask::<FEW>(next.wrapping_add(i * row_bytes + 2 * dim));
                    ask::<FEW>(next.wrapping_add((i + SIDE) * row_bytes + 2 * dim));
                    pair(i, load(i), load(i + SIDE));
                }
                continue;
            }
            let inside = F32x16::ramp().lt(F32x16::splat(layout.head_dim as f32 - dim as f32));
            let load = |at: usize| match keys.contains(&at) && dim < layout.head_dim {
                true => F32x16::select(inside, load(at), zeros()),
                false => zeros(),
            };
            for i in 0..SIDE {
                pair(i, load(i), load(i + SIDE));
            }
        }
    }
    // The exponent of a bf16 that is not finite has all bits set.
    _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7F80)) == 0
}

/// Four products of left tiles 4 and 5 with right tiles 6 and 7, into tiles 0 to 3.
macro_rules! four {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// Loads what the first products of a step of two left and two right tiles need.
macro_rules! upper {
    () => {
        "tileloadd tmm4, [{a} + {row}]
         tileloadd tmm5, [{b} + {row}]
         tileloadd tmm6, [{right} + {row}]
         tileloadd tmm7, [{right} + {row} + 2048]"
    };
}

/// The rest of a step of two left and two right tiles: upper with lower terms, and lower with upper.
macro_rules! lower {
    () => {
        "tileloadd tmm6, [{right} + {row} + 1024]
         tileloadd tmm7, [{right} + {row} + 3072]
         tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7
         tileloadd tmm4, [{a} + {row} + 1024]
         tileloadd tmm5, [{b} + {row} + 1024]
         tileloadd tmm6, [{right} + {row}]
         tileloadd tmm7, [{right} + {row} + 2048]"
    };
}

/// Stores a tile and clears it.
macro_rules! next {
    ($n:literal, $to:literal) => {
        concat!("tilestored [{", $to, "} + {row}], tmm", $n, "\ntilezero tmm", $n)
    };
}

/// Two left tiles and two right ones: sums go to tiles 0 to 3, left by left.
struct Square {
    /// Where the sums in the tiles go.
    out: [*mut u8; 4],
}

impl Square {
    /// Stores the sums before, and begins new ones, for `out`, with one step.
    ///
    /// # Safety
    /// Tiles are configured; `a` and `b` are pairs of tiles, `right` two pairs; `out` are tiles.
    #[inline(always)]
    unsafe fn begin(&mut self, a: *const u8, b: *const u8, right: *const u8, out: [*mut u8; 4]) {
        // SAFETY: the caller's, and that of the call before.
        unsafe {
            asm!(
                upper!(),
                next!("0", "c0"),
                "tdpbf16ps tmm0, tmm4, tmm6",
                next!("1", "c1"),
                "tdpbf16ps tmm1, tmm4, tmm7",
                next!("2", "c2"),
                "tdpbf16ps tmm2, tmm5, tmm6",
                next!("3", "c3"),
                "tdpbf16ps tmm3, tmm5, tmm7",
                lower!(),
                four!(),
                a = in(reg) a,
                b = in(reg) b,
                right = in(reg) right,
                row = in(reg) ROW,
                c0 = in(reg) self.out[0],
                c1 = in(reg) self.out[1],
                c2 = in(reg) self.out[2],
                c3 = in(reg) self.out[3],
                options(nostack, preserves_flags),
            );
        }
        self.out = out;
    }

    /// One more step.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn step(&self, a: *const u8, b: *const u8, right: *const u8) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                upper!(),
                four!(),
                lower!(),
                four!(),
                a = in(reg) a,
                b = in(reg) b,
                right = in(reg) right,
                row = in(reg) ROW,
                options(nostack, preserves_flags, readonly),
            );
        }
    }

    /// Stores the last sums.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    unsafe fn end(self) {
        // SAFETY: the caller's.
        unsafe { store(self.out) }
    }
}

/// Stores tiles 0 to 3.
///
/// # Safety
/// Tiles are configured, and there is room for each.
#[inline(always)]
unsafe fn store(out: [*mut u8; 4]) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilestored [{c0} + {row}], tmm0",
            "tilestored [{c1} + {row}], tmm1",
            "tilestored [{c2} + {row}], tmm2",
            "tilestored [{c3} + {row}], tmm3",
            c0 = in(reg) out[0],
            c1 = in(reg) out[1],
            c2 = in(reg) out[2],
            c3 = in(reg) out[3],
            row = in(reg) ROW,
            options(nostack, preserves_flags),
        );
    }
}

/// Clears tiles 0 to 3.
///
/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn clear() {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, preserves_flags, nomem),
        );
    }
}

/// Products of the left tile `$left` with right tiles from an offset on, into tiles 0 to 3.
macro_rules! row_of_four {
    ($left:literal, $at:literal) => {
        concat!(
            "tileloadd tmm6, [{x} + {row} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm0, ",
            $left,
            ", tmm6\n",
            "tileloadd tmm7, [{x} + {row} + ",
            $at,
            " + 2048]\n",
            "tdpbf16ps tmm1, ",
            $left,
            ", tmm7\n",
            "tileloadd tmm6, [{y} + {row} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm2, ",
            $left,
            ", tmm6\n",
            "tileloadd tmm7, [{y} + {row} + ",
            $at,
            " + 2048]\n",
            "tdpbf16ps tmm3, ",
            $left,
            ", tmm7",
        )
    };
}

/// One step of one left tile with four right ones, two from `x` on and two from `y` on.
///
/// # Safety
/// Tiles are configured; `a` is a pair of tiles, `x` and `y` are two pairs each.
#[inline(always)]
unsafe fn narrow_step(a: *const u8, x: *const u8, y: *const u8) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm5, [{a} + {row} + 1024]",
            row_of_four!("tmm4", "0"),
            row_of_four!("tmm4", "1024"),
            row_of_four!("tmm5", "0"),
            a = in(reg) a,
            x = in(reg) x,
            y = in(reg) y,
            row = in(reg) ROW,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Walks one chunk of a block: scores, weights, weighted values.
pub struct Walk<'a> {
    chunk: &'a Chunk<'a>,
    /// Pages that any query looks at.
    pages: Range<usize>,
    /// Positions that any query looks at.
    keys: Range<usize>,
    /// Tiles of queries.
    tiles: usize,
}

impl<'a> Walk<'a> {
    /// The part of `chunk` at `keys`, which are not none.
    pub fn new(chunk: &'a Chunk<'a>, keys: Range<usize>) -> Self {
        let pages = keys.start / PAGE..keys.end.div_ceil(PAGE);
        Self { chunk, pages, keys, tiles: rows(chunk.keys.len()) / SIDE }
    }

    fn layout(&self) -> &'a PageLayout {
        self.chunk.block.pages.layout
    }

    /// Scores of tile `tile` of queries with the keys of a page, later the terms of their weights: two tiles.
    fn scores(&self, page: usize, tile: usize) -> *mut u8 {
        self.chunk.memory.p.cast::<u8>().wrapping_add((page * self.tiles + tile) * PAIR)
    }

    /// Sums of tile `tile` of queries for 16 dims from `dim` on.
    fn sums(&self, tile: usize, dim: usize) -> *mut u8 {
        let across = sums_len(self.layout().head_dim) / SIDE;
        self.chunk.memory.sums.cast::<u8>().wrapping_add((tile * across + dim / SIDE) * TILE)
    }

    /// Terms of tile `tile` of queries.
    fn queries(&self, tile: usize) -> *const u8 {
        let steps = self.layout().head_dim.div_ceil(STEP);
        self.chunk.memory.q.cast::<u8>().wrapping_add(tile * steps * PAIR).cast_const()
    }

    /// All of it.
    ///
    /// # Safety
    /// Tiles are configured for the block's queries; the memory is that of the block, with its queries split.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn run(&self) {
        // SAFETY: the caller's.
        unsafe {
            if self.tiles == 1 {
                self.score_narrow()
            } else {
                self.score()
            }
            for query in 0..self.chunk.keys.len() {
                self.soften(query);
            }
            let finite = self.values(&self.keys);
            if finite || self.chunk.open(&self.keys) {
                self.settle(0..self.chunk.keys.len());
                return;
            }
            // Values that only some queries may look at are not all finite, and no zero hides them: row by row.
            let group = self.chunk.block.group();
            for first in (0..self.chunk.keys.len()).step_by(group) {
                let keys = &self.chunk.keys[first];
                if !keys.is_empty() {
                    self.values(keys);
                    self.settle(first..first + group);
                }
            }
        }
    }

    /// Splits a step of the keys of a page. Asked for meanwhile is the page `after` it, or where that is none of the
    /// chunk's, values.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn split_step(&self, page: usize, step: usize, to: *mut u8, after: usize) {
        let next = match page + after < self.pages.end {
            true => self.chunk.page_keys((page + after) * PAGE),
            false => self.chunk.page_values((self.pages.start + page % after).min(page) * PAGE),
        };
        let (layout, keys) = (self.layout(), self.chunk.page_keys(page * PAGE));
        // SAFETY: the caller's.
        unsafe { typed!(layout.kind, self.tiles == 1, split_step(layout, keys, step, to, next)) }
    }

    /// Scores of pairs of tiles of queries.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn score(&self) {
        let steps = self.layout().head_dim.div_ceil(STEP);
        let terms = self.chunk.memory.wide.cast::<u8>();
        let out = |page, tile| {
            let (a, b) = (self.scores(page, tile), self.scores(page, tile + 1));
            [a, a.wrapping_add(TILE), b, b.wrapping_add(TILE)]
        };
        // SAFETY: the caller's; what is stored first is overwritten later.
        unsafe {
            let mut square = Square { out: out(self.pages.start, 0) };
            for page in self.pages.clone() {
                for step in 0..steps {
                    self.split_step(page, step, terms.add(step * 2 * PAIR), 1);
                }
                for tile in (0..self.tiles).step_by(2) {
                    let (a, b) = (self.queries(tile), self.queries(tile + 1));
                    square.begin(a, b, terms, out(page, tile));
                    for step in 1..steps {
                        square.step(a.add(step * PAIR), b.add(step * PAIR), terms.add(step * 2 * PAIR));
                    }
                }
            }
            square.end();
        }
    }

    /// Scores of one tile of queries, two pages at a time.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn score_narrow(&self) {
        let steps = self.layout().head_dim.div_ceil(STEP);
        let terms = |step: usize| self.chunk.memory.wide.cast::<u8>().wrapping_add(step % 2 * 4 * PAIR);
        let pairs = self.pages.start / 2..self.pages.end.div_ceil(2);
        let all = pairs.len() * steps;
        // SAFETY: the caller's. Where one of two pages is not looked at, its scores are of whatever was split before, and
        // are not looked at either. A step is split before the one before it is multiplied: tiles then do not wait for
        // terms that were just written, and both stay in the first cache.
        unsafe {
            for at in 0..all + 1 {
                let first = 2 * (pairs.start + at / steps);
                for page in (first..first + 2).filter(|page| at < all && self.pages.contains(page)) {
                    self.split_step(page, at % steps, terms(at).add(page % 2 * 2 * PAIR), 2);
                }
                let Some(before) = at.checked_sub(1) else { continue };
                let (first, step) = (2 * (pairs.start + before / steps), before % steps);
                if step == 0 {
                    clear();
                }
                let right = terms(before);
                narrow_step(self.queries(0).add(step * PAIR), right, right.add(2 * PAIR));
                if step + 1 == steps {
                    let (a, b) = (self.scores(first, 0), self.scores(first + 1, 0));
                    store([a, a.add(TILE), b, b.add(TILE)]);
                }
            }
        }
    }

    /// Weights from the scores of a query, as terms in their place; +0 where it may not look, in all pages of the chunk
    /// that any query looks at. Notes their maximum and sum.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn soften(&self, query: usize) {
        let Chunk { memory, keys, block, .. } = *self.chunk;
        let keys = &keys[query];
        let weights = Weights {
            first: self.scores(0, query / SIDE).wrapping_add(query % SIDE * ROW),
            stride: self.tiles * PAIR,
            keys,
        };
        // SAFETY: the caller's: rows of the scores.
        unsafe {
            let (m, l) = match block.spec.softcap {
                _ if keys.is_empty() => (0.0, 0.0),
                None => weights.soften(block.spec.scale, |s| s),
                Some(cap) => {
                    let cap = F32x16::splat(cap);
                    weights.soften(block.spec.scale, |s| cap.mul(math::tanh(s.div(cap))))
                }
            };
            for page in self.pages.clone() {
                if keys.is_empty() || !weights.pages().contains(&page) {
                    put(weights.row(page), (_mm512_setzero_si512(), _mm512_setzero_si512()));
                }
            }
            memory.chunk.max.add(query).write(m);
            memory.chunk.sum.add(query).write(l);
        }
    }

    /// Asks for part `part` of the keys after this chunk, of as many as there are for each 64 dims `each` of.
    #[inline]
    fn ask(&self, part: usize, each: usize) {
        let Some(pages) = self.chunk.next else { return };
        let lines = self.layout().key_bytes.div_ceil(LINE);
        let parts = each * self.layout().head_dim.div_ceil(4 * SIDE);
        for line in part * lines / parts..(part + 1) * lines / parts {
            pages.iter().for_each(|page| prefetch_far(page.wrapping_add(line * LINE)));
        }
    }

    /// Weighted values of the positions `keys` for all queries; whether the values were finite.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn values(&self, keys: &Range<usize>) -> bool {
        let layout = self.layout();
        let terms = self.chunk.memory.wide.cast::<u8>();
        let pages = keys.start / PAGE..keys.end.div_ceil(PAGE);
        let mut finite = true;
        // SAFETY: the caller's; pages, dims and tiles of the block.
        unsafe {
            let mut split = |page: usize, dims: Range<usize>, to: *mut u8| {
                let values = self.chunk.page_values(page * PAGE);
                // With few queries, the first two were asked for with the last keys.
                let next = if self.tiles == 1 { page + 2 } else { page + 1 };
                let next = if next < pages.end { self.chunk.page_values(next * PAGE) } else { values };
                let keys = clip(keys, &(page * PAGE..(page + 1) * PAGE));
                finite &=
                    typed!(layout.kind, self.tiles == 1, split_values(layout, values, keys, dims, to, next));
            };
            if self.tiles == 1 {
                for dim in (0..layout.head_dim).step_by(4 * SIDE) {
                    clear();
                    let terms = |page: usize| terms.add(page % 2 * 4 * PAIR);
                    for page in pages.start..pages.end + 1 {
                        if page < pages.end {
                            split(page, dim..dim + 4 * SIDE, terms(page));
                            self.ask(dim / (4 * SIDE) * pages.len() + page - pages.start, pages.len());
                        }
                        if page > pages.start {
                            let right = terms(page - 1);
                            narrow_step(self.scores(page - 1, 0), right, right.add(2 * PAIR));
                        }
                    }
                    store([0, 1, 2, 3].map(|i| self.sums(0, dim + i * SIDE)));
                }
                return finite;
            }
            let out = |tile, dim| {
                let (a, b) = (self.sums(tile, dim), self.sums(tile + 1, dim));
                [a, a.add(TILE), b, b.add(TILE)]
            };
            let mut square = Square { out: out(0, 0) };
            for dim in (0..layout.head_dim).step_by(2 * SIDE) {
                for page in pages.clone() {
                    split(page, dim..dim + 2 * SIDE, terms.add((page - pages.start) * 2 * PAIR));
                }
                for tile in (0..self.tiles).step_by(2) {
                    for page in pages.clone() {
                        let (a, b) = (self.scores(page, tile), self.scores(page, tile + 1));
                        let right = terms.add((page - pages.start) * 2 * PAIR);
                        if page == pages.start {
                            square.begin(a, b, right, out(tile, dim));
                        } else {
                            square.step(a, b, right);
                        }
                    }
                }
            }
            square.end();
            finite
        }
    }

    /// Sums of some queries as the merge of chunks wants them, -0 as +0.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn settle(&self, queries: Range<usize>) {
        let padded = self.chunk.padded;
        for query in queries {
            for dim in (0..padded).step_by(SIDE) {
                // SAFETY: the caller's.
                unsafe {
                    let sums = self.sums(query / SIDE, dim).add(query % SIDE * ROW).cast::<f32>();
                    F32x16::load(sums).add(zeros()).store(self.chunk.memory.o.add(query * padded + dim));
                }
            }
        }
    }
}

/// The scores of a query in a chunk, and later their weights.
struct Weights<'a> {
    /// Row of the first of the two tiles of page 0.
    first: *mut u8,
    /// Bytes between pages.
    stride: usize,
    /// Positions that the query may look at, not none.
    keys: &'a Range<usize>,
}

impl Weights<'_> {
    fn row(&self, page: usize) -> *mut u8 {
        self.first.wrapping_add(page * self.stride)
    }

    fn pages(&self) -> Range<usize> {
        self.keys.start / PAGE..self.keys.end.div_ceil(PAGE)
    }

    /// Turns scores, still without scale and cap, into terms of their weights. Their maximum, and the sum of the weights.
    ///
    /// A NaN that a maximum of vectors loses is found again in the sum, and makes all of the row NaN: whatever the maximum
    /// then is, and the weights are.
    ///
    /// # Safety
    /// The rows of the pages in use are scores.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn soften(&self, scale: f32, cap: impl Fn(F32x16) -> F32x16) -> (f32, f32) {
        let scale = F32x16::splat(scale);
        let nothing = F32x16::splat(f32::NEG_INFINITY);
        let mut most = [nothing; 2];
        let mut sums = [zeros(); 2];
        // SAFETY: the caller's; a page's terms take the place of its scores.
        unsafe {
            for page in self.pages() {
                let row = self.row(page).cast::<f32>();
                let other = row.add(TILE / size_of::<f32>());
                let mut a = cap(F32x16::load(row).mul(scale));
                let mut b = cap(F32x16::load(other).mul(scale));
                if self.keys.start > page * PAGE || (page + 1) * PAGE > self.keys.end {
                    a = F32x16::select(within::<F32x16>(self.keys, page * PAGE), a, nothing);
                    b = F32x16::select(within::<F32x16>(self.keys, page * PAGE + SIDE), b, nothing);
                }
                a.store(row);
                b.store(other);
                most = [most[0].max(a), most[1].max(b)];
            }
            let m = most[0].max(most[1]).largest();
            for page in self.pages() {
                let row = self.row(page);
                let a = math::exp(F32x16::load(row.cast()).sub(F32x16::splat(m)));
                let b = math::exp(F32x16::load(row.add(TILE).cast()).sub(F32x16::splat(m)));
                sums = [sums[0].add(a), sums[1].add(b)];
                put(row, split(a, b));
            }
            (m, sums[0].add(sums[1]).sum())
        }
    }
}
