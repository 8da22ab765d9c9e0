//! The largest of some neighbouring elements.

use crate::simd::{Kernel, Vector};

/// y = the largest of `n` elements, at least one; NaN if one of them is, and a zero is +0.
pub struct Peak {
    /// `n` f32.
    pub x: *const f32,
    /// Elements.
    pub n: usize,
    /// One f32.
    pub y: *mut f32,
}

/// Independent maxima: a maximum takes several cycles, and two begin in each.
const CHAINS: usize = 8;

impl Kernel for Peak {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { x, n, y } = self;
        let lowest = V::splat(f32::NEG_INFINITY);
        let mut maxima = [lowest; CHAINS];
        // Lanes that have seen no NaN.
        let mut sound = lowest.le(lowest);
        // SAFETY: the fields' own promise.
        unsafe {
            let mut at = 0;
            while at + CHAINS * V::LANES <= n {
                for (i, max) in maxima.iter_mut().enumerate() {
                    let x = V::load(x.add(at + i * V::LANES));
                    sound = V::both(sound, x.le(x));
                    *max = max.max(x);
                }
                at += CHAINS * V::LANES;
            }
            while at < n {
                let x = match n - at {
                    rest if rest < V::LANES => {
                        let inside = V::ramp().lt(V::splat(rest as f32));
                        V::select(inside, V::load_first(x.add(at), rest), lowest)
                    }
                    _ => V::load(x.add(at)),
                };
                sound = V::both(sound, x.le(x));
                maxima[0] = maxima[0].max(x);
                at += V::LANES;
            }
            let max = maxima.into_iter().fold(lowest, V::max).largest();
            y.write(if V::count(sound) == V::LANES { max + 0.0 } else { f32::NAN });
        }
    }
}
