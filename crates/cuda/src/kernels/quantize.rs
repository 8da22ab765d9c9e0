//! Quantized activations (`ingle_graph::quantize`): of a value, and fused with what makes the value.

use ingle_graph::op::UNITS;
use ingle_graph::quantize::Layout;
use ingle_graph::{Activation, Rows};

use super::{Issue, Source};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::{Error, Result};

const GLU: &[Param] =
    &[Memory, U32, U32, U32, Memory, Memory, Memory, Memory, U32, Memory, U32, Memory, U32, Memory, U32];

/// Of a value.
pub const QUANTIZE: Entry = Entry {
    name: "quantize",
    params: &[Memory, U32, U32, U32, Memory, Memory, U32, Memory, U32, Memory, U32, Memory, U32],
};
/// Of the norm of whole rows.
pub const NORM_QUANTIZE: Entry = Entry {
    name: "norm_quantize",
    params: &[
        Memory, U32, U32, U32, F32, Memory, Memory, Memory, Memory, U32, Memory, U32, Memory, U32, Memory,
        U32,
    ],
};
const GLU_SILU: Entry = Entry { name: "glu_quantize_silu", params: GLU };
const GLU_GELU_TANH: Entry = Entry { name: "glu_quantize_gelu_tanh", params: GLU };
const GLU_GELU_ERF: Entry = Entry { name: "glu_quantize_gelu_erf", params: GLU };

/// The file.
pub const SOURCE: Source = Source {
    name: "quantize",
    text: include_str!("quantize.cu"),
    entries: &[QUANTIZE, NORM_QUANTIZE, GLU_SILU, GLU_GELU_TANH, GLU_GELU_ERF],
};

/// Most quantized outputs of one launch.
pub const OUTPUTS_MAX: usize = 4;

/// Columns a warp takes, and threads of a block.
const WARP_COLS: usize = 256;
const THREADS: usize = 128;

/// Where an op's result goes: as f32, quantized, or both.
#[derive(Clone, Debug)]
pub struct Outputs<'a> {
    /// The f32 result.
    pub f32: Option<Span<'a>>,
    /// Quantized results, [`OUTPUTS_MAX`] at most, with room for the bucket's rows.
    pub quantized: Vec<(Span<'a>, Layout)>,
}

/// What every launch here begins with: step, rows, room, columns.
fn head<'a>(step: Span<'a>, rows: Rows, room: usize, cols: usize) -> Vec<Arg<'a>> {
    vec![Arg::Memory(step), super::rows(rows), Arg::U32(room as u32), Arg::U32(cols as u32)]
}

/// What it ends with: four outputs.
fn quantized<'a>(room: usize, cols: usize, outputs: &[(Span<'a>, Layout)]) -> Result<Vec<Arg<'a>>> {
    if outputs.len() > OUTPUTS_MAX {
        let what = format!("{} quantized outputs of one launch: at most {OUTPUTS_MAX}", outputs.len());
        return Err(Error::Refused(what));
    }
    let mut arguments = Vec::with_capacity(2 * OUTPUTS_MAX);
    for (span, layout) in outputs {
        let known = UNITS.contains(&layout.unit) && matches!(layout.digits, 1 | 2);
        if !known || (layout.rows, layout.cols) != (room, cols) || span.bytes() < layout.bytes() {
            let what = format!("{layout:?} in {} bytes for [{room}, {cols}] quantized", span.bytes());
            return Err(Error::Refused(what));
        }
        arguments.extend([Arg::Memory(*span), Arg::U32(layout.unit as u32 | (layout.digits as u32) << 16)]);
    }
    for _ in outputs.len()..OUTPUTS_MAX {
        arguments.extend([Arg::Nothing, Arg::U32(WARP_COLS as u32 | 1 << 16)]);
    }
    Ok(arguments)
}

fn shape(room: usize, cols: usize) -> Launch {
    Launch::new([room as u32, cols.div_ceil(WARP_COLS * THREADS / 32) as u32], THREADS as u32)
}

/// The launches that quantize x `[room, cols]`, however many outputs there are; `room` is the bucket's rows.
///
/// # Errors
/// An output that is not of this shape.
pub fn issues<'a>(
    step: Span<'a>,
    rows: Rows,
    room: usize,
    cols: usize,
    x: Span<'a>,
    outputs: &[(Span<'a>, Layout)],
) -> Result<Vec<Issue<'a>>> {
    let issue = |outputs| {
        let mut arguments = head(step, rows, room, cols);
        arguments.push(Arg::Memory(x));
        arguments.extend(quantized(room, cols, outputs)?);
        Ok(Issue { entry: QUANTIZE, shape: shape(room, cols), arguments })
    };
    outputs.chunks(OUTPUTS_MAX).map(issue).collect()
}

/// x `[room, cols]` -> its norm over whole rows, weight `[cols]`. The f32 result may take the place of x.
///
/// # Errors
/// Too many quantized outputs, or one that is not of this shape.
pub fn norm<'a>(
    step: Span<'a>,
    rows: Rows,
    [room, cols]: [usize; 2],
    eps: f32,
    [x, weight]: [Span<'a>; 2],
    outputs: &Outputs<'a>,
) -> Result<Issue<'a>> {
    let mut arguments = head(step, rows, room, cols);
    arguments.extend([Arg::F32(eps), Arg::Memory(x), Arg::Memory(weight), super::optional(outputs.f32)]);
    arguments.extend(quantized(room, cols, &outputs.quantized)?);
    // As many threads as the contract has accumulators.
    Ok(Issue { entry: NORM_QUANTIZE, shape: Launch::new([room as u32, 1], 256), arguments })
}

/// gate, up `[room, cols]` -> fl(act(gate) * up). The f32 result may take the place of either.
///
/// # Errors
/// As [`norm`].
pub fn glu<'a>(
    step: Span<'a>,
    rows: Rows,
    [room, cols]: [usize; 2],
    act: Activation,
    [gate, up]: [Span<'a>; 2],
    outputs: &Outputs<'a>,
) -> Result<Issue<'a>> {
    let entry = match act {
        Activation::Silu => GLU_SILU,
        Activation::GeluTanh => GLU_GELU_TANH,
        Activation::GeluErf => GLU_GELU_ERF,
    };
    let mut arguments = head(step, rows, room, cols);
    arguments.extend([Arg::Memory(gate), Arg::Memory(up), super::optional(outputs.f32)]);
    arguments.extend(quantized(room, cols, &outputs.quantized)?);
    Ok(Issue { entry, shape: shape(room, cols), arguments })
}
