//! Q5_1: 32 values in 24 bytes, `value = d * q + m`.
//!
//! Layout: `d` f16; `m` f16; 20 bytes of 5-bit codes as in [Q5_0](super::q5_0). Integer view: unit 32, `w = q`
//! in 0..=31, one int8 digit; `m[k] = 1` with scale `+m`, so one activation sum per unit.

use super::q5_0::{read_codes, write_codes};
use super::{Format, Minimum, UnitView, inverse, range, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q5_1, unit: 32, minimum: Minimum::OfUnit, decode_block, encode_block, unit_view };

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), min: read_f16(block, 2), ..UnitView::default() };
    view.m[..32].fill(1);
    for (w, q) in view.w.iter_mut().zip(read_codes(&block[4..])) {
        *w = i16::from(q);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let (d, m) = (read_f16(block, 0), read_f16(block, 2));
    for (out, q) in out.iter_mut().zip(read_codes(&block[4..])) {
        *out = d * f32::from(q) + m;
    }
}

/// The codes span the block's smallest to its largest value.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let (lo, hi) = range(values);
    let d = (hi - lo) / 31.0;
    let id = inverse(d);
    write_f16(out, 0, d);
    write_f16(out, 2, lo);
    write_codes(std::array::from_fn(|k| (((values[k] - lo) * id + 0.5) as u8).min(31)), &mut out[4..]);
}
