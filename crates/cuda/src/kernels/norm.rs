//! Ops that reduce the columns of a row: the norm, and the peaks of logits.

use ingle_graph::Rows;

use super::Source;
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Span};

/// Root-mean-square norm.
pub const RMS_NORM: Entry =
    Entry { name: "rms_norm", params: &[Memory, U32, U32, F32, Memory, Memory, Memory] };
/// The largest of each span of columns.
pub const PEAKS: Entry = Entry { name: "peaks", params: &[Memory, U32, U32, U32, Memory, Memory] };

/// The file.
pub const SOURCE: Source =
    Source { name: "norm", text: include_str!("norm.cu"), entries: &[RMS_NORM, PEAKS] };

/// Shape of [`RMS_NORM`]: `groups` of `group` columns in each of the bucket's rows.
pub fn norm_shape(rows: u32, groups: u32, group: u32) -> Launch {
    Launch::new([rows, groups], group.next_power_of_two().clamp(32, 256))
}

/// Arguments of [`RMS_NORM`]: x and y `[rows, groups * group]`, weight `[group]`.
pub fn norm<'a>(
    step: Span<'a>,
    rows: Rows,
    group: u32,
    eps: f32,
    x: Span<'a>,
    weight: Span<'a>,
    y: Span<'a>,
) -> [Arg<'a>; 7] {
    let [step, x, weight, y] = [step, x, weight, y].map(Arg::Memory);
    [step, super::rows(rows), Arg::U32(group), Arg::F32(eps), x, weight, y]
}

/// Shape of [`PEAKS`].
pub fn peaks_shape(rows: u32, cols: u32, span: u32) -> Launch {
    Launch::new([rows, cols.div_ceil(span)], 256)
}

/// Arguments of [`PEAKS`]: x `[rows, cols]`, y `[rows, ceil(cols / span)]`.
pub fn peaks<'a>(step: Span<'a>, rows: Rows, cols: u32, span: u32, x: Span<'a>, y: Span<'a>) -> [Arg<'a>; 6] {
    let [step, x, y] = [step, x, y].map(Arg::Memory);
    [step, super::rows(rows), Arg::U32(cols), Arg::U32(span), x, y]
}
