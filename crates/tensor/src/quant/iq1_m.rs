//! IQ1_M: 256 values in 56 bytes, `value = (d / 8) * w`, `w = (2 s + 1) * (8 g ± 1)` with `s` per 16 values, the
//! sign per 8 and `g` in -1..=1.
//!
//! Layout: 32 bytes, the low eight bits of the row numbers of 32 groups of 8 values; 16 bytes, nibble `g % 2` of
//! byte `g / 2` holding the high three bits of row number `g` and, above them, whether the eighth is subtracted;
//! four u16, each with four 3-bit sub-scales and, from bit 12, four bits of `d` as f16, the low ones first. Rows:
//! [`super::iq1`]. Integer view: unit 256, multiplier 8, `w` in -135..=135, two digits of radix 64, no minimum, no
//! activation sums; scale `d / 8`, exact in f32.

use half::f16;

use super::iq1::{self, Codes, Runs};
use super::{Format, Minimum, UnitView};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::IQ1M, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the high bits of row numbers, and the words with sub-scales, begin.
const HIGH: usize = 32;
const WORDS: usize = 48;

const RUNS: Runs = Runs { scale: 16, shift: 8 };

fn word(block: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([block[WORDS + 2 * i], block[WORDS + 2 * i + 1]])
}

fn scale(block: &[u8]) -> f32 {
    f16::from_bits((0..4).fold(0, |bits, i| bits | (word(block, i) >> 12) << (4 * i))).to_f32()
}

fn codes(block: &[u8]) -> Codes {
    let high = |g: usize| block[HIGH + g / 2] >> (g % 2 * 4) & 15;
    Codes {
        scales: std::array::from_fn(|j| (word(block, j / 4) >> (j % 4 * 3) & 7) as u8),
        rows: std::array::from_fn(|g| u16::from_le_bytes([block[g], high(g) & 7])),
        down: std::array::from_fn(|g| high(g) >> 3 == 1),
    }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    codes(block).unit_view(scale(block), view);
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    codes(block).decode(scale(block), out);
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let d = f16::from_f32(iq1::scale_for(values));
    let codes = Codes::encode(values, d.to_f32(), RUNS);
    for (i, word) in out[WORDS..].chunks_exact_mut(2).enumerate() {
        let scales = (0..4).fold(0, |word, j| word | u16::from(codes.scales[4 * i + j]) << (3 * j));
        word.copy_from_slice(&(scales | (d.to_bits() >> (4 * i) & 15) << 12).to_le_bytes());
    }
    let nibble = |g: usize| (codes.rows[g] >> 8) as u8 | u8::from(codes.down[g]) << 3;
    for i in 0..16 {
        out[HIGH + i] = nibble(2 * i) | nibble(2 * i + 1) << 4;
    }
    for g in 0..32 {
        out[g] = codes.rows[g] as u8;
    }
}
