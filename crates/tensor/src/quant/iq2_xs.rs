//! IQ2_XS: 256 values in 74 bytes, `value = (d / 8) * w`, `w = ±(2 s + 1) * level` with `s` per 16 values.
//!
//! Layout: `d` f16; for each 8 values a u16, the row number in its low nine bits and above it the signs of seven
//! values, the eighth making the number of negative ones even; 8 bytes, sub-scale `j` being nibble `j % 2` of
//! byte `j / 2`. Rows: [`super::codebook::IQ2_XS`]. Integer view: unit 256, multiplier 8, `w` in -1333..=1333,
//! radix 64, no minimum, no activation sums; scale `d / 8`, exact in f32.

use super::codebook::{Codes, IQ2_XS as BOOK, eight_signs};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ2XS, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the groups of 8 values and the sub-scales begin.
const GROUPS: usize = 2;
const SCALES: usize = 66;

fn codes(block: &[u8]) -> Codes {
    let group = |g: usize| u16::from_le_bytes([block[GROUPS + 2 * g], block[GROUPS + 2 * g + 1]]);
    Codes {
        scales: std::array::from_fn(|j| block[SCALES + j / 2] >> (j % 2 * 4) & 15),
        rows: std::array::from_fn(|g| if g < 32 { group(g) & 511 } else { 0 }),
        signs: std::array::from_fn(|g| eight_signs((group(g) >> 9) as u8)),
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    BOOK.unit_view(block, &codes(block), view);
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    BOOK.decode(block, &codes(block), out);
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let codes = BOOK.encode(values, out);
    for g in 0..32 {
        let word = codes.rows[g] | u16::from(codes.signs[g] & 127) << 9;
        out[GROUPS + 2 * g..][..2].copy_from_slice(&word.to_le_bytes());
    }
    for j in 0..8 {
        out[SCALES + j] = codes.scales[2 * j] | codes.scales[2 * j + 1] << 4;
    }
}
