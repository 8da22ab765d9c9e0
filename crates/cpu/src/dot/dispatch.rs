//! Which compiled kernel serves a call: one per instruction set, format, digits and panel height.

use ingle_tensor::DType;

use super::engine::Scalar;
use super::kernel::{self, Call};
use super::spec::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::simd::Isa;

/// A kernel; its safety contract is that of [`kernel::run`].
pub(super) type Kernel = unsafe fn(&Call<'_>);

/// Rows of the tallest panel.
pub(super) const HEIGHT_MAX: usize = 12;

/// Panel heights in rows, by number of digits; register pressure sets the tallest.
const HEIGHTS: [&[usize]; 2] = [&[12, 8, 4, 2, 1], &[6, 4, 2, 1]];

/// Height of the next panel when `rows` remain. One more row than there are is cheaper than one panel more.
pub(super) fn height(rows: usize, digits: usize) -> usize {
    let heights = HEIGHTS[digits - 1];
    let fits = |slack: usize| heights.iter().copied().find(|&h| h <= rows + slack).unwrap_or(1);
    if heights.contains(&rows) { rows } else { fits(1) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<F: Format, const V: usize, const D: usize>(call: &Call<'_>) {
    // SAFETY: the features are enabled here; the rest is the caller's duty.
    unsafe { kernel::run::<super::avx512::Avx512, F, V, D>(call) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<F: Format, const V: usize, const D: usize>(call: &Call<'_>) {
    // SAFETY: the features are enabled here; the rest is the caller's duty.
    unsafe { kernel::run::<super::avx2::Avx2, F, V, D>(call) }
}

unsafe fn scalar<F: Format, const V: usize, const D: usize>(call: &Call<'_>) {
    // SAFETY: nothing beyond the target's own instructions is used; the rest is the caller's duty.
    unsafe { kernel::run::<Scalar, F, V, D>(call) }
}

/// The kernel for panels of `height` rows, one of those [`height`] returns.
pub(super) fn kernel(isa: Isa, dtype: DType, digits: usize, height: usize) -> Kernel {
    macro_rules! heights {
        ($run:ident, $format:ident) => {
            match (digits, height) {
                (1, 1) => $run::<$format, 1, 1>,
                (1, 2) => $run::<$format, 2, 1>,
                (1, 4) => $run::<$format, 4, 1>,
                (1, 8) => $run::<$format, 8, 1>,
                (1, _) => $run::<$format, 12, 1>,
                (_, 1) => $run::<$format, 2, 2>,
                (_, 2) => $run::<$format, 4, 2>,
                (_, 4) => $run::<$format, 8, 2>,
                (_, _) => $run::<$format, 12, 2>,
            }
        };
    }
    macro_rules! formats {
        ($run:ident) => {
            match dtype {
                DType::Q4_0 => heights!($run, Q4_0),
                DType::Q4_1 => heights!($run, Q4_1),
                DType::Q5_0 => heights!($run, Q5_0),
                DType::Q5_1 => heights!($run, Q5_1),
                DType::Q8_0 => heights!($run, Q8_0),
                DType::Q4K => heights!($run, Q4K),
                DType::Q5K => heights!($run, Q5K),
                DType::Q6K => heights!($run, Q6K),
                _ => unreachable!("{dtype} has no packed form; Packed::new refuses it"),
            }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => formats!(avx512),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => formats!(avx2),
        _ => formats!(scalar),
    }
}
