//! Ops that work on one element at a time, and the choice of wanted rows.

use ingle_graph::Rows;

use super::Source;
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Span};

/// fl(a + b)
pub const ADD: Entry = Entry { name: "add_rows", params: &[Memory, U32, U32, Memory, Memory, Memory] };
/// fl(x * factor)
pub const SCALE: Entry = Entry { name: "scale_rows", params: &[Memory, U32, U32, Memory, F32, Memory] };
/// cap * tanh(x / cap)
pub const SOFTCAP: Entry = Entry { name: "softcap_rows", params: &[Memory, U32, U32, Memory, F32, Memory] };
/// Rows that are wanted.
pub const TAKE_ROWS: Entry = Entry { name: "take_rows", params: &[Memory, U32, Memory, Memory] };

/// The file.
pub const SOURCE: Source = Source {
    name: "elementwise",
    text: include_str!("elementwise.cu"),
    entries: &[ADD, SCALE, SOFTCAP, TAKE_ROWS],
};

const THREADS: u32 = 256;

/// Shape of every launch here: `rows` of the bucket.
pub fn shape(rows: u32, cols: u32) -> Launch {
    Launch::new([rows, cols.div_ceil(THREADS)], THREADS)
}

/// Arguments of [`ADD`]: a, b, y `[rows, cols]`.
pub fn two<'a>(step: Span<'a>, rows: Rows, cols: u32, a: Span<'a>, b: Span<'a>, y: Span<'a>) -> [Arg<'a>; 6] {
    let [step, a, b, y] = [step, a, b, y].map(Arg::Memory);
    [step, super::rows(rows), Arg::U32(cols), a, b, y]
}

/// Arguments of [`SCALE`] and [`SOFTCAP`]: x, y `[rows, cols]`.
pub fn one<'a>(step: Span<'a>, rows: Rows, cols: u32, x: Span<'a>, number: f32, y: Span<'a>) -> [Arg<'a>; 6] {
    let [step, x, y] = [step, x, y].map(Arg::Memory);
    [step, super::rows(rows), Arg::U32(cols), x, Arg::F32(number), y]
}

/// Arguments of [`TAKE_ROWS`]: x `[T, cols]`, y `[R, cols]`.
pub fn take<'a>(step: Span<'a>, cols: u32, x: Span<'a>, y: Span<'a>) -> [Arg<'a>; 4] {
    let [step, x, y] = [step, x, y].map(Arg::Memory);
    [step, Arg::U32(cols), x, y]
}
