//! Quantized activations: their layout in memory and the arithmetic that makes them (NUMERICS.md section 2).

/// Columns whose digits are summed together for the offset and minimum terms of weight formats.
pub const SUM: usize = 16;

/// Layout of quantized activations of `[rows, cols]`, each section aligned to 64 bytes:
/// digits `[digits][rows][cols]` int8 (rows padded to 64 columns), scales `[rows][cols / unit]` f32, sums
/// `[digits][rows][cols / 16]` int16. With two digits, element = 128 * digit 0 + digit 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Rows the memory has room for.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Columns per scale.
    pub unit: usize,
    /// int8 digits per element.
    pub digits: usize,
}

const fn up64(n: usize) -> usize {
    n.div_ceil(64) * 64
}

impl Layout {
    /// Layout for at most `rows` rows.
    pub const fn new(rows: usize, cols: usize, unit: usize, digits: usize) -> Self {
        Self { rows, cols, unit, digits }
    }

    /// Units of a row; the last may be short.
    pub const fn units(&self) -> usize {
        self.cols.div_ceil(self.unit)
    }

    /// Sums of a row.
    pub const fn sums(&self) -> usize {
        self.cols.div_ceil(SUM)
    }

    /// Bytes between the digits of two rows.
    pub const fn digit_stride(&self) -> usize {
        up64(self.cols)
    }

    /// Byte offset of the digits of `row`.
    pub const fn digit_offset(&self, digit: usize, row: usize) -> usize {
        (digit * self.rows + row) * self.digit_stride()
    }

    /// Byte offset of the scales of `row`.
    pub const fn scale_offset(&self, row: usize) -> usize {
        self.digits * self.rows * self.digit_stride() + row * up64(self.units() * 4)
    }

    /// Byte offset of the sums of `row`.
    pub const fn sum_offset(&self, digit: usize, row: usize) -> usize {
        self.scale_offset(self.rows) + (digit * self.rows + row) * up64(self.sums() * 2)
    }

    /// Bytes of the whole.
    pub const fn bytes(&self) -> usize {
        self.sum_offset(self.digits, 0)
    }
}

/// Smallest maximum that is not flushed to zero: 2^-100.
pub const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Largest digit sum of one element: 127 for one digit, 16256 = 128 * 127 for two.
pub const fn limit(digits: usize) -> f32 {
    if digits == 1 { 127.0 } else { 16256.0 }
}

/// Quantizes one unit: writes the integer of each element and returns the scale.
///
/// a = max|x|; if a < 2^-100, all are 0 and the scale is 0; else q = rne(fl(x * fl(limit / a))) and the scale is
/// fl(a / limit). A non-finite element gives the scale NaN and zeros, which makes every output of the row NaN.
pub fn quantize_unit(x: &[f32], digits: usize, q: &mut [i32]) -> f32 {
    let mut a = 0.0f32;
    let mut finite = true;
    for &v in x {
        finite &= v.is_finite();
        a = a.max(v.abs());
    }
    if !finite {
        q.fill(0);
        return f32::NAN;
    }
    if a < TINY {
        q.fill(0);
        return 0.0;
    }
    let r = limit(digits) / a;
    for (q, &v) in q.iter_mut().zip(x) {
        *q = (v * r).round_ties_even() as i32;
    }
    a / limit(digits)
}

/// Splits a two-digit integer into 128 * high + low with low in -64..=63.
pub const fn split(q: i32) -> (i8, i8) {
    let high = (q + 64) >> 7;
    (high as i8, (q - 128 * high) as i8)
}

/// Quantizes row `row` of a matrix into `out`, which has the given layout.
///
/// # Panics
/// When `x` is not one row or `out` is smaller than the layout says.
pub fn quantize_row(layout: &Layout, x: &[f32], row: usize, out: &mut [u8]) {
    assert_eq!(x.len(), layout.cols);
    let mut q = [0i32; 256];
    for (u, x) in x.chunks(layout.unit).enumerate() {
        let q = &mut q[..x.len()];
        let d = quantize_unit(x, layout.digits, q);
        let at = layout.scale_offset(row) + 4 * u;
        out[at..at + 4].copy_from_slice(&d.to_le_bytes());
        for digit in 0..layout.digits {
            let value = |q: i32| match (layout.digits, digit) {
                (1, _) => q as i8,
                (_, 0) => split(q).0,
                _ => split(q).1,
            };
            let at = layout.digit_offset(digit, row) + u * layout.unit;
            for (out, &q) in out[at..at + q.len()].iter_mut().zip(q.iter()) {
                *out = value(q) as u8;
            }
            let at = layout.sum_offset(digit, row) + u * layout.unit / SUM * 2;
            for (out, q) in out[at..].chunks_exact_mut(2).zip(q.chunks(SUM)) {
                let sum: i16 = q.iter().map(|&q| i16::from(value(q))).sum();
                out.copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_round_to_even_and_reach_the_limit() {
        let mut q = [0; 4];
        let d = quantize_unit(&[127.0, 0.5, 1.5, -127.0], 1, &mut q);
        assert_eq!((q, d), ([127, 0, 2, -127], 1.0));
        let d = quantize_unit(&[-16256.0, 1.0, 64.0, -65.0], 2, &mut q);
        assert_eq!((q, d), ([-16256, 1, 64, -65], 1.0));
        for v in -16256..=16256 {
            let (h, l) = split(v);
            assert_eq!(128 * i32::from(h) + i32::from(l), v);
            assert!((-64..64).contains(&l));
        }
    }

    #[test]
    fn edges_of_the_scale() {
        let mut q = [9; 2];
        assert_eq!(quantize_unit(&[1e-38, -1e-38], 1, &mut q), 0.0);
        assert_eq!(q, [0, 0]);
        q = [9; 2];
        assert!(quantize_unit(&[f32::INFINITY, 1.0], 1, &mut q).is_nan());
        assert!(quantize_unit(&[f32::NAN, 1.0], 1, &mut q).is_nan());
        assert_eq!(q, [0, 0]);
        assert_eq!(quantize_unit(&[TINY, 0.0], 1, &mut q), TINY / 127.0);
        assert_eq!(q, [127, 0]);
    }

    #[test]
    fn rows_are_laid_out_apart() {
        let layout = Layout::new(3, 96, 32, 2);
        let mut out = vec![0xAAu8; layout.bytes()];
        let x: Vec<f32> = (0..96).map(|i| (i as f32 - 40.0) * 3.25).collect();
        quantize_row(&layout, &x, 1, &mut out);
        let digit = |d: usize, k: usize| i32::from(out[layout.digit_offset(d, 1) + k] as i8);
        let sum = |d: usize, j: usize| {
            let at = layout.sum_offset(d, 1) + 2 * j;
            i32::from(i16::from_le_bytes([out[at], out[at + 1]]))
        };
        for d in 0..2 {
            for j in 0..6 {
                assert_eq!((16 * j..16 * j + 16).map(|k| digit(d, k)).sum::<i32>(), sum(d, j));
            }
        }
        assert!(out[..layout.digit_stride()].iter().all(|&b| b == 0xAA), "row 0 was touched");
        assert_eq!(layout.bytes() % 64, 0);
    }
}
