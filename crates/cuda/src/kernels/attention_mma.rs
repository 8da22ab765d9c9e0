//! Softmax attention over pages, in `mma`.
//!
//! Prompts: a block has rows of some tokens and walks the chunks that they may look at. Few rows, and decoding: a block has the
//! heads of one token that share keys, and some of its chunks. Both give the same bits.

use ingle_graph::{AttentionSpec, Bucket, KvType, mma};

use super::attention::{self, Call, Room};
use super::{Issue, Source};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param};
use crate::weights::Limits;
use crate::{Error, Result};

const PROMPT: &[Param] = &[Memory, U32, U32, U32, U32, U32, F32, F32, Memory, Memory, Memory, Memory, U32];
const FEW: &[Param] =
    &[Memory, U32, U32, U32, U32, U32, F32, F32, Memory, Memory, Memory, Memory, U32, U32, Memory, Memory];

/// The kernels of one size of heads: of prompts, and of few rows.
struct Kernels {
    dims: usize,
    prompt: Entry,
    tile: Entry,
    source: Source,
}

macro_rules! kernels {
    ($name:ident, $kind:literal, $size:literal, $dims:literal) => {
        const $name: Kernels = {
            const ENTRIES: &[Entry] = &[
                Entry { name: concat!("attend_prompt_", $kind, "_", $size), params: PROMPT },
                Entry { name: concat!("attend_tile_", $kind, "_", $size), params: FEW },
            ];
            let name = concat!("attention_", $kind, "_", $size);
            let text = include_str!(concat!("attention_", $kind, "_", $size, ".cu"));
            Kernels {
                dims: $dims,
                prompt: ENTRIES[0],
                tile: ENTRIES[1],
                source: Source { name, text, entries: ENTRIES },
            }
        };
    };
}
kernels!(F16_64, "f16", "64", 64);
kernels!(F16_128, "f16", "128", 128);
kernels!(F16_256, "f16", "256", 256);
kernels!(BF16_64, "bf16", "64", 64);
kernels!(BF16_128, "bf16", "128", 128);
kernels!(BF16_256, "bf16", "256", 256);
const OF_F16: [&Kernels; 3] = [&F16_64, &F16_128, &F16_256];
const OF_BF16: [&Kernels; 3] = [&BF16_64, &BF16_128, &BF16_256];

/// The files: one for each type of keys and size of heads, since each takes a while to compile.
pub const SOURCES: [&Source; 6] =
    [&F16_64.source, &F16_128.source, &F16_256.source, &BF16_64.source, &BF16_128.source, &BF16_256.source];

/// Positions of a tile in shared memory (attend_mma.cuh).
const TILE: usize = 64;

/// Rows of a tile of queries, and most heads of a block of few rows.
const ROWS: usize = 16;

/// Tiles that are there at a time.
const SLOTS_PROMPT: [usize; 3] = [4, 3, 2];
const SLOTS_TILE: [usize; 4] = [5, 4, 3, 2];

/// Shared memory that a block takes besides what its launch says, at most: its own, and 1 KiB of the system's.
const BESIDES: usize = 8 << 10;

/// Bytes of a row in shared memory.
fn pitch(dims: usize) -> usize {
    2 * dims + 16
}

/// Blocks of heads of a row.
pub fn head_blocks(spec: &AttentionSpec) -> usize {
    spec.kv_heads * (spec.heads / spec.kv_heads).div_ceil(ROWS)
}

/// The launch for a bucket.
///
/// # Errors
/// Heads or keys that tensor cores do not take, by name.
pub fn issue<'a>(call: &Call<'a>, bucket: Bucket, room: Room<'a>, limits: Limits) -> Result<Issue<'a>> {
    let (spec, kind) = (&call.spec, call.kind);
    if !mma::serves(spec.head_dim, kind) {
        return Err(Error::Refused(format!("attention in mma of heads of {} dims in {kind}", spec.head_dim)));
    }
    let kernels = match kind {
        KvType::BF16 => OF_BF16,
        _ => OF_F16,
    };
    let kernels = kernels.into_iter().find(|kernels| spec.head_dim <= kernels.dims);
    let Kernels { dims, prompt, tile, .. } = kernels.expect("heads that are served have at most 256 dims");
    let (tile_bytes, group) = (TILE * pitch(*dims), spec.heads / spec.kv_heads);
    let mut arguments = call.arguments();
    // From compute capability 10.0 on registers of the kernel of prompts do not suffice for a softcap.
    let uncapped = spec.softcap.is_some() && limits.capability >= (10, 0);
    if attention::is_apart(bucket) || uncapped {
        let side = group.div_ceil(group.div_ceil(ROWS));
        // Queries, and weights of a chunk in 16 and in 32 bits.
        let rest = side * (pitch(*dims) + 6 * ingle_graph::ATTENTION_CHUNK + 16);
        // A block of the kernel behind has room beside it.
        let half = (limits.shared_bytes / 2).saturating_sub(BESIDES + rest);
        let slots = SLOTS_TILE.into_iter().find(|slots| slots * tile_bytes <= half).unwrap_or(2);
        let (blocks, chunks) = (head_blocks(spec), attention::chunks(spec, call.context));
        let sides = attention::sides(bucket.t, blocks, chunks, limits);
        arguments.extend([Arg::U32(chunks as u32), Arg::U32(slots as u32)]);
        arguments.extend([room.parts, room.counters].map(Arg::Memory));
        let shape = Launch {
            grid: [bucket.t as u32, blocks as u32, sides as u32],
            shared_bytes: (slots * tile_bytes + rest) as u32,
            ..Launch::new([1, 1], 256)
        };
        return Ok(Issue { entry: *tile, shape, arguments });
    }
    let rows = bucket.t * group;
    let blocks = |warps: usize| rows.div_ceil(ROWS * warps);
    // Queries, sums of 32 bits, and with a softcap 32 scores of each lane.
    let capped = if spec.softcap.is_some() { 32 * 32 * 4 } else { 0 };
    let own = |warps: usize| warps * (ROWS * (pitch(*dims) + 4 * dims) + capped);
    let most = limits.shared_bytes - BESIDES;
    let fits = |warps: usize| SLOTS_PROMPT.into_iter().find(|slots| slots * tile_bytes + own(warps) <= most);
    // As many warps as share a tile and still leave blocks for all multiprocessors.
    let enough = 3 * limits.multiprocessors as usize / 4;
    let warps = [8, 4, 2].into_iter().find(|&w| fits(w).is_some() && blocks(w) * spec.kv_heads >= enough);
    let (warps, slots) = [warps.unwrap_or(1), 1]
        .into_iter()
        .find_map(|warps| Some((warps, fits(warps)?)))
        .ok_or_else(|| Error::Refused(format!("no shared memory for heads of {} dims", spec.head_dim)))?;
    arguments.push(Arg::U32(slots as u32));
    let grid = [blocks(warps) as u32, spec.kv_heads as u32];
    let shape = Launch {
        shared_bytes: (slots * tile_bytes + own(warps)) as u32,
        ..Launch::new(grid, 32 * warps as u32)
    };
    Ok(Issue { entry: *prompt, shape, arguments })
}
