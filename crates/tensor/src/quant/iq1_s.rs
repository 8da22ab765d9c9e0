//! IQ1_S: 256 values in 50 bytes, `value = (d / 8) * w`, `w = (2 s + 1) * (8 g ± 1)` with `s` and the sign per 32
//! values and `g` in -1..=1.
//!
//! Layout: `d` f16; 32 bytes, the low eight bits of the row numbers of 32 groups of 8 values; for each 32 values a
//! u16: four times the high three bits of a row number, bit `3 i` and up for group `i`, from bit 12 the sub-scale,
//! in bit 15 whether the eighth is subtracted. Rows: [`super::iq1`]. Integer view: unit 256, multiplier 8, `w` in
//! -135..=135, two digits of radix 64, no minimum, no activation sums; scale `d / 8`, exact in f32.

use super::iq1::{self, Codes, Runs};
use super::{Format, Minimum, UnitView, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ1S, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the low bits of row numbers, and the words with all else, begin.
const ROWS: usize = 2;
const WORDS: usize = 34;

const RUNS: Runs = Runs { scale: 32, shift: 32 };

fn codes(block: &[u8]) -> Codes {
    let word = |j: usize| u16::from_le_bytes([block[WORDS + 2 * j], block[WORDS + 2 * j + 1]]);
    Codes {
        scales: std::array::from_fn(|j| (word(j / 2) >> 12 & 7) as u8),
        rows: std::array::from_fn(|g| u16::from(block[ROWS + g]) | (word(g / 4) >> (g % 4 * 3) & 7) << 8),
        down: std::array::from_fn(|g| word(g / 4) >> 15 == 1),
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    codes(block).unit_view(read_f16(block, 0), view);
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    codes(block).decode(read_f16(block, 0), out);
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = write_f16(out, 0, iq1::scale_for(values));
    let codes = Codes::encode(values, d, RUNS);
    for (j, word) in out[WORDS..].chunks_exact_mut(2).enumerate() {
        let high = (0..4).fold(0, |word, i| word | (codes.rows[4 * j + i] >> 8) << (3 * i));
        let bits = high | u16::from(codes.scales[2 * j]) << 12 | u16::from(codes.down[4 * j]) << 15;
        word.copy_from_slice(&bits.to_le_bytes());
    }
    for g in 0..32 {
        out[ROWS + g] = codes.rows[g] as u8;
    }
}
