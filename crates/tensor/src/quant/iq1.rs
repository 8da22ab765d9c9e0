//! What IQ1_S and IQ1_M share: eight neighbouring values of -1, 0 and 1 are one row of a table of 2048, a run of
//! values has a 3-bit sub-scale, and a group of them is shifted up or down by an eighth.
//!
//! `value = (d / 8) * w`, `w = (2 s + 1) * (8 g ± 1)`: integers times a power of two times an f16, so that every
//! product is exact in f32 and the integer view equals the decoded block.

use super::codebook::rows::IQ1 as ROWS;
use super::{UnitView, least};

/// Values of one row.
const WIDTH: usize = 8;
/// Groups of [`WIDTH`] values in a block.
const GROUPS: usize = 32;
/// The largest `w`.
const TOP: f32 = 15.0 * 9.0;
/// What `d` is multiplied by.
const UNIT: f32 = 0.125;

/// What a block holds beside `d`.
pub(super) struct Codes {
    /// Sub-scales, 0..=7, per 16 values.
    pub scales: [u8; 16],
    /// Row numbers, 0..=2047.
    pub rows: [u16; GROUPS],
    /// Whether a group is shifted down.
    pub down: [bool; GROUPS],
}

/// How values share what is stored: in runs of one sub-scale, and in runs of one shift, which are no longer.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    pub scale: usize,
    pub shift: usize,
}

/// Value `i` of a row: -1, 0 or 1.
fn value(row: u16, i: usize) -> i16 {
    (row >> (2 * i) & 3) as i16 - 1
}

impl Codes {
    fn weight(&self, k: usize) -> i16 {
        let group = k / WIDTH;
        let shift = if self.down[group] { -1 } else { 1 };
        let scale = 2 * i16::from(self.scales[k / 16]) + 1;
        scale * (8 * value(ROWS[usize::from(self.rows[group])], k % WIDTH) + shift)
    }

    /// The integers of a block with this `d`.
    pub fn unit_view(&self, d: f32, view: &mut UnitView) {
        let w = std::array::from_fn(|k| self.weight(k));
        *view = UnitView { len: 256, w, d: d * UNIT, ..UnitView::default() };
    }

    /// The values of the same block.
    pub fn decode(&self, d: f32, out: &mut [f32]) {
        for (k, out) in out.iter_mut().enumerate() {
            *out = d * UNIT * f32::from(self.weight(k));
        }
    }

    /// Chooses codes for 256 values under the scale that [`scale_for`] gave and f16 rounded.
    ///
    /// The sub-scale and shifts of a run are those that would lose least if every combination of -1, 0 and 1 were
    /// a row; then each group takes the nearest row there is.
    pub fn encode(values: &[f32], d: f32, runs: Runs) -> Self {
        let mut codes = Self { scales: [0; 16], rows: [0; GROUPS], down: [false; GROUPS] };
        let step = |scale: i16| d * UNIT * f32::from(2 * scale + 1);
        let best_shift = |values: &[f32], step: f32| {
            let loss = |down: i16| {
                values
                    .iter()
                    .map(|&v| losses(v, step, down == 1).into_iter().fold(f32::INFINITY, f32::min))
                    .sum()
            };
            let down = least(0..=1, loss);
            (down == 1, loss(down))
        };
        for (r, run) in values.chunks_exact(runs.scale).enumerate() {
            let loss = |scale| run.chunks_exact(runs.shift).map(|v| best_shift(v, step(scale)).1).sum();
            let scale = least(0..=7, loss);
            codes.scales[r * runs.scale / 16..][..runs.scale / 16].fill(scale as u8);
            for (s, shifted) in run.chunks_exact(runs.shift).enumerate() {
                let (down, _) = best_shift(shifted, step(scale));
                for (g, group) in shifted.chunks_exact(WIDTH).enumerate() {
                    let at = (r * runs.scale + s * runs.shift) / WIDTH + g;
                    codes.down[at] = down;
                    codes.rows[at] = nearest_row(group, step(scale), down);
                }
            }
        }
        codes
    }
}

/// The scale under which the widest value can be reached.
pub(super) fn scale_for(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |widest: f32, v| widest.max(v.abs())) / (TOP * UNIT)
}

/// The square of what -1, 0 and 1 each lose on `target`.
fn losses(target: f32, step: f32, down: bool) -> [f32; 3] {
    let shift = if down { -1.0 } else { 1.0 };
    [-8.0, 0.0, 8.0].map(|level: f32| (target - step * (level + shift)).powi(2))
}

/// The row that loses least on eight values. Half rows are summed once: each is one byte of a row.
fn nearest_row(group: &[f32], step: f32, down: bool) -> u16 {
    let halves: [[f32; 256]; 2] = std::array::from_fn(|h| {
        let losses: [[f32; 3]; 4] = std::array::from_fn(|i| losses(group[4 * h + i], step, down));
        std::array::from_fn(|byte| {
            (0..4).map(|i| losses[i].get(byte >> (2 * i) & 3).copied().unwrap_or(f32::INFINITY)).sum()
        })
    });
    least(0..=ROWS.len() as i16 - 1, |row| {
        let [low, high] = ROWS[row as usize].to_le_bytes();
        halves[0][usize::from(low)] + halves[1][usize::from(high)]
    }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table holds what was published: FNV-1a over the values of all rows, computed from the package.
    #[test]
    fn the_rows_are_the_published_ones() {
        let values = ROWS.iter().flat_map(|&row| (0..WIDTH).map(move |i| value(row, i)));
        let found = values.fold(0xcbf2_9ce4_8422_2325, |hash: u64, value| {
            (hash ^ u64::from(value as u8)).wrapping_mul(0x100_0000_01b3)
        });
        assert_eq!(found, 0x6703_ed86_3501_ae2e, "{found:#x}");
    }
}
