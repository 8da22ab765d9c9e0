//! Q6_K: 256 values in 210 bytes, `value = (d * s) * (q - 32)` with signed `s` per 16 values.
//!
//! Layout: 128 bytes of low four bits; 64 bytes of high two bits; 16 signed bytes `s`; `d` f16. Each half of
//! 128 values has 64 low and 32 high bytes: value `32 r + i` of the half has its low bits in byte
//! `32 (r % 2) + i`, the low nibble for r < 2, else the high one, and its high bits in byte `i` at bit `2 r`.
//! Integer view: unit 256, `w = s * (q - 32)` in -4064..=4096, radix 64, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q6K, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Values that share one sub-scale.
const SUB: usize = 16;
/// Where the sub-scales and the scale begin.
const SCALES: usize = 192;
const D: usize = 208;

/// The code of value `k`, less 32: -32..=31.
fn code(block: &[u8], k: usize) -> i8 {
    let (half, r, i) = (k / 128, k % 128 / 32, k % 32);
    let low = block[64 * half + 32 * (r % 2) + i] >> (4 * (r / 2)) & 15;
    let high = block[128 + 32 * half + i] >> (2 * r) & 3;
    (low | high << 4) as i8 - 32
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, D), ..UnitView::default() };
    for k in 0..256 {
        view.w[k] = i16::from(block[SCALES + k / SUB] as i8) * i16::from(code(block, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, D);
    for k in 0..256 {
        out[k] = d * f32::from(block[SCALES + k / SUB] as i8) * f32::from(code(block, k));
    }
}

/// In each run of 16 the value of largest magnitude becomes code 0 (-32), which fixes the run's signed step;
/// the steps are then rounded to multiples of the widest one's 127th.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let steps: [f32; 16] = std::array::from_fn(|j| extreme(&values[j * SUB..][..SUB]) / -32.0);
    let d = write_f16(out, D, extreme(&steps).abs() / 127.0);
    let scales = steps.map(|step| (step * inverse(d)).round().clamp(-127.0, 127.0) as i8);
    out[..SCALES].fill(0);
    for j in 0..16 {
        out[SCALES + j] = scales[j] as u8;
    }
    for k in 0..256 {
        let q = (values[k] * inverse(d * f32::from(scales[k / SUB]))).round().clamp(-32.0, 31.0) as i8;
        let q = (q + 32) as u8;
        let (half, r, i) = (k / 128, k % 128 / 32, k % 32);
        out[64 * half + 32 * (r % 2) + i] |= (q & 15) << (4 * (r / 2));
        out[128 + 32 * half + i] |= (q >> 4) << (2 * r);
    }
}
