//! IQ4_XS: 256 values in 136 bytes, `value = (d * (s - 32)) * LEVELS[q]` with `s` per 32 values.
//!
//! Layout: `d` f16; a u16, the high two bits of sub-scale `j` at bit `2 j`; 4 bytes, the low four bits of
//! `s[j]` being nibble `j % 2` of byte `j / 2`; 128 bytes of codes, sixteen for each 32 values, in the order
//! of IQ4_NL. Integer view: unit 256, no multiplier, `w = (s - 32) * LEVELS[q]` in -3937..=4064, radix 64, no
//! minimum, no activation sums; scale `d`.

use super::iq4_nl::{self, LEVELS};
use super::{Format, Minimum, UnitView, extreme, least, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ4XS, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Values that share one sub-scale, and bytes of their codes.
const SUB: usize = 32;
const SUB_BYTES: usize = 16;
/// Where the sub-scales and the codes begin.
const HIGH: usize = 2;
const LOW: usize = 4;
const CODES: usize = 8;

/// Sub-scale `j`, less 32: -32..=31.
fn scale(block: &[u8], j: usize) -> i8 {
    let low = block[LOW + j / 2] >> (j % 2 * 4) & 15;
    let high = block[HIGH + j / 4] >> (j % 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, 0), ..UnitView::default() };
    for (j, (w, codes)) in
        view.w.chunks_exact_mut(SUB).zip(block[CODES..].chunks_exact(SUB_BYTES)).enumerate()
    {
        for (w, q) in w.iter_mut().zip(iq4_nl::read_codes(codes)) {
            *w = i16::from(scale(block, j)) * i16::from(LEVELS[usize::from(q)]);
        }
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, 0);
    for (j, (out, codes)) in out.chunks_exact_mut(SUB).zip(block[CODES..].chunks_exact(SUB_BYTES)).enumerate()
    {
        let step = d * f32::from(scale(block, j));
        for (out, q) in out.iter_mut().zip(iq4_nl::read_codes(codes)) {
            *out = step * f32::from(LEVELS[usize::from(q)]);
        }
    }
}

/// `d` lets the value of largest magnitude be code 0 (-127) under sub-scale 0 (-32); then each run takes, of
/// all 64 sub-scales, the one that loses least.
fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = write_f16(out, 0, extreme(values) / (127.0 * 32.0));
    out[HIGH..CODES].fill(0);
    for (j, run) in values.chunks_exact(SUB).enumerate() {
        let step = |scale: i16| d * f32::from(scale);
        let scale = least(-32..=31, |scale| iq4_nl::loss(run, step(scale)));
        let bits = (scale + 32) as u8;
        out[LOW + j / 2] |= (bits & 15) << (j % 2 * 4);
        out[HIGH + j / 4] |= (bits >> 4) << (j % 4 * 2);
        iq4_nl::write_codes(
            iq4_nl::nearest(run, step(scale)),
            &mut out[CODES + j * SUB_BYTES..][..SUB_BYTES],
        );
    }
}
