//! Products with weights: which kernels make an `Op::Linear`, and how they are launched.
//!
//! Parts of one op that have the same form and read the same input go in one launch, three at most. There is one file of
//! kernels per form of integer weights ([`Form`]), put together from `linear.cuh` and the form's own header in `quant/`.

use ingle_graph::op::Elem;
use ingle_graph::quantize::Layout;
use ingle_graph::{Activation, Rows};
use ingle_tensor::DType;

use super::{Issue, Source, float, tile};
use crate::driver::Param::{F32, Memory, U32};
use crate::driver::{Arg, Entry, Launch, Param, Span};
use crate::weights::{Form, Limits, Matrix, MatrixLayout};
use crate::{Error, Result};

pub(super) const FEW: &[Param] = &[
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
const ONE: &[Param] = &[
    Memory, U32, U32, Memory, Memory, Memory, F32, // step, rows, cols, quantized, x, norm, eps
    Memory, U32, // residual, gated unit
    Memory, U32, Memory, F32, Memory, // weights, rows, bias, scale, y
    Memory, U32, Memory, F32, Memory, //
    Memory, U32, Memory, F32, Memory,
];
/// Kernels of a form of integer weights: for one row, with one digit and with two; then tiles, with one digit of up to 8 rows
/// and of up to 32, with two of up to 8 and of up to 16; then panels, with one and with two.
macro_rules! integers {
    ($name:literal, $struct:literal) => {
        Source {
            name: concat!("linear_", $name),
            text: concat!(
                "#include \"quant/",
                $name,
                ".cuh\"\n#include \"stream.cuh\"\n\nSTREAM(linear_",
                $name,
                ", ",
                $struct,
                ")\nLINEAR(linear_",
                $name,
                ", ",
                $struct,
                ")\n"
            ),
            entries: &[
                Entry { name: concat!("linear_", $name, "_one_d1"), params: ONE },
                Entry { name: concat!("linear_", $name, "_one_d2"), params: ONE },
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

/// The kernel for one row with two digits whose third part has another form than the first two: what `attn_v` is in files whose
/// `attn_q` and `attn_k` have the first one.
macro_rules! mixed {
    ($name:literal, $first:literal, $struct:literal, $third:literal, $of_third:literal) => {
        Source {
            name: concat!("linear_", $name),
            text: concat!(
                "#include \"quant/",
                $first,
                ".cuh\"\n#include \"quant/",
                $third,
                ".cuh\"\n#include \"stream.cuh\"\n\nSTREAM_ROW(linear_",
                $name,
                ", ",
                $struct,
                ", ",
                $of_third,
                ", 2)\n"
            ),
            entries: &[Entry { name: concat!("linear_", $name, "_one_d2"), params: ONE }],
        }
    };
}

/// Files of two forms.
pub const Q4_K_Q6_K: Source = mixed!("q4_k_q6_k", "q4_k", "Q4K", "q6_k", "Q6K");
/// As above.
pub const IQ4_XS_Q5_K: Source = mixed!("iq4_xs_q5_k", "iq4_xs", "Iq4Xs", "q5_k", "Q5K");

/// The file for parts of these forms, if it is one of those: of Q5_K and Q6_K registers do not suffice.
fn mixed(first: Form, third: Form) -> Option<&'static Source> {
    match (first, third) {
        (Form::Q4K, Form::Q6K) => Some(&Q4_K_Q6_K),
        (Form::IQ4XS, Form::Q5K) => Some(&IQ4_XS_Q5_K),
        _ => None,
    }
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

/// Dynamic shared memory of a block at most: what needs no opt-in.
pub(super) const SHARED_MAX: usize = 48 << 10;

/// Parts of one launch.
const PARTS: usize = 3;

/// The file a form's kernels are in.
pub fn source(form: Form) -> &'static Source {
    match form {
        Form::F32 => &float::F32,
        Form::F16 => &float::F16,
        Form::BF16 => &float::BF16,
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

/// Activations of a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f32 `[room, cols]`.
    Floats(Span<'a>),
    /// Quantized.
    Quantized(Span<'a>, Layout),
    /// Made by the product itself, which has one row ([`streams`]): quantized, or f32.
    Made(Made<'a>, Option<Layout>),
}

/// What a product makes its activations from: f32 `[1, cols]`, or its norm.
#[derive(Clone, Copy, Debug)]
pub struct Made<'a> {
    /// The row.
    pub x: Span<'a>,
    /// Weights of the norm, f32 `[cols]`, and its epsilon.
    pub norm: Option<(Span<'a>, f32)>,
}

impl<'a> Input<'a> {
    fn layout(&self) -> Option<Layout> {
        match self {
            Self::Floats(_) => None,
            Self::Quantized(_, layout) => Some(*layout),
            Self::Made(_, layout) => *layout,
        }
    }

    /// Where they lie, or what they are made from.
    pub(super) fn span(&self) -> Span<'a> {
        match *self {
            Self::Floats(x) | Self::Quantized(x, _) => x,
            Self::Made(made, _) => made.x,
        }
    }

    fn digits(&self) -> usize {
        self.layout().map_or(0, |layout| layout.digits)
    }

    /// Addresses by which equal inputs are known.
    fn addresses(&self) -> [u64; 2] {
        match self {
            Self::Floats(x) | Self::Quantized(x, _) => [x.address(), 0],
            Self::Made(made, _) => [made.x.address(), made.norm.map_or(0, |(weight, _)| weight.address())],
        }
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
    /// Activations.
    pub x: Input<'a>,
    /// Added at the end, like `y`.
    pub residual: Option<Span<'a>>,
    /// Where the product goes: f32 `[room, rows of the matrix]`.
    pub y: Span<'a>,
}

impl Part<'_> {
    /// That activations are what the matrix multiplies, in a bucket of `room` rows, and that all it adds and writes has its
    /// rows.
    fn check(&self, room: usize) -> Result<()> {
        let MatrixLayout { form, rows, cols, .. } = self.matrix.layout();
        let sizes = [(Some(self.y), room * rows), (self.residual, room * rows), (self.bias, rows)];
        for (span, values) in sizes {
            if let Some(bytes) =
                span.map(|span| span.bytes()).filter(|bytes| *bytes < values * size_of::<f32>())
            {
                let what = format!("{bytes} bytes for {values} values of {form:?} [{rows}, {cols}]");
                return Err(Error::Refused(what));
            }
        }
        let layout = self.x.layout();
        let known = |x: &Layout| {
            let sizes = (x.unit, x.cols, x.rows) == (self.matrix.layout().unit().unwrap_or(0), cols, room);
            sizes && matches!(x.digits, 1 | 2)
        };
        let floats = room * cols * size_of::<f32>();
        let (bytes, fits) = match self.x {
            Input::Floats(x) => (x.bytes(), self.matrix.layout().unit().is_none() && x.bytes() >= floats),
            Input::Quantized(x, layout) => (x.bytes(), known(&layout) && x.bytes() >= layout.bytes()),
            Input::Made(made, layout) => {
                let norm = made.norm.is_none_or(|(weight, _)| weight.bytes() >= floats);
                let streams = streams(self.matrix, room, layout.map_or(0, |layout| layout.digits));
                let known = layout.map_or(self.matrix.layout().unit().is_none(), |layout| known(&layout));
                (made.x.bytes(), known && streams && norm && made.x.bytes() >= floats)
            }
        };
        if fits {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "{layout:?} in {bytes} bytes as activations of {form:?} [{rows}, {cols}]"
        )))
    }

    /// Whether one launch can make both.
    fn joins(&self, other: &Self) -> bool {
        self.has_input_of(other) && self.matrix.layout().form == other.matrix.layout().form
    }

    /// Whether both multiply the same activations, and nothing is added to their sums.
    fn has_input_of(&self, other: &Self) -> bool {
        let alone = self.residual.is_some() || other.residual.is_some();
        let same_x = (self.x.addresses(), self.x.layout()) == (other.x.addresses(), other.x.layout());
        !alone && same_x && self.matrix.layout().cols == other.matrix.layout().cols
    }

    /// Whether a launch for one row makes two parts of the form of this one and `third`.
    fn joins_as_third(&self, third: &Self, room: usize) -> bool {
        let [first, other] = [self, third].map(|part| part.matrix.layout().form);
        let streams = room == 1 && self.x.digits() == 2 && Stream::of(self).is_some();
        streams && self.has_input_of(third) && mixed(first, other).is_some()
    }
}

/// Whether a product with this matrix has the kernel that takes one row and can make its activations itself.
pub fn streams(matrix: &Matrix, room: usize, digits: usize) -> bool {
    let (layout, limits) = (matrix.layout(), matrix.limits());
    room == 1
        && match digits {
            0 => float::streams(&layout, room, limits),
            _ => Stream::plan(&layout, digits, true, limits).is_some(),
        }
}

/// Whether gate and up can be one launch that writes the gated unit.
pub fn gates(gate: &Part<'_>, up: &Part<'_>, room: usize) -> bool {
    let layout = gate.matrix.layout();
    let streams = match gate.x.digits() {
        0 => float::streams(&layout, room, gate.matrix.limits()),
        digits => streams(gate.matrix, room, digits),
    };
    layout.rows == up.matrix.layout().rows && gate.joins(up) && streams
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
    for at in (1..groups.len()).rev() {
        let pair = groups[..at]
            .iter()
            .position(|group| group.len() == 2 && group[0].joins_as_third(groups[at][0], room));
        if let Some(first) = pair.filter(|_| groups[at].len() == 1) {
            let third = groups.remove(at);
            groups[first].extend(third);
        }
    }
    Ok(groups.iter().map(|group| issue(step, rows, room as u32, group)).collect())
}

/// The launch that writes act(gate) * up, both as [`gates`] says, to the y of `gate`.
///
/// # Errors
/// As [`issues`].
pub fn gated<'a>(
    step: Span<'a>,
    rows: Rows,
    room: usize,
    act: Activation,
    [gate, up]: [&Part<'a>; 2],
) -> Result<Issue<'a>> {
    gate.check(room)?;
    up.check(room)?;
    let issue = || match gate.x.digits() {
        0 => float::gated(step, rows, room, act, [gate, up]),
        _ => Some(Stream::of(gate)?.issue(step, rows, &[gate, up], Some(act))),
    };
    let issue = gates(gate, up, room).then(issue).flatten();
    issue.ok_or_else(|| Error::Refused("a gated unit of products that are not of one kind".into()))
}

/// How the kernel for one row is launched (stream.cuh).
struct Stream {
    shared_bytes: usize,
}

/// Warps of a block, and of one that makes parts of two forms (stream.cuh).
const WARPS: u32 = 16;
const WARPS_OF_TWO: u32 = 12;

/// Rows of the matrix that a warp makes at a time (stream.cuh).
fn rows_of_turn(form: Form) -> usize {
    if form.unit() == Some(256) { 2 } else { 4 }
}

/// By how many bytes a large block of a float product takes more than half of a multiprocessor's shared memory; what a block
/// takes besides what it asks for.
pub(super) const LARGER: usize = 6 << 10;
pub(super) const OTHER: usize = 3 << 10;

impl Stream {
    fn of(part: &Part<'_>) -> Option<Self> {
        let norm = matches!(part.x, Input::Made(Made { norm: Some(_), .. }, _));
        Self::plan(&part.matrix.layout(), part.x.digits(), norm, part.matrix.limits())
    }

    /// `None` where activations do not fit. `norm`: they are a row's norm, for which it lies there as f32.
    fn plan(layout: &MatrixLayout, digits: usize, norm: bool, limits: Limits) -> Option<Self> {
        if matches!(layout.form, Form::Wide { .. }) {
            return None;
        }
        let most = (layout.cols / layout.form.unit()?).next_multiple_of(8);
        let row = if norm { 4 * most * layout.form.unit()? } else { 0 };
        let shared_bytes = shared_bytes(layout.form, most, 1, digits).next_multiple_of(16) + row;
        (shared_bytes + OTHER <= limits.shared_bytes).then_some(Self { shared_bytes })
    }

    fn issue<'a>(
        &self,
        step: Span<'a>,
        which: Rows,
        parts: &[&Part<'a>],
        gated: Option<Activation>,
    ) -> Issue<'a> {
        let first = parts[0];
        let MatrixLayout { form, cols, .. } = first.matrix.layout();
        let rows = rows_of_turn(form);
        let turns = parts.iter().map(|part| part.matrix.layout().rows.div_ceil(rows) as u32).sum::<u32>();
        let blocks = turns.min(first.matrix.limits().multiprocessors);
        let none = (Arg::Nothing, Arg::Nothing, Arg::Nothing, 0.0);
        let (quantized, x, norm, eps) = match first.x {
            Input::Floats(_) => none,
            Input::Quantized(x, _) => (Arg::Memory(x), Arg::Nothing, Arg::Nothing, 0.0),
            Input::Made(made, _) => {
                let (norm, eps) = made.norm.map_or((Arg::Nothing, 0.0), |(w, eps)| (Arg::Memory(w), eps));
                (Arg::Nothing, Arg::Memory(made.x), norm, eps)
            }
        };
        let mut arguments = vec![Arg::Memory(step), super::rows(which)];
        arguments.push(Arg::U32(cols as u32));
        arguments.extend([quantized, x, norm, Arg::F32(eps), super::optional(first.residual)]);
        arguments.extend([Arg::U32(act(gated))]);
        arguments.extend(parts_arguments(parts));
        let third = parts.last().map_or(form, |part| part.matrix.layout().form);
        let (entry, warps) = match mixed(form, third) {
            Some(source) => (source.entries[0], WARPS_OF_TWO),
            None => (source(form).entries[first.x.digits() - 1], WARPS),
        };
        let shape = Launch { shared_bytes: self.shared_bytes as u32, ..Launch::new([blocks, 1], 32 * warps) };
        Issue { entry, shape, arguments }
    }
}

/// What kernels are told of a gated unit.
pub(super) fn act(gated: Option<Activation>) -> u32 {
    match gated {
        None => 0,
        Some(Activation::Silu) => 1,
        Some(Activation::GeluTanh) => 2,
        Some(Activation::GeluErf) => 3,
    }
}

/// What kernels are told of the parts of a launch.
pub(super) fn parts_arguments<'a>(parts: &[&Part<'a>]) -> Vec<Arg<'a>> {
    let one = |i: usize| match parts.get(i) {
        Some(part) => [
            Arg::Memory(part.matrix.span()),
            Arg::U32(part.matrix.layout().rows as u32),
            super::optional(part.bias),
            Arg::F32(part.scale.unwrap_or(1.0)),
            Arg::Memory(part.y),
        ],
        None => [Arg::Nothing, Arg::U32(0), Arg::Nothing, Arg::F32(1.0), Arg::Nothing],
    };
    (0..PARTS).flat_map(one).collect()
}

/// One launch, of parts that join.
fn issue<'a>(step: Span<'a>, which: Rows, room: u32, parts: &[&Part<'a>]) -> Issue<'a> {
    let first = parts[0];
    let layout = first.matrix.layout();
    let MatrixLayout { form, cols, .. } = layout;
    let digits = first.x.digits();
    let limits = first.matrix.limits();
    if digits == 0 {
        return float::issue(step, which, room as usize, parts);
    }
    if let Some(plan) = Stream::of(first).filter(|_| room == 1) {
        return plan.issue(step, which, parts, None);
    }
    let entries = source(form).entries;
    if tile::serves(form) {
        return tile::issue(step, which, room, digits as u32, parts);
    }
    // Rows of activations that a block takes; of integer forms but one, the kernel for one row is another.
    let least = if matches!(form, Form::Wide { .. }) { 1 } else { 2 };
    let rows = room.next_power_of_two().clamp(least, 8);
    let choice = rows.ilog2() as usize;
    let entry = match digits {
        2 => entries[if matches!(form, Form::Wide { .. }) { 4 + choice } else { 1 }],
        _ => entries[choice],
    };
    let slab = slab(form, cols, rows as usize, digits);
    let (per_warp, shared) = (4, shared_bytes(form, slab, rows as usize, digits));
    let outputs = |part: &&Part<'_>| part.matrix.layout().rows as u32;
    let all: u32 = parts.iter().map(outputs).sum();
    let threads = threads(all.div_ceil(per_warp), limits.multiprocessors);
    let blocks = parts.iter().map(|part| outputs(part).div_ceil(threads / 32 * per_warp)).sum();
    let shape = Launch { shared_bytes: shared as u32, ..Launch::new([blocks, room.div_ceil(rows)], threads) };

    let mut arguments = arguments(step, which, room, slab as u32, parts);
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
    arguments.extend([Arg::Memory(parts[0].x.span()), super::optional(parts[0].residual)]);
    arguments.extend(parts_arguments(parts));
    arguments
}

/// Name of the path that products of this type of weights take with these activations, in a bucket of `room` rows; `streams`
/// as [`streams`] says.
pub fn path(dtype: DType, elem: Elem, room: usize, streams: bool) -> String {
    let digits = elem.digits().map(|(_, digits)| digits);
    let form = Form::of(dtype, digits.is_some());
    let how = match (digits, form) {
        (None, _) if room >= float::MANY_ROWS => "f32x32.many",
        (None, _) if streams => "f32x32.stream",
        (None, _) => "f32x32.few",
        (Some(_), _) if streams => "int.stream",
        (Some(_), Form::Wide { .. }) => "int.dp2a",
        (Some(_), _) => "int.mma",
    };
    format!("linear.{how}.cuda")
}

/// Threads of a block: as many warps as leave two blocks for each multiprocessor, so that none stands idle long.
pub(super) fn threads(warps: u32, multiprocessors: u32) -> u32 {
    32 * (warps / (2 * multiprocessors.max(1))).clamp(2, 8).next_power_of_two().min(8)
}

/// Units that lie in shared memory at a time: whole rounds of eight lanes, which own a unit each.
fn slab(form: Form, cols: usize, rows: usize, digits: usize) -> usize {
    let (all, one) = (cols / form.unit().unwrap_or(cols), shared_bytes(form, 8, rows, digits) / 8);
    let most = (SHARED_MAX / one / 8 * 8).max(8);
    all.next_multiple_of(8).min(most)
}

/// Shared memory of a slab: digits, sums for every 16 of them, scales.
fn shared_bytes(form: Form, slab: usize, rows: usize, digits: usize) -> usize {
    let unit = form.unit().unwrap_or(0);
    let digit_bytes = rows * digits * slab * unit;
    digit_bytes + digit_bytes / 8 + rows * slab * size_of::<f32>()
}
