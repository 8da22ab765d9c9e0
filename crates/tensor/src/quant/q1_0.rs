//! Q1_0: 128 values in 18 bytes, `value = ±d`.
//!
//! Layout: `d` f16; 16 bytes, bit `k % 8` of byte `k / 8` saying that value `k` is `+d`. Integer view: unit 128,
//! `w` is -1 or 1, one int8 digit, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q1_0, unit: 128, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// The weight of value `k`.
fn weight(block: &[u8], k: usize) -> i8 {
    2 * (block[2 + k / 8] >> (k % 8) & 1) as i8 - 1
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 128, d: read_f16(block, 0), ..UnitView::default() };
    for k in 0..128 {
        view.w[k] = i16::from(weight(block, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for k in 0..128 {
        out[k] = d * f32::from(weight(block, k));
    }
}

/// The mean magnitude loses least.
fn encode_block(values: &[f32], out: &mut [u8]) {
    write_f16(out, 0, values.iter().map(|v| v.abs() / 128.0).sum());
    for (byte, values) in out[2..].iter_mut().zip(values.chunks_exact(8)) {
        *byte = (0..8).fold(0, |bits, i| bits | u8::from(values[i] >= 0.0) << i);
    }
}
