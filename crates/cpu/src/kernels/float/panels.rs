//! Products of many rows with rows of floats, near the rate of fused multiply-adds.
//!
//! The 32 accumulators of an output (k mod 32) are summed one after the other, so that vector lanes can be outputs and
//! registers hold a block of outputs by rows: no lanes are added up, and each element read enters many products. The
//! accumulators come in the order in which the tree of NUMERICS.md section 1 meets them; what waits for its other half
//! lies on a stack of five.
//!
//! For that, both operands are rearranged to be read in one stream: weights a panel of outputs at a time, once for all
//! rows; rows of activations once for all panels.

use std::ops::Range;

use super::{ACCUMULATORS, BF16, F16, F32, Float, FloatProduct, Read};
use crate::memory::Lines;
use crate::simd::{Isa, Kernel, MAX_LANES, Vector};

/// Rows from which rearranging the weights pays.
pub const ROWS_LEAST: usize = 24;

/// Bytes of activations that are kept rearranged; they stay in the L2 cache beside a panel of weights.
const ROWS_SHARE: usize = 1 << 20;

/// Vectors of outputs in a panel.
const VECTORS: usize = 2;

/// The most rows of a block, with any instruction set.
const HEIGHT_MOST: usize = 12;

/// Sums that wait for their other half.
const WAITING: usize = ACCUMULATORS.ilog2() as usize;

/// Heights of blocks: the sums of the tallest, for a panel, fill the registers; the others are for what rows remain.
const fn heights(lanes: usize) -> [usize; 3] {
    match lanes {
        16 => [12, 8, 4],
        8 => [6, 4, 2],
        _ => [1, 1, 1],
    }
}

/// The height of the next block when `rows` remain: the lowest that has room for them.
fn height(lanes: usize, rows: usize) -> usize {
    let [tall, middle, low] = heights(lanes);
    match rows {
        rows if rows > middle => tall,
        rows if rows > low => middle,
        _ => low,
    }
}

/// Steps of the longest accumulator.
fn steps(cols: usize) -> usize {
    cols.div_ceil(ACCUMULATORS)
}

/// The accumulator that the tree meets at `place`, and the place of an accumulator: the bits in reverse.
fn reversed(i: usize) -> usize {
    (i as u32).reverse_bits() as usize >> (u32::BITS as usize - WAITING)
}

/// Place of column `k` in a panel or block: `[place of its accumulator][step]`.
fn place(cols: usize, k: usize) -> usize {
    reversed(k % ACCUMULATORS) * steps(cols) + k / ACCUMULATORS
}

/// Rows that should be multiplied at once, when there are `rows`: parts of about equal size.
pub fn rows_at_once(cols: usize, rows: usize) -> usize {
    let most = (ROWS_SHARE / (cols.max(1) * size_of::<f32>())).max(HEIGHT_MOST);
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(HEIGHT_MOST)
}

/// A worker's private memory for products of many rows.
#[derive(Default)]
pub struct Scratch {
    lines: Lines,
    /// What its last part holds.
    arranged: Option<(*const f32, Range<usize>, usize, Isa)>,
}

// SAFETY: the address is compared, never read.
unsafe impl Send for Scratch {}

/// f32 of the sums that wait, and of a block of 16 x 16 on its way.
const STACK: usize = WAITING * VECTORS * MAX_LANES * HEIGHT_MOST;
const BLOCK: usize = MAX_LANES * MAX_LANES;

/// f32 of a panel of weights.
fn panel_len(cols: usize) -> usize {
    ACCUMULATORS * steps(cols) * VECTORS * MAX_LANES
}

/// Bytes of scratch for products of at most so many rows at once.
pub fn scratch_bytes(cols: usize, rows: usize) -> usize {
    // The last block may have rows that are not there.
    let x = (rows + HEIGHT_MOST) * ACCUMULATORS * steps(cols);
    (STACK + BLOCK + panel_len(cols) + x) * size_of::<f32>()
}

impl Scratch {
    /// Makes room, so that no product that needs at most so many bytes allocates.
    pub fn reserve(&mut self, bytes: usize) {
        self.lines.reserve(bytes);
    }

    /// Activations may have changed since the last product.
    pub fn forget(&mut self) {
        self.arranged = None;
    }

    /// Runs a product. Activations at one address are taken to be the same until [`Scratch::forget`].
    pub fn run(&mut self, isa: Isa, product: FloatProduct<'_>) {
        let memory = self.lines.bytes(scratch_bytes(product.cols, product.rows.len())).cast();
        let wanted = Some((product.x, product.rows.clone(), product.cols, isa));
        let arranges = self.arranged != wanted;
        self.arranged = wanted;
        isa.run(Panels { product, arranges, memory });
    }
}

/// A product with its memory.
struct Panels<'a> {
    product: FloatProduct<'a>,
    /// Whether rows have to be rearranged; else they are as the last call left them.
    arranges: bool,
    /// Stack, block, panel, rows.
    memory: *mut f32,
}

impl Kernel for Panels<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        match self.product.float {
            Float::F32 => self.panels::<V, F32>(),
            Float::F16 => self.panels::<V, F16>(),
            Float::BF16 => self.panels::<V, BF16>(),
        }
    }
}

impl Panels<'_> {
    #[inline(always)]
    fn panels<V: Vector, R: Read>(&self) {
        let product = &self.product;
        let cols = product.cols;
        // SAFETY: the memory has these parts, by `Scratch::reserve`, for rows up to the height of the last block.
        unsafe {
            let block = self.memory.add(STACK);
            let panel = block.add(BLOCK);
            let x = panel.add(panel_len(cols));
            if self.arranges {
                arrange_rows::<V>(product, block, x);
            }
            let mut output = product.outputs.start;
            while output < product.outputs.end {
                let left = product.outputs.end - output;
                let vectors = if left > V::LANES { VECTORS } else { 1 };
                for v in 0..vectors {
                    arrange_weights::<V, R>(
                        product,
                        output + v * V::LANES,
                        block,
                        panel.add(v * V::LANES),
                        vectors,
                    );
                }
                let mut row = product.rows.start;
                let mut from = x.cast_const();
                while row < product.rows.end {
                    let height = height(V::LANES, product.rows.end - row);
                    macro_rules! block {
                        ($($vectors:literal $lanes:literal $height:literal,)*) => {
                            match (vectors, V::LANES, height) {
                                $(($vectors, $lanes, $height) => {
                                    multiply::<V, $vectors, $height>(product, output, row, panel, from, self.memory)
                                })*
                                (2, _, _) => multiply::<V, 2, 1>(product, output, row, panel, from, self.memory),
                                _ => multiply::<V, 1, 1>(product, output, row, panel, from, self.memory),
                            }
                        };
                    }
                    block! {
                        2 16 12, 2 16 8, 2 16 4, 1 16 12, 1 16 8, 1 16 4,
                        2 8 6, 2 8 4, 2 8 2, 1 8 6, 1 8 4, 1 8 2,
                    }
                    row += height;
                    from = from.add(height * ACCUMULATORS * steps(cols));
                }
                output += vectors * V::LANES;
            }
        }
    }
}

/// Rearranges rows of activations: blocks one after the other, in each `[place][row]`.
///
/// # Safety
/// `block` has room for `LANES * LANES` f32, `to` for all rows.
#[inline(always)]
unsafe fn arrange_rows<V: Vector>(product: &FloatProduct<'_>, block: *mut f32, mut to: *mut f32) {
    let cols = product.cols;
    let whole = cols / V::LANES * V::LANES;
    let mut row = product.rows.start;
    while row < product.rows.end {
        let height = height(V::LANES, product.rows.end - row);
        // SAFETY: rows are the product's, or repeat its last; each height is at most the lanes.
        unsafe {
            let x = |r: usize| product.x.add((row + r).min(product.rows.end - 1) * cols);
            for k in (0..whole).step_by(V::LANES) {
                for r in 0..height {
                    V::load(x(r).add(k)).store(block.add(r * V::LANES));
                }
                V::transpose(block);
                for i in 0..V::LANES {
                    let column = V::load(block.add(i * V::LANES));
                    let to = to.add(place(cols, k + i) * height);
                    if height == V::LANES { column.store(to) } else { column.store_first(to, height) }
                }
            }
            for k in whole..cols {
                for r in 0..height {
                    to.add(place(cols, k) * height + r).write(x(r).add(k).read());
                }
            }
            to = to.add(height * ACCUMULATORS * steps(cols));
        }
        row += height;
    }
}

/// Widens and rearranges the weights of a vector of outputs from `output` on: `[place][vectors]` vectors, of which `to` is
/// the first to be written.
///
/// # Safety
/// `block` has room for `LANES * LANES` f32, `to` for the panel; `output` is one of the product's.
#[inline(always)]
unsafe fn arrange_weights<V: Vector, R: Read>(
    product: &FloatProduct<'_>,
    output: usize,
    block: *mut f32,
    to: *mut f32,
    vectors: usize,
) {
    let cols = product.cols;
    let whole = cols / V::LANES * V::LANES;
    let last = product.outputs.end - 1;
    // SAFETY: outputs are the product's, or repeat its last.
    unsafe {
        let w = |lane: usize| {
            let output = (output + lane).min(last) - product.outputs.start;
            product.weights.add(output * cols * R::BYTES)
        };
        let to = |k: usize| to.add(place(cols, k) * vectors * V::LANES);
        for k in (0..whole).step_by(V::LANES) {
            for lane in 0..V::LANES {
                R::read::<V>(w(lane).add(k * R::BYTES)).store(block.add(lane * V::LANES));
            }
            V::transpose(block);
            for i in 0..V::LANES {
                V::load(block.add(i * V::LANES)).store(to(k + i));
            }
        }
        for k in whole..cols {
            for lane in 0..V::LANES {
                to(k).add(lane).write(R::read::<f32>(w(lane).add(k * R::BYTES)));
            }
        }
    }
}

/// A panel of `W` vectors of outputs from `output` on with a block of `X` rows from `row` on.
///
/// # Safety
/// `w` and `x` are a panel and a block; `stack` has room for [`STACK`] f32.
#[inline(always)]
unsafe fn multiply<V: Vector, const W: usize, const X: usize>(
    product: &FloatProduct<'_>,
    output: usize,
    row: usize,
    w: *const f32,
    x: *const f32,
    stack: *mut f32,
) {
    let (cols, steps) = (product.cols, steps(product.cols));
    // SAFETY: the caller's duty: all offsets are inside a panel, a block, and the stack.
    unsafe {
        for i in 0..ACCUMULATORS {
            let mut sums = [[V::splat(0.0); W]; X];
            let (mut w, mut x) = (w.add(i * steps * W * V::LANES), x.add(i * steps * X));
            // Of the accumulators beyond the last whole run of columns, some have a step less.
            for _ in 0..(cols + ACCUMULATORS - 1 - reversed(i)) / ACCUMULATORS {
                let mut weights = [V::splat(0.0); W];
                for v in 0..W {
                    weights[v] = V::load(w.add(v * V::LANES));
                }
                for r in 0..X {
                    let x = V::splat(x.add(r).read());
                    for v in 0..W {
                        sums[r][v] = weights[v].fma(x, sums[r][v]);
                    }
                }
                w = w.add(W * V::LANES);
                x = x.add(X);
            }
            // Each sum that this one completes was left by the last of its other half.
            let levels = i.trailing_ones() as usize;
            for level in 0..levels {
                let other = stack.add(level * X * W * V::LANES);
                for r in 0..X {
                    for v in 0..W {
                        sums[r][v] = V::load(other.add((r * W + v) * V::LANES)).add(sums[r][v]);
                    }
                }
            }
            // The last is the product, at the bottom of the stack.
            let own = stack.add(levels % WAITING * X * W * V::LANES);
            for r in 0..X {
                for v in 0..W {
                    sums[r][v].store(own.add((r * W + v) * V::LANES));
                }
            }
        }
        for r in 0..X.min(product.rows.end - row) {
            for v in 0..W {
                let y = V::load(stack.add((r * W + v) * V::LANES));
                product.write_lanes(y, output + v * V::LANES, row + r);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ingle_graph::reference;

    use super::*;

    fn number(seed: &mut u64) -> f32 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Weights of each type: their bytes, and what they stand for.
    fn weights(float: Float, n: usize, seed: &mut u64) -> (Vec<u8>, Vec<f32>) {
        (0..n)
            .map(|_| {
                let w = number(seed);
                match float {
                    Float::F32 => (w.to_le_bytes().to_vec(), w),
                    Float::F16 => {
                        let w = half::f16::from_f32(w);
                        (w.to_le_bytes().to_vec(), w.to_f32())
                    }
                    Float::BF16 => {
                        let w = half::bf16::from_f32(w);
                        (w.to_le_bytes().to_vec(), w.to_f32())
                    }
                }
            })
            .fold((Vec::new(), Vec::new()), |(mut bytes, mut values), (b, w)| {
                bytes.extend(b);
                values.push(w);
                (bytes, values)
            })
    }

    /// Some outputs and rows of a larger product, few and many at once, with and without a tail, the residual in place.
    fn check(isa: Isa, float: Float, cols: usize, outputs: usize, rows: usize) {
        let mut seed = (cols * 1009 + outputs * 31 + rows) as u64;
        let (bytes, values) = weights(float, cols * outputs, &mut seed);
        let x: Vec<f32> = (0..cols * (rows + 1)).map(|_| number(&mut seed)).collect();
        let bias: Vec<f32> = (0..outputs + 1).map(|_| number(&mut seed)).collect();
        let stride = outputs + 4;
        let before: Vec<f32> = (0..stride * (rows + 1)).map(|_| number(&mut seed)).collect();
        for (many, tail) in [(true, false), (true, true), (false, true)] {
            let mut out = before.clone();
            let product = FloatProduct {
                float,
                weights: bytes.as_ptr(),
                outputs: 1..outputs + 1,
                cols,
                x: x.as_ptr(),
                rows: 1..rows + 1,
                out: out.as_mut_ptr(),
                stride,
                bias: tail.then_some(&bias[..]),
                residual: tail.then_some(out.as_ptr()),
            };
            if many {
                Scratch::default().run(isa, product);
            } else {
                isa.run(product);
            }
            for (i, (&y, &before)) in out.iter().zip(&before).enumerate() {
                let (row, n) = (i / stride, i % stride);
                let mut wanted = before;
                if row > 0 && (1..outputs + 1).contains(&n) {
                    let w = &values[(n - 1) * cols..n * cols];
                    let dot = reference::dot(w, &x[row * cols..(row + 1) * cols]);
                    wanted = if tail { before + (dot + bias[n]) } else { dot };
                }
                let what = format!("{isa} {float:?} [{outputs}, {cols}] x {rows}, many {many}: ({row}, {n})");
                assert_eq!(y.to_bits(), wanted.to_bits(), "{what}: {y} for {wanted}");
            }
        }
    }

    #[test]
    fn every_shape_has_the_reference_bits() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for float in [Float::F32, Float::F16, Float::BF16] {
                for cols in [1, 16, 31, 33, 96, 170] {
                    for (outputs, rows) in [(1, 1), (7, 5), (16, 12), (17, 13), (33, 23), (64, 24)] {
                        check(isa, float, cols, outputs, rows);
                    }
                }
            }
        }
    }

    #[test]
    fn places_are_the_order_of_the_tree() {
        let order: Vec<usize> = (0..6).map(reversed).collect();
        assert_eq!(order, [0, 16, 8, 24, 4, 20]);
        let mut places: Vec<usize> = (0..170).map(|k| place(170, k)).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 170);
    }
}
