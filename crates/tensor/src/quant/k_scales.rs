//! What Q4_K and Q5_K share, which is all but where the codes are: eight 6-bit sub-scales and sub-minima in 12
//! bytes, what they make of codes, and how to choose them.
//!
//! Bytes 0..4 hold sub-scales 0..4 in their low six bits, bytes 4..8 sub-minima 0..4; their two high bits are
//! bits 4 and 5 of sub-scales and sub-minima 4..8, whose low four bits are the nibbles of bytes 8..12.

use super::{UnitView, inverse, range, read_f16, write_f16};

/// Values that share one sub-scale and one sub-minimum.
const SUB: usize = 32;

/// The (sub-scale, sub-minimum) pairs, each 0..=63.
fn read(packed: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|j| {
        if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            let low = packed[j + 4];
            (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
        }
    })
}

/// The integers of a block whose value `k` has the code `code(k)`.
pub(super) fn unit_view(block: &[u8], code: impl Fn(usize) -> u8, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, 0), min: -read_f16(block, 2), ..UnitView::default() };
    let scales = read(&block[4..16]);
    for k in 0..256 {
        let (scale, min) = scales[k / SUB];
        view.w[k] = i16::from(scale) * i16::from(code(k));
        view.m[k] = i16::from(min);
    }
}

/// The values of the same block.
pub(super) fn decode(block: &[u8], code: impl Fn(usize) -> u8, out: &mut [f32]) {
    let (d, dmin) = (read_f16(block, 0), read_f16(block, 2));
    let scales = read(&block[4..16]).map(|(s, m)| (d * f32::from(s), dmin * f32::from(m)));
    for k in 0..256 {
        let (scale, min) = scales[k / SUB];
        out[k] = scale * f32::from(code(k)) - min;
    }
}

/// The inverse of [`read`].
fn write(pairs: [(u8, u8); 8], packed: &mut [u8]) {
    for j in 0..4 {
        let ((scale, min), (scale_4, min_4)) = (pairs[j], pairs[j + 4]);
        packed[j] = scale | scale_4 >> 4 << 6;
        packed[j + 4] = min | min_4 >> 4 << 6;
        packed[j + 8] = scale_4 & 15 | min_4 << 4;
    }
}

/// Chooses scales for 256 values and codes `0..=top`, writes the 16 bytes that open a block (`d`, `dmin`, the
/// twelve packed bytes), and returns the codes.
///
/// Each run of 32 is spanned from its minimum (at most 0, since the sub-minimum is subtracted) to its maximum.
/// A run's scale is fitted after its minimum was rounded, so that rounding costs precision and not range.
pub(super) fn encode(values: &[f32], top: u8, header: &mut [u8]) -> [u8; 256] {
    let ranges: [(f32, f32); 8] = std::array::from_fn(|j| {
        let (lo, hi) = range(&values[j * SUB..][..SUB]);
        (lo.min(0.0), hi.max(0.0))
    });
    let step = |lo: f32, hi: f32| (hi - lo) / f32::from(top);
    let deepest = ranges.iter().fold(0.0, |deepest: f32, (lo, _)| deepest.max(-lo));
    let dmin = write_f16(header, 2, deepest / 63.0);
    let mins = ranges.map(|(lo, _)| (-lo * inverse(dmin)).round().min(63.0) as u8);
    let steps: [f32; 8] = std::array::from_fn(|j| step(-dmin * f32::from(mins[j]), ranges[j].1));
    let d = write_f16(header, 0, steps.iter().fold(0.0, |widest: f32, step| widest.max(*step)) / 63.0);
    let scales = steps.map(|step| (step * inverse(d)).round().min(63.0) as u8);
    write(std::array::from_fn(|j| (scales[j], mins[j])), &mut header[4..16]);
    std::array::from_fn(|k| {
        let j = k / SUB;
        let shifted = values[k] + dmin * f32::from(mins[j]);
        (shifted * inverse(d * f32::from(scales[j]))).round().clamp(0.0, f32::from(top)) as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_reads_back_every_pair() {
        for seed in 0..64 {
            let pairs =
                std::array::from_fn(|j| (((seed + 11 * j) % 64) as u8, ((seed * 5 + 29 * j) % 64) as u8));
            let mut packed = [0; 12];
            write(pairs, &mut packed);
            assert_eq!(read(&packed), pairs);
        }
    }
}
