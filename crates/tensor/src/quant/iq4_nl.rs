//! IQ4_NL: 32 values in 18 bytes, `value = d * LEVELS[q]`.
//!
//! Layout: `d` f16; 16 bytes, byte `i` holding value `i` in its low and value `i + 16` in its high nibble.
//! Integer view: unit 32, `w = LEVELS[q]` in -127..=113, one int8 digit, no minimum, no activation sums;
//! scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, least, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ4NL, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// What the codes of IQ4_NL and IQ4_XS stand for.
pub const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The codes of 32 values: both formats have the same order.
pub(super) fn read_codes(packed: &[u8]) -> [u8; 32] {
    std::array::from_fn(|k| if k < 16 { packed[k] & 15 } else { packed[k - 16] >> 4 })
}

/// The codes nearest to 32 values under a step.
pub(super) fn nearest(values: &[f32], step: f32) -> [u8; 32] {
    let id = inverse(step);
    std::array::from_fn(|k| {
        let v = values[k] * id;
        (1..16).fold(0, |code, next| {
            let middle = (f32::from(LEVELS[next - 1]) + f32::from(LEVELS[next])) / 2.0;
            code + u8::from(v > middle)
        })
    })
}

/// The sum of squares that 32 values lose under a step.
pub(super) fn loss(values: &[f32], step: f32) -> f32 {
    let codes = nearest(values, step);
    values.iter().zip(codes).map(|(v, q)| (v - step * f32::from(LEVELS[usize::from(q)])).powi(2)).sum()
}

/// The inverse of [`read_codes`].
pub(super) fn write_codes(codes: [u8; 32], packed: &mut [u8]) {
    for i in 0..16 {
        packed[i] = codes[i] | codes[i + 16] << 4;
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), ..UnitView::default() };
    for (w, q) in view.w.iter_mut().zip(read_codes(&block[2..])) {
        *w = i16::from(LEVELS[usize::from(q)]);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for (out, q) in out.iter_mut().zip(read_codes(&block[2..])) {
        *out = d * f32::from(LEVELS[usize::from(q)]);
    }
}

/// The value of largest magnitude is put at every place from -127 to -90 and from 90 to 127 in turn, which
/// gives a step each; the step that loses least is taken.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let widest = extreme(values);
    let step = |place: i16| widest / f32::from(if place < 0 { place - 89 } else { place + 90 });
    let place = least(-38..=37, |place| loss(values, step(place)));
    let d = write_f16(out, 0, step(place));
    write_codes(nearest(values, d), &mut out[2..]);
}
