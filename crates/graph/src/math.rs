//! The functions of the numeric contract (NUMERICS.md section 3): range reduction and a polynomial, no libm.
//!
//! Every function is one fixed sequence of IEEE operations (`+ - * /`, fused multiply-add, moves of bits) without a
//! branch. It is written once, over [`Lanes`]: with `f32` it is the definition, with a vector type of a backend it is the
//! same operations on every lane, so both give the same bits. A NaN argument gives NaN; payloads are not part of the
//! contract.
//!
//! Coefficients are minimax fits of our own, rounded to f32 one after the other with the rest fitted again. Errors below
//! are the largest found against f64 with every 31st bit pattern as argument, in units of the last place of the result.

/// One f32, or a vector of them on which every operation works lane by lane with the rounding of IEEE 754.
pub trait Lanes: Copy {
    /// Result of a comparison.
    type Mask: Copy;

    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// fl(self + other)
    fn add(self, other: Self) -> Self;
    /// fl(self - other)
    fn sub(self, other: Self) -> Self;
    /// fl(self * other)
    fn mul(self, other: Self) -> Self;
    /// fl(self / other)
    fn div(self, other: Self) -> Self;
    /// fl(self * factor + term), rounded once.
    fn fma(self, factor: Self, term: Self) -> Self;
    /// The sign flipped, of NaN too.
    fn neg(self) -> Self;
    /// The sign cleared, of NaN too.
    fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;
    /// The nearest integer, ties to even.
    fn round(self) -> Self;
    /// self < other; false when either is NaN.
    fn lt(self, other: Self) -> Self::Mask;
    /// `yes` where the mask is set, else `no`.
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// self * 2^n for integral n, by adding n to the exponent field: right where self and the result are normal,
    /// unspecified (but no trap) elsewhere.
    fn exponent_add(self, n: Self) -> Self;
    /// (m, e) with self = m * 2^e, m in [sqrt(1/2), sqrt(2)), for normal self > 0; unspecified elsewhere.
    fn exponent_split(self) -> (Self, Self);
}

/// Bits of fl(sqrt(1/2)): mantissas from here on up to twice this have exponent 0 in [`Lanes::exponent_split`].
pub const SQRT_HALF_BITS: i32 = 0x3F35_04F3;

impl Lanes for f32 {
    type Mask = bool;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self + other
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self - other
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self * other
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self / other
    }
    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        self.mul_add(factor, term)
    }
    #[inline(always)]
    fn neg(self) -> Self {
        -self
    }
    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }
    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        f32::copysign(self, sign)
    }
    #[inline(always)]
    fn round(self) -> Self {
        self.round_ties_even()
    }
    #[inline(always)]
    fn lt(self, other: Self) -> bool {
        self < other
    }
    #[inline(always)]
    fn select(mask: bool, yes: Self, no: Self) -> Self {
        if mask { yes } else { no }
    }
    #[inline(always)]
    fn exponent_add(self, n: Self) -> Self {
        f32::from_bits(self.to_bits().wrapping_add((n as i32 as u32) << 23))
    }
    #[inline(always)]
    fn exponent_split(self) -> (Self, Self) {
        let bits = self.to_bits() as i32;
        let e = bits.wrapping_sub(SQRT_HALF_BITS) >> 23;
        (f32::from_bits(bits.wrapping_sub(e << 23) as u32), e as f32)
    }
}

/// c\[0\] + c\[1\] x + ... by Horner's rule, one FMA per step.
#[inline(always)]
fn polynomial<L: Lanes, const N: usize>(x: L, c: [f32; N]) -> L {
    let mut y = L::splat(c[N - 1]);
    for &c in c[..N - 1].iter().rev() {
        y = y.fma(x, L::splat(c));
    }
    y
}

/// ln 2 with ten zero bits at the end, so that its product with an exponent is exact; and the rest.
const LN_2_HI: f32 = 0.693_115_23;
const LN_2_LO: f32 = 3.194_618_3e-5;

/// e^x within 1.1 ULP. Below -87 it is +0, above 88.722_83 infinite; exp(±0) is exactly 1.
#[inline(always)]
pub fn exp<L: Lanes>(x: L) -> L {
    let n = x.mul(L::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(L::splat(-LN_2_LO), n.fma(L::splat(-LN_2_HI), x));
    // (e^r - 1 - r) / r^2
    let p = polynomial(r, [0.499_999_94, 0.166_665_21, 0.041_668_266, 0.008_368_676, 0.001_382_069]);
    let y = r.mul(r).fma(p, r).add(L::splat(1.0)).exponent_add(n);
    let y = L::select(x.lt(L::splat(-87.0)), L::splat(0.0), y);
    L::select(L::splat(88.722_83).lt(x), L::splat(f32::INFINITY), y)
}

/// 2^x within 0.8 ULP. Below -126 it is +0, from 128 on infinite; integers give exact powers.
#[inline(always)]
pub fn exp2<L: Lanes>(x: L) -> L {
    let n = x.round();
    let r = x.sub(n);
    // (2^r - 1) / r
    let p = polynomial(
        r,
        [std::f32::consts::LN_2, 0.240_226_48, 0.055_503_6, 0.009_618_506, 0.001_339_080_6, 0.000_153_264_61],
    );
    let y = r.fma(p, L::splat(1.0)).exponent_add(n);
    let y = L::select(x.lt(L::splat(-126.0)), L::splat(0.0), y);
    // The bound is the largest number below 128.
    L::select(L::splat(127.999_99).lt(x), L::splat(f32::INFINITY), y)
}

/// ln(1 + f) - f + low for f in (-0.3, 0.42), where `low` is smaller than the last place of f or about it.
#[inline(always)]
fn ln_tail<L: Lanes>(f: L, low: L) -> L {
    // (ln(1 + f) - f + f^2 / 2) / f^3
    let p = polynomial(
        f,
        [
            0.333_333_3,
            -0.250_008_2,
            0.200_012_42,
            -0.166_234_09,
            0.142_015_8,
            -0.131_596_1,
            0.127_622_17,
            -0.076_364_39,
        ],
    );
    f.mul(f).fma(f.fma(p, L::splat(-0.5)), low)
}

/// `y` where the logarithm's argument is positive and finite; elsewhere its limit or NaN.
#[inline(always)]
fn ln_edges<L: Lanes>(x: L, y: L) -> L {
    let y = L::select(L::splat(0.0).lt(x), y, L::splat(f32::NAN));
    let y = L::select(x.abs().lt(L::splat(f32::from_bits(1))), L::splat(f32::NEG_INFINITY), y);
    L::select(L::splat(f32::MAX).lt(x), x, y)
}

/// ln x within 0.9 ULP, subnormal x included. ln(±0) is -infinity, ln(1) is +0, a negative x gives NaN.
#[inline(always)]
pub fn ln<L: Lanes>(x: L) -> L {
    let small = x.lt(L::splat(f32::MIN_POSITIVE));
    let scaled = L::select(small, x.mul(L::splat(8_388_608.0)), x);
    let (m, e) = scaled.exponent_split();
    let e = e.sub(L::select(small, L::splat(23.0), L::splat(0.0)));
    let f = m.sub(L::splat(1.0));
    let y = e.fma(L::splat(LN_2_HI), f.add(ln_tail(f, e.mul(L::splat(LN_2_LO)))));
    ln_edges(x, y)
}

/// ln(1 + x) within 0.9 ULP. log1p(±0) is ±0, log1p(-1) is -infinity, below it NaN.
#[inline(always)]
pub fn log1p<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    let u = one.add(x);
    // What the sum lost: exact, as the larger operand is subtracted first.
    let lost = L::select(x.lt(one), x.sub(u.sub(one)), one.sub(u.sub(x)));
    let (m, e) = u.exponent_split();
    let f = m.sub(one);
    let y = e.fma(L::splat(LN_2_HI), f.add(ln_tail(f, e.fma(L::splat(LN_2_LO), lost.div(u)))));
    // 2^-25: from here down the series ends at x, and -0 stays -0.
    L::select(x.abs().lt(L::splat(2.980_232_2e-8)), x, ln_edges(u, y))
}

/// 1 / (1 + e^-x) within 2.5 ULP. Below -88.722_83 it is +0.
#[inline(always)]
pub fn sigmoid<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    one.div(one.add(exp(x.neg())))
}

/// x / (1 + e^-x), which is x sigmoid(x), within 2.5 ULP. Below -88.722_83 it is -0; -infinity gives NaN.
#[inline(always)]
pub fn silu<L: Lanes>(x: L) -> L {
    x.div(L::splat(1.0).add(exp(x.neg())))
}

/// tanh x within 1.4 ULP, odd; from 9.02 on exactly 1.
#[inline(always)]
pub fn tanh<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    let a = x.abs();
    let square = x.mul(x);
    // (tanh(x) - x) / x^3 as a function of x^2
    let p = polynomial(square, [-0.333_332_8, 0.133_314_06, -0.053_736_515, 0.020_628_167, -0.005_692_296]);
    let near = a.mul(square).fma(p, a);
    let far = one.sub(L::splat(2.0).div(exp(a.add(a)).add(one)));
    L::select(a.lt(L::splat(0.625)), near, far).copysign(x)
}

/// erf x within 1.2 ULP, odd; from 3.95 on exactly 1.
#[inline(always)]
pub fn erf<L: Lanes>(x: L) -> L {
    let a = x.abs();
    // (erf(x) - x) / x as a function of x^2
    let p = polynomial(
        x.mul(x),
        [
            0.128_379_17,
            -0.376_126_3,
            0.112_836_24,
            -0.026_855_56,
            0.005_191_753,
            -0.000_803_975_3,
            0.000_079_431,
        ],
    );
    let near = a.fma(p, a);
    let limit = L::splat(3.95);
    // ln(1 - erf(a))
    let q = polynomial(
        L::select(limit.lt(a), limit, a),
        [
            -0.000_177_495_52,
            -1.127_749_6,
            -0.637_059_75,
            -0.104_037_37,
            0.022_277_09,
            -0.003_055_608_4,
            0.000_197_181_83,
        ],
    );
    let far = L::splat(1.0).sub(exp(q));
    L::select(a.lt(L::splat(0.9)), near, far).copysign(x)
}

/// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): fl(fl(x / 2) * fl(1 + t)). Where the sum cancels, for x below
/// about -2, only its absolute error is small: at most 2^-24 |x|.
#[inline(always)]
pub fn gelu_tanh<L: Lanes>(x: L) -> L {
    // sqrt(2 / pi) and 0.044715 sqrt(2 / pi)
    let inner = x.mul(x.mul(x).fma(L::splat(0.035_677_407), L::splat(0.797_884_6)));
    x.mul(L::splat(0.5)).mul(L::splat(1.0).add(tanh(inner)))
}

/// x / 2 (1 + erf(x / sqrt 2)): fl(fl(x / 2) * fl(1 + e)), with the error of [`gelu_tanh`].
#[inline(always)]
pub fn gelu_erf<L: Lanes>(x: L) -> L {
    let e = erf(x.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2)));
    x.mul(L::splat(0.5)).mul(L::splat(1.0).add(e))
}

/// ln(1 + e^x), as max(x, 0) + log1p(e^-|x|), within 1.6 ULP. Below -87 it is +0.
#[inline(always)]
pub fn softplus<L: Lanes>(x: L) -> L {
    let zero = L::splat(0.0);
    L::select(x.lt(zero), zero, x).add(log1p(exp(x.abs().neg())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f`, and where, over every `STRIDE`th argument inside `range`.
    fn error_ulp(
        range: std::ops::RangeInclusive<f32>,
        f: fn(f32) -> f32,
        exact: fn(f64) -> f64,
    ) -> (f64, f32) {
        const STRIDE: usize = if cfg!(debug_assertions) { 65_537 } else { 9_973 };
        let mut worst = (0.0, 0.0);
        for bits in (0..=u32::MAX).step_by(STRIDE) {
            let x = f32::from_bits(bits);
            if !range.contains(&x) {
                continue;
            }
            let want = exact(f64::from(x));
            let rounded = want as f32;
            if rounded.is_infinite() {
                assert_eq!(f(x), rounded, "at {x}");
                continue;
            }
            let place = (rounded.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127 - 23;
            let ulp = (f64::from(f(x)) - want).abs() / 2f64.powi(place);
            assert!(!ulp.is_nan(), "NaN at {x}");
            if ulp > worst.0 {
                worst = (ulp, x);
            }
        }
        worst
    }

    #[test]
    fn errors_are_within_the_stated_limits() {
        let all = f32::NEG_INFINITY..=f32::INFINITY;
        let sigmoid64 = |x: f64| 1.0 / (1.0 + (-x).exp());
        type Row = (&'static str, std::ops::RangeInclusive<f32>, fn(f32) -> f32, fn(f64) -> f64, f64);
        let rows: [Row; 9] = [
            ("exp", -87.0..=f32::INFINITY, exp, f64::exp, 1.1),
            ("exp2", -126.0..=f32::INFINITY, exp2, f64::exp2, 0.8),
            ("ln", 0.0..=f32::INFINITY, ln, f64::ln, 0.9),
            ("log1p", -1.0..=f32::INFINITY, log1p, f64::ln_1p, 0.9),
            ("sigmoid", -87.0..=f32::INFINITY, sigmoid, sigmoid64, 2.5),
            ("silu", -87.0..=f32::MAX, silu, |x| x / (1.0 + (-x).exp()), 2.5),
            ("tanh", all.clone(), tanh, f64::tanh, 1.4),
            ("erf", all, erf, libm::erf, 1.2),
            ("softplus", -87.0..=f32::INFINITY, softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), 1.6),
        ];
        for (name, range, f, exact, limit) in rows {
            let (ulp, x) = error_ulp(range, f, exact);
            println!("{name}: {ulp:.3} ULP at {x:e}");
            assert!(ulp <= limit, "{name}: {ulp:.3} ULP at {x:e}, limit {limit}");
        }
    }

    #[test]
    fn gelu_errors_are_small_against_x() {
        let c = (2.0 / std::f64::consts::PI).sqrt();
        for bits in (0..=u32::MAX).step_by(9_973) {
            let x = f32::from_bits(bits);
            if x.is_nan() || x.abs() > 1e18 {
                continue;
            }
            let w = f64::from(x);
            let forms = [
                (gelu_tanh(x), 0.5 * w * (1.0 + (c * (w + 0.044715 * w * w * w)).tanh())),
                (gelu_erf(x), 0.5 * w * (1.0 + libm::erf(w / std::f64::consts::SQRT_2))),
            ];
            for (got, want) in forms {
                let limit = w.abs() * 2f64.powi(-23) + 1e-45;
                assert!((f64::from(got) - want).abs() <= limit, "{x:e}: {got:e} for {want:e}");
            }
        }
    }

    #[test]
    fn edges() {
        let inf = f32::INFINITY;
        type Row = (fn(f32) -> f32, &'static [(f32, f32)]);
        const INF: f32 = f32::INFINITY;
        let rows: [Row; 11] = [
            (exp, &[(0.0, 1.0), (-0.0, 1.0), (-87.000_01, 0.0), (-INF, 0.0), (INF, INF), (88.722_84, INF)]),
            (exp2, &[(0.0, 1.0), (-126.0, f32::MIN_POSITIVE), (-126.1, 0.0), (128.0, INF), (3.0, 8.0)]),
            (ln, &[(0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF), (-1.0, f32::NAN), (-INF, f32::NAN)]),
            (log1p, &[(0.0, 0.0), (-0.0, -0.0), (-1.0, -INF), (INF, INF), (-1.5, f32::NAN), (1e-40, 1e-40)]),
            (sigmoid, &[(0.0, 0.5), (INF, 1.0), (-INF, 0.0), (-89.0, 0.0), (89.0, 1.0)]),
            (silu, &[(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, f32::NAN), (-100.0, -0.0)]),
            (tanh, &[(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (9.02, 1.0), (1e-40, 1e-40)]),
            (erf, &[(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (3.95, 1.0)]),
            (gelu_tanh, &[(0.0, 0.0), (INF, INF), (-1e30, -0.0), (1e30, 1e30)]),
            (gelu_erf, &[(0.0, 0.0), (INF, INF), (-1e30, -0.0), (1e30, 1e30)]),
            (softplus, &[(INF, INF), (-INF, 0.0), (-88.0, 0.0), (1e30, 1e30)]),
        ];
        for (i, (f, edges)) in rows.into_iter().enumerate() {
            assert!(f(f32::NAN).is_nan(), "row {i}");
            for &(x, want) in edges {
                let got = f(x);
                assert!(
                    got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                    "row {i}: {x}: {got}"
                );
            }
        }
        assert!(exp(-87.0f32) > 0.0 && exp(88.722_83f32) < inf);
    }
}
