//! Products with weights: which kernels make an `Op::Linear`, and how they are launched.
//!
//! Parts of one op that have the same form and read the same input go in one launch, three at most. There is one file of
//! kernels per form of integer weights ([`Form`]), put together from `linear.cuh` and the form's own header in `quant/`.

use ingle_graph::Rows;
use ingle_graph::op::Elem;
use ingle_graph::quantize::Layout;
use ingle_tensor::DType;

use super::{Issue, Source, tile};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::weights::{Form, Matrix, MatrixLayout};
use crate::{Error, Result};

const FEW: &[Param] = &[
    Memory, U32, U32, U32, U32, Memory, Memory, // step, rows, room, cols, slab or shape, x, residual
    Memory, U32, Memory, F32, Memory, // weights, rows, bias, scale, y
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory,
];
const FEW_WIDE: &[Param] = &[
    Memory, U32, U32, U32, U32, Memory, Memory, // as above
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory, //
    U32,
];
const MANY_FLOATS: &[Param] = &[
    Memory, U32, U32, Memory, Memory, // step, rows, cols, x, residual
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory,
];

/// Kernels of a form of integer weights: for one row a block, with one digit and with two; then tiles, with one digit of up
/// to 8 rows and of up to 32, with two of up to 8 and of up to 16; then panels, with one and with two.
macro_rules! integers {
    ($name:literal, $struct:literal) => {
        Source {
            name: concat!("linear_", $name),
            text: concat!(
                "#include \"quant/",
                $name,
                ".cuh\"\n\nLINEAR(linear_",
                $name,
                ", ",
                $struct,
                ")\n"
            ),
            entries: &[
                Entry { name: concat!("linear_", $name, "_r1_d1"), params: FEW },
                Entry { name: concat!("linear_", $name, "_r1_d2"), params: FEW },
                Entry { name: concat!("linear_", $name, "_n1_d1"), params: FEW },
                Entry { name: concat!("linear_", $name, "_n4_d1"), params: FEW },
                Entry { name: concat!("linear_", $name, "_n1_d2"), params: FEW },
                Entry { name: concat!("linear_", $name, "_n2_d2"), params: FEW },
                Entry { name: concat!("linear_", $name, "_panel_d1"), params: FEW },
                Entry { name: concat!("linear_", $name, "_panel_d2"), params: FEW },
            ],
        }
    };
}

/// Files of integer forms.
pub const Q4_0: Source = integers!("q4_0", "Q4_0");
/// As above.
pub const Q4_1: Source = integers!("q4_1", "Q4_1");
/// As above.
pub const Q5_0: Source = integers!("q5_0", "Q5_0");
/// As above.
pub const Q5_1: Source = integers!("q5_1", "Q5_1");
/// As above.
pub const Q8_0: Source = integers!("q8_0", "Q8_0");
/// As above.
pub const IQ4_NL: Source = integers!("iq4_nl", "Iq4Nl");
/// As above.
pub const MXFP4: Source = integers!("mxfp4", "Mxfp4");
/// As above.
pub const Q4_K: Source = integers!("q4_k", "Q4K");
/// As above.
pub const Q5_K: Source = integers!("q5_k", "Q5K");
/// As above.
pub const Q6_K: Source = integers!("q6_k", "Q6K");
/// As above.
pub const IQ4_XS: Source = integers!("iq4_xs", "Iq4Xs");
/// The form of every other format.
pub const WIDE: Source = Source {
    name: "linear_wide",
    text: "#include \"quant/wide.cuh\"\n\nLINEAR_WIDE\n",
    entries: &[
        Entry { name: "linear_wide_r1_d1", params: FEW_WIDE },
        Entry { name: "linear_wide_r2_d1", params: FEW_WIDE },
        Entry { name: "linear_wide_r4_d1", params: FEW_WIDE },
        Entry { name: "linear_wide_r8_d1", params: FEW_WIDE },
        Entry { name: "linear_wide_r1_d2", params: FEW_WIDE },
        Entry { name: "linear_wide_r2_d2", params: FEW_WIDE },
        Entry { name: "linear_wide_r4_d2", params: FEW_WIDE },
        Entry { name: "linear_wide_r8_d2", params: FEW_WIDE },
    ],
};

/// Kernels of a form of float weights: 1, 2, 4 and 8 rows a block, then many.
macro_rules! floats {
    ($name:literal) => {
        [
            Entry { name: concat!("linear_", $name, "_r1"), params: FEW },
            Entry { name: concat!("linear_", $name, "_r2"), params: FEW },
            Entry { name: concat!("linear_", $name, "_r4"), params: FEW },
            Entry { name: concat!("linear_", $name, "_r8"), params: FEW },
            Entry { name: concat!("linear_", $name, "_many"), params: MANY_FLOATS },
        ]
    };
}

const HALF: [Entry; 5] = floats!("f16");
const BRAIN: [Entry; 5] = floats!("bf16");
const SINGLE: [Entry; 5] = floats!("f32");
const FLOATS: [Entry; 15] = {
    let mut all = [SINGLE[0]; 15];
    let mut i = 0;
    while i < 5 {
        (all[i], all[5 + i], all[10 + i]) = (HALF[i], BRAIN[i], SINGLE[i]);
        i += 1;
    }
    all
};

/// The file of float forms.
pub const FLOAT: Source = Source { name: "float", text: include_str!("float.cu"), entries: &FLOATS };

/// Dynamic shared memory of a block at most: what needs no opt-in.
const SHARED_MAX: usize = 48 << 10;

/// Rows of activations from which float products are made eight by eight.
const MANY_ROWS: u32 = 16;

/// Parts of one launch.
const PARTS: usize = 3;

/// The file a form's kernels are in.
pub fn source(form: Form) -> &'static Source {
    match form {
        Form::F32 | Form::F16 | Form::BF16 => &FLOAT,
        Form::Q4_0 => &Q4_0,
        Form::Q4_1 => &Q4_1,
        Form::Q5_0 => &Q5_0,
        Form::Q5_1 => &Q5_1,
        Form::Q8_0 => &Q8_0,
        Form::IQ4NL => &IQ4_NL,
        Form::MXFP4 => &MXFP4,
        Form::Q4K => &Q4_K,
        Form::Q5K => &Q5_K,
        Form::Q6K => &Q6_K,
        Form::IQ4XS => &IQ4_XS,
        Form::Wide { .. } => &WIDE,
    }
}

/// One matrix of a Linear: what it multiplies, what becomes of the sums.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The matrix.
    pub matrix: &'a Matrix,
    /// Factor of the whole tensor.
    pub scale: Option<f32>,
    /// Bias, f32 `[rows of the matrix]`.
    pub bias: Option<Span<'a>>,
    /// Activations: f32 `[room, cols]`, or quantized.
    pub x: Span<'a>,
    /// How quantized activations lie; `None` for f32.
    pub layout: Option<Layout>,
    /// Added at the end, like `y`.
    pub residual: Option<Span<'a>>,
    /// Where the product goes: f32 `[room, rows of the matrix]`.
    pub y: Span<'a>,
}

impl Part<'_> {
    /// That activations are what the matrix multiplies, in a bucket of `room` rows.
    fn check(&self, room: usize) -> Result<()> {
        let MatrixLayout { form, rows, cols, .. } = self.matrix.layout();
        let fits = match (self.layout, self.matrix.layout().unit()) {
            (None, None) => self.x.bytes() >= room * cols * size_of::<f32>(),
            (Some(x), Some(unit)) => {
                let digits = matches!(x.digits, 1 | 2);
                (x.unit, x.cols, x.rows) == (unit, cols, room) && digits && self.x.bytes() >= x.bytes()
            }
            _ => false,
        };
        if fits {
            return Ok(());
        }
        let (layout, bytes) = (self.layout, self.x.bytes());
        Err(Error::Refused(format!(
            "{layout:?} in {bytes} bytes as activations of {form:?} [{rows}, {cols}]"
        )))
    }

    /// Whether one launch can make both.
    fn joins(&self, other: &Self) -> bool {
        let alone = self.residual.is_some() || other.residual.is_some();
        let [a, b] = [self.matrix.layout(), other.matrix.layout()];
        let same_x = (self.x.address(), self.layout) == (other.x.address(), other.layout);
        !alone && same_x && (a.form, a.cols) == (b.form, b.cols)
    }
}

/// The launches that make these products for up to `room` rows of the step.
///
/// # Errors
/// Activations that are not what their matrix multiplies.
pub fn issues<'a>(step: Span<'a>, rows: Rows, room: usize, parts: &[Part<'a>]) -> Result<Vec<Issue<'a>>> {
    let mut groups: Vec<Vec<&Part<'a>>> = Vec::new();
    for part in parts {
        part.check(room)?;
        match groups.iter_mut().find(|group| group.len() < PARTS && group[0].joins(part)) {
            Some(group) => group.push(part),
            None => groups.push(vec![part]),
        }
    }
    Ok(groups.iter().map(|group| issue(step, rows, room as u32, group)).collect())
}

/// One launch, of parts that join.
fn issue<'a>(step: Span<'a>, which: Rows, room: u32, parts: &[&Part<'a>]) -> Issue<'a> {
    let first = parts[0];
    let MatrixLayout { form, cols, .. } = first.matrix.layout();
    let entries = match form {
        Form::F16 => &HALF[..],
        Form::BF16 => &BRAIN,
        Form::F32 => &SINGLE,
        _ => source(form).entries,
    };
    let digits = first.layout.map_or(0, |layout| layout.digits);
    if tile::serves(form, room) {
        return tile::issue(step, which, room, digits as u32, parts);
    }
    let many = digits == 0 && room >= MANY_ROWS;
    // Rows of activations that a block takes.
    let rows = if many { 8 } else { room.next_power_of_two().min(8) };
    let choice = rows.ilog2() as usize;
    let entry = match digits {
        0 if many => entries[4],
        2 => entries[if matches!(form, Form::Wide { .. }) { 4 + choice } else { 1 }],
        _ => entries[choice],
    };
    let slab = slab(form, cols, rows as usize, digits);
    let (per_warp, shared) = match digits {
        0 if many => (8, 0),
        0 => (8, rows as usize * slab * size_of::<f32>()),
        _ => (4, shared_bytes(form, slab, rows as usize, digits)),
    };
    let outputs = |part: &&Part<'_>| part.matrix.layout().rows as u32;
    let all: u32 = parts.iter().map(outputs).sum();
    let threads = threads(all.div_ceil(per_warp), first.matrix.multiprocessors());
    let blocks = parts.iter().map(|part| outputs(part).div_ceil(threads / 32 * per_warp)).sum();
    let shape = Launch { shared_bytes: shared as u32, ..Launch::new([blocks, room.div_ceil(rows)], threads) };

    let mut arguments = match many {
        true => many_arguments(step, which, parts),
        false => arguments(step, which, room, slab as u32, parts),
    };
    if let Form::Wide { unit, scale_unit, minima } = form {
        arguments.push(Arg::U32(unit as u32 | (scale_unit as u32) << 10 | u32::from(minima) << 20));
    }
    Issue { entry, shape, arguments }
}

/// Arguments of a kernel of [`FEW`]; `fourth` is what it takes between columns and activations.
pub(super) fn arguments<'a>(
    step: Span<'a>,
    which: Rows,
    room: u32,
    fourth: u32,
    parts: &[&Part<'a>],
) -> Vec<Arg<'a>> {
    let cols = parts[0].matrix.layout().cols as u32;
    let mut arguments = vec![Arg::Memory(step), super::rows(which)];
    arguments.extend([Arg::U32(room), Arg::U32(cols), Arg::U32(fourth)]);
    arguments.extend(part_arguments(parts));
    arguments
}

/// Arguments of a kernel of [`MANY_FLOATS`].
fn many_arguments<'a>(step: Span<'a>, which: Rows, parts: &[&Part<'a>]) -> Vec<Arg<'a>> {
    let cols = parts[0].matrix.layout().cols as u32;
    let mut arguments = vec![Arg::Memory(step), super::rows(which), Arg::U32(cols)];
    arguments.extend(part_arguments(parts));
    arguments
}

/// Activations, residual, and what kernels are told of each part.
fn part_arguments<'a>(parts: &[&Part<'a>]) -> Vec<Arg<'a>> {
    let mut arguments = vec![Arg::Memory(parts[0].x), super::optional(parts[0].residual)];
    for i in 0..PARTS {
        arguments.extend(match parts.get(i) {
            Some(part) => [
                Arg::Memory(part.matrix.span()),
                Arg::U32(part.matrix.layout().rows as u32),
                super::optional(part.bias),
                Arg::F32(part.scale.unwrap_or(1.0)),
                Arg::Memory(part.y),
            ],
            None => [Arg::Nothing, Arg::U32(0), Arg::Nothing, Arg::F32(1.0), Arg::Nothing],
        });
    }
    arguments
}

/// Name of the path that products of this type of weights take with these activations, in a bucket of `room` rows.
pub fn path(dtype: DType, elem: Elem, room: usize) -> String {
    let digits = elem.digits().map(|(_, digits)| digits);
    let form = Form::of(dtype, digits.is_some());
    let how = match (digits, form) {
        (None, _) if room >= MANY_ROWS as usize => "f32x32.many",
        (None, _) => "f32x32.few",
        (Some(_), Form::Wide { .. }) => "int.dp2a",
        (Some(_), form) if tile::serves(form, room as u32) => "int.mma",
        (Some(_), _) => "int.dp4a",
    };
    format!("linear.{how}.cuda")
}

/// Threads of a block: as many warps as leave two blocks for each multiprocessor, so that none stands idle long.
fn threads(warps: u32, multiprocessors: u32) -> u32 {
    32 * (warps / (2 * multiprocessors.max(1))).clamp(2, 8).next_power_of_two().min(8)
}

/// Units (columns for floats) that lie in shared memory at a time: whole rounds of loads ahead.
fn slab(form: Form, cols: usize, rows: usize, digits: usize) -> usize {
    let (round, all, one) = match (digits, form.unit()) {
        (0, _) | (_, None) => (128, cols, rows * size_of::<f32>()),
        (_, Some(unit)) => {
            // Eight lanes, which own up to eight units each before they load again.
            let round = if unit == 32 && !matches!(form, Form::Wide { .. }) { 64 } else { 8 };
            (round, cols / unit, shared_bytes(form, round, rows, digits) / round)
        }
    };
    let most = (SHARED_MAX / one / round * round).max(round);
    all.next_multiple_of(round).min(most)
}

/// Shared memory of a slab: digits, sums for every 16 of them, scales.
fn shared_bytes(form: Form, slab: usize, rows: usize, digits: usize) -> usize {
    let unit = form.unit().unwrap_or(0);
    let digit_bytes = rows * digits * slab * unit;
    digit_bytes + digit_bytes / 8 + rows * slab * size_of::<f32>()
}
