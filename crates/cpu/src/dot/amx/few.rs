//! Some rows, too few for [`plain`](super::plain), with units of 32 columns: a block of at most 16 rows meets one tile of
//! weights through all its units, as int8, so that codes need no more than a byte each and the sums stay in registers.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use ingle_tensor::DType;

use super::super::avx512::Avx512;
use super::super::engine::Engine;
use super::super::kernel::{self, FAR, NEAR, read_scale, record_bytes};
use super::super::pack::{RESIDUES, units_of};
use super::super::panel::{self, UnitLayout};
use super::super::spec::{self, Format, Min, TILE};
use super::super::{Activations, OutPtr, Packed, Scratch, Tail};
use super::TILE_BYTES;
use crate::simd::amx::Tiles;
use crate::simd::{Isa, prefetch, prefetch_far};

/// Rows from which tiles pay here: one panel of vectors has up to 12, but codes of 8 bits need no expanding.
const ROWS_LEAST: usize = 13;
const ROWS_LEAST_BYTES: usize = 5;

/// Rows of a block at most.
const ROWS_MOST: usize = 16;

/// Tile registers that collect products, which take turns.
const RING: usize = 2;

type Product = unsafe fn(&Few<'_>, Range<usize>, Range<usize>, OutPtr, Tail<'_>, &mut Scratch);

/// A product with some rows.
pub(in super::super) struct Few<'a> {
    packed: &'a Packed,
    x: &'a Activations<'a>,
    run: Product,
}

/// Blocks of some rows, and the rows of each: of few kinds, because each is a compiled kernel.
fn blocks(rows: usize) -> (usize, usize) {
    let blocks = rows.div_ceil(ROWS_MOST);
    let height = [8, 12].into_iter().find(|height| blocks * height >= rows).unwrap_or(ROWS_MOST);
    (blocks, height)
}

/// Whether so many rows are multiplied here, where they are too few for more.
fn serves(packed: &Packed, digits: usize, rows: usize) -> bool {
    packed.spec.sub == 0
        && digits == 1
        && rows >= if packed.spec.bits == 8 { ROWS_LEAST_BYTES } else { ROWS_LEAST }
        && packed.units() > 0
        && super::plan(packed, digits, rows).is_none()
}

/// The product of so many rows; none if vectors are as quick, or tiles of more rows quicker.
pub(in super::super) fn product<'a>(
    packed: &'a Packed,
    x: &'a Activations<'a>,
    rows: usize,
) -> Option<Few<'a>> {
    let run: Product = match packed.spec.dtype {
        DType::Q4_0 => run::<spec::Q4_0>,
        DType::Q4_1 => run::<spec::Q4_1>,
        DType::Q5_0 => run::<spec::Q5_0>,
        DType::Q5_1 => run::<spec::Q5_1>,
        DType::Q8_0 => run::<spec::Q8_0>,
        DType::IQ4NL => run::<spec::IQ4NL>,
        DType::MXFP4 => run::<spec::MXFP4>,
        _ => return None,
    };
    serves(packed, x.layout().digits, rows).then_some(Few { packed, x, run })
}

/// Bytes of scratch for at most `rows` rows.
pub(super) fn scratch_bytes(packed: &Packed, digits: usize, rows: usize) -> usize {
    let most = (ROWS_LEAST_BYTES..=rows.min(super::ROWS_LEAST_BYTES)).rev();
    most.filter(|&rows| serves(packed, digits, rows))
        .map(|rows| Places::of(packed, rows).bytes)
        .max()
        .unwrap_or(0)
}

/// Where the parts of scratch begin: codes of a tile as bytes, stored products, panels, totals.
struct Places {
    ring: usize,
    panels: usize,
    panel: usize,
    totals: usize,
    bytes: usize,
}

impl Places {
    fn of(packed: &Packed, rows: usize) -> Places {
        let (blocks, height) = blocks(rows);
        let ring = packed.expanded_bytes().next_multiple_of(4096);
        let totals = ring + RING * TILE_BYTES;
        let panels = totals + TILE_BYTES;
        let panel = (packed.units() * UnitLayout::new(packed.spec, height, 1).bytes).next_multiple_of(64);
        Places { ring, panels, panel, totals, bytes: panels + blocks * panel }
    }
}

impl Few<'_> {
    /// As [`Packed::product`].
    ///
    /// # Safety
    /// That of [`Packed::product`], with matrix tiles available.
    pub(in super::super) unsafe fn run(
        &self,
        rows: Range<usize>,
        tiles: Range<usize>,
        out: OutPtr,
        tail: Tail<'_>,
        scratch: &mut Scratch,
    ) {
        // SAFETY: the caller's.
        unsafe { (self.run)(self, rows, tiles, out, tail, scratch) };
    }
}

/// # Safety
/// As [`Few::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run<F: Format>(
    few: &Few<'_>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: OutPtr,
    tail: Tail<'_>,
    scratch: &mut Scratch,
) {
    let (packed, units) = (few.packed, few.packed.units());
    let places = Places::of(packed, rows.len());
    let (blocks, height) = blocks(rows.len());
    let memory = scratch.lines.bytes(places.bytes);
    // SAFETY: scratch has room for all places; see the contracts of the functions called.
    unsafe {
        let (panels, totals) = (memory.add(places.panels), memory.add(places.totals).cast::<[f32; TILE]>());
        let of = |b: usize| rows.start + b * height..rows.end.min(rows.start + (b + 1) * height);
        if scratch.arranges(few.x, &rows, packed.spec.dtype, Isa::Amx) {
            for b in (0..blocks).filter(|&b| !of(b).is_empty()) {
                panel::write::<F>(few.x, of(b), height, panels.add(b * places.panel));
            }
        }
        let _tiles = Tiles::of_bytes(height);
        for tile in tiles {
            let (mut codes, scales) = (packed.tile_codes(tile), packed.tile_scales(tile));
            let mut ahead = Ahead { at: codes, lines: 0 };
            if F::SPEC.bits != 8 {
                kernel::expand::<Avx512, F>(codes, units, memory);
                // The next tile, whose codes are expanded next.
                let lines = packed.tile_bytes().div_ceil(64 * units * blocks);
                ahead = Ahead { at: codes.wrapping_add(packed.tile_bytes()), lines };
                codes = memory;
            }
            for b in (0..blocks).filter(|&b| !of(b).is_empty()) {
                let x = panels.add(b * places.panel).cast_const();
                let block =
                    Block { x, codes, scales, units, ring: memory.add(places.ring).cast(), totals, ahead };
                match height {
                    8 => block.multiply::<F, 8>(),
                    12 => block.multiply::<F, 12>(),
                    _ => block.multiply::<F, ROWS_MOST>(),
                }
                ahead.at = ahead.at.wrapping_add(64 * ahead.lines * units);
                let lanes = TILE.min(packed.rows() - TILE * tile);
                for (r, row) in of(b).enumerate() {
                    tail.finish(&*totals.add(r), out, row, TILE * tile, lanes);
                }
            }
        }
    }
}

/// Weights to ask memory for: so many lines with each unit, or with codes of eight bits a unit with each.
#[derive(Clone, Copy)]
struct Ahead {
    at: *const u8,
    lines: usize,
}

/// A block of activations and a tile of weights.
struct Block {
    /// Panel of the block.
    x: *const u8,
    /// Codes as bytes, `[unit][word][output row][4]`.
    codes: *const u8,
    /// The tile's scale records.
    scales: *const u8,
    units: usize,
    /// Room for the products under way.
    ring: *mut u8,
    /// Results: a row for each of the block.
    totals: *mut [f32; TILE],
    ahead: Ahead,
}

impl Block {
    /// All units of the block's `H` rows.
    ///
    /// # Safety
    /// AVX-512 is present and tiles are configured for `H` rows; the fields hold what they say.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<F: Format, const H: usize>(&self) {
        let to = const { UnitLayout::new(&F::SPEC, H, 1) };
        let zero = _mm512_setzero_ps();
        let mut acc = [zero; H];
        let (mut x, mut scales) = (self.x, self.scales);
        // Of the next unit to be multiplied.
        let (mut next_x, mut next_codes, mut left) = (self.x, self.codes, self.units);
        let mut ahead = self.ahead.at;
        macro_rules! multiply {
            ($sum:tt $a:tt $b:tt) => {
                if left > 0 {
                    asm!(
                        concat!("tileloadd ", $a, ", [{x} + {bytes}]"),
                        concat!("tileloadd ", $b, ", [{codes} + {line}]"),
                        concat!("tilezero ", $sum),
                        concat!("tdpbsud ", $sum, ", ", $a, ", ", $b),
                        x = in(reg) next_x,
                        codes = in(reg) next_codes,
                        bytes = in(reg) 32usize,
                        line = in(reg) 64usize,
                        options(nostack, preserves_flags, readonly),
                    );
                    next_x = next_x.wrapping_add(to.bytes);
                    next_codes = next_codes.wrapping_add(TILE * 32);
                    left -= 1;
                }
            };
        }
        macro_rules! rows {
            ($($r:literal)*) => {$( if $r < H { row!($r); } )*};
        }
        macro_rules! every_row {
            () => {
                rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            };
        }
        // SAFETY: the caller's; what is behind the products of a unit are its arrays, and behind its record the next.
        unsafe {
            multiply!("tmm0" "tmm4" "tmm6");
            multiply!("tmm1" "tmm5" "tmm7");
            let mut odd = false;
            for residue in 0..RESIDUES.min(self.units) {
                for _ in 0..units_of(self.units, residue) {
                    let slot = self.ring.wrapping_add(if odd { TILE_BYTES } else { 0 });
                    if odd {
                        asm!("tilestored [{to} + {line}], tmm1", to = in(reg) slot, line = in(reg) 64usize,
                            options(nostack, preserves_flags));
                        multiply!("tmm1" "tmm5" "tmm7");
                    } else {
                        asm!("tilestored [{to} + {line}], tmm0", to = in(reg) slot, line = in(reg) 64usize,
                            options(nostack, preserves_flags));
                        multiply!("tmm0" "tmm4" "tmm6");
                    }
                    odd = !odd;
                    let d = read_scale::<Avx512, F>(scales);
                    let min =
                        if F::SPEC.min == Min::Add { Avx512::from_f16(scales.add(2 * TILE)) } else { zero };
                    let number = |at: usize, r: usize| x.wrapping_add(at + 4 * r);
                    macro_rules! row {
                        ($r:literal) => {
                            let mut ints = _mm512_load_si512(slot.add(64 * $r).cast());
                            if F::SPEC.starts() == 1 {
                                let start = _mm512_set1_epi32(number(to.starts, $r).cast::<i32>().read());
                                ints = _mm512_add_epi32(ints, start);
                            }
                            let s = _mm512_mul_ps(d, Avx512::splat(number(to.scales, $r).cast()));
                            acc[$r] = _mm512_fmadd_ps(s, _mm512_cvtepi32_ps(ints), acc[$r]);
                            if F::SPEC.min == Min::Add {
                                let sum = Avx512::splat(number(to.sums, $r).cast());
                                acc[$r] = _mm512_fmadd_ps(min, sum, acc[$r]);
                            }
                        };
                    }
                    every_row!();
                    if F::SPEC.bits == 8 {
                        for line in 0..const { record_bytes(&F::SPEC).div_ceil(64) } {
                            prefetch_far(ahead.wrapping_add(FAR + 64 * line));
                            prefetch(ahead.wrapping_add(NEAR + 64 * line));
                        }
                        ahead = ahead.wrapping_add(const { record_bytes(&F::SPEC) });
                    } else {
                        for line in 0..self.ahead.lines {
                            prefetch_far(ahead.wrapping_add(64 * line));
                        }
                        ahead = ahead.wrapping_add(64 * self.ahead.lines);
                    }
                    x = x.wrapping_add(to.bytes);
                    scales = scales.wrapping_add(F::SPEC.scale_bytes());
                }
                macro_rules! row {
                    ($r:literal) => {
                        let total = self.totals.add($r).cast::<f32>();
                        let before = if residue == 0 {
                            acc[$r]
                        } else {
                            _mm512_add_ps(_mm512_load_ps(total), acc[$r])
                        };
                        _mm512_store_ps(total, before);
                        acc[$r] = zero;
                    };
                }
                every_row!();
            }
            // An accumulator without units is +0, and one more changes what all others would.
            if self.units < RESIDUES {
                super::add_nothing(self.totals, H);
            }
        }
    }
}
