//! Rotary embedding and the write of keys and values into pages.
//!
//! A pool is `[page][head]` blocks, one pool for the keys and one for the values of a layer. A block holds the elements of
//! one head at 32 positions, `[position][dim]`, and in `q8_0` after them the f16 scales, `[position][unit of 32]`.

use ingle_graph::op::RopeStyle;
use ingle_graph::program::KvLayer;
use ingle_graph::reference::rope_entry;
use ingle_graph::{KvType, PAGE, RopeSpec};

use super::Source;
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};

/// Rotation alone.
pub const ROPE: Entry = Entry { name: "rope", params: &[Memory, U32, U32, U32, Memory, Memory, Memory] };

const STORE: &[Param] = &[Memory, U32, U32, U32, Memory, Memory, Memory, Memory, Memory];
const ROPE_STORE: &[Param] = &[
    Memory, U32, U32, U32, U32, U32, U32, U32, Memory, // step, group, cells, sizes, rotation
    Memory, Memory, Memory, Memory, F32, Memory,
    F32, // q, k, v, norms of q and of k with their epsilons
    Memory, Memory, Memory, Memory, // y, keys, values, saturated
];

const KV_STORE_F32: Entry = Entry { name: "kv_store_f32", params: STORE };
const KV_STORE_F16: Entry = Entry { name: "kv_store_f16", params: STORE };
const KV_STORE_BF16: Entry = Entry { name: "kv_store_bf16", params: STORE };
const KV_STORE_Q8_0: Entry = Entry { name: "kv_store_q8_0", params: STORE };
const ROPE_STORE_F32: Entry = Entry { name: "rope_store_f32", params: ROPE_STORE };
const ROPE_STORE_F16: Entry = Entry { name: "rope_store_f16", params: ROPE_STORE };
const ROPE_STORE_BF16: Entry = Entry { name: "rope_store_bf16", params: ROPE_STORE };
const ROPE_STORE_Q8_0: Entry = Entry { name: "rope_store_q8_0", params: ROPE_STORE };

/// The file.
pub const SOURCE: Source = Source {
    name: "kv",
    text: include_str!("kv.cu"),
    entries: &[
        ROPE,
        KV_STORE_F32,
        KV_STORE_F16,
        KV_STORE_BF16,
        KV_STORE_Q8_0,
        ROPE_STORE_F32,
        ROPE_STORE_F16,
        ROPE_STORE_BF16,
        ROPE_STORE_Q8_0,
    ],
};

/// The kernel that writes keys and values of this type.
pub fn store_kernel(kind: KvType) -> Entry {
    match kind {
        KvType::F32 => KV_STORE_F32,
        KvType::F16 => KV_STORE_F16,
        KvType::BF16 => KV_STORE_BF16,
        KvType::Q8_0 => KV_STORE_Q8_0,
    }
}

/// The kernel that rotates queries and keys, and writes keys and values of this type.
pub fn rope_store_kernel(kind: KvType) -> Entry {
    match kind {
        KvType::F32 => ROPE_STORE_F32,
        KvType::F16 => ROPE_STORE_F16,
        KvType::BF16 => ROPE_STORE_BF16,
        KvType::Q8_0 => ROPE_STORE_Q8_0,
    }
}

/// Bytes of one head in a page.
pub fn head_bytes(kind: KvType, head_dim: usize) -> usize {
    PAGE * kind.bytes(head_dim)
}

/// Bytes of a page of keys, or of values.
pub fn page_bytes(layer: &KvLayer, kind: KvType) -> usize {
    layer.heads * head_bytes(kind, layer.head_dim)
}

/// Cosines and sines of all positions below `context`: `[context][2][pairs]`.
pub fn rope_table(spec: &RopeSpec, context: usize) -> Vec<f32> {
    let mut table = Vec::with_capacity(context * 2 * spec.inv_freq.len());
    for position in 0..context as u32 {
        table.extend(spec.inv_freq.iter().map(|&freq| rope_entry(spec, position, freq).0));
        table.extend(spec.inv_freq.iter().map(|&freq| rope_entry(spec, position, freq).1));
    }
    table
}

/// Threads of a block: a head's dims, in whole warps.
fn threads(head_dim: u32) -> u32 {
    head_dim.next_multiple_of(32).clamp(32, 256)
}

/// Shape of [`ROPE`].
pub fn rope_shape(rows: u32, heads: u32, head_dim: u32) -> Launch {
    Launch::new([rows, heads], threads(head_dim / 2))
}

/// Shape of a store.
pub fn store_shape(rows: u32, layer: &KvLayer) -> Launch {
    Launch { grid: [rows, layer.heads as u32, 2], ..Launch::new([1, 1], threads(layer.head_dim as u32)) }
}

/// Shape of a rotation with a store.
pub fn rope_store_shape(rows: u32, heads: u32, layer: &KvLayer) -> Launch {
    let head_dim = layer.head_dim as u32;
    let threads = head_dim.next_power_of_two().clamp(32, 256);
    let shape = Launch::new([rows, heads + 2 * layer.heads as u32], threads);
    Launch { shared_bytes: head_dim * size_of::<f32>() as u32, ..shape }
}

/// A rotary embedding on the device.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// What [`rope_table`] made.
    pub table: Span<'a>,
    /// Pairs of a head.
    pub pairs: u32,
    /// Pairing.
    pub style: RopeStyle,
}

impl<'a> Rope<'a> {
    fn arguments(&self) -> [Arg<'a>; 3] {
        let style = match self.style {
            RopeStyle::Half => 0,
            RopeStyle::Interleaved => 1,
        };
        [Arg::U32(self.pairs), Arg::U32(style), Arg::Memory(self.table)]
    }
}

/// Pools of a layer on the device.
#[derive(Clone, Copy, Debug)]
pub struct Pools<'a> {
    /// Its KV group.
    pub group: u32,
    /// Cells of each pool.
    pub cells: u32,
    /// Keys.
    pub keys: Span<'a>,
    /// Values.
    pub values: Span<'a>,
    /// A 64-bit count of elements that were too large for their type.
    pub saturated: Span<'a>,
}

/// Arguments of [`ROPE`]: x, y `[T, heads * head_dim]`.
pub fn rope<'a>(step: Span<'a>, head_dim: u32, rope: Rope<'a>, x: Span<'a>, y: Span<'a>) -> [Arg<'a>; 7] {
    let [pairs, style, table] = rope.arguments();
    let [step, x, y] = [step, x, y].map(Arg::Memory);
    [step, Arg::U32(head_dim), pairs, style, table, x, y]
}

/// Arguments of a store: k, v `[T, heads * head_dim]`.
pub fn store<'a>(step: Span<'a>, pools: Pools<'a>, head_dim: u32, k: Span<'a>, v: Span<'a>) -> [Arg<'a>; 9] {
    let [group, cells, head_dim] = [pools.group, pools.cells, head_dim].map(Arg::U32);
    let memory = [step, k, v, pools.keys, pools.values, pools.saturated];
    let [step, k, v, keys, values, saturated] = memory.map(Arg::Memory);
    [step, group, cells, head_dim, k, v, keys, values, saturated]
}

/// A norm of each head: weights `[head_dim]`, and its epsilon.
pub type HeadNorm<'a> = Option<(Span<'a>, f32)>;

/// Arguments of a rotation with a store: q and y `[T, heads * head_dim]`, k and v `[T, kv_heads * head_dim]`; q and k become
/// their norms first, where they have one.
pub fn rope_store<'a>(
    step: Span<'a>,
    pools: Pools<'a>,
    [heads, kv_heads, head_dim]: [u32; 3],
    rope: Rope<'a>,
    [q, k, v]: [Span<'a>; 3],
    norms: [HeadNorm<'a>; 2],
    y: Span<'a>,
) -> Vec<Arg<'a>> {
    let sizes = [pools.group, pools.cells, heads, kv_heads, head_dim];
    let norm = |norm: HeadNorm<'a>| {
        let (weights, eps) = norm.unzip();
        [super::optional(weights), Arg::F32(eps.unwrap_or(0.0))]
    };
    let mut arguments = vec![Arg::Memory(step)];
    arguments.extend(sizes.map(Arg::U32));
    arguments.extend(rope.arguments());
    arguments.extend([q, k, v].map(Arg::Memory));
    arguments.extend(norms.into_iter().flat_map(norm));
    arguments.extend([y, pools.keys, pools.values, pools.saturated].map(Arg::Memory));
    arguments
}
