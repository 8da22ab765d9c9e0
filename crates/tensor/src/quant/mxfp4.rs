//! MXFP4 (OCP Microscaling Formats 1.0): 32 values in 17 bytes, `value = 2^(e - 127) * f` with `f` a 4-bit float.
//!
//! Layout: a byte `e`; 16 bytes, byte `i` holding code `i` in its low and code `i + 16` in its high nibble.
//! Integer view: unit 32, multiplier 2: `w = 2 f` in -12..=12, one int8 digit, no minimum, no activation sums;
//! scale `2^(e - 128)`, exact in f32. `e = 255` means "not a number" and is refused when weights are loaded
//! ([`super::check_scales`]); decoding carries on the power of two.

use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::MXFP4, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Twice what the codes of MXFP4 and NVFP4 stand for: a sign, two bits of exponent, one of mantissa.
pub const LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale code that means "not a number".
pub(super) const NAN: u8 = 255;

/// `2^(e - 128)`, which is subnormal for the two smallest codes.
fn scale(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => (u32::from(e) - 1) << 23,
    })
}

/// The code whose level, times `step`, is nearest to `v`, the first of equals.
pub(super) fn nearest(v: f32, step: f32) -> u8 {
    let loss = |q: u8| (v - step * f32::from(LEVELS[usize::from(q)])).abs();
    (1..16).fold(0, |best, q| if loss(q) < loss(best) { q } else { best })
}

fn code(block: &[u8], k: usize) -> u8 {
    if k < 16 { block[1 + k] & 15 } else { block[1 + k - 16] >> 4 }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: scale(block[0]), ..UnitView::default() };
    for k in 0..32 {
        view.w[k] = i16::from(LEVELS[usize::from(code(block, k))]);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = scale(block[0]);
    for k in 0..32 {
        out[k] = d * f32::from(LEVELS[usize::from(code(block, k))]);
    }
}

/// The power of two puts the widest value between 4 and 8 (times a half), where the largest code is 6.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let widest = values.iter().fold(0.0, |widest: f32, v| widest.max(v.abs()));
    // A subnormal has the exponent 0 here and smaller powers of two than there are codes for.
    let exponent = (widest.to_bits() >> 23) as u8;
    out[0] = exponent.saturating_sub(2);
    let d = scale(out[0]);
    for i in 0..16 {
        out[1 + i] = nearest(values[i], d) | nearest(values[i + 16], d) << 4;
    }
}
