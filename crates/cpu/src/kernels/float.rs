//! Products with rows of floats: the arithmetic `f32x32`, on weights as a model file has them.
//!
//! Few rows read each weight once, as it lies; many go through [`panels`].

pub mod panels;

use std::mem::MaybeUninit;
use std::ops::Range;

use ingle_graph::math::Lanes;

use super::tree;
use crate::simd::{Kernel, Vector, prefetch};

/// Accumulators of one product (k mod 32).
const ACCUMULATORS: usize = 32;

/// Bytes ahead of its reading that memory is asked for weights.
const AHEAD: usize = 8192;

/// Element types of weights that are widened as they are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
}

/// `out[r][o] = dot(weights[o], x[r])`, then the bias and then the residual added, for some outputs and some rows.
pub struct FloatProduct<'a> {
    /// Element type of the weights.
    pub float: Float,
    /// Weights of the first of `outputs`, and of those after it: `cols` elements each, at any address.
    pub weights: *const u8,
    /// Columns of `out`.
    pub outputs: Range<usize>,
    /// Length of a product.
    pub cols: usize,
    /// `[rows, cols]` f32.
    pub x: *const f32,
    /// Rows of x and out.
    pub rows: Range<usize>,
    /// `[rows, stride]` f32.
    pub out: *mut f32,
    /// f32 between rows of `out` and `residual`.
    pub stride: usize,
    /// One per output.
    pub bias: Option<&'a [f32]>,
    /// `[rows, stride]` f32; may be `out`.
    pub residual: Option<*const f32>,
}

impl Kernel for FloatProduct<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        match self.float {
            Float::F32 => self.tiles::<V, F32>(),
            Float::F16 => self.tiles::<V, F16>(),
            Float::BF16 => self.tiles::<V, BF16>(),
        }
    }
}

/// How weights are read.
trait Read {
    const BYTES: usize;
    /// `LANES` elements from `from` on, which are readable.
    unsafe fn read<V: Vector>(from: *const u8) -> V;
}

struct F32;
struct F16;
struct BF16;

impl Read for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn read<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's; loads need no alignment.
        unsafe { V::load(from.cast()) }
    }
}
impl Read for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn read<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f16(from) }
    }
}
impl Read for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn read<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_bf16(from) }
    }
}

impl FloatProduct<'_> {
    /// All products, in blocks of outputs and rows whose accumulators fit the registers.
    #[inline(always)]
    fn tiles<V: Vector, R: Read>(&self) {
        match V::LANES {
            16 if self.rows.len() == 1 => self.blocks::<V, R, 4, 1, 2>(),
            16 => self.blocks::<V, R, 2, 4, 2>(),
            8 => self.blocks::<V, R, 1, 2, 4>(),
            _ => self.blocks::<V, R, 1, 1, ACCUMULATORS>(),
        }
    }

    /// Blocks of `W` outputs and `X` rows, with `A` vectors of accumulators for each product.
    #[inline(always)]
    fn blocks<V: Vector, R: Read, const W: usize, const X: usize, const A: usize>(&self) {
        debug_assert_eq!(A * V::LANES, ACCUMULATORS);
        let mut output = self.outputs.start;
        while output < self.outputs.end {
            let wide = output + W <= self.outputs.end;
            let mut row = self.rows.start;
            while row < self.rows.end {
                let tall = row + X <= self.rows.end;
                // SAFETY: outputs and rows are the product's.
                unsafe {
                    match (wide, tall) {
                        (true, true) => self.block::<V, R, W, X, A>(output, row),
                        (true, false) => self.block::<V, R, W, 1, A>(output, row),
                        (false, true) => self.block::<V, R, 1, X, A>(output, row),
                        (false, false) => self.block::<V, R, 1, 1, A>(output, row),
                    }
                }
                row += if tall { X } else { 1 };
            }
            output += if wide { W } else { 1 };
        }
    }

    #[inline(always)]
    unsafe fn block<V: Vector, R: Read, const W: usize, const X: usize, const A: usize>(
        &self,
        output: usize,
        row: usize,
    ) {
        let cols = self.cols;
        let whole = cols / ACCUMULATORS * ACCUMULATORS;
        let mut sums = [[[V::splat(0.0); A]; X]; W];
        // SAFETY: every output of the block has `cols` weights, every row `cols` elements of x; both are in range.
        unsafe {
            let weights = self.weights.add((output - self.outputs.start) * cols * R::BYTES);
            let x = self.x.add(row * cols);
            for k in (0..whole).step_by(ACCUMULATORS) {
                for i in 0..W {
                    for line in (0..ACCUMULATORS * R::BYTES).step_by(64) {
                        prefetch(weights.wrapping_add((i * cols + k) * R::BYTES + line + AHEAD));
                    }
                }
                for a in 0..A {
                    let at = k + a * V::LANES;
                    let mut w = [V::splat(0.0); W];
                    for i in 0..W {
                        w[i] = R::read(weights.add((i * cols + at) * R::BYTES));
                    }
                    for j in 0..X {
                        let x = V::load(x.add(j * cols + at));
                        for i in 0..W {
                            sums[i][j][a] = w[i].fma(x, sums[i][j][a]);
                        }
                    }
                }
            }
            // Through memory, in a loop that is unrolled, so that the sums above are registers.
            let mut lanes = MaybeUninit::<[[[f32; ACCUMULATORS]; X]; W]>::uninit();
            let lanes = lanes.as_mut_ptr().cast::<f32>();
            for i in 0..W {
                for j in 0..X {
                    for a in 0..A {
                        sums[i][j][a].store(lanes.add((i * X + j) * ACCUMULATORS + a * V::LANES));
                    }
                }
            }
            for i in 0..W {
                for j in 0..X {
                    let lanes = lanes.add((i * X + j) * ACCUMULATORS);
                    for k in whole..cols {
                        let w: f32 = R::read(weights.add((i * cols + k) * R::BYTES));
                        let sum = lanes.add(k - whole);
                        sum.write(w.fma(x.add(j * cols + k).read(), sum.read()));
                    }
                    self.write(output + i, row + j, tree::<V>(lanes, ACCUMULATORS));
                }
            }
        }
    }

    /// Writes a vector of outputs of one row, as far as they are the product's.
    ///
    /// # Safety
    /// `row` is the product's.
    #[inline(always)]
    unsafe fn write_lanes<V: Vector>(&self, mut y: V, output: usize, row: usize) {
        let lanes = self.outputs.end.saturating_sub(output);
        let at = row * self.stride + output;
        // SAFETY: as many elements of this product's part of `out`, `residual` and `bias` as it has lanes here.
        unsafe {
            if lanes < V::LANES {
                if let Some(bias) = self.bias {
                    y = y.add(V::load_first(bias.as_ptr().add(output), lanes));
                }
                if let Some(residual) = self.residual {
                    y = y.add(V::load_first(residual.add(at), lanes));
                }
                return y.store_first(self.out.wrapping_add(at), lanes);
            }
            if let Some(bias) = self.bias {
                y = y.add(V::load(bias.as_ptr().add(output)));
            }
            if let Some(residual) = self.residual {
                y = y.add(V::load(residual.add(at)));
            }
            y.store(self.out.wrapping_add(at));
        }
    }

    #[inline(always)]
    unsafe fn write(&self, output: usize, row: usize, mut y: f32) {
        if let Some(bias) = self.bias {
            y += bias[output];
        }
        let at = row * self.stride + output;
        // SAFETY: an element of this product's part of `out` and `residual`.
        unsafe {
            if let Some(residual) = self.residual {
                y += residual.add(at).read();
            }
            self.out.wrapping_add(at).write(y);
        }
    }
}
