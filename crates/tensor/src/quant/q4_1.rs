//! Q4_1: 32 values in 20 bytes, `value = d * q + m`.
//!
//! Layout: `d` f16; `m` f16; 16 bytes, byte `i` holding value `i` in its low and value `i + 16` in its high
//! nibble. Integer view: unit 32, `w = q` in 0..=15, one int8 digit; `m[k] = 1` with scale `+m`, so one
//! activation sum per unit.

use super::{Format, Minimum, UnitView, inverse, range, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q4_1, unit: 32, minimum: Minimum::OfUnit, decode_block, encode_block, unit_view };

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), min: read_f16(block, 2), ..UnitView::default() };
    view.m[..32].fill(1);
    for i in 0..16 {
        view.w[i] = i16::from(block[4 + i] & 15);
        view.w[i + 16] = i16::from(block[4 + i] >> 4);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (read_f16(block, 0), read_f16(block, 2));
    for i in 0..16 {
        out[i] = d * f32::from(block[4 + i] & 15) + m;
        out[i + 16] = d * f32::from(block[4 + i] >> 4) + m;
    }
}

/// The codes span the block's smallest to its largest value.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let (lo, hi) = range(values);
    let d = (hi - lo) / 15.0;
    let id = inverse(d);
    write_f16(out, 0, d);
    write_f16(out, 2, lo);
    let code = |v: f32| (((v - lo) * id + 0.5) as u8).min(15);
    for i in 0..16 {
        out[4 + i] = code(values[i]) | code(values[i + 16]) << 4;
    }
}
