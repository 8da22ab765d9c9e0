//! Softmax attention over pages: in `f32x32` here, in `mma` in `attention_mma.rs`.
//!
//! Many rows: a block walks the chunks of its row and head. Few: blocks share the chunks of a row, heads with the same keys
//! are one block's, and the block that ends last merges the chunks in order. Both give the same bits.

use ingle_graph::{
    ATTENTION_CHUNK, AttentionSpec, Bucket, FloatArithmetic, Graph, KvType, Numerics, PAGE, mma,
};

use super::kv::{Pools, head_bytes};
use super::{Issue, Source, attention_mma};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::weights::Limits;
use crate::{Error, Result};

const PARAMS: &[Param] = &[Memory, U32, U32, U32, U32, U32, F32, F32, Memory, Memory, Memory, Memory];
const FEW: &[Param] =
    &[Memory, U32, U32, U32, U32, U32, F32, F32, Memory, Memory, Memory, Memory, U32, U32, Memory, Memory];

const F32_WALK: Entry = Entry { name: "attend_f32", params: PARAMS };
const F16_WALK: Entry = Entry { name: "attend_f16", params: PARAMS };
const BF16_WALK: Entry = Entry { name: "attend_bf16", params: PARAMS };
const Q8_0_WALK: Entry = Entry { name: "attend_q8_0", params: PARAMS };
const F32_FEW: Entry = Entry { name: "attend_few_f32", params: FEW };
const F16_FEW: Entry = Entry { name: "attend_few_f16", params: FEW };
const BF16_FEW: Entry = Entry { name: "attend_few_bf16", params: FEW };
const Q8_0_FEW: Entry = Entry { name: "attend_few_q8_0", params: FEW };

/// The file.
pub const SOURCE: Source = Source {
    name: "attention",
    text: include_str!("attention.cu"),
    entries: &[F32_WALK, F16_WALK, BF16_WALK, Q8_0_WALK, F32_FEW, F16_FEW, BF16_FEW, Q8_0_FEW],
};

/// Rows up to which blocks share the chunks of a row, and most heads of a block then (attention.cu).
const ROWS_FEW: usize = 16;
const HEADS: usize = 4;

/// Tiles in shared memory (attention.cu).
const TILES: usize = 3;

/// Blocks of heads at most.
const HEAD_BLOCKS_MAX: usize = 1024;

/// Bytes of the counters that [`issue`] is given: zeros, and so they stay.
pub const COUNTER_BYTES: usize = ROWS_FEW * HEAD_BLOCKS_MAX * size_of::<u32>();

/// Largest head.
const HEAD_MAX: usize = ATTENTION_CHUNK;

fn walk(kind: KvType) -> Entry {
    match kind {
        KvType::F32 => F32_WALK,
        KvType::F16 => F16_WALK,
        KvType::BF16 => BF16_WALK,
        KvType::Q8_0 => Q8_0_WALK,
    }
}

fn few(kind: KvType) -> Entry {
    match kind {
        KvType::F32 => F32_FEW,
        KvType::F16 => F16_FEW,
        KvType::BF16 => BF16_FEW,
        KvType::Q8_0 => Q8_0_FEW,
    }
}

/// The float arithmetic that a mode stands for where a GPU has all of a model: `mma`, if tensor cores take its heads and keys.
pub fn float_for(numerics: Numerics, graph: &Graph, kind: KvType) -> FloatArithmetic {
    match numerics == Numerics::Fast && mma::serves_all(graph, kind) {
        true => FloatArithmetic::Mma,
        false => FloatArithmetic::F32x32,
    }
}

/// Chunks that a row of at most `context` positions may look at.
pub fn chunks(spec: &AttentionSpec, context: usize) -> usize {
    // A window touches one chunk more than it fills.
    let seen = spec.window.map_or(context, |window| window.saturating_add(ATTENTION_CHUNK).min(context));
    seen.div_ceil(ATTENTION_CHUNK)
}

/// Whether rows are worked on each for itself: few, or all of different sequences.
pub fn is_apart(bucket: Bucket) -> bool {
    bucket.t <= ROWS_FEW || bucket.t == bucket.s
}

/// Blocks that share the chunks of a row: all blocks together are two for each multiprocessor at most, which take turns at what
/// is more. One where there are many rows.
pub fn sides(rows: usize, blocks: usize, chunks: usize, limits: Limits) -> usize {
    match rows > ROWS_FEW {
        true => 1,
        false => (2 * limits.multiprocessors as usize).div_ceil(rows * blocks).clamp(1, chunks),
    }
}

/// Bytes of the parts of a bucket's rows; none where a block walks all chunks.
pub fn parts_bytes(spec: &AttentionSpec, rows: usize, context: usize) -> usize {
    let all = rows * spec.heads * chunks(spec, context) * (2 + spec.head_dim) * size_of::<f32>();
    if rows <= ROWS_FEW { all } else { 0 }
}

/// Bytes of shared memory for `tile` positions: keys, or values, with rows apart so that no two lanes meet in a bank.
fn tile_bytes(spec: &AttentionSpec, kind: KvType, tile: usize) -> usize {
    let elements = match kind {
        KvType::Q8_0 => spec.head_dim,
        KvType::F16 | KvType::BF16 => 2 * spec.head_dim,
        KvType::F32 => 4 * spec.head_dim,
    };
    let scales = head_bytes(kind, spec.head_dim) / PAGE - elements;
    tile * (scales + elements + if elements.is_multiple_of(16) { 16 } else { 0 })
}

/// Positions that lie in shared memory at a time, three times: as many as leave room for a block of the kernel behind.
fn tile(spec: &AttentionSpec, kind: KvType, limits: Limits) -> usize {
    // What a block has besides: queries, weights, and 1 KiB of the system's.
    let have = (limits.shared_bytes / 2).saturating_sub(10 << 10);
    if TILES * tile_bytes(spec, kind, 64) <= have { 64 } else { PAGE }
}

/// Where attention works: parts of chunks, and counters.
#[derive(Clone, Copy)]
pub struct Room<'a> {
    /// [`parts_bytes`].
    pub parts: Span<'a>,
    /// [`COUNTER_BYTES`].
    pub counters: Span<'a>,
}

/// What attends to what.
pub struct Call<'a> {
    /// The step's data.
    pub step: Span<'a>,
    /// Heads and rules.
    pub spec: AttentionSpec,
    /// Keys and values.
    pub pools: Pools<'a>,
    /// Their type.
    pub kind: KvType,
    /// Most positions of a sequence.
    pub context: usize,
    /// Queries `[T, heads * head_dim]`.
    pub q: Span<'a>,
    /// Results, of the same shape.
    pub y: Span<'a>,
}

impl<'a> Call<'a> {
    /// The first arguments of every kernel.
    pub(super) fn arguments(&self) -> Vec<Arg<'a>> {
        let Self { spec, pools, .. } = self;
        let sizes =
            [pools.group as usize, spec.heads, spec.kv_heads, spec.head_dim, spec.window.unwrap_or(0)];
        let mut arguments = vec![Arg::Memory(self.step)];
        arguments.extend(sizes.map(|size| Arg::U32(size as u32)));
        arguments.extend([Arg::F32(spec.scale), Arg::F32(spec.softcap.unwrap_or(0.0))]);
        arguments.extend([pools.keys, pools.values, self.q, self.y].map(Arg::Memory));
        arguments
    }
}

/// The launch for a bucket in `mma` or `f32x32`.
///
/// # Errors
/// Heads of more than 256 dims, or more of them than there are counters; in `mma` what tensor cores do not take.
pub fn issue<'a>(
    call: &Call<'a>,
    float: FloatArithmetic,
    bucket: Bucket,
    room: Room<'a>,
    limits: Limits,
) -> Result<Issue<'a>> {
    let (spec, kind, rows) = (&call.spec, call.kind, bucket.t);
    if spec.head_dim > HEAD_MAX {
        return Err(Error::Refused(format!("heads of {} dims: the kernels take {HEAD_MAX}", spec.head_dim)));
    }
    // Threads are pairs of dims.
    let heads = (2 * ATTENTION_CHUNK / spec.head_dim).clamp(1, HEADS);
    let blocks = spec.kv_heads * (spec.heads / spec.kv_heads).div_ceil(heads);
    if blocks.max(attention_mma::head_blocks(spec)) > HEAD_BLOCKS_MAX {
        let what =
            format!("{} heads, {} of keys: the kernels take {HEAD_BLOCKS_MAX}", spec.heads, spec.kv_heads);
        return Err(Error::Refused(what));
    }
    if float == FloatArithmetic::Mma {
        return attention_mma::issue(call, bucket, room, limits);
    }
    let mut arguments = call.arguments();
    let threads = ATTENTION_CHUNK as u32;
    if !is_apart(bucket) || spec.head_dim % 2 == 1 {
        let shape = Launch::new([rows as u32, spec.heads as u32], threads);
        return Ok(Issue { entry: walk(kind), shape, arguments });
    }
    let (chunks, tile) = (chunks(spec, call.context), tile(spec, kind, limits));
    arguments.extend([Arg::U32(chunks as u32), Arg::U32(tile as u32)]);
    arguments.extend([room.parts, room.counters].map(Arg::Memory));
    let side = sides(rows, blocks, chunks, limits);
    let shape = Launch {
        grid: [rows as u32, blocks as u32, side as u32],
        shared_bytes: (TILES * tile_bytes(spec, kind, tile)) as u32,
        ..Launch::new([1, 1], threads)
    };
    Ok(Issue { entry: few(kind), shape, arguments })
}
