//! Q8_K: 256 values in 292 bytes, `value = d * q`.
//!
//! Layout: `d` f32; 256 signed bytes; sixteen i16, the sums of 16 codes each, which only products with other
//! formats read. Integer view: unit 256, `w = q` in -128..=127, one int8 digit, no minimum, no activation sums;
//! scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q8K, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where codes and sums begin, and codes in a sum.
const CODES: usize = 4;
const SUMS: usize = 260;
const SUM: usize = 16;

fn scale(block: &[u8]) -> f32 {
    f32::from_le_bytes([block[0], block[1], block[2], block[3]])
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: scale(block), ..UnitView::default() };
    for (w, q) in view.w.iter_mut().zip(&block[CODES..SUMS]) {
        *w = i16::from(*q as i8);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = scale(block);
    for (out, q) in out.iter_mut().zip(&block[CODES..SUMS]) {
        *out = d * f32::from(*q as i8);
    }
}

/// The value of largest magnitude becomes -127, which fixes the signed step.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = extreme(values) / -127.0;
    let id = inverse(d);
    out[..CODES].copy_from_slice(&d.to_le_bytes());
    let (codes, sums) = out[CODES..].split_at_mut(SUMS - CODES);
    for (q, v) in codes.iter_mut().zip(values) {
        *q = (v * id).round() as i8 as u8;
    }
    for (sum, codes) in sums.chunks_exact_mut(2).zip(codes.chunks_exact(SUM)) {
        let total: i16 = codes.iter().map(|q| i16::from(*q as i8)).sum();
        sum.copy_from_slice(&total.to_le_bytes());
    }
}
