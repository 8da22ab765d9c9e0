//! IQ2_S: 256 values in 82 bytes, `value = (d / 8) * w`, `w = ±(2 s + 1) * level` with `s` per 16 values.
//!
//! Layout: `d` f16; 32 bytes, the low eight bits of the row numbers of 32 groups of 8 values; 32 bytes of
//! signs, bit `k % 8` of byte `k / 8` for value `k`; 8 bytes, bits 8 and 9 of row number `g` at bit
//! `2 (g % 4)` of byte `g / 4`; 8 bytes, sub-scale `j` being nibble `j % 2` of byte `j / 2`. Rows:
//! [`super::codebook::IQ2_S`]. Integer view: unit 256, multiplier 8, `w` in -1333..=1333, radix 64, no
//! minimum, no activation sums; scale `d / 8`, exact in f32.

use super::codebook::{Codes, IQ2_S as BOOK};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ2S, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where each part of a block begins.
const ROWS: usize = 2;
const SIGNS: usize = 34;
const ROWS_HIGH: usize = 66;
const SCALES: usize = 74;

fn codes(block: &[u8]) -> Codes {
    let row = |g: usize| {
        let high = block[ROWS_HIGH + g / 4] >> (g % 4 * 2) & 3;
        u16::from_le_bytes([block[ROWS + g], high])
    };
    Codes {
        scales: std::array::from_fn(|j| block[SCALES + j / 2] >> (j % 2 * 4) & 15),
        rows: std::array::from_fn(|g| if g < 32 { row(g) } else { 0 }),
        signs: std::array::from_fn(|i| block[SIGNS + i]),
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
    out[ROWS_HIGH..].fill(0);
    for g in 0..32 {
        let [low, high] = codes.rows[g].to_le_bytes();
        out[ROWS + g] = low;
        out[ROWS_HIGH + g / 4] |= high << (g % 4 * 2);
    }
    out[SIGNS..ROWS_HIGH].copy_from_slice(&codes.signs);
    for j in 0..16 {
        out[SCALES + j / 2] |= codes.scales[j] << (j % 2 * 4);
    }
}
