//! Q2_K: 256 values in 84 bytes, `value = (d * s) * q - dmin * m` with `s`, `m` per 16 values.
//!
//! Layout: 16 bytes, `s` of a run in the low and `m` in the high nibble; 64 bytes of codes: byte `i` of each
//! 32 holds at bit `2 r` the code of value `32 r + i` of 128; `d` f16; `dmin` f16. Integer view: unit 256,
//! `w = s * q` in 0..=45, one int8 digit; `m` the sub-minimum with scale `-dmin`, so activation sums per 16.

use super::{Format, Minimum, UnitView, inverse, least, range, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format = Format {
    dtype: DType::Q2K,
    unit: 256,
    minimum: Minimum::OfSubUnits,
    decode_block,
    encode_block,
    unit_view,
};

/// Values that share one sub-scale and one sub-minimum.
const SUB: usize = 16;
/// Where the codes and the two scales begin.
const CODES: usize = 16;
const D: usize = 80;
const DMIN: usize = 82;

/// Which byte holds the 2-bit code of value `k` of 256, and at which bit: Q3_K has the same order.
pub(super) const fn place(k: usize) -> (usize, usize) {
    (k / 128 * 32 + k % 32, k % 128 / 32 * 2)
}

/// The code of value `k`.
fn code(block: &[u8], k: usize) -> u8 {
    let (byte, bit) = place(k);
    block[CODES + byte] >> bit & 3
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, D), min: -read_f16(block, DMIN), ..UnitView::default() };
    for k in 0..256 {
        let pair = block[k / SUB];
        view.w[k] = i16::from(pair & 15) * i16::from(code(block, k));
        view.m[k] = i16::from(pair >> 4);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (read_f16(block, D), read_f16(block, DMIN));
    for k in 0..256 {
        let pair = block[k / SUB];
        out[k] = d * f32::from(pair & 15) * f32::from(code(block, k)) - dmin * f32::from(pair >> 4);
    }
}

/// `d` and `dmin` let the widest run span its range; then each run takes, of all 256 pairs of sub-scale and
/// sub-minimum, the one that loses least.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let ranges = values.chunks_exact(SUB).map(range);
    let (widest, deepest) = ranges.fold((0.0f32, 0.0f32), |(widest, deepest), (lo, hi)| {
        let lo = lo.min(0.0);
        (widest.max(hi - lo), deepest.max(-lo))
    });
    let (d, dmin) = (write_f16(out, D, widest / 45.0), write_f16(out, DMIN, deepest / 15.0));
    out[CODES..D].fill(0);
    for (j, run) in values.chunks_exact(SUB).enumerate() {
        let quantized = |v: f32, id: f32, min: f32| (((v + min) * id + 0.5) as u8).min(3);
        let parts = |pair: i16| {
            let (step, min) = (d * f32::from(pair & 15), dmin * f32::from(pair >> 4));
            (step, inverse(step), min)
        };
        let pair = least(0..=255, |pair| {
            let (step, id, min) = parts(pair);
            run.iter().map(|&v| (v + min - step * f32::from(quantized(v, id, min))).powi(2)).sum()
        });
        let (_, id, min) = parts(pair);
        out[j] = pair as u8;
        for (i, &v) in run.iter().enumerate() {
            let (byte, bit) = place(j * SUB + i);
            out[CODES + byte] |= quantized(v, id, min) << bit;
        }
    }
}
