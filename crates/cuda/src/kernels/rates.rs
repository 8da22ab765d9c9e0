//! What a device can do, for shares of it.

use super::Source;
use crate::driver::Entry;
use crate::driver::Param::{Memory, U32};

/// Reads memory.
pub const READ: Entry = Entry { name: "rate_read", params: &[Memory, U32, Memory] };
/// Multiplies int8 on tensor cores.
pub const INT8: Entry = Entry { name: "rate_int8", params: &[U32, Memory] };
/// Fused multiply-adds.
pub const F32: Entry = Entry { name: "rate_f32", params: &[U32, Memory] };

/// The file.
pub const SOURCE: Source =
    Source { name: "rates", text: include_str!("rates.cu"), entries: &[READ, INT8, F32] };

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Blocks for each multiprocessor.
pub const BLOCKS: u32 = 8;
/// Operations of a warp in a round of [`INT8`], and of a thread in one of [`F32`].
pub const INT8_OPS: f64 = 8.0 * 2.0 * 16.0 * 8.0 * 32.0;
/// As above.
pub const F32_OPS: f64 = 16.0 * 2.0;
