//! Rows of the embedding table.

use ingle_graph::Error;

use super::Source;
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use ingle_tensor::DType;

const PARAMS: &[Param] = &[Memory, Memory, Memory, U32, U32, F32, Memory];

/// Of a table in f32.
pub const EMBED_F32: Entry = Entry { name: "embed_f32", params: PARAMS };
/// Of a table in f16.
pub const EMBED_F16: Entry = Entry { name: "embed_f16", params: PARAMS };
/// Of a table in bf16.
pub const EMBED_BF16: Entry = Entry { name: "embed_bf16", params: PARAMS };

/// The file.
pub const SOURCE: Source =
    Source { name: "embed", text: include_str!("embed.cu"), entries: &[EMBED_F32, EMBED_F16, EMBED_BF16] };

const THREADS: u32 = 256;

/// The kernel for a table of this type.
///
/// # Errors
/// A type that no kernel reads.
pub fn kernel(dtype: DType) -> ingle_graph::Result<Entry> {
    match dtype {
        DType::F32 => Ok(EMBED_F32),
        DType::F16 => Ok(EMBED_F16),
        DType::BF16 => Ok(EMBED_BF16),
        _ => Err(Error::Device { device: "cuda".into(), what: format!("no kernel embeds from {dtype:?}") }),
    }
}

/// Shape of the launch for the bucket's rows.
pub fn shape(rows: u32, cols: u32) -> Launch {
    Launch::new([rows, cols.div_ceil(THREADS)], THREADS)
}

/// Arguments: tokens sampled on the device, table `[vocabulary, cols]`, y `[T, cols]`.
pub fn arguments<'a>(
    step: Span<'a>,
    sampled: Span<'a>,
    table: Span<'a>,
    [vocabulary, cols]: [u32; 2],
    scale: f32,
    y: Span<'a>,
) -> [Arg<'a>; 7] {
    let [step, sampled, table, y] = [step, sampled, table, y].map(Arg::Memory);
    [step, sampled, table, Arg::U32(vocabulary), Arg::U32(cols), Arg::F32(scale), y]
}
