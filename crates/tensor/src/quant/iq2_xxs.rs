//! IQ2_XXS: 256 values in 66 bytes, `value = (d / 8) * w`, `w = ±(2 s + 1) * level` with `s` per 32 values.
//!
//! Layout: `d` f16; for each 32 values 4 bytes, the row numbers of 4 groups of 8 values, then a u32: four times
//! the signs of seven values, bit `7 i` and up for values `8 i..`, the eighth making the number of negative
//! ones even, and from bit 28 the sub-scale. Rows: [`super::codebook::IQ2_XXS`]. Integer view: unit 256,
//! multiplier 8, `w` in -1333..=1333, radix 64, no minimum, no activation sums; scale `d / 8`, exact in f32.

use super::codebook::{Codes, IQ2_XXS as BOOK, eight_signs};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ2XXS, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the runs of 32 values begin, the bytes of one, and where in it the signs with the sub-scale begin.
const RUNS: usize = 2;
const RUN_BYTES: usize = 8;
const SIGNS: usize = 4;

fn codes(block: &[u8]) -> Codes {
    let words: [u32; 8] = std::array::from_fn(|j| {
        let at = RUNS + RUN_BYTES * j + SIGNS;
        u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
    });
    Codes {
        scales: std::array::from_fn(|j| if j < 8 { (words[j] >> 28) as u8 } else { 0 }),
        rows: std::array::from_fn(|g| {
            if g < 32 { u16::from(block[RUNS + g / 4 * RUN_BYTES + g % 4]) } else { 0 }
        }),
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
    for (j, run) in out[RUNS..].chunks_exact_mut(RUN_BYTES).enumerate() {
        let signs = (0..4).fold(0, |word, i| word | u32::from(codes.signs[4 * j + i] & 127) << (7 * i));
        let word = signs | u32::from(codes.scales[j]) << 28;
        run[SIGNS..].copy_from_slice(&word.to_le_bytes());
        for i in 0..4 {
            run[i] = codes.rows[4 * j + i] as u8;
        }
    }
}
