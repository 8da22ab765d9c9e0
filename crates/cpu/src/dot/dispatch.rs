//! Which compiled kernel serves a call: one per instruction set, format, digits and panel height.

use std::ops::Range;

use ingle_tensor::DType;

use super::engine::Scalar;
use super::kernel::{self, Call};
use super::pack;
use super::panel::{self, Activations};
use super::spec::{self, Format};
use crate::simd::Isa;

/// A kernel; its safety contract is that of [`kernel::run`].
pub(super) type Kernel = unsafe fn(&Call<'_>);

/// Packs a tile: [`pack::pack_tile`].
pub(super) type TilePacker = fn(&[u8], usize, &mut [u8], &mut [u8]);

/// Writes a panel; its safety contract is that of [`panel::write`].
pub(super) type PanelWriter = unsafe fn(&Activations<'_>, Range<usize>, usize, *mut u8);

/// Panel heights in rows, tallest first: the vector registers hold the sums of the tallest. Few of them, because each is
/// a compiled kernel per format, and the build must stay quick.
fn heights(isa: Isa, digits: usize) -> &'static [usize] {
    match (isa, digits) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, 1) => &[12, 8, 4, 2, 1],
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, _) => &[6, 1],
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, 1) => &[8, 2, 1],
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => &[4, 1],
        _ => &[1],
    }
}

/// A run of panels of equal height.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// Rows of each panel.
    pub height: usize,
    /// Rows in all; the last panel may have one fewer than its height.
    pub rows: usize,
    /// Whether codes are expanded first, which pays from two panels on.
    pub many: bool,
}

/// Most groups that rows are split into.
pub(super) const GROUPS_MAX: usize = 7;

/// The next group when `rows` remain. One more row than there are is cheaper than one panel more.
pub(super) fn next_group(isa: Isa, rows: usize, digits: usize) -> Group {
    let heights = heights(isa, digits);
    let tallest = heights[0];
    if rows >= tallest {
        let panels = (rows + 1) / tallest;
        return Group { height: tallest, rows: rows.min(panels * tallest), many: panels > 1 };
    }
    let exact = heights.iter().find(|&&h| h == rows);
    let height = exact.or(heights.iter().find(|&&h| h <= rows + 1)).copied().unwrap_or(1);
    Group { height, rows: rows.min(height), many: false }
}

/// The tallest panel, in rows.
pub(super) fn tallest(isa: Isa, digits: usize) -> usize {
    heights(isa, digits)[0]
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<F: Format, const V: usize, const D: usize, const X: bool>(call: &Call<'_>) {
    // SAFETY: the features are enabled here; the rest is the caller's duty.
    unsafe { kernel::run::<super::avx512::Avx512, F, V, D, X>(call) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<F: Format, const V: usize, const D: usize, const X: bool>(call: &Call<'_>) {
    // SAFETY: the features are enabled here; the rest is the caller's duty.
    unsafe { kernel::run::<super::avx2::Avx2, F, V, D, X>(call) }
}

unsafe fn scalar<F: Format, const V: usize, const D: usize, const X: bool>(call: &Call<'_>) {
    // SAFETY: nothing beyond the target's own instructions is used; the rest is the caller's duty.
    unsafe { kernel::run::<Scalar, F, V, D, X>(call) }
}

/// Chooses by format: runs `$body` with `$f` as its type.
macro_rules! with_format {
    ($dtype:expr, $f:ident => $body:expr) => {
        match $dtype {
            DType::Q4_0 => with_format!(@ Q4_0, $f => $body),
            DType::Q4_1 => with_format!(@ Q4_1, $f => $body),
            DType::Q5_0 => with_format!(@ Q5_0, $f => $body),
            DType::Q5_1 => with_format!(@ Q5_1, $f => $body),
            DType::Q8_0 => with_format!(@ Q8_0, $f => $body),
            DType::Q4K => with_format!(@ Q4K, $f => $body),
            DType::Q5K => with_format!(@ Q5K, $f => $body),
            DType::Q6K => with_format!(@ Q6K, $f => $body),
            DType::IQ4NL => with_format!(@ IQ4NL, $f => $body),
            DType::IQ4XS => with_format!(@ IQ4XS, $f => $body),
            DType::MXFP4 => with_format!(@ MXFP4, $f => $body),
            dtype => unreachable!("{dtype} has no packed form; Packed::new refuses it"),
        }
    };
    (@ $format:ident, $f:ident => $body:expr) => {{
        type $f = spec::$format;
        $body
    }};
}

/// The packer of a format.
pub(super) fn tile_packer(dtype: DType) -> TilePacker {
    with_format!(dtype, F => pack::pack_tile::<F>)
}

/// The panel writer of a format.
pub(super) fn panel_writer(dtype: DType) -> PanelWriter {
    with_format!(dtype, F => panel::write::<F>)
}

/// The kernel for a group that [`next_group`] returns.
pub(super) fn kernel(isa: Isa, dtype: DType, digits: usize, group: Group) -> Kernel {
    // Each arm is (digits, height, whether to expand): digit rows, digits, whether the kernel expands.
    macro_rules! kernels {
        ($run:ident: $($key:pat => $v:literal $d:literal $x:literal,)*) => {
            with_format!(dtype, F => match (digits, group.height, group.many && F::SPEC.bits != 8) {
                $($key => $run::<F, $v, $d, $x>,)*
            })
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => kernels! {
            avx512:
            (1, 1, _) => 1 1 false,
            (1, 2, _) => 2 1 false,
            (1, 4, _) => 4 1 false,
            (1, 8, _) => 8 1 false,
            (1, _, false) => 12 1 false,
            (1, _, true) => 12 1 true,
            (_, 1, _) => 2 2 false,
            (_, _, _) => 12 2 false,
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => kernels! {
            avx2:
            (1, 1, _) => 1 1 false,
            (1, 2, _) => 2 1 false,
            (1, _, false) => 8 1 false,
            (1, _, true) => 8 1 true,
            (_, 1, _) => 2 2 false,
            (_, _, _) => 8 2 false,
        },
        _ => kernels! {
            scalar:
            (1, _, _) => 1 1 false,
            (_, _, _) => 2 2 false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_groups_cover_all_rows() {
        for (isa, digits) in Isa::ALL.into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
            for rows in 1..200 {
                let mut left = rows;
                let mut groups = 0;
                while left > 0 {
                    let group = next_group(isa, left, digits);
                    assert!(group.rows > 0 && group.rows <= left, "{rows}: {group:?}");
                    assert!(group.rows.next_multiple_of(group.height) <= group.rows + 1, "{rows}: {group:?}");
                    left -= group.rows;
                    groups += 1;
                }
                assert!(groups <= GROUPS_MAX, "{isa:?}: {rows} rows take {groups} groups");
            }
        }
    }
}
