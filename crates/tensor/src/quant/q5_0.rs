//! Q5_0: 32 values in 22 bytes, `value = d * (q - 16)`.
//!
//! Layout: `d` f16; `high` u32, bit `k` being bit 4 of value `k`; 16 bytes, byte `i` holding the low four bits
//! of value `i` in its low and of value `i + 16` in its high nibble. Integer view: unit 32, `w = q - 16` in
//! -16..=15, one int8 digit, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q5_0, unit: 32, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// The codes of one block, 0..=31, from the bytes after its scales.
pub(super) fn read_codes(packed: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    std::array::from_fn(|k| {
        let byte = packed[4 + k % 16];
        let low = if k < 16 { byte & 15 } else { byte >> 4 };
        low | ((high >> k & 1) as u8) << 4
    })
}

/// The inverse of [`read_codes`].
pub(super) fn write_codes(codes: [u8; 32], packed: &mut [u8]) {
    let high = (0..32).fold(0, |high, k| high | u32::from(codes[k] >> 4) << k);
    packed[..4].copy_from_slice(&high.to_le_bytes());
    for i in 0..16 {
        packed[4 + i] = codes[i] & 15 | codes[i + 16] << 4;
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 32, d: read_f16(block, 0), ..UnitView::default() };
    for (w, q) in view.w.iter_mut().zip(read_codes(&block[2..])) {
        *w = i16::from(q) - 16;
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for (out, q) in out.iter_mut().zip(read_codes(&block[2..])) {
        *out = d * (f32::from(q) - 16.0);
    }
}

/// The value of largest magnitude becomes code 0 (-16), as in Q4_0.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = extreme(values) / -16.0;
    let id = f64::from(inverse(d));
    write_f16(out, 0, d);
    write_codes(std::array::from_fn(|k| ((f64::from(values[k]) * id + 16.5) as u8).min(31)), &mut out[2..]);
}
