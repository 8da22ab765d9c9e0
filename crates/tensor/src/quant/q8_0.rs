//! Q8_0: 32 values in 34 bytes, `value = d * q`.
//!
//! Layout: `d` f16; 32 signed bytes. Integer view: unit 32, `w = q` in -128..=127 (encoders stay within 127),
//! one int8 digit, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q8_0, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), ..UnitView::default() };
    for (w, q) in view.w.iter_mut().zip(&block[2..34]) {
        *w = i16::from(*q as i8);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for (out, q) in out.iter_mut().zip(&block[2..34]) {
        *out = d * f32::from(*q as i8);
    }
}

/// Symmetric; halves round away from zero.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = extreme(values).abs() / 127.0;
    let id = inverse(d);
    write_f16(out, 0, d);
    for (q, v) in out[2..34].iter_mut().zip(values) {
        *q = (v * id).round() as i8 as u8;
    }
}
