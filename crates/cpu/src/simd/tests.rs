//! Every vector type against single numbers, as bits. Instruction sets this processor lacks are not run.

use ingle_graph::math;

use super::*;

/// A lane function as a kernel: `LANES` arguments at a time.
struct Apply<'a, F> {
    x: &'a [f32],
    y: &'a mut [f32],
    f: F,
}

trait Function {
    fn of<V: Vector>(&self, x: V) -> V;
}

impl<F: Function> Kernel for Apply<'_, F> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        assert!(self.x.len() == self.y.len() && self.x.len().is_multiple_of(MAX_LANES));
        for i in (0..self.x.len()).step_by(V::LANES) {
            // SAFETY: whole vectors inside both slices.
            unsafe { self.f.of(V::load(&self.x[i])).store(&mut self.y[i]) };
        }
    }
}

macro_rules! functions {
    ($($name:ident = |$x:ident| $y:expr;)*) => {
        $(
            #[allow(non_camel_case_types)]
            struct $name;
            impl Function for $name {
                #[inline(always)]
                fn of<V: Vector>(&self, $x: V) -> V {
                    $y
                }
            }
        )*
        /// Calls `check` with each function's name and a way to apply it.
        fn each_function(mut check: impl FnMut(&str, &dyn Fn(Isa, &[f32], &mut [f32]))) {
            $(check(stringify!($name), &|isa, x, y| isa.run(Apply { x, y, f: $name }));)*
        }
    };
}

functions! {
    exp = |x| math::exp(x);
    exp2 = |x| math::exp2(x);
    ln = |x| math::ln(x);
    log1p = |x| math::log1p(x);
    sigmoid = |x| math::sigmoid(x);
    silu = |x| math::silu(x);
    tanh = |x| math::tanh(x);
    erf = |x| math::erf(x);
    gelu_tanh = |x| math::gelu_tanh(x);
    gelu_erf = |x| math::gelu_erf(x);
    softplus = |x| math::softplus(x);
    round_and_floor = |x| x.round().add(x.floor().mul(V::splat(0.5)));
    signs = |x| V::select(x.le(V::splat(2.0)), x.neg(), x.abs()).copysign(x.sub(V::splat(1.0)));
    larger = |x| V::select(x.le(x), x.max(x.mul(V::splat(1.5)).neg()).add(V::splat(0.0)), x);
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn others() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| *isa != Isa::Scalar && isa.available())
}

/// Says and counts the instruction sets no test of this crate can run here, where the test runner does not hide it.
#[test]
fn what_is_not_run_is_said() {
    use std::io::{Write, stderr};
    let absent: Vec<_> = Isa::ALL.into_iter().filter(|isa| !isa.available()).map(Isa::name).collect();
    if !absent.is_empty() {
        let _ =
            writeln!(stderr(), "not run, missing on this machine: {} ({})", absent.len(), absent.join(", "));
    }
    assert!(Isa::Scalar.available() && Isa::detect().available());
}

#[test]
fn functions_give_the_same_bits_on_every_instruction_set() {
    const STRIDE: usize = if cfg!(debug_assertions) { 400_009 } else { 6_007 };
    let mut x: Vec<f32> = (0..=u32::MAX).step_by(STRIDE).map(f32::from_bits).collect();
    x.extend([0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -87.0, 88.722_83, 0.625]);
    x.resize(x.len().next_multiple_of(MAX_LANES), 0.5);
    let (mut want, mut got) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    each_function(|name, apply| {
        apply(Isa::Scalar, &x, &mut want);
        for isa in others() {
            apply(isa, &x, &mut got);
            let bad = (0..x.len()).find(|&i| !same(got[i], want[i]));
            assert_eq!(bad.map(|i| (x[i], got[i], want[i])), None, "{name} with {isa}");
        }
    });
    // The comparison sees one unit in the last place.
    let e = math::exp(1.0f32);
    assert!(!same(e, f32::from_bits(e.to_bits() + 1)) && !same(0.0, -0.0));
}

/// Memory and what combines lanes, on 32 numbers.
struct Moves<'a> {
    x: &'a [f32; 32],
    codes: &'a [u8; 32],
    report: &'a mut Vec<f32>,
}

impl Kernel for Moves<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { x, codes, report } = self;
        let mut out = [0.0f32; 32];
        let mut bytes = [0u8; 64];
        // SAFETY: every access is inside these arrays.
        unsafe {
            for i in (0..32).step_by(V::LANES) {
                V::load_i8(&codes[i]).store(&mut out[i]);
                V::load(&x[i]).store_f16(&mut bytes[2 * i]);
            }
            report.extend(out);
            for i in (0..32).step_by(V::LANES) {
                V::load_f16(&bytes[2 * i]).store(&mut out[i]);
                V::load(&x[i]).store_bf16(&mut bytes[2 * i]);
            }
            report.extend(out);
            for i in (0..32).step_by(V::LANES) {
                V::load_bf16(&bytes[2 * i]).store(&mut out[i]);
                V::load(&x[i]).round().store_i8(&mut bytes[i]);
            }
            report.extend(out);
            report.extend(bytes[..32].iter().map(|&b| f32::from(b as i8)));
            for i in (0..32).step_by(2 * V::LANES) {
                let (even, odd) = V::load_pairs(&x[i]);
                V::store_pairs(odd, even.add(odd), &mut out[i]);
            }
            report.extend(out);
            // Sixteen lanes at a time, whatever a vector holds: the same tree of sums.
            let mut sums = *x;
            let mut half = 16;
            while half >= V::LANES {
                for i in (0..half).step_by(V::LANES) {
                    V::load(&sums[i]).add(V::load(&sums[i + half])).store(&mut sums[i]);
                }
                half /= 2;
            }
            report.push(V::load(&sums[0]).sum());
            let mut largest = f32::NEG_INFINITY;
            let mut inside = 0;
            for i in (0..32).step_by(V::LANES) {
                let v = V::load(&x[i]);
                largest = largest.max(v.largest());
                let at = V::ramp().add(V::splat(i as f32));
                inside += V::count(V::both(v.le(V::splat(1.0)), V::splat(3.0).lt(at)));
            }
            report.extend([largest, inside as f32]);
            for n in 0..V::LANES {
                let mut part = [7.0f32; 32];
                V::load_first(&x[1], n).add(V::splat(1.0)).store(&mut part[0]);
                let loaded = (0..V::LANES).all(|i| part[i] == if i < n { x[1 + i] + 1.0 } else { 1.0 });
                part.fill(7.0);
                V::load(&x[0]).store_first(&mut part[0], n);
                let stored = (0..32).all(|i| part[i] == if i < n { x[i] } else { 7.0 });
                assert!(loaded && stored, "the first {n} of {} lanes", V::LANES);
            }
        }
    }
}

#[test]
fn memory_and_lanes_agree() {
    for round in 0..200u32 {
        let number = |i: usize| {
            let bits = (round * 32 + i as u32).wrapping_mul(2_654_435_761);
            (bits as f32 / 2f32.powi(25) - 60.0) * if round % 3 == 0 { 1e-6 } else { 1.0 }
        };
        let x: [f32; 32] = std::array::from_fn(number);
        let codes = std::array::from_fn(|i| (round as usize * 7 + i * 13) as u8);
        let mut want = Vec::new();
        Isa::Scalar.run(Moves { x: &x, codes: &codes, report: &mut want });
        for isa in others() {
            let mut got = Vec::new();
            isa.run(Moves { x: &x, codes: &codes, report: &mut got });
            assert_eq!(got.len(), want.len());
            let bad = (0..got.len()).find(|&i| !same(got[i], want[i]));
            assert_eq!(bad.map(|i| (i, got[i], want[i])), None, "{isa}, round {round}");
        }
    }
}

/// Rounds numbers to two-byte floats and back.
struct Narrow<'a> {
    x: &'a [f32],
    f16: &'a mut [u16],
    bf16: &'a mut [u16],
    wide: &'a mut [f32],
}

impl Kernel for Narrow<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        assert!(self.x.len().is_multiple_of(MAX_LANES));
        for i in (0..self.x.len()).step_by(V::LANES) {
            // SAFETY: whole vectors inside slices of one length.
            unsafe {
                V::load(&self.x[i]).store_f16((&raw mut self.f16[i]).cast());
                V::load(&self.x[i]).store_bf16((&raw mut self.bf16[i]).cast());
                V::load_f16((&raw const self.f16[i]).cast()).store(&mut self.wide[i]);
            }
        }
    }
}

/// A transposition in memory.
struct Transpose<'a>(&'a mut [f32]);

impl Kernel for Transpose<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let before = self.0.to_vec();
        let n = V::LANES;
        // SAFETY: room for 16 by 16, the most there is.
        unsafe { V::transpose(self.0.as_mut_ptr()) };
        for i in 0..n * n {
            assert_eq!(self.0[i], before[i % n * n + i / n], "{n} lanes, element {i}");
        }
    }
}

#[test]
fn a_transposed_matrix_has_rows_for_columns() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let mut x: Vec<f32> = (0..MAX_LANES * MAX_LANES).map(|i| i as f32).collect();
        isa.run(Transpose(&mut x));
    }
}

#[test]
fn narrowing_rounds_to_nearest_even_everywhere() {
    let mut x: Vec<f32> = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).collect();
    // Every f16 and its neighbourhood: exact values, ties, and just beside them.
    for bits in 0..=u16::MAX {
        let f = half::f16::from_bits(bits).to_f32();
        let near = |step: i32| f32::from_bits(f.to_bits().wrapping_add_signed(step));
        x.extend([f, near(1 << 12), near((1 << 12) + 1), near((1 << 12) - 1), near(1 << 15)]);
    }
    x.resize(x.len().next_multiple_of(MAX_LANES), 0.0);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let n = x.len();
        let (mut f16, mut bf16, mut wide) = (vec![0; n], vec![0; n], vec![0.0; n]);
        isa.run(Narrow { x: &x, f16: &mut f16, bf16: &mut bf16, wide: &mut wide });
        for i in 0..n {
            let (want, brain) = (half::f16::from_f32(x[i]), half::bf16::from_f32(x[i]));
            assert!(same(half::f16::from_bits(f16[i]).to_f32(), want.to_f32()), "{isa}: f16 of {:e}", x[i]);
            assert!(
                same(half::bf16::from_bits(bf16[i]).to_f32(), brain.to_f32()),
                "{isa}: bf16 of {:e}",
                x[i]
            );
            assert!(same(wide[i], want.to_f32()), "{isa}: f32 of {want}");
        }
    }
}

#[test]
fn the_widest_is_available_and_names_are_apart() {
    assert!(Isa::detect().available() && Isa::Scalar.available());
    assert!(Isa::ALL.iter().filter(|isa| isa.available()).all(|&isa| isa <= Isa::detect()));
    let names: std::collections::HashSet<_> = Isa::ALL.iter().map(|isa| isa.to_string()).collect();
    assert_eq!(names.len(), Isa::ALL.len());
}
