//! The integer kernels, generic over engine, format and panel height: a panel of activation rows times the tiles of
//! a range. `V` is the number of digit rows of the panel, `D` the digits per activation.

use std::ops::Range;

use super::engine::Engine;
use super::pack::{RESIDUES, units_of};
use super::panel::UnitLayout;
use super::spec::{Format, Min, Scale, Spec, TILE};
use super::{OutPtr, Packed, Tail};

/// A group of panels' share of a product.
pub(super) struct Call<'a> {
    pub packed: &'a Packed,
    /// Panels of equal height, one after the other.
    pub panels: *const u8,
    /// Activation rows of the panels; the last panel may have fewer than its height.
    pub rows: Range<usize>,
    pub tiles: Range<usize>,
    pub out: OutPtr,
    pub tail: Tail<'a>,
    /// Room for the codes of one tile as bytes, for kernels that expand them.
    pub bytes: *mut u8,
}

/// Bytes ahead of its reading that a kernel asks memory for weights, no further than the second cache, which can have
/// more requests under way than the first; and that it asks for them from there.
pub(super) const FAR: usize = 24 << 10;
pub(super) const NEAR: usize = 2 << 10;

/// Bytes of one unit of a tile: codes and scales, though these do not lie together.
pub(super) const fn record_bytes(spec: &Spec) -> usize {
    spec.code_bytes() + spec.scale_bytes()
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

/// Runs one call. `X`, for several panels: the codes of a tile are first expanded to bytes.
///
/// # Safety
/// The engine's instruction set is present and enabled in the calling function. The call was checked by
/// [`Packed::product`]: ranges lie inside the matrices, panels of `V / D` rows were written for all rows, scratch has
/// room for a tile's bytes, the caller owns the outputs.
#[inline(always)]
pub(super) unsafe fn run<S: Engine, F: Format, const V: usize, const D: usize, const X: bool>(
    call: &Call<'_>,
) {
    let packed = call.packed;
    let units = packed.units();
    let height = V / D;
    let panel_bytes = units * const { UnitLayout::new(&F::SPEC, V / D, D).bytes };
    let share = packed.tile_bytes() / (units.max(1) * call.rows.len().div_ceil(height));
    for tile in call.tiles.clone() {
        let (mut codes, scales) = (packed.tile_codes(tile), packed.tile_scales(tile));
        // Before what weights to ask for, and how far to move on with each unit. Expanded codes come from cache:
        // meanwhile each panel asks for its share of the next tile.
        let mut ahead = Ahead { at: codes, bytes: const { record_bytes(&F::SPEC) } };
        if X {
            // SAFETY: the tile holds `units` records of the format, and scratch has room for the bytes of a tile.
            unsafe { expand::<S, F>(codes, units, call.bytes) };
            ahead = Ahead { at: codes.wrapping_add(packed.tile_bytes()), bytes: share };
            codes = call.bytes;
        }
        let lanes = TILE.min(packed.rows() - TILE * tile);
        let mut panel = call.panels;
        let mut row = call.rows.start;
        while row < call.rows.end {
            let mut sums = [[0.0f32; TILE]; V];
            for half in 0..TILE / S::LANES {
                let lane = half * S::LANES;
                // SAFETY: the two sections of a tile hold `units` records of the format; there is a panel for this row.
                unsafe {
                    let (codes, scales) = (codes.add(4 * lane), scales.add(F::SPEC.scale.bytes() * lane));
                    tile_sums::<S, F, V, D, X>(codes, scales, units, panel, ahead, &mut sums, lane);
                }
            }
            for r in 0..height.min(call.rows.end - row) {
                // SAFETY: row and columns are inside the caller's output and residual, which it owns.
                unsafe { call.tail.finish(&sums[r], call.out, row + r, TILE * tile, lanes) };
            }
            row += height;
            // One past the last panel, and beyond the last tile, at most.
            panel = panel.wrapping_add(panel_bytes);
            ahead.at = ahead.at.wrapping_add(units * ahead.bytes);
        }
    }
}

/// Weights to ask memory for: `bytes` from `at` on with the first unit, and so on.
#[derive(Clone, Copy)]
struct Ahead {
    at: *const u8,
    bytes: usize,
}

/// Writes the codes of a tile as bytes, plane by plane.
///
/// # Safety
/// As [`run`]; `bytes` has room for 16 bytes per column.
#[inline(always)]
pub(super) unsafe fn expand<S: Engine, F: Format>(mut codes: *const u8, units: usize, mut bytes: *mut u8) {
    for _ in 0..units * (F::SPEC.unit() / 32) {
        for half in 0..TILE / S::LANES {
            let lane = half * S::LANES;
            macro_rules! word {
                ($g:literal) => {
                    // SAFETY: a group of the format is left, and room for eight planes.
                    unsafe {
                        let word = read_codes::<S, F>($g, codes.add(4 * lane));
                        S::store_bytes(word, $g, bytes.add(4 * lane));
                    };
                };
            }
            each_word!(word);
        }
        codes = codes.wrapping_add(F::SPEC.group_bytes());
        bytes = bytes.wrapping_add(8 * 64);
    }
}

/// The dot products of `S::LANES` rows of a tile with every row of the panel, into `sums[r][lane..]`.
///
/// # Safety
/// As [`run`]; `codes` and `scales` point at the first lane's part of the first records.
#[inline(always)]
unsafe fn tile_sums<S: Engine, F: Format, const V: usize, const D: usize, const X: bool>(
    mut codes: *const u8,
    mut scales: *const u8,
    units: usize,
    mut panel: *const u8,
    mut ahead: Ahead,
    sums: &mut [[f32; TILE]; V],
    lane: usize,
) {
    let code_bytes = if X { TILE * F::SPEC.unit() } else { F::SPEC.code_bytes() };
    // SAFETY: `units` records follow each of the pointers.
    unsafe {
        let mut total = [S::zero(); V];
        for residue in 0..RESIDUES {
            let mut acc = [S::zero(); V];
            for _ in 0..units_of(units, residue) {
                if F::SPEC.sub == 0 {
                    unit_plain::<S, F, V, D, X>(codes, scales, panel, &mut acc);
                } else {
                    unit_scaled::<S, F, V, D, X>(codes, scales, panel, &mut acc);
                }
                if X {
                    for line in (0..ahead.bytes).step_by(64) {
                        S::prefetch_l2(ahead.at.wrapping_add(line));
                    }
                    ahead.at = ahead.at.wrapping_add(ahead.bytes);
                } else {
                    for line in 0..const { record_bytes(&F::SPEC).div_ceil(64) } {
                        S::prefetch_l2(ahead.at.wrapping_add(FAR + 64 * line));
                        S::prefetch(ahead.at.wrapping_add(NEAR + 64 * line));
                    }
                    ahead.at = ahead.at.wrapping_add(const { record_bytes(&F::SPEC) });
                }
                codes = codes.add(code_bytes);
                scales = scales.add(F::SPEC.scale_bytes());
                panel = panel.add(const { UnitLayout::new(&F::SPEC, V / D, D).bytes });
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

/// The codes of word `g` of a group as they are multiplied, from memory.
///
/// # Safety
/// The engine's instruction set is enabled in the calling function; `group` is the first lane's part of a group.
#[inline(always)]
pub(super) unsafe fn read_codes<S: Engine, F: Format>(g: usize, group: *const u8) -> S::Codes {
    // SAFETY: the caller's duty.
    unsafe {
        let codes = S::codes(F::SPEC.bits, g, group);
        match F::SPEC.levels {
            Some(levels) => S::levels(codes, levels),
            None => codes,
        }
    }
}

/// The same, or as [`expand`] wrote them.
///
/// # Safety
/// As [`tile_sums`], with a group left.
#[inline(always)]
unsafe fn codes_of<S: Engine, F: Format, const X: bool>(g: usize, group: *const u8) -> S::Codes {
    // SAFETY: the caller's duty.
    unsafe { if X { S::bytes(g, group) } else { read_codes::<S, F>(g, group) } }
}

/// Adds a unit of 32 columns with one scale.
///
/// # Safety
/// As [`tile_sums`], with one record left.
#[inline(always)]
unsafe fn unit_plain<S: Engine, F: Format, const V: usize, const D: usize, const X: bool>(
    codes: *const u8,
    scales: *const u8,
    panel: *const u8,
    acc: &mut [S::Float; V],
) {
    // SAFETY: all offsets are inside one record of each layout.
    unsafe {
        let at = const { UnitLayout::new(&F::SPEC, V / D, D) };
        let starts = panel.add(at.starts).cast::<i32>();
        let mut pieces = [S::empty(); V];
        let mut ints = [S::int_zero(); V];
        if F::SPEC.starts() == 1 && S::SIGNED_BITS != F::SPEC.width() {
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
                let word = codes_of::<S, F, X>($g, codes);
                for v in 0..V {
                    pieces[v] = S::step(F::SPEC.width(), pieces[v], word, panel.add(32 * v + 4 * $g).cast());
                    if !S::WIDE && ($g + 1) % F::SPEC.short_words() == 0 {
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
        let mut sums = [S::zero(); V];
        if F::SPEC.min == Min::Add {
            for v in 0..V {
                sums[v] = S::splat(panel.add(at.sums).cast::<f32>().add(v));
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
unsafe fn unit_scaled<S: Engine, F: Format, const V: usize, const D: usize, const X: bool>(
    codes: *const u8,
    scales: *const u8,
    panel: *const u8,
    acc: &mut [S::Float; V],
) {
    let spec = &const { F::SPEC };
    // SAFETY: all offsets are inside one record of each layout.
    unsafe {
        let at = const { UnitLayout::new(&F::SPEC, V / D, D) };
        let starts = panel.add(at.starts).cast::<i32>();
        let pairs = panel.add(at.sums).cast::<i32>();
        let sub_scales = scales.add(spec.sub_scale_at());
        let mut ints = [S::int_zero(); V];
        // Pieces are sums of (code - center), of (code - offset) or of code; the format's weights are (code - offset).
        let shifted = match (S::WIDE, S::SIGNED_BITS == spec.width()) {
            (true, _) => spec.center() - spec.offset,
            (false, true) => 0,
            (false, false) => -spec.offset,
        };
        let words = if S::WIDE { spec.piece_words() } else { spec.short_words() };
        if shifted != 0 {
            pair_sums::<S, V>(spec, sub_scales, pairs, &mut ints);
            for v in 0..V {
                ints[v] = S::int_times(ints[v], shifted);
            }
        }
        for group in 0..8 {
            let codes = codes.add(group * if X { 8 * 64 } else { spec.group_bytes() });
            let starts = starts.add(V * (group * 8 / words));
            let digits = S::in_register(panel.add(32 * V * group));
            let sub_scales = sub_scales.add(2 * TILE * (group * 32 / spec.sub / 2));
            let mut pieces = [S::empty(); V];
            macro_rules! word {
                ($g:literal) => {
                    let word = codes_of::<S, F, X>($g, codes);
                    for v in 0..V {
                        if S::WIDE && $g % words == 0 {
                            pieces[v] = S::start(starts.add(V * ($g / words) + v));
                        }
                        pieces[v] =
                            S::step(spec.width(), pieces[v], word, digits.add(32 * v + 4 * $g).cast());
                    }
                    if ($g + 1) % words == 0 {
                        let second = if spec.sub == 32 { group % 2 == 1 } else { $g / 4 == 1 };
                        let scale = S::sub_scale(sub_scales, second);
                        for v in 0..V {
                            ints[v] = if S::WIDE && spec.is_long() {
                                S::add_scaled_long(ints[v], pieces[v], sub_scales, second)
                            } else {
                                S::add_scaled(ints[v], pieces[v], scale)
                            };
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
            pair_sums::<S, V>(spec, scales.add(spec.sub_min_at()), pairs, &mut minima);
            for v in 0..V {
                sums[v] = S::from_int(minima[v]);
            }
        }
        accumulate::<S, F, V, D>(scales, panel, &ints, &sums, acc);
    }
}

/// Adds the products of a unit's sub-scales or sub-minima with the sums of each digit row.
///
/// # Safety
/// As [`tile_sums`]; `factors` are the pairs of a record, `sums` those of the panel's unit.
#[inline(always)]
unsafe fn pair_sums<S: Engine, const V: usize>(
    spec: &Spec,
    factors: *const u8,
    sums: *const i32,
    ints: &mut [S::Int; V],
) {
    for i in 0..spec.pairs() {
        for v in 0..V {
            // SAFETY: the caller's duty.
            ints[v] = unsafe { S::add_pairs(ints[v], factors.add(2 * TILE * i), sums.add(V * i + v)) };
        }
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
        let digit_scales = panel.add(const { UnitLayout::new(&F::SPEC, V / D, D).scales }).cast::<f32>();
        let d = read_scale::<S, F>(scales);
        for r in 0..V / D {
            let s = S::mul(d, S::splat(digit_scales.add(r)));
            if D == 2 {
                acc[r] = S::fma(S::times_128(s), S::from_int(ints[r * D]), acc[r]);
            }
            acc[r] = S::fma(s, S::from_int(ints[r * D + D - 1]), acc[r]);
        }
        if F::SPEC.min == Min::Add {
            let min = S::from_f16(scales.add(2 * TILE));
            for v in 0..V {
                acc[v / D] = S::fma(min, sums[v], acc[v / D]);
            }
        }
        if F::SPEC.min == Min::Subtract {
            let min = S::from_f16(scales.add(2 * TILE));
            for r in 0..V / D {
                let t = S::mul(min, S::splat(digit_scales.add(r)));
                if D == 2 {
                    acc[r] = S::fnma(S::times_128(t), sums[r * D], acc[r]);
                }
                acc[r] = S::fnma(t, sums[r * D + D - 1], acc[r]);
            }
        }
    }
}

/// The scales of `S::LANES` rows of a tile.
///
/// # Safety
/// As [`tile_sums`], with one record left.
#[inline(always)]
pub(super) unsafe fn read_scale<S: Engine, F: Format>(scales: *const u8) -> S::Float {
    // SAFETY: the caller's duty.
    unsafe {
        match F::SPEC.scale {
            Scale::F16 => S::from_f16(scales),
            Scale::Exponent => S::from_exponent(scales),
        }
    }
}
