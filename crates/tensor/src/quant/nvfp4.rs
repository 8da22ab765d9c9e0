//! NVFP4: 64 values in 36 bytes, `value = s * f` with `s` an 8-bit float per 16 values and `f` a 4-bit float.
//!
//! Layout: 4 bytes `s`, one per 16 values: four bits of exponent (bias 7), three of mantissa, the top bit unused;
//! for each 16 values 8 bytes, byte `i` holding code `i` in its low and code `i + 8` in its high nibble. Integer
//! view: unit 16, so four units in a block, which share one activation scale; multiplier 2: `w = 2 f` in -12..=12,
//! one int8 digit, no minimum, no activation sums; scale `s / 2`, exact in f32. A scale of the whole tensor is
//! stored beside it and enters once, on the final sum; an `input_scale` there was fitted to activations of fixed
//! scale, which are not used here. The codes 0x7f and 0xff mean "not a number" and are refused
//! when weights are loaded ([`super::check_scales`]); decoding takes the first for 0, as the reference does, and
//! ignores the unused bit.

use super::mxfp4::{LEVELS, nearest};
use super::{Format, Minimum, UnitView, least};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::NVFP4, unit: UNIT, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Values that share a scale, and bytes of their codes.
const UNIT: usize = 16;
const UNIT_BYTES: usize = 8;
/// Where the codes begin: one scale for each of the four units before them.
const CODES: usize = 4;

/// The scale code that means "not a number", whatever its unused bit.
pub(super) const NAN: u8 = 0x7f;

/// Half of what a scale code stands for.
fn scale(code: u8) -> f32 {
    if code == NAN {
        return 0.0;
    }
    let (exponent, mantissa) = (code >> 3 & 15, code & 7);
    match exponent {
        0 => f32::from(mantissa) * 2f32.powi(-10),
        _ => f32::from(8 + mantissa) * 2f32.powi(i32::from(exponent) - 11),
    }
}

/// The level of value `k` of a unit.
fn level(codes: &[u8], k: usize) -> i8 {
    let byte = codes[k % UNIT_BYTES];
    LEVELS[usize::from(if k < UNIT_BYTES { byte & 15 } else { byte >> 4 })]
}

fn unit_view(block: &[u8], unit: usize, view: &mut UnitView) {
    *view = UnitView { len: UNIT, d: scale(block[unit]), ..UnitView::default() };
    let codes = &block[CODES + unit * UNIT_BYTES..][..UNIT_BYTES];
    for k in 0..UNIT {
        view.w[k] = i16::from(level(codes, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = block.split_at(CODES);
    for ((out, &s), codes) in out.chunks_exact_mut(UNIT).zip(scales).zip(codes.chunks_exact(UNIT_BYTES)) {
        let d = scale(s);
        for (k, out) in out.iter_mut().enumerate() {
            *out = d * f32::from(level(codes, k));
        }
    }
}

/// Each unit takes the scale that loses least, of the smallest that reaches its widest value and the seven below.
fn encode_block(values: &[f32], out: &mut [u8]) {
    for (unit, values) in values.chunks_exact(UNIT).enumerate() {
        let widest = values.iter().fold(0.0, |widest: f32, v| widest.max(v.abs()));
        let reaches = |code: &u8| scale(*code) * f32::from(LEVELS[7]) >= widest;
        let top = (0..NAN).find(reaches).unwrap_or(NAN - 1);
        let code = least(i16::from(top.saturating_sub(7))..=i16::from(top), |code| {
            let d = scale(code as u8);
            values.iter().map(|&v| (v - d * f32::from(LEVELS[usize::from(nearest(v, d))])).powi(2)).sum()
        }) as u8;
        let d = scale(code);
        out[unit] = code;
        for i in 0..UNIT_BYTES {
            let (low, high) = (nearest(values[i], d), nearest(values[i + UNIT_BYTES], d));
            out[CODES + unit * UNIT_BYTES + i] = low | high << 4;
        }
    }
}
