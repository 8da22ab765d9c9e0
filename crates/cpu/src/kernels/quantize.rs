//! f32 to int8 activations (NUMERICS.md section 2), with the layout of [`ingle_graph::quantize`].

use ingle_graph::quantize::{Layout, SUM, TINY, limit};

use crate::simd::{Kernel, Vector};

/// A quantized value in memory.
#[derive(Clone, Copy, Debug)]
pub struct Quantized {
    /// First byte; the layout's bytes follow.
    pub ptr: *mut u8,
    /// Where digits, scales and sums are.
    pub layout: Layout,
}

// SAFETY: an address; who writes through it answers for that.
unsafe impl Send for Quantized {}
// SAFETY: as above.
unsafe impl Sync for Quantized {}

/// Quantizes columns `col..col + n` of one row.
pub struct Quantize<'a> {
    /// `n` f32.
    pub x: *const f32,
    /// Elements: whole units of every output.
    pub n: usize,
    /// Outputs.
    pub to: &'a [Quantized],
    /// Row of the outputs.
    pub row: usize,
    /// First column.
    pub col: usize,
}

impl Kernel for Quantize<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        for to in self.to {
            // SAFETY: the fields' own promise.
            unsafe { quantize::<V>(to, self.row, self.col, self.x, self.n) };
        }
    }
}

/// Quantizes `n` elements from `x` into columns `col..col + n` of row `row`: whole units, which a multiple of both
/// the unit and [`SUM`] columns make.
///
/// # Safety
/// `x` is readable for `n` f32; the row and the columns are inside the layout, whose memory is writable and of which
/// nobody else uses these units.
#[inline(always)]
pub unsafe fn quantize<V: Vector>(to: &Quantized, row: usize, col: usize, x: *const f32, n: usize) {
    let Quantized { ptr, layout } = *to;
    let last = layout.digits - 1;
    // SAFETY: offsets of the row and of units inside the layout, the caller's promise.
    unsafe {
        let scales = ptr.add(layout.scale_offset(row)).cast::<f32>();
        let [high, low] = [0, last].map(|digit| ptr.add(layout.digit_offset(digit, row)));
        let [high_sums, low_sums] =
            [0, last].map(|digit| ptr.add(layout.sum_offset(digit, row)).cast::<i16>());
        for at in (0..n).step_by(layout.unit) {
            let (x, col, sum) = (x.add(at), col + at, (col + at) / SUM);
            let (high, high_sums) = (high.add(col), high_sums.add(sum));
            let (low, low_sums) = (low.add(col), low_sums.add(sum));
            let scale = if last == 0 {
                unit::<V, false>(x, layout.unit, high, high_sums, low, low_sums)
            } else {
                unit::<V, true>(x, layout.unit, high, high_sums, low, low_sums)
            };
            scales.add(col / layout.unit).write(scale);
        }
    }
}

/// Quantizes one unit and returns its scale; the low digit is written only with `TWO`.
#[inline(always)]
unsafe fn unit<V: Vector, const TWO: bool>(
    x: *const f32,
    n: usize,
    high: *mut u8,
    high_sums: *mut i16,
    low: *mut u8,
    low_sums: *mut i16,
) -> f32 {
    let digits = if TWO { 2 } else { 1 };
    let mut a = V::splat(0.0);
    let mut finite = a.le(a);
    // SAFETY: n elements, digits and n / SUM sums, the caller's promise; n is a multiple of SUM and so of LANES.
    unsafe {
        for k in (0..n).step_by(V::LANES) {
            let v = V::load(x.add(k)).abs();
            finite = V::both(finite, v.le(V::splat(f32::MAX)));
            a = a.max(v);
        }
        let a = a.largest();
        let finite = V::count(finite) == V::LANES;
        if !finite || a < TINY {
            high.write_bytes(0, n);
            high_sums.write_bytes(0, n / SUM);
            if TWO {
                low.write_bytes(0, n);
                low_sums.write_bytes(0, n / SUM);
            }
            return if finite { 0.0 } else { f32::NAN };
        }
        let r = V::splat(limit(digits) / a);
        for group in 0..n / SUM {
            let (mut high_sum, mut low_sum) = (V::splat(0.0), V::splat(0.0));
            for k in (group * SUM..(group + 1) * SUM).step_by(V::LANES) {
                let q = V::load(x.add(k)).mul(r).round();
                if TWO {
                    // Exact: q has at most 15 bits, so the sum and the power of two round nothing.
                    let h = q.add(V::splat(64.0)).mul(V::splat(1.0 / 128.0)).floor();
                    let l = q.sub(h.mul(V::splat(128.0)));
                    h.store_i8(high.add(k));
                    l.store_i8(low.add(k));
                    high_sum = high_sum.add(h);
                    low_sum = low_sum.add(l);
                } else {
                    q.store_i8(high.add(k));
                    high_sum = high_sum.add(q);
                }
            }
            // Sums of integers this small are exact in any order.
            high_sums.add(group).write(high_sum.sum() as i16);
            if TWO {
                low_sums.add(group).write(low_sum.sum() as i16);
            }
        }
        a / limit(digits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;
    use ingle_graph::quantize::quantize_row;

    #[test]
    fn rows_are_quantized_as_the_reference_does() {
        let mut seed = 1u32;
        let mut x: Vec<f32> = (0..1024)
            .map(|i| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 8) as f32 / 1e6 * if i % 97 == 0 { -30.0 } else { 1.0 } - 8.0
            })
            .collect();
        x[256..288].fill(0.0);
        x[300] = f32::NAN;
        x[330] = f32::NEG_INFINITY;
        x[352..384].iter_mut().for_each(|x| *x *= 1e-34);
        x[384..416].iter_mut().for_each(|x| *x = x.round() + 0.5);
        for (unit, digits) in [(32, 1), (64, 1), (128, 1), (256, 1), (32, 2), (64, 2), (128, 2), (256, 2)] {
            let layout = Layout::new(3, x.len(), unit, digits);
            let mut want = vec![0xAA; layout.bytes()];
            quantize_row(&layout, &x, 1, &mut want);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let mut got = vec![0xAA; layout.bytes()];
                let to = [Quantized { ptr: got.as_mut_ptr(), layout }];
                // In two spans, as tasks do.
                for (col, n) in [(0, 768), (768, 256)] {
                    isa.run(Quantize { x: x[col..].as_ptr(), n, to: &to, row: 1, col });
                }
                let scales = layout.scale_offset(0)..layout.sum_offset(0, 0);
                let float =
                    |bytes: &[u8], at: usize| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                for at in scales.clone().step_by(4) {
                    let (a, b) = (float(&got, at), float(&want, at));
                    assert!(
                        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
                        "{isa}, {unit}: {a}, {b}"
                    );
                }
                assert_eq!(got[..scales.start], want[..scales.start], "{isa}: digits of {layout:?}");
                assert_eq!(got[scales.end..], want[scales.end..], "{isa}: sums of {layout:?}");
            }
        }
    }
}
