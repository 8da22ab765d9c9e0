//! `amx3` in scalar code: what bf16 matrix tiles (TDPBF16PS) compute, on operands split into two terms.
//!
//! An operand x becomes two bf16 terms, `hi` and `lo`, and a product of x and y the sum of hi * hi, hi * lo and lo * hi;
//! lo * lo is left out. Sums go 32 elements at a time, and in such a step over those three products, in that order.

/// Elements of one tile step.
pub const STEP: usize = 32;

/// The two bf16 terms of an operand, widened. A tile takes numbers too small for a normal one as zeros of their sign.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// The nearest number of eight significant bits; of two, the one away from zero.
    pub hi: f32,
    /// What that leaves, cut to eight significant bits.
    pub lo: f32,
}

/// Numbers too small for a normal one become zeros of their sign.
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}

/// The upper half of an f32's bits.
fn cut(bits: u32) -> f32 {
    f32::from_bits(bits & 0xFFFF_0000)
}

impl Terms {
    /// Terms of x; every f16 and every normal bf16 is the sum of its terms. What is not finite, or too large for a finite
    /// `hi`, has a lower term that is not finite.
    pub fn of(x: f32) -> Self {
        let hi = cut(x.to_bits().wrapping_add(0x8000));
        Self { hi: flush(hi), lo: flush(cut((x - hi).to_bits())) }
    }
}

/// a * b + c, rounded once. Operands of eight significant bits have a product of 16, and with f64 that is enough: where
/// the sum is not exact, the smaller part is far below half of the result's last place.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    flush((f64::from(a) * f64::from(b) + f64::from(c)) as f32)
}

/// One tile step: c plus the products of up to [`STEP`] elements. Two chains of fused multiply-adds from +0, over the
/// first sixteen elements and over the last sixteen, are added, and their sum to c.
fn step(c: f32, products: impl Iterator<Item = (f32, f32)>) -> f32 {
    let mut chains = [0.0f32; 2];
    for (k, (a, b)) in products.enumerate() {
        let chain = &mut chains[2 * k / STEP];
        *chain = fused(a, b, *chain);
    }
    flush(c + flush(chains[0] + chains[1]))
}

/// c plus the products of up to [`STEP`] elements: three tile steps.
pub fn add_products(c: f32, a: &[Terms], b: &[Terms]) -> f32 {
    let terms = || a.iter().zip(b);
    let c = step(c, terms().map(|(a, b)| (a.hi, b.hi)));
    let c = step(c, terms().map(|(a, b)| (a.hi, b.lo)));
    step(c, terms().map(|(a, b)| (a.lo, b.hi)))
}

/// Dot product.
pub fn dot(a: &[Terms], b: &[Terms]) -> f32 {
    a.chunks(STEP).zip(b.chunks(STEP)).fold(0.0, |c, (a, b)| add_products(c, a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_hold_every_f16_and_every_normal_bf16() {
        for bits in 0..=u16::MAX {
            let half = half::f16::from_bits(bits).to_f32();
            let brain = flush(half::bf16::from_bits(bits).to_f32());
            for x in [half, brain].into_iter().filter(|x| x.is_finite()) {
                let Terms { hi, lo } = Terms::of(x);
                assert_eq!(hi + lo, x);
                assert!([hi, lo].iter().all(|t| t.to_bits() & 0xFFFF == 0), "{x:e}");
            }
        }
    }

    #[test]
    fn terms_of_an_f32_keep_sixteen_bits() {
        for bits in (0x0100_0000u32..0x7F00_0000).step_by(104_729) {
            let x = f32::from_bits(bits);
            let Terms { hi, lo } = Terms::of(x);
            let left = (f64::from(x) - f64::from(hi) - f64::from(lo)).abs();
            assert!(left <= f64::from(x) * 2f64.powi(-16) + f64::from(f32::MIN_POSITIVE), "{x:e}");
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        let one = Terms::of(1.0);
        for bits in
            [0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_8000, 0x7F7F_8000]
        {
            let terms = Terms::of(f32::from_bits(bits));
            assert!(!terms.lo.is_finite());
            assert!(dot(&[terms], &[one]).is_nan() && dot(&[one], &[terms]).is_nan(), "{bits:08x}");
        }
    }

    /// Against a fused multiply-add that is rounded once whatever its operands are.
    #[test]
    fn fused_is_rounded_once() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32
        };
        for _ in 0..200_000 {
            let [a, b] = [random(), random()].map(|bits| cut(bits & 0x9FFF_FFFF | 0x2000_0000));
            // Near the product, where halves of the last place are met, and anywhere.
            let near = (a * b) * (random() % 64) as f32 * 2f32.powi(-(random() as i32 & 63));
            for c in [near, f32::from_bits(random() & 0x9FFF_FFFF | 0x2000_0000)] {
                assert_eq!(
                    fused(a, b, c).to_bits(),
                    flush(a.mul_add(b, c)).to_bits(),
                    "{a:e} * {b:e} + {c:e}"
                );
            }
        }
    }

    /// The order of a step, by numbers that another order would round otherwise.
    #[test]
    fn two_chains_make_a_step() {
        let big = 16_777_216.0;
        let one = Terms { hi: 1.0, lo: 0.0 };
        let sum = |places: &[(usize, f32)]| {
            let mut a = [Terms::default(); 48];
            places.iter().for_each(|&(k, x)| a[k].hi = x);
            dot(&a, &[one; 48])
        };
        // 2^24 + 1 is not an f32: it is lost in the chain of the large number, and not in the other.
        assert_eq!(sum(&[(0, big), (1, 1.0), (15, 1.0), (16, 1.0), (31, -big), (2, 1.0)]), 1.0);
        assert_eq!(sum(&[(0, big), (1, 1.0), (2, -big), (16, 1.0), (31, 1.0)]), 2.0);
        // The sum of the first step is rounded before the next.
        assert_eq!(sum(&[(0, big), (16, 1.0), (32, -big)]), 0.0);
    }
}
