//! Q4_0: 32 values in 18 bytes, `value = d * (q - 8)`.
//!
//! Layout: `d` f16; 16 bytes, byte `i` holding value `i` in its low and value `i + 16` in its high nibble.
//! Integer view: unit 32, `w = q - 8` in -8..=7, one int8 digit, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q4_0, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), ..UnitView::default() };
    for i in 0..16 {
        view.w[i] = i16::from(block[2 + i] & 15) - 8;
        view.w[i + 16] = i16::from(block[2 + i] >> 4) - 8;
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for i in 0..16 {
        out[i] = d * (f32::from(block[2 + i] & 15) - 8.0);
        out[i + 16] = d * (f32::from(block[2 + i] >> 4) - 8.0);
    }
}

/// The value of largest magnitude becomes code 0 (-8), so the scale's sign is opposite to its own. The sum is
/// taken in f64, where it is exact enough to need no statement about fused multiply-add.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = extreme(values) / -8.0;
    let id = f64::from(inverse(d));
    write_f16(out, 0, d);
    let code = |v: f32| ((f64::from(v) * id + 8.5) as u8).min(15);
    for i in 0..16 {
        out[2 + i] = code(values[i]) | code(values[i + 16]) << 4;
    }
}
