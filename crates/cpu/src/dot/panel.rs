//! The activation panel: a few rows of quantized activations, rearranged unit by unit in packed order, so that a
//! kernel reads one stream at constant offsets.

use std::marker::PhantomData;
use std::ops::Range;

use ingle_graph::quantize::Layout;

use super::engine::Engine;
use super::pack::RESIDUES;
use super::spec::{Format, Min};

/// Quantized activations `[rows, cols]` in memory (NUMERICS.md section 2).
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    layout: Layout,
    bytes: &'a [u8],
}

impl<'a> Activations<'a> {
    /// Activations that lie in `bytes` as `layout` says.
    ///
    /// # Panics
    /// When `bytes` is shorter than the layout, or the digits are not one or two.
    pub fn new(layout: Layout, bytes: &'a [u8]) -> Self {
        assert!(bytes.len() >= layout.bytes(), "{} bytes of activations for {layout:?}", bytes.len());
        assert!(matches!(layout.digits, 1 | 2), "{layout:?}");
        Self { layout, bytes }
    }

    /// Where everything is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

/// Bytes per panel row and unit, at most: digits, starts and pairs of K formats, a scale.
pub(super) const fn row_bytes_max(unit: usize, digits: usize) -> usize {
    if unit == 32 { digits * (32 + 4) + 4 } else { digits * (256 + 4 * 32 + 4 * 8) + 4 }
}

/// Shape of one unit of a panel of `V` digit rows (`V / D` activation rows of `D` digits each):
/// digits `[V][unit]` int8; starts `[V][pieces]` i32; sums `[V]` f32 or pairs `[V][pairs]` of int16; scales f32.
pub(super) struct Panel<S, F, const V: usize, const D: usize>(PhantomData<(S, F)>);

impl<S: Engine, F: Format, const V: usize, const D: usize> Panel<S, F, V, D> {
    pub const K: bool = F::SPEC.sub != 0;
    /// Columns per unit.
    pub const UNIT: usize = F::SPEC.unit();
    /// Starting values of a digit row: what a sum of products begins with so that codes need no offset.
    pub const STARTS: usize = match (Self::K, S::WIDE) {
        (true, true) => F::SPEC.pieces(),
        (false, _) if F::SPEC.offset != 0 && S::SIGNED_BITS != F::SPEC.bits => 1,
        _ => 0,
    };
    /// `4 *` this is what follows the starts of a digit row.
    pub const SUMS: usize = if Self::K { F::SPEC.pairs() } else { matches!(F::SPEC.min, Min::Add) as usize };
    pub const STARTS_AT: usize = V * Self::UNIT;
    pub const SUMS_AT: usize = Self::STARTS_AT + 4 * V * Self::STARTS;
    pub const SCALES_AT: usize = Self::SUMS_AT + 4 * V * Self::SUMS;
    /// Bytes of one unit.
    pub const BYTES: usize = Self::SCALES_AT + 4 * (V / D);

    /// Writes the panel of `rows`, at most `V / D` of them; missing rows repeat the last one.
    ///
    /// # Safety
    /// `panel` has room for `BYTES` per unit. `rows` is not empty and lies within the layout, whose unit and number
    /// of digits are the format's and `D`, and whose columns are a multiple of the unit.
    #[inline(always)]
    pub unsafe fn write(x: &Activations<'_>, rows: Range<usize>, panel: *mut u8) {
        let layout = x.layout;
        let units = layout.cols / Self::UNIT;
        for r in 0..V / D {
            let row = (rows.start + r).min(rows.end - 1);
            for digit in 0..D {
                let v = r * D + digit;
                // SAFETY: the layout places units * UNIT digits, units scales and their sums of this row inside
                // `bytes` (checked by `Activations::new`); v < V and the offsets stay within BYTES per unit.
                unsafe {
                    let digits = x.bytes.as_ptr().add(layout.digit_offset(digit, row));
                    let sums = x.bytes.as_ptr().add(layout.sum_offset(digit, row)).cast::<i16>();
                    let scales = x.bytes.as_ptr().add(layout.scale_offset(row)).cast::<f32>();
                    let mut to = panel;
                    for residue in 0..RESIDUES {
                        let mut u = residue;
                        while u < units {
                            Self::write_unit(digits.add(u * Self::UNIT), sums.add(u * Self::UNIT / 16), to, v);
                            if digit == 0 {
                                let scale = scales.add(u).read_unaligned();
                                to.add(Self::SCALES_AT).cast::<f32>().add(r).write_unaligned(scale);
                            }
                            to = to.add(Self::BYTES);
                            u += RESIDUES;
                        }
                    }
                }
            }
        }
    }

    /// Writes what belongs to digit row `v` of one unit.
    ///
    /// # Safety
    /// `digits` holds UNIT bytes, `sums` UNIT / 16 values, `to` BYTES bytes; `v < V`.
    #[inline(always)]
    unsafe fn write_unit(digits: *const u8, sums: *const i16, to: *mut u8, v: usize) {
        let spec = F::SPEC;
        // SAFETY: the caller's duty covers all reads; writes are at offsets below BYTES.
        unsafe {
            std::ptr::copy_nonoverlapping(digits, to.add(v * Self::UNIT), Self::UNIT);
            let starts = to.add(Self::STARTS_AT).cast::<i32>().add(v * Self::STARTS);
            let after = to.add(Self::SUMS_AT).cast::<i32>().add(v * Self::SUMS);
            let sum = |i: usize| i32::from(sums.add(i).read_unaligned());
            if !Self::K {
                let all = sum(0) + sum(1);
                if Self::STARTS == 1 {
                    starts.write_unaligned(-spec.offset * all);
                }
                if Self::SUMS == 1 {
                    after.write_unaligned((all as f32).to_bits() as i32);
                }
                return;
            }
            for i in 0..Self::STARTS {
                let all = match spec.piece_words() {
                    8 => sum(2 * i) + sum(2 * i + 1),
                    4 => sum(i),
                    _ => {
                        let mut all = 0;
                        for k in 0..8 {
                            all += i32::from(digits.cast::<i8>().add(8 * i + k).read());
                        }
                        all
                    }
                };
                starts.add(i).write_unaligned(-spec.center() * all);
            }
            for i in 0..Self::SUMS {
                let of = |j: usize| if spec.sub == 32 { sum(2 * j) + sum(2 * j + 1) } else { sum(j) };
                let pair = of(2 * i) & 0xFFFF | of(2 * i + 1) << 16;
                after.add(i).write_unaligned(pair);
            }
        }
    }
}
