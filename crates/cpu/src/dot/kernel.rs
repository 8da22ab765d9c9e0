//! The integer kernels, generic over engine, format and panel height: a panel of activation rows times the tiles of
//! a range. `V` is the number of digit rows of the panel, `D` the digits per activation.

use std::ops::Range;

use super::engine::Engine;
use super::pack::{RESIDUES, units_of};
use super::panel::{Activations, Panel};
use super::spec::{Format, Min, TILE};
use super::{OutPtr, Packed, Tail};

/// One panel's share of a product.
pub(super) struct Call<'a> {
    pub packed: &'a Packed,
    pub x: Activations<'a>,
    /// Activation rows, at most `V / D`.
    pub rows: Range<usize>,
    pub tiles: Range<usize>,
    pub out: OutPtr,
    pub tail: Tail<'a>,
    /// Scratch for the panel.
    pub panel: *mut u8,
}

/// Bytes ahead of its reading that a kernel asks memory for weights.
const PREFETCH: usize = 2048;

/// Runs one call.
///
/// # Safety
/// The engine's instruction set is present and enabled in the calling function. The call was checked by
/// [`Packed::product`]: ranges lie inside the matrices, the panel has room, the caller owns the outputs.
#[inline(always)]
pub(super) unsafe fn run<S: Engine, F: Format, const V: usize, const D: usize>(call: &Call<'_>) {
    let packed = call.packed;
    // SAFETY: rows are inside the layout, whose unit matches the format; the panel has room.
    unsafe { Panel::<S, F, V, D>::write(&call.x, call.rows.clone(), call.panel) };
    for tile in call.tiles.clone() {
        let mut sums = [[0.0f32; TILE]; V];
        // SAFETY: tile is inside the packed matrix, whose two sections hold `units` records of the format.
        unsafe {
            let codes = packed.tile_codes(tile);
            let scales = packed.tile_scales(tile);
            for half in 0..TILE / S::LANES {
                let lane = half * S::LANES;
                tile_sums::<S, F, V, D>(codes.add(4 * lane), scales.add(2 * lane), packed.units(), call.panel, &mut sums, lane);
            }
        }
        let lanes = TILE.min(packed.rows() - TILE * tile);
        for (r, row) in call.rows.clone().enumerate() {
            // SAFETY: row and columns are inside the caller's output and residual, which it owns.
            unsafe { finish(&sums[r], TILE * tile, lanes, row, call) };
        }
    }
}

/// Adds bias and residual and writes one row of a tile.
///
/// # Safety
/// As [`run`]: `row` and `first .. first + lanes` are inside the output, the bias and the residual.
#[inline(always)]
unsafe fn finish(sums: &[f32; TILE], first: usize, lanes: usize, row: usize, call: &Call<'_>) {
    let mut y = *sums;
    if let Some(bias) = call.tail.bias {
        for (y, b) in y.iter_mut().zip(&bias[first..first + lanes]) {
            *y += b;
        }
    }
    // SAFETY: the caller's duty; the residual may be the output itself, so both are raw and read before written.
    unsafe {
        let out = call.out.at(row, first);
        if let Some(residual) = call.tail.residual {
            let residual = residual.at(row, first);
            for lane in 0..lanes {
                y[lane] += *residual.add(lane);
            }
        }
        std::ptr::copy_nonoverlapping(y.as_ptr(), out, lanes);
    }
}

/// The dot products of `S::LANES` rows of a tile with every row of the panel, into `sums[r][lane..]`.
///
/// # Safety
/// As [`run`]; `codes` and `scales` point at the first lane's part of the first records.
#[inline(always)]
unsafe fn tile_sums<S: Engine, F: Format, const V: usize, const D: usize>(
    mut codes: *const u8,
    mut scales: *const u8,
    units: usize,
    mut panel: *const u8,
    sums: &mut [[f32; TILE]; V],
    lane: usize,
) {
    // SAFETY: `units` records follow each of the three pointers.
    unsafe {
        let mut total = [S::zero(); V];
        for residue in 0..RESIDUES {
            let mut acc = [S::zero(); V];
            for _ in 0..units_of(units, residue) {
                if F::SPEC.sub == 0 {
                    unit_plain::<S, F, V, D>(codes, scales, panel, &mut acc);
                } else {
                    unit_scaled::<S, F, V, D>(codes, scales, panel, &mut acc);
                }
                let mut line = 0;
                while line < F::SPEC.code_bytes() {
                    S::prefetch(codes.wrapping_add(PREFETCH + line));
                    line += 64;
                }
                codes = codes.add(F::SPEC.code_bytes());
                scales = scales.add(F::SPEC.scale_bytes());
                panel = panel.add(Panel::<S, F, V, D>::BYTES);
            }
            for r in 0..V / D {
                total[r] = if residue == 0 { acc[r] } else { S::add(total[r], acc[r]) };
            }
        }
        for r in 0..V / D {
            S::store(total[r], sums[r].as_mut_ptr().add(lane));
        }
    }
}

/// Calls a macro with each word of a group, in order.
macro_rules! each_word {
    ($word:ident) => {
        $word!(0);
        $word!(1);
        $word!(2);
        $word!(3);
        $word!(4);
        $word!(5);
        $word!(6);
        $word!(7);
    };
}

/// Adds a unit of 32 columns with one scale.
///
/// # Safety
/// As [`tile_sums`], with one record left.
#[inline(always)]
unsafe fn unit_plain<S: Engine, F: Format, const V: usize, const D: usize>(
    codes: *const u8,
    scales: *const u8,
    panel: *const u8,
    acc: &mut [S::Float; V],
) {
    // SAFETY: all offsets are inside one record of each layout.
    unsafe {
        let starts = panel.add(Panel::<S, F, V, D>::STARTS_AT).cast::<i32>();
        let mut pieces = [S::empty(); V];
        let mut ints = [S::int_zero(); V];
        if Panel::<S, F, V, D>::STARTS == 1 {
            for v in 0..V {
                if S::WIDE {
                    pieces[v] = S::start(starts.add(v));
                } else {
                    ints[v] = S::int(starts.add(v));
                }
            }
        }
        macro_rules! word {
            ($g:literal) => {
                let word = S::codes(F::SPEC.bits, $g, codes);
                for v in 0..V {
                    pieces[v] = S::step(F::SPEC.bits, pieces[v], word, panel.add(32 * v + 4 * $g).cast());
                    if !S::WIDE && ($g + 1) % F::SPEC.piece_words() == 0 {
                        ints[v] = S::int_add(ints[v], S::total(pieces[v]));
                        pieces[v] = S::empty();
                    }
                }
            };
        }
        each_word!(word);
        if S::WIDE {
            for v in 0..V {
                ints[v] = S::total(pieces[v]);
            }
        }
        let minima = panel.add(Panel::<S, F, V, D>::SUMS_AT).cast::<f32>();
        let mut sums = [S::zero(); V];
        if F::SPEC.min == Min::Add {
            for v in 0..V {
                sums[v] = S::splat(minima.add(v));
            }
        }
        accumulate::<S, F, V, D>(scales, panel, &ints, &sums, acc);
    }
}

/// Adds a unit of 256 columns with sub-scales.
///
/// # Safety
/// As [`tile_sums`], with one record left.
#[inline(always)]
unsafe fn unit_scaled<S: Engine, F: Format, const V: usize, const D: usize>(
    codes: *const u8,
    scales: *const u8,
    panel: *const u8,
    acc: &mut [S::Float; V],
) {
    let spec = F::SPEC;
    let sub_words = spec.sub / 4;
    // SAFETY: all offsets are inside one record of each layout.
    unsafe {
        let sub_scales = scales.add(spec.sub_scale_at());
        let starts = panel.add(Panel::<S, F, V, D>::STARTS_AT).cast::<i32>();
        let pairs = panel.add(Panel::<S, F, V, D>::SUMS_AT).cast::<i32>();
        let mut ints = [S::int_zero(); V];
        // Pieces are sums of (code - center) or of code; the format's weights are (code - offset).
        let shifted = if S::WIDE { spec.center() - spec.offset } else { -spec.offset };
        if shifted != 0 {
            for i in 0..spec.pairs() {
                for v in 0..V {
                    ints[v] = S::add_pairs(ints[v], sub_scales.add(2 * TILE * i), pairs.add(v * spec.pairs() + i));
                }
            }
            for v in 0..V {
                ints[v] = S::int_times(ints[v], shifted);
            }
        }
        for group in 0..8 {
            let codes = codes.add(group * spec.group_bytes());
            let starts = starts.add(group * 8 / spec.piece_words());
            let digits = panel.add(32 * group);
            let sub_scales = sub_scales.add(2 * TILE * (group * 32 / spec.sub / 2));
            let mut pieces = [S::empty(); V];
            macro_rules! word {
                ($g:literal) => {
                    let word = S::codes(F::SPEC.bits, $g, codes);
                    for v in 0..V {
                        if S::WIDE && $g % spec.piece_words() == 0 {
                            pieces[v] = S::start(starts.add(v * spec.pieces() + $g / spec.piece_words()));
                        }
                        pieces[v] = S::step(F::SPEC.bits, pieces[v], word, digits.add(256 * v + 4 * $g).cast());
                    }
                    if ($g + 1) % spec.piece_words() == 0 {
                        let odd = if sub_words == 8 { group % 2 == 1 } else { $g / 4 == 1 };
                        let scale = S::sub_scale(sub_scales, odd);
                        for v in 0..V {
                            ints[v] = S::add_scaled(ints[v], pieces[v], scale);
                            pieces[v] = S::empty();
                        }
                    }
                };
            }
            each_word!(word);
        }
        let mut sums = [S::zero(); V];
        if spec.min == Min::Subtract {
            let mut minima = [S::int_zero(); V];
            for i in 0..spec.pairs() {
                let sub_mins = scales.add(spec.sub_min_at() + 2 * TILE * i);
                for v in 0..V {
                    minima[v] = S::add_pairs(minima[v], sub_mins, pairs.add(v * spec.pairs() + i));
                }
            }
            for v in 0..V {
                sums[v] = S::from_int(minima[v]);
            }
        }
        accumulate::<S, F, V, D>(scales, panel, &ints, &sums, acc);
    }
}

/// The float tail of a unit (NUMERICS.md section 2): `ints` are its integers, `sums` those of its minimum.
///
/// # Safety
/// As [`tile_sums`], with one record left.
#[inline(always)]
unsafe fn accumulate<S: Engine, F: Format, const V: usize, const D: usize>(
    scales: *const u8,
    panel: *const u8,
    ints: &[S::Int; V],
    sums: &[S::Float; V],
    acc: &mut [S::Float; V],
) {
    // SAFETY: all offsets are inside one record of each layout.
    unsafe {
        let digit_scales = panel.add(Panel::<S, F, V, D>::SCALES_AT).cast::<f32>();
        let d = S::from_f16(scales);
        for r in 0..V / D {
            let s = S::mul(d, S::splat(digit_scales.add(r)));
            if D == 2 {
                acc[r] = S::fma(S::times_128(s), S::from_int(ints[r * D]), acc[r]);
            }
            acc[r] = S::fma(s, S::from_int(ints[r * D + D - 1]), acc[r]);
        }
        if F::SPEC.min != Min::None {
            let min = S::from_f16(scales.add(2 * TILE));
            for r in 0..V / D {
                let t = S::mul(min, S::splat(digit_scales.add(r)));
                if D == 2 {
                    acc[r] = add_min::<S, F>(S::times_128(t), sums[r * D], acc[r]);
                }
                acc[r] = add_min::<S, F>(t, sums[r * D + D - 1], acc[r]);
            }
        }
    }
}

/// Adds the minimum's share, with the format's sign.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn add_min<S: Engine, F: Format>(t: S::Float, sum: S::Float, acc: S::Float) -> S::Float {
    // SAFETY: the caller's duty.
    unsafe { if F::SPEC.min == Min::Add { S::fma(t, sum, acc) } else { S::fnma(t, sum, acc) } }
}
