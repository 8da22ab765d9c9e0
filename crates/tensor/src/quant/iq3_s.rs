//! IQ3_S: 256 values in 110 bytes, `value = d * w`, `w = ±(2 s + 1) * level` with `s` per 32 values.
//!
//! Layout: `d` f16; 64 bytes, the low eight bits of the row numbers of 64 groups of 4 values; 8 bytes, bit 8
//! of row number `g` at bit `g % 8` of byte `g / 8`; 32 bytes of signs, bit `k % 8` of byte `k / 8` for value
//! `k`; 4 bytes, sub-scale `j` being nibble `j % 2` of byte `j / 2`. Rows: [`super::codebook::IQ3_S`].
//! Integer view: unit 256, no multiplier, `w` in -465..=465, radix 64, no minimum, no activation sums; scale
//! `d`.

use super::codebook::{Codes, IQ3_S as BOOK};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ3S, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where each part of a block begins.
const ROWS: usize = 2;
const ROWS_HIGH: usize = 66;
const SIGNS: usize = 74;
const SCALES: usize = 106;

fn codes(block: &[u8]) -> Codes {
    let scale = |j: usize| block[SCALES + j / 2] >> (j % 2 * 4) & 15;
    Codes {
        scales: std::array::from_fn(|j| if j < 8 { scale(j) } else { 0 }),
        rows: std::array::from_fn(|g| {
            u16::from_le_bytes([block[ROWS + g], block[ROWS_HIGH + g / 8] >> (g % 8) & 1])
        }),
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
    for g in 0..64 {
        let [low, high] = codes.rows[g].to_le_bytes();
        out[ROWS + g] = low;
        out[ROWS_HIGH + g / 8] |= high << (g % 8);
    }
    out[SIGNS..SCALES].copy_from_slice(&codes.signs);
    for j in 0..8 {
        out[SCALES + j / 2] |= codes.scales[j] << (j % 2 * 4);
    }
}
