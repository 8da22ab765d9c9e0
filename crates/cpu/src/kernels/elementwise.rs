//! Sums, factors, soft-caps and gated units over spans of columns.

use std::ops::Range;

use ingle_graph::Activation;
use ingle_graph::math::{self, Lanes};

use super::quantize::{Quantized, quantize};
use crate::simd::{Kernel, Vector};

/// y = f(a, b) for `n` elements.
pub struct Zip<F> {
    /// First operand, `n` f32.
    pub a: *const f32,
    /// Second operand, `n` f32.
    pub b: *const f32,
    /// Result, `n` f32; may be `a` or `b`.
    pub y: *mut f32,
    /// Elements.
    pub n: usize,
    /// The function.
    pub f: F,
}

/// A function of two numbers, lane by lane.
pub trait Binary: Copy {
    /// f(a, b)
    fn apply<L: Lanes>(self, a: L, b: L) -> L;
}

/// fl(a + b)
#[derive(Clone, Copy)]
pub struct Sum;

impl Binary for Sum {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, b: L) -> L {
        a.add(b)
    }
}

/// fl(a * factor); b is not used.
#[derive(Clone, Copy)]
pub struct Factor(pub f32);

impl Binary for Factor {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, _: L) -> L {
        a.mul(L::splat(self.0))
    }
}

/// fl(cap * tanh(fl(a / cap))); b is not used.
#[derive(Clone, Copy)]
pub struct Softcap(pub f32);

impl Binary for Softcap {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, _: L) -> L {
        let cap = L::splat(self.0);
        cap.mul(math::tanh(a.div(cap)))
    }
}

/// fl(act(a) * b), with a type for the activation so that it is chosen outside the loop.
#[derive(Clone, Copy)]
pub struct Gated<A>(pub A);

/// Marks `x / (1 + e^-x)`.
#[derive(Clone, Copy)]
pub struct Silu;
/// Marks the tanh form of the Gaussian unit.
#[derive(Clone, Copy)]
pub struct GeluTanh;
/// Marks the erf form of the Gaussian unit.
#[derive(Clone, Copy)]
pub struct GeluErf;

impl Binary for Gated<Silu> {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, b: L) -> L {
        math::silu(a).mul(b)
    }
}
impl Binary for Gated<GeluTanh> {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, b: L) -> L {
        math::gelu_tanh(a).mul(b)
    }
}
impl Binary for Gated<GeluErf> {
    #[inline(always)]
    fn apply<L: Lanes>(self, a: L, b: L) -> L {
        math::gelu_erf(a).mul(b)
    }
}

impl<F: Binary> Zip<F> {
    #[inline(always)]
    fn each<V: Vector>(&self) {
        let whole = self.n / V::LANES * V::LANES;
        // SAFETY: the fields' own promise, for indices below n.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                let (a, b) = (V::load(self.a.add(i)), V::load(self.b.add(i)));
                self.f.apply(a, b).store(self.y.add(i));
            }
            let rest = self.n - whole;
            if rest > 0 {
                let (a, b) = (V::load_first(self.a.add(whole), rest), V::load_first(self.b.add(whole), rest));
                self.f.apply(a, b).store_first(self.y.add(whole), rest);
            }
        }
    }
}

impl<F: Binary> Kernel for Zip<F> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        self.each::<V>();
    }
}

/// A gated unit over columns `col..col + n` of some rows, quantized where that is wanted.
pub struct Glu<'a> {
    /// The function.
    pub act: Activation,
    /// Gate, `n` f32 of the first row.
    pub gate: *const f32,
    /// Factor, `n` f32 of the first row.
    pub up: *const f32,
    /// Elements between rows of the two.
    pub stride: usize,
    /// Result, `n` f32 of the first row; may be `gate`.
    pub y: *mut f32,
    /// Elements between rows of the result.
    pub y_stride: usize,
    /// Elements: whole units of `quantized`.
    pub n: usize,
    /// Where the result goes quantized.
    pub quantized: &'a [Quantized],
    /// Rows of the result.
    pub rows: Range<usize>,
    /// First column of the result.
    pub col: usize,
}

impl Kernel for Glu<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let n = self.n;
        for (i, row) in self.rows.enumerate() {
            let (at, y) = (i * self.stride, self.y.wrapping_add(i * self.y_stride));
            let (a, b) = (self.gate.wrapping_add(at), self.up.wrapping_add(at));
            match self.act {
                Activation::Silu => Zip { a, b, y, n, f: Gated(Silu) }.each::<V>(),
                Activation::GeluTanh => Zip { a, b, y, n, f: Gated(GeluTanh) }.each::<V>(),
                Activation::GeluErf => Zip { a, b, y, n, f: Gated(GeluErf) }.each::<V>(),
            }
            for to in self.quantized {
                // SAFETY: y holds the n results, and the columns are whole units inside the row.
                unsafe { quantize::<V>(to, row, self.col, y, n) };
            }
        }
    }
}
