//! TQ2_0: 256 values in 66 bytes, `value = d * (q - 1)`.
//!
//! Layout: 64 bytes of 2-bit codes in the order of [Q2_K](super::q2_k); `d` f16. Integer view: unit 256,
//! `w = q - 1` in -1..=2 (encoders stay within 1), one int8 digit, no minimum, no activation sums; scale `d`.

use super::q2_k::place;
use super::{Format, Minimum, UnitView, read_f16, tq1_0, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::TQ2_0, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the scale begins.
const D: usize = 64;

/// The weight of value `k`.
fn weight(block: &[u8], k: usize) -> i8 {
    let (byte, bit) = place(k);
    (block[byte] >> bit & 3) as i8 - 1
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, D), ..UnitView::default() };
    for k in 0..256 {
        view.w[k] = i16::from(weight(block, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, D);
    for k in 0..256 {
        out[k] = d * f32::from(weight(block, k));
    }
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let (d, digits) = tq1_0::encode(values);
    write_f16(out, D, d);
    out[..D].fill(0);
    for (k, digit) in digits.into_iter().enumerate() {
        let (byte, bit) = place(k);
        out[byte] |= digit << bit;
    }
}
