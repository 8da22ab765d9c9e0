//! The activation panel: a few rows of quantized activations, rearranged unit by unit in packed order, so that a
//! kernel reads one stream at constant offsets.

use std::ops::Range;

use ingle_graph::quantize::{Layout, SUM};

use super::pack::RESIDUES;
use super::spec::{Format, Spec};

/// Quantized activations `[rows, cols]` in memory (NUMERICS.md section 2).
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    pub(super) layout: Layout,
    pub(super) bytes: &'a [u8],
    pub(super) kept: bool,
}

impl<'a> Activations<'a> {
    /// Activations that lie in `bytes` as `layout` says.
    ///
    /// # Panics
    /// When `bytes` is shorter than the layout, or the digits are not one or two.
    pub fn new(layout: Layout, bytes: &'a [u8]) -> Self {
        assert!(bytes.len() >= layout.bytes(), "{} bytes of activations for {layout:?}", bytes.len());
        assert!(matches!(layout.digits, 1 | 2), "{layout:?}");
        Self { layout, bytes, kept: false }
    }

    /// The same with the promise that the bytes do not change until [`Scratch::forget`](super::Scratch::forget): products
    /// with the same scratch arrange them once.
    pub fn kept(self) -> Self {
        Self { kept: true, ..self }
    }

    /// Where everything is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Where the parts of one unit of a panel are, in bytes. A panel of `height` activation rows has
/// `v = height * digits` digit rows, the digits of an activation next to each other.
#[derive(Clone, Copy)]
pub(super) struct UnitLayout {
    /// `[starts][v]` i32, after the digits `[unit / 32][v][32]` int8.
    pub starts: usize,
    /// `[sums][v]` f32, with the scale, or pairs of int16, without.
    pub sums: usize,
    /// `[height]` f32.
    pub scales: usize,
    /// The next unit.
    pub bytes: usize,
}

impl UnitLayout {
    pub const fn new(spec: &Spec, height: usize, digits: usize) -> Self {
        let v = height * digits;
        let starts = v * spec.unit();
        let sums = starts + 4 * v * spec.starts();
        let scales = sums + 4 * v * spec.sums();
        Self { starts, sums, scales, bytes: scales + 4 * height }
    }
}

/// Writes the panel of `rows`, at most `height` of them; missing rows repeat the last one.
///
/// # Safety
/// `panel` has room for the bytes of [`UnitLayout`] times the units of a row. `rows` is not empty and lies within the
/// activations' layout, whose unit is the format's, and whose columns are a multiple of the unit.
pub(super) unsafe fn write<F: Format>(
    x: &Activations<'_>,
    rows: Range<usize>,
    height: usize,
    panel: *mut u8,
) {
    let spec = &const { F::SPEC };
    let layout = &x.layout;
    let to = UnitLayout::new(spec, height, layout.digits);
    let units = layout.cols / spec.unit();
    let all = height * layout.digits;
    let mut unit = panel;
    for residue in 0..RESIDUES {
        let mut first = residue;
        while first < units {
            // A few units at a time: all of their panel stays in cache until every row has been written to it.
            let count = AT_A_TIME.min((units - first).div_ceil(RESIDUES));
            for v in 0..all {
                let (r, digit) = (v / layout.digits, v % layout.digits);
                let row = (rows.start + r).min(rows.end - 1);
                // SAFETY: the layout places units * unit digits, units scales and their sums of this row inside `bytes`
                // (checked by `Activations::new`); every write is to the parts of row r of `count` units of the panel.
                unsafe {
                    let from = x.bytes.as_ptr();
                    let mut digits = from.add(layout.digit_offset(digit, row) + first * spec.unit());
                    let mut sums =
                        from.add(layout.sum_offset(digit, row)).cast::<i16>().add(first * spec.unit() / SUM);
                    let mut scales = from.add(layout.scale_offset(row)).cast::<f32>().add(first);
                    let mut unit = unit;
                    for _ in 0..count {
                        for group in 0..spec.unit() / 32 {
                            let to = unit.add((group * all + v) * 32);
                            std::ptr::copy_nonoverlapping(digits.add(group * 32), to, 32);
                        }
                        let starts = unit.add(to.starts).cast::<i32>().add(v);
                        let after = unit.add(to.sums).cast::<i32>().add(v);
                        let scale = scales.read();
                        let of_digit = if digit + 1 < layout.digits { 128.0 * scale } else { scale };
                        write_sums(spec, digits, sums, of_digit, starts, after, all);
                        // Both digits of an activation write the same scale.
                        unit.add(to.scales).cast::<f32>().add(r).write(scale);
                        digits = digits.wrapping_add(RESIDUES * spec.unit());
                        sums = sums.wrapping_add(RESIDUES * spec.unit() / SUM);
                        scales = scales.wrapping_add(RESIDUES);
                        unit = unit.wrapping_add(to.bytes);
                    }
                }
            }
            unit = unit.wrapping_add(count * to.bytes);
            first += count * RESIDUES;
        }
    }
}

/// Units written at a time.
const AT_A_TIME: usize = 8;

/// Writes starts and sums of one digit row and unit; `scale` is the digit's.
///
/// # Safety
/// `digits` holds a unit, `sums` its sums per 16 columns; `starts` and `after` have room for the format's numbers,
/// `stride` apart.
#[inline(always)]
unsafe fn write_sums(
    spec: &Spec,
    digits: *const u8,
    sums: *const i16,
    scale: f32,
    starts: *mut i32,
    after: *mut i32,
    stride: usize,
) {
    // SAFETY: the caller's duty.
    unsafe {
        let sum = |i: usize| i32::from(sums.add(i).read());
        if spec.sub == 0 {
            let all = sum(0) + sum(1);
            if spec.starts() == 1 {
                starts.write(-spec.offset * all);
            }
            if spec.sums() == 1 {
                after.write((scale * all as f32).to_bits() as i32);
            }
            return;
        }
        for i in 0..spec.starts() {
            let all = match spec.piece_words() {
                8 => sum(2 * i) + sum(2 * i + 1),
                4 => sum(i),
                _ => sum_of_8(digits.add(8 * i).cast::<u64>().read_unaligned()),
            };
            starts.add(i * stride).write(-spec.center() * all);
        }
        for i in 0..spec.sums() {
            let of = |j: usize| if spec.sub == 32 { sum(2 * j) + sum(2 * j + 1) } else { sum(j) };
            after.add(i * stride).write(of(2 * i) & 0xFFFF | of(2 * i + 1) << 16);
        }
    }
}

/// The sum of the eight signed bytes of a word.
#[inline(always)]
fn sum_of_8(word: u64) -> i32 {
    const EVEN: u64 = 0x00FF_00FF_00FF_00FF;
    let biased = word ^ 0x8080_8080_8080_8080;
    let pairs = (biased & EVEN) + (biased >> 8 & EVEN);
    (pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32 - 8 * 128
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_summed_with_their_signs() {
        for bytes in [[-128i8; 8], [127; 8], [1, -2, 3, -4, 5, -6, 7, -128], [0; 8]] {
            let word = u64::from_le_bytes(bytes.map(|b| b as u8));
            assert_eq!(sum_of_8(word), bytes.iter().map(|&b| i32::from(b)).sum::<i32>());
        }
    }
}
