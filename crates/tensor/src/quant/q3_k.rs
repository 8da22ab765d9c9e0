//! Q3_K: 256 values in 110 bytes, `value = (d * (s - 32)) * (q - 4)` with `s` per 16 values.
//!
//! Layout: 32 bytes of high bits, bit `k / 32` of byte `k % 32` being bit 2 of value `k`; 64 bytes of low two
//! bits in the order of Q2_K; 12 bytes of sub-scales: the low four bits of `s[j]` are nibble `j / 8` of byte
//! `j % 8`, the high two are at bit `2 (j / 4)` of byte `8 + j % 4`; `d` f16. Integer view: unit 256,
//! `w = (s - 32) * (q - 4)` in -124..=128, one int8 digit if stored negated, no minimum, no activation sums;
//! scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, least, q2_k, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::Q3K, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Values that share one sub-scale.
const SUB: usize = 16;
/// Where the low bits, the sub-scales and the scale begin.
const LOW: usize = 32;
const SCALES: usize = 96;
const D: usize = 108;

/// The code of value `k`, less 4: -4..=3.
fn code(block: &[u8], k: usize) -> i8 {
    let (byte, bit) = q2_k::place(k);
    let high = block[k % 32] >> (k / 32) & 1;
    (block[LOW + byte] >> bit & 3 | high << 2) as i8 - 4
}

/// The sub-scales, less 32: -32..=31.
fn read_scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let (low, high) = (packed[j % 8] >> (j / 8 * 4) & 15, packed[8 + j % 4] >> (j / 4 * 2) & 3);
        (low | high << 4) as i8 - 32
    })
}

/// The inverse of [`read_scales`].
fn write_scales(scales: [i8; 16], packed: &mut [u8]) {
    packed.fill(0);
    for (j, scale) in scales.into_iter().enumerate() {
        let scale = (scale + 32) as u8;
        packed[j % 8] |= (scale & 15) << (j / 8 * 4);
        packed[8 + j % 4] |= (scale >> 4) << (j / 4 * 2);
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, D), ..UnitView::default() };
    let scales = read_scales(&block[SCALES..D]);
    for k in 0..256 {
        view.w[k] = i16::from(scales[k / SUB]) * i16::from(code(block, k));
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, D);
    let scales = read_scales(&block[SCALES..D]).map(|scale| d * f32::from(scale));
    for k in 0..256 {
        out[k] = scales[k / SUB] * f32::from(code(block, k));
    }
}

/// `d` lets the value of largest magnitude be code 0 (-4) under sub-scale 0 (-32); then each run takes, of
/// all 64 sub-scales, the one that loses least.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = write_f16(out, D, extreme(values) / 128.0);
    let quantized = |v: f32, id: f32| ((v * id + 4.5) as u8).min(7);
    let step = |scale: i8| d * f32::from(scale);
    let scales: [i8; 16] = std::array::from_fn(|j| {
        let run = &values[j * SUB..][..SUB];
        least(-32..=31, |scale| {
            let step = step(scale as i8);
            let id = inverse(step);
            run.iter().map(|&v| (v - step * (f32::from(quantized(v, id)) - 4.0)).powi(2)).sum()
        }) as i8
    });
    write_scales(scales, &mut out[SCALES..D]);
    out[..SCALES].fill(0);
    for k in 0..256 {
        let q = quantized(values[k], inverse(step(scales[k / SUB])));
        let (byte, bit) = q2_k::place(k);
        out[LOW + byte] |= (q & 3) << bit;
        out[k % 32] |= (q >> 2) << (k / 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_reads_back_every_scale() {
        for seed in 0..64 {
            let scales = std::array::from_fn(|j| ((seed + 11 * j) % 64) as i8 - 32);
            let mut packed = [0xff; 12];
            write_scales(scales, &mut packed);
            assert_eq!(read_scales(&packed), scales);
        }
    }
}
