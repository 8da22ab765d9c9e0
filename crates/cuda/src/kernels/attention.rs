//! Softmax attention over pages, in `f32x32`.
//!
//! Many rows: a block walks the chunks of its row and head. Few: each chunk is a block, and the parts are merged in order.
//! Both give the same bits.

use ingle_graph::{ATTENTION_CHUNK, AttentionSpec, KvType};

use super::kv::Pools;
use super::{Issue, Source};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::{Error, Result};

const PARAMS: &[Param] = &[Memory, U32, U32, U32, U32, U32, F32, F32, Memory, Memory, Memory, Memory];

const F32_WALK: Entry = Entry { name: "attend_f32", params: PARAMS };
const F16_WALK: Entry = Entry { name: "attend_f16", params: PARAMS };
const BF16_WALK: Entry = Entry { name: "attend_bf16", params: PARAMS };
const Q8_0_WALK: Entry = Entry { name: "attend_q8_0", params: PARAMS };
const F32_PARTS: Entry = Entry { name: "attend_parts_f32", params: PARAMS };
const F16_PARTS: Entry = Entry { name: "attend_parts_f16", params: PARAMS };
const BF16_PARTS: Entry = Entry { name: "attend_parts_bf16", params: PARAMS };
const Q8_0_PARTS: Entry = Entry { name: "attend_parts_q8_0", params: PARAMS };
const MERGE: Entry = Entry { name: "attend_merge", params: &[Memory, U32, U32, U32, U32, Memory, Memory] };

/// The file.
pub const SOURCE: Source = Source {
    name: "attention",
    text: include_str!("attention.cu"),
    entries: &[F32_WALK, F16_WALK, BF16_WALK, Q8_0_WALK, F32_PARTS, F16_PARTS, BF16_PARTS, Q8_0_PARTS, MERGE],
};

/// Rows up to which each chunk is a block of its own.
const ROWS_FEW: usize = 16;

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

fn parts(kind: KvType) -> Entry {
    match kind {
        KvType::F32 => F32_PARTS,
        KvType::F16 => F16_PARTS,
        KvType::BF16 => BF16_PARTS,
        KvType::Q8_0 => Q8_0_PARTS,
    }
}

/// Chunks that a row of at most `context` positions may look at.
fn chunks(spec: &AttentionSpec, context: usize) -> usize {
    // A window touches one chunk more than it fills.
    let seen = spec.window.map_or(context, |window| window.saturating_add(ATTENTION_CHUNK).min(context));
    seen.div_ceil(ATTENTION_CHUNK)
}

/// Bytes of the parts of a bucket's rows; none where a block walks all chunks.
pub fn parts_bytes(spec: &AttentionSpec, rows: usize, context: usize) -> usize {
    let all = rows * spec.heads * chunks(spec, context) * (2 + spec.head_dim) * size_of::<f32>();
    if rows <= ROWS_FEW { all } else { 0 }
}

/// The launches for a bucket of `rows`: q and y `[T, heads * head_dim]`, `room` of [`parts_bytes`].
///
/// # Errors
/// Heads of more than 256 dims.
pub fn issues<'a>(
    step: Span<'a>,
    spec: &AttentionSpec,
    kind: KvType,
    pools: Pools<'a>,
    [rows, context]: [usize; 2],
    [q, y, room]: [Span<'a>; 3],
) -> Result<Vec<Issue<'a>>> {
    if spec.head_dim > HEAD_MAX {
        return Err(Error::Refused(format!("heads of {} dims: the kernels take {HEAD_MAX}", spec.head_dim)));
    }
    let sizes = [pools.group as usize, spec.heads, spec.kv_heads, spec.head_dim, spec.window.unwrap_or(0)];
    let [group, heads, kv_heads, head_dim, window] = sizes.map(|size| Arg::U32(size as u32));
    let common = |to: Span<'a>| {
        let (scale, softcap) = (Arg::F32(spec.scale), Arg::F32(spec.softcap.unwrap_or(0.0)));
        let [step, keys, values, q, to] = [step, pools.keys, pools.values, q, to].map(Arg::Memory);
        vec![step, group, heads, kv_heads, head_dim, window, scale, softcap, keys, values, q, to]
    };
    let shape = |z: usize| Launch {
        grid: [rows as u32, spec.heads as u32, z as u32],
        ..Launch::new([1, 1], ATTENTION_CHUNK as u32)
    };
    if rows > ROWS_FEW {
        return Ok(vec![Issue { entry: walk(kind), shape: shape(1), arguments: common(y) }]);
    }
    let chunks = chunks(spec, context);
    let merge = vec![
        Arg::Memory(step),
        heads,
        head_dim,
        window,
        Arg::U32(chunks as u32),
        Arg::Memory(room),
        Arg::Memory(y),
    ];
    Ok(vec![
        Issue { entry: parts(kind), shape: shape(chunks), arguments: common(room) },
        Issue { entry: MERGE, shape: shape(1), arguments: merge },
    ])
}
