//! Q2_0: 64 values in 18 bytes, `value = d * (q - 1)`.
//!
//! Layout: `d` f16; 16 bytes, the 2-bit code of value `k` at bit `2 (k % 4)` of byte `k / 4`. Integer view: unit
//! 64, `w = q - 1` in -1..=2, one int8 digit, no minimum, no activation sums; scale `d`.
//!
//! A fork once gave the same type number to blocks of 128 values in 34 bytes. Such a file is refused when it is
//! opened: its tensors are shorter than the ones this format would need, so they overlap.

use super::{Format, Minimum, UnitView, extreme, inverse, least, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q2_0, unit: 64, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// The weight of value `k`.
fn weight(block: &[u8], k: usize) -> i8 {
    (block[2 + k / 4] >> (k % 4 * 2) & 3) as i8 - 1
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 64, d: read_f16(block, 0), ..UnitView::default() };
    for k in 0..64 {
        view.w[k] = i16::from(weight(block, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for k in 0..64 {
        out[k] = d * f32::from(weight(block, k));
    }
}

/// The weight nearest to a value in steps.
fn nearest(v: f32) -> f32 {
    v.round().clamp(-1.0, 2.0)
}

/// The value of largest magnitude is put at every sixteenth from -1.5 to -0.5 and from 0.5 to 2.5 in turn, which
/// gives a step each; the step that loses least is taken.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let widest = extreme(values);
    let step = |place: i16| widest / (f32::from(if place < 0 { place - 7 } else { place + 8 }) / 16.0);
    let place = least(-17..=32, |place| {
        let (step, id) = (step(place), inverse(step(place)));
        values.iter().map(|v| (v - step * nearest(v * id)).powi(2)).sum()
    });
    let id = inverse(write_f16(out, 0, step(place)));
    for (byte, values) in out[2..].iter_mut().zip(values.chunks_exact(4)) {
        *byte = (0..4).fold(0, |bits, i| bits | ((nearest(values[i] * id) + 1.0) as u8) << (2 * i));
    }
}
