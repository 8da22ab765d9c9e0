//! IQ3_XXS: 256 values in 98 bytes, `value = (d / 4) * w`, `w = ±(2 s + 1) * level` with `s` per 32 values.
//!
//! Layout: `d` f16; 64 bytes, the row numbers of 64 groups of 4 values; for each 32 values a u32: four times
//! the signs of seven values, bit `7 i` and up for values `8 i..`, the eighth making the number of negative
//! ones even, and from bit 28 the sub-scale. Rows: [`super::codebook::IQ3_XXS`]. Integer view: unit 256,
//! multiplier 4, `w` in -1922..=1922, radix 64, no minimum, no activation sums; scale `d / 4`, exact in f32.

use super::codebook::{Codes, IQ3_XXS as BOOK, eight_signs};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ3XXS, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the row numbers, and the signs with sub-scales, begin.
const ROWS: usize = 2;
const SIGNS: usize = 66;

fn codes(block: &[u8]) -> Codes {
    let words: [u32; 8] = std::array::from_fn(|j| {
        let at = SIGNS + 4 * j;
        u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
    });
    Codes {
        scales: std::array::from_fn(|j| if j < 8 { (words[j] >> 28) as u8 } else { 0 }),
        rows: std::array::from_fn(|g| u16::from(block[ROWS + g])),
        signs: std::array::from_fn(|i| eight_signs((words[i / 4] >> (i % 4 * 7)) as u8)),
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
    for g in 0..64 {
        out[ROWS + g] = codes.rows[g] as u8;
    }
    for j in 0..8 {
        let signs = (0..4).fold(0, |word, i| word | u32::from(codes.signs[4 * j + i] & 127) << (7 * i));
        let word = signs | u32::from(codes.scales[j]) << 28;
        out[SIGNS + 4 * j..][..4].copy_from_slice(&word.to_le_bytes());
    }
}
