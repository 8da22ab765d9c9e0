//! Q8_1: 32 values in 36 bytes, `value = d * q`.
//!
//! Layout: `d` f16; `s` f16, the sum of the values, which only products with other formats read; 32 signed bytes.
//! Integer view: that of [Q8_0](super::q8_0): unit 32, `w = q` in -128..=127, one int8 digit, no minimum, no
//! activation sums; scale `d`.
//!
//! (The type's size in the `gguf` package, 40 bytes, is that of an older layout with f32 scales.)

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q8_1, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the codes begin.
const CODES: usize = 4;

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), ..UnitView::default() };
    for (w, q) in view.w.iter_mut().zip(&block[CODES..]) {
        *w = i16::from(*q as i8);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for (out, q) in out.iter_mut().zip(&block[CODES..]) {
        *out = d * f32::from(*q as i8);
    }
}

/// Symmetric; halves round away from zero; the sum is that of the rounded values.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = extreme(values).abs() / 127.0;
    let id = inverse(d);
    let mut sum = 0;
    for (out, v) in out[CODES..].iter_mut().zip(values) {
        let q = (v * id).round() as i8;
        sum += i32::from(q);
        *out = q as u8;
    }
    write_f16(out, 0, d);
    write_f16(out, 2, d * sum as f32);
}
