//! What IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S share: 4 or 8 neighbouring magnitudes are one row of a codebook, with a sign
//! bit for each value and a 4-bit sub-scale for each run.
//!
//! `value = (d * unit) * w`, `w = ±(2 s + 1) * level`: integers times a power of two times an f16, so that
//! every product is exact in f32 and the integer view equals the decoded block.

pub(super) mod rows;

use super::{UnitView, least, read_f16, write_f16};

/// A codebook and the constants around it.
#[derive(Debug)]
pub struct Codebook {
    /// Values in one row: 4 or 8.
    pub width: usize,
    /// Bits of one level number.
    pub bits: usize,
    /// The magnitudes, ascending.
    pub levels: &'static [u8],
    /// The rows, ascending: the level number of value `i` is at bit `bits * i`.
    pub rows: &'static [u16],
    /// Values that share one sub-scale.
    pub run: usize,
    /// What `d` is multiplied by: a power of two.
    pub unit: f32,
    /// Whether the signs of eight values are stored as seven, an even number of them being negative.
    pub even_signs: bool,
}

/// The codebook of [`super::iq2_xxs`].
pub const IQ2_XXS: Codebook = Codebook { rows: &rows::IQ2_XXS, run: 32, even_signs: true, ..IQ2_S };

/// The codebook of [`super::iq2_xs`].
pub const IQ2_XS: Codebook = Codebook { rows: &rows::IQ2_XS, even_signs: true, ..IQ2_S };

/// The codebook of [`super::iq2_s`].
pub const IQ2_S: Codebook = Codebook {
    width: 8,
    bits: 2,
    levels: &[8, 25, 43],
    rows: &rows::IQ2_S,
    run: 16,
    unit: 0.125,
    even_signs: false,
};

/// The codebook of [`super::iq3_s`].
pub const IQ3_S: Codebook = Codebook {
    width: 4,
    bits: 3,
    levels: &[1, 3, 5, 7, 9, 11, 13, 15],
    rows: &rows::IQ3_S,
    run: 32,
    unit: 1.0,
    even_signs: false,
};

/// The codebook of [`super::iq3_xxs`].
pub const IQ3_XXS: Codebook = Codebook {
    width: 4,
    bits: 3,
    levels: &[4, 12, 20, 28, 36, 44, 52, 62],
    rows: &rows::IQ3_XXS,
    run: 32,
    unit: 0.25,
    even_signs: true,
};

/// What a block holds beside `d`.
pub(super) struct Codes {
    /// Sub-scales, 0..=15; the first `256 / run` count.
    pub scales: [u8; 16],
    /// Row numbers; the first `256 / width` count.
    pub rows: [u16; 64],
    /// Bit `k % 8` of byte `k / 8` says that value `k` is negative.
    pub signs: [u8; 32],
}

/// The signs of eight values from the seven that are stored where an even number of them is negative; the top bit of
/// `seven` is something else's.
pub(super) fn eight_signs(seven: u8) -> u8 {
    let seven = seven & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

impl Codebook {
    fn level_number(&self, row: u16, i: usize) -> usize {
        usize::from(row >> (self.bits * i)) & ((1 << self.bits) - 1)
    }

    /// The magnitude of value `i` of row number `row`.
    pub fn level(&self, row: usize, i: usize) -> u8 {
        self.levels[self.level_number(self.rows[row], i)]
    }

    /// The integers of a block that begins with `d` and holds these codes.
    pub(super) fn unit_view(&self, block: &[u8], codes: &Codes, view: &mut UnitView) {
        let d = read_f16(block, 0) * self.unit;
        *view = UnitView { len: 256, w: self.weights(codes), d, ..UnitView::default() };
    }

    /// The values of the same block.
    pub(super) fn decode(&self, block: &[u8], codes: &Codes, out: &mut [f32]) {
        let d = read_f16(block, 0) * self.unit;
        for (out, w) in out.iter_mut().zip(self.weights(codes)) {
            *out = d * f32::from(w);
        }
    }

    /// The integer weights of 256 values.
    fn weights(&self, codes: &Codes) -> [i16; 256] {
        std::array::from_fn(|k| {
            let scale = 2 * i16::from(codes.scales[k / self.run]) + 1;
            let level = self.level(usize::from(codes.rows[k / self.width]), k % self.width);
            let magnitude = scale * i16::from(level);
            if codes.signs[k / 8] >> (k % 8) & 1 == 1 { -magnitude } else { magnitude }
        })
    }

    /// Chooses codes for 256 values and writes `d` to the first two bytes of the block.
    ///
    /// `d` lets the widest value reach the top level. A run's sub-scale is the one that would lose least if
    /// every combination of levels were a row; then each group takes the nearest row there is.
    pub(super) fn encode(&self, values: &[f32], block: &mut [u8]) -> Codes {
        let (targets, signs) = self.magnitudes(values);
        let top = f32::from(self.levels[self.levels.len() - 1]);
        let widest = targets.iter().fold(0.0, |widest: f32, &t| widest.max(t));
        let d = write_f16(block, 0, widest / (31.0 * top * self.unit)) * self.unit;
        let step = |scale: u8| d * (2.0 * f32::from(scale) + 1.0);
        let mut codes = Codes { scales: [0; 16], rows: [0; 64], signs };
        for (scale, run) in codes.scales.iter_mut().zip(targets.chunks_exact(self.run)) {
            let loss =
                |step: f32| run.iter().map(|&t| self.losses(t, step).fold(f32::INFINITY, f32::min)).sum();
            *scale = least(0..=15, |scale| loss(step(scale as u8))) as u8;
        }
        for (g, group) in targets.chunks_exact(self.width).enumerate() {
            let step = step(codes.scales[g * self.width / self.run]);
            let mut losses = [[0.0; 8]; 8];
            for (losses, &t) in losses.iter_mut().zip(group) {
                losses.iter_mut().zip(self.losses(t, step)).for_each(|(loss, l)| *loss = l);
            }
            let loss = |row: i16| {
                let row = self.rows[row as usize];
                (0..self.width).map(|i| losses[i][self.level_number(row, i)]).sum()
            };
            codes.rows[g] = least(0..=self.rows.len() as i16 - 1, loss) as u16;
        }
        codes
    }

    /// The square of what each level loses on `target`.
    fn losses(&self, target: f32, step: f32) -> impl Iterator<Item = f32> {
        self.levels.iter().map(move |&level| (target - step * f32::from(level)).powi(2))
    }

    /// Magnitudes and sign bits. Where an odd number of eight values is negative and must not be, the
    /// smallest of them changes sign: its target is then negative, which the lowest level is nearest to.
    fn magnitudes(&self, values: &[f32]) -> ([f32; 256], [u8; 32]) {
        let (mut targets, mut signs) = ([0.0; 256], [0; 32]);
        for ((targets, signs), values) in
            targets.chunks_exact_mut(8).zip(&mut signs).zip(values.chunks_exact(8))
        {
            *signs = (0..8).fold(0, |bits, i| bits | u8::from(values[i] < 0.0) << i);
            for (target, value) in targets.iter_mut().zip(values) {
                *target = value.abs();
            }
            if self.even_signs && signs.count_ones() % 2 == 1 {
                let smallest = (1..8).fold(0, |best, i| if targets[i] < targets[best] { i } else { best });
                targets[smallest] = -targets[smallest];
                *signs ^= 1 << smallest;
            }
        }
        (targets, signs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables hold what was published: FNV-1a over the levels of all rows, computed from the package.
    #[test]
    fn the_tables_are_the_published_ones() {
        for (book, rows, hash) in [
            (&IQ2_XXS, 256, 0xbb4e_e025_b5ac_6e8e),
            (&IQ2_XS, 512, 0xc9b1_ee61_e799_09bd),
            (&IQ2_S, 1024, 0x123e_dd38_a3b6_2b90),
            (&IQ3_S, 512, 0xfa37_020c_25b4_4829),
            (&IQ3_XXS, 256, 0xdfa5_dc83_d6a1_55d5),
        ] {
            assert_eq!(book.rows.len(), rows);
            let levels = (0..rows).flat_map(|row| (0..book.width).map(move |i| book.level(row, i)));
            let found = levels.fold(0xcbf2_9ce4_8422_2325, |hash: u64, level| {
                (hash ^ u64::from(level)).wrapping_mul(0x100_0000_01b3)
            });
            assert_eq!(found, hash, "{found:#x}");
        }
    }
}
