//! Units of 32 columns with one scale, and a minimum in some formats, as bf16.
//!
//! The integers of a unit leave the tiles through memory, and three things decide how quick that is (measured: two to
//! three times as quick as the plain order).
//! - A tile's products are stored only when its register is needed again, since a register is busy from its zeroing to
//!   its storing.
//! - The ring of stored results is 4 KiB in all, and the running sums lie as it does: a vector load waits for any store
//!   under way to an address with the same lower twelve bits.
//! - A tile of activations meets two tiles of weights, and those meet several blocks: loading tiles takes four times as
//!   long while another thread uses the same core, as neighbours on a shared machine do.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::avx512::Avx512;
use super::super::engine::Engine;
use super::super::kernel::read_scale;
use super::super::pack::{RESIDUES, units_of};
use super::super::spec::{self, Format, Min, Spec, TILE};
use super::super::{Activations, Packed};
use super::{
    BLOCK, Blocks, Expand, Multiply, Plan, Records, Segment, TILE_BYTES, Write, add_nothing, begin_totals,
};
use ingle_tensor::DType;

/// Tiles of weights that meet each tile of activations.
const TILES: usize = 2;
/// Tile registers that collect products, and so the tiles of the ring of results.
const RING: usize = 2 * TILES;
/// Blocks of activations that meet each tile of weights while it is loaded. Their running sums stay in the L1 cache.
const GROUP: usize = 2;
/// Bytes of the ring, and of the running sums behind it. Sums lie as the ring does, modulo 4 KiB.
pub(super) const RESULT_BYTES: usize = (RING + GROUP * TILES) * TILE_BYTES;
/// Steps that the products are ahead of the float tail: two until a register is stored, and one for the store.
const AHEAD: usize = 3;

/// A unit: a tile, then 16 scales, then with a minimum 16 more values. Of activations `[row][column]` bf16, the scales
/// of the rows and their sums times these; of weights `[pair of columns][output row][column of the pair]` bf16, the scales of the
/// output rows and their minima. Columns of four are paired as (0, 2) and (1, 3), which is how codes come apart.
const fn unit_bytes(min: bool) -> usize {
    TILE_BYTES + if min { 128 } else { 64 }
}

/// The plan of a format; none with two digits.
pub(super) fn plan(spec: &Spec, digits: usize) -> Option<Plan> {
    let expand: Expand = match spec.dtype {
        DType::Q4_0 => expand::<spec::Q4_0>,
        DType::Q4_1 => expand::<spec::Q4_1>,
        DType::Q5_0 => expand::<spec::Q5_0>,
        DType::Q5_1 => expand::<spec::Q5_1>,
        DType::Q8_0 => expand::<spec::Q8_0>,
        DType::IQ4NL => expand::<spec::IQ4NL>,
        DType::MXFP4 => expand::<spec::MXFP4>,
        _ => return None,
    };
    let bytes = unit_bytes(spec.min != Min::None);
    let (write, multiply): (Write, Multiply) = match spec.min {
        Min::None => (write::<false>, multiply::<false>),
        _ => (write::<true>, multiply::<true>),
    };
    (digits == 1).then_some(Plan {
        block: BLOCK,
        tiles: TILES,
        x_bytes: bytes,
        w_bytes: bytes,
        write,
        expand,
        multiply,
    })
}

/// Arranges the units of these accumulators of a block of activations.
///
/// # Safety
/// AVX-512 is present; `rows`, not empty and at most 16, lie within the activations' layout, which is that of the matrix;
/// `to` has room for these units of the block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn write<const MIN: bool>(
    packed: &Packed,
    x: &Activations<'_>,
    rows: Range<usize>,
    accumulators: Range<usize>,
    to: *mut u8,
) {
    let layout = x.layout();
    let units = packed.units();
    let pairs = _mm256_set_epi64x(PAIRED[1], PAIRED[0], PAIRED[1], PAIRED[0]);
    for r in 0..BLOCK {
        let row = (rows.start + r).min(rows.end - 1);
        // SAFETY: the layout places digits, scales and sums of the row inside the activations; writes are to row `r` of
        // each unit.
        unsafe {
            let from = x.bytes.as_ptr();
            let digits = from.add(layout.digit_offset(0, row));
            let scales = from.add(layout.scale_offset(row)).cast::<f32>();
            let sums = from.add(layout.sum_offset(0, row)).cast::<i16>();
            let mut to = to;
            for residue in accumulators.clone() {
                for i in 0..units_of(units, residue) {
                    let u = residue + RESIDUES * i;
                    let bytes = _mm256_shuffle_epi8(_mm256_loadu_si256(digits.add(32 * u).cast()), pairs);
                    let words = _mm512_cvtepi8_epi16(bytes);
                    let low = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(words)));
                    let high =
                        _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(words)));
                    let both = _mm512_cvtne2ps_pbh(high, low);
                    to.add(64 * r).cast::<__m512bh>().write_unaligned(both);
                    let scale = scales.add(u).read();
                    let after = to.add(TILE_BYTES).cast::<f32>().add(r);
                    after.write(scale);
                    if MIN {
                        let sum = i32::from(sums.add(2 * u).read()) + i32::from(sums.add(2 * u + 1).read());
                        after.add(BLOCK).write(scale * sum as f32);
                    }
                    to = to.add(const { unit_bytes(MIN) });
                }
            }
        }
    }
}

/// Byte order of 16 columns in their pairs.
const PAIRED: [i64; 2] = [0x0705_0604_0301_0200, 0x0F0D_0E0C_0B09_0A08];

/// Expands units of a tile of weights.
///
/// # Safety
/// AVX-512 is present; the records are the format's; `to` has room for their units, `stride` bytes apart.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,avx2,fma")]
unsafe fn expand<F: Format>(from: Records, mut to: *mut u8, stride: usize) {
    let Records { mut codes, mut scales, count } = from;
    // SAFETY: offsets are inside one record of each layout; the engine's instruction set is enabled here.
    unsafe {
        let table = _mm512_loadu_si512(const { &weights(&F::SPEC) }.as_ptr().cast());
        for _ in 0..count {
            macro_rules! word {
                ($($g:literal)*) => {$(
                    let code = Avx512::codes(F::SPEC.bits, $g, codes);
                    let (even, odd) = if F::SPEC.bits == 8 {
                        bytes(_mm512_sub_epi8(code, _mm512_set1_epi8(F::SPEC.offset as u8 as i8)))
                    } else {
                        // Of each index only the lowest five bits count.
                        (
                            _mm512_permutexvar_epi16(code, table),
                            _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(code), table),
                        )
                    };
                    to.add(128 * $g).cast::<__m512i>().write_unaligned(even);
                    to.add(128 * $g + 64).cast::<__m512i>().write_unaligned(odd);
                )*};
            }
            word!(0 1 2 3 4 5 6 7);
            let after = to.add(TILE_BYTES).cast::<f32>();
            Avx512::store(read_scale::<Avx512, F>(scales), after);
            if F::SPEC.min != Min::None {
                Avx512::store(Avx512::from_f16(scales.add(2 * TILE)), after.add(TILE));
            }
            codes = codes.add(F::SPEC.code_bytes());
            scales = scales.add(F::SPEC.scale_bytes());
            to = to.wrapping_add(stride);
        }
    }
}

/// What each code of at most five bits stands for, as bf16.
const fn weights(spec: &Spec) -> [u16; 32] {
    let mut table = [0; 32];
    let mut code = 0;
    while code < 32 {
        let weight = match spec.levels {
            Some(levels) => levels[code % 16] as i32,
            None => code as i32 - spec.offset,
        };
        // Exact: an integer below 256 needs no more than the upper half of an f32.
        table[code] = ((weight as f32).to_bits() >> 16) as u16;
        code += 1;
    }
    table
}

/// Signed bytes as pairs of bf16: bytes 0 and 2 of each lane, and bytes 1 and 3.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bytes(w: __m512i) -> (__m512i, __m512i) {
    let upper = |lane| _mm512_castps_si512(_mm512_cvtepi32_ps(lane));
    let pair = |first, second| {
        let (first, second) = (upper(_mm512_srai_epi32::<24>(first)), upper(_mm512_srai_epi32::<24>(second)));
        _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(first), second)
    };
    (pair(_mm512_slli_epi32::<24>(w), _mm512_slli_epi32::<8>(w)), pair(_mm512_slli_epi32::<16>(w), w))
}

/// Multiplies a segment with blocks, all units in one stream: adds to their totals, or begins them.
///
/// # Safety
/// AVX-512 is present and tiles are configured; the segment's units are those of each block.
#[target_feature(enable = "avx512f")]
unsafe fn multiply<const MIN: bool>(segment: &Segment, blocks: &Blocks) {
    let bytes = const { unit_bytes(MIN) };
    let sums = blocks.results.wrapping_add(RING * TILE_BYTES).cast::<f32>();
    // SAFETY: the caller's duty: results have room for ring and sums, totals for all blocks, and as many units as counted
    // follow each pointer.
    unsafe {
        if segment.first {
            begin_totals(blocks.totals, blocks.count * TILES * BLOCK);
        }
        let mut stream = Stream::<MIN>::new(segment, blocks);
        for _ in 0..AHEAD {
            stream.step();
        }
        for first in (0..blocks.count).step_by(GROUP) {
            let group = GROUP.min(blocks.count - first);
            let mut x = blocks.x.add(first * blocks.stride);
            let mut w = segment.weights;
            let totals = blocks.totals.add(first * TILES * BLOCK).cast::<f32>();
            for residue in 0..segment.residues {
                let count = segment.counts[residue];
                for unit in 0..count {
                    for block in 0..group {
                        let of = Tail {
                            x: x.add(block * blocks.stride + TILE_BYTES).cast(),
                            w: w.add(TILE_BYTES).cast(),
                            sums: sums.add(block * TILES * TILE * BLOCK),
                            totals: totals.add(block * TILES * TILE * BLOCK),
                        };
                        let (first, last) = (unit == 0, unit + 1 == count);
                        match (stream.odd, first, last) {
                            (false, false, false) => step::<MIN, false, false, false>(&mut stream, &of),
                            (false, false, true) => step::<MIN, false, false, true>(&mut stream, &of),
                            (false, true, false) => step::<MIN, false, true, false>(&mut stream, &of),
                            (false, true, true) => step::<MIN, false, true, true>(&mut stream, &of),
                            (true, false, false) => step::<MIN, true, false, false>(&mut stream, &of),
                            (true, false, true) => step::<MIN, true, false, true>(&mut stream, &of),
                            (true, true, false) => step::<MIN, true, true, false>(&mut stream, &of),
                            (true, true, true) => step::<MIN, true, true, true>(&mut stream, &of),
                        }
                    }
                    x = x.add(bytes);
                    w = w.add(TILES * bytes);
                }
                if count == 0 {
                    add_nothing(totals.cast(), group * TILES * BLOCK);
                    break;
                }
            }
        }
    }
}

/// What the float tails of 16 rows and two tiles of weights read and write.
struct Tail {
    /// Scales of the rows, and their sums times these.
    x: *const f32,
    /// Scales of the first tile's outputs, and their minima; those of the second a unit later.
    w: *const f32,
    /// Running sums, `[tile][row][output]`.
    sums: *mut f32,
    /// The same of all accumulators together.
    totals: *mut f32,
}

/// One step of the stream, and between its instructions the float tails of the step that is [`AHEAD`] behind. The first
/// unit of an accumulator begins its sums, the last adds them to the totals.
///
/// # Safety
/// As [`multiply`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn step<const MIN: bool, const ODD: bool, const FIRST: bool, const LAST: bool>(
    stream: &mut Stream<'_, MIN>,
    of: &Tail,
) {
    // SAFETY: the caller's duty.
    unsafe {
        let others = stream.slots(!ODD);
        let w = |tile: usize| of.w.wrapping_byte_add(tile * unit_bytes(MIN));
        let d = [_mm512_loadu_ps(w(0)), _mm512_loadu_ps(w(1))];
        let min = if MIN { [_mm512_loadu_ps(w(0).add(TILE)), _mm512_loadu_ps(w(1).add(TILE))] } else { d };
        macro_rules! rows {
            ($($r:literal)*) => {$(
                let scale = _mm512_set1_ps(of.x.add($r).read());
                let sum = if MIN { _mm512_set1_ps(of.x.add(BLOCK + $r).read()) } else { scale };
                macro_rules! tile {
                    ($tile:literal) => {
                        let at = TILE * (BLOCK * $tile + $r);
                        let ints = _mm512_loadu_ps(others.add(at));
                        let sums = of.sums.add(at);
                        let mut acc = if FIRST { _mm512_setzero_ps() } else { _mm512_loadu_ps(sums) };
                        acc = _mm512_fmadd_ps(_mm512_mul_ps(d[$tile], scale), ints, acc);
                        if MIN {
                            acc = _mm512_fmadd_ps(min[$tile], sum, acc);
                        }
                        if LAST {
                            let total = of.totals.add(at);
                            _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), acc));
                        } else {
                            _mm512_storeu_ps(sums, acc);
                        }
                    };
                }
                tile!(0);
                tile!(1);
            )*};
        }
        stream.store::<ODD, false>();
        rows!(0 1);
        stream.load::<ODD>();
        rows!(2 3 4);
        stream.multiply::<ODD, false>();
        rows!(5 6 7);
        stream.store::<ODD, true>();
        rows!(8 9 10 11);
        stream.multiply::<ODD, true>();
        rows!(12 13 14 15);
        stream.advance();
    }
}

/// The products of a segment with blocks, one step after the other: a tile of activations times two of weights. Steps
/// take turns with two pairs of registers, whose contents the compiler does not know of.
struct Stream<'a, const MIN: bool> {
    segment: &'a Segment,
    blocks: &'a Blocks,
    /// The unit's tile in the block whose turn it is, and the unit's weights.
    x: *const u8,
    w: *const u8,
    /// The block's place in its group.
    block: usize,
    /// Units of the segment from this one on, blocks from this group on.
    units: usize,
    left: usize,
    /// Whether the second pair of registers is next.
    odd: bool,
}

impl<'a, const MIN: bool> Stream<'a, MIN> {
    fn new(segment: &'a Segment, blocks: &'a Blocks) -> Self {
        let units = segment.counts.iter().sum();
        Self {
            segment,
            blocks,
            x: blocks.x,
            w: segment.weights,
            block: 0,
            units,
            left: if units == 0 { 0 } else { blocks.count },
            odd: false,
        }
    }

    /// A step without tails.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn step(&mut self) {
        macro_rules! all {
            ($odd:literal) => {
                // SAFETY: the caller's duty.
                unsafe {
                    self.store::<$odd, false>();
                    self.load::<$odd>();
                    self.multiply::<$odd, false>();
                    self.store::<$odd, true>();
                    self.multiply::<$odd, true>();
                }
            };
        }
        if self.odd {
            all!(true);
        } else {
            all!(false);
        }
        self.advance();
    }

    /// Where a pair's results go.
    #[inline(always)]
    fn slots(&self, odd: bool) -> *mut f32 {
        self.blocks.results.wrapping_add(if odd { TILES * TILE_BYTES } else { 0 }).cast()
    }

    /// Stores what a register of the pair collected two steps ago. (Before its first product it holds anything; nobody
    /// reads that.)
    #[inline(always)]
    unsafe fn store<const ODD: bool, const SECOND: bool>(&self) {
        let to = self.slots(ODD).wrapping_add(if SECOND { TILE * BLOCK } else { 0 });
        macro_rules! store {
            ($tile:tt) => {
                asm!(
                    concat!("tilestored [{to} + {stride}], ", $tile),
                    to = in(reg) to,
                    stride = in(reg) 64usize,
                    options(nostack, preserves_flags),
                )
            };
        }
        // SAFETY: the ring has room.
        unsafe {
            match (ODD, SECOND) {
                (false, false) => store!("tmm0"),
                (false, true) => store!("tmm1"),
                (true, false) => store!("tmm2"),
                (true, true) => store!("tmm3"),
            }
        }
    }

    /// Loads the next tiles, if any are left.
    #[inline(always)]
    unsafe fn load<const ODD: bool>(&self) {
        if self.left == 0 {
            return;
        }
        macro_rules! load {
            ($tile:tt) => {
                asm!(
                    concat!("tileloadd ", $tile, ", [{x} + {stride}]"),
                    x = in(reg) self.x,
                    stride = in(reg) 64usize,
                    options(nostack, preserves_flags, readonly),
                )
            };
        }
        // SAFETY: the caller's duty.
        unsafe {
            if ODD {
                load!("tmm5");
            } else {
                load!("tmm4");
            }
            if self.block == 0 {
                asm!(
                    "tileloadd tmm6, [{w} + {stride}]",
                    "tileloadd tmm7, [{w} + {stride} + {bytes}]",
                    w = in(reg) self.w,
                    stride = in(reg) 64usize,
                    bytes = const unit_bytes(MIN),
                    options(nostack, preserves_flags, readonly),
                );
            }
        }
    }

    /// Multiplies what was loaded into a register of the pair.
    #[inline(always)]
    unsafe fn multiply<const ODD: bool, const SECOND: bool>(&self) {
        macro_rules! multiply {
            ($to:tt $x:tt $w:tt) => {
                asm!(
                    concat!("tilezero ", $to),
                    concat!("tdpbf16ps ", $to, ", ", $x, ", ", $w),
                    options(nostack, preserves_flags, nomem),
                )
            };
        }
        // SAFETY: tiles are configured, the caller's duty.
        unsafe {
            match (ODD, SECOND) {
                (false, false) => multiply!("tmm0" "tmm4" "tmm6"),
                (false, true) => multiply!("tmm1" "tmm4" "tmm7"),
                (true, false) => multiply!("tmm2" "tmm5" "tmm6"),
                (true, true) => multiply!("tmm3" "tmm5" "tmm7"),
            }
        }
    }

    /// On to the next step.
    #[inline(always)]
    fn advance(&mut self) {
        self.odd = !self.odd;
        if self.left == 0 {
            return;
        }
        self.x = self.x.wrapping_add(self.blocks.stride);
        self.block += 1;
        let group = GROUP.min(self.left);
        if self.block == group {
            let bytes = const { unit_bytes(MIN) };
            self.x = self.x.wrapping_sub(group * self.blocks.stride).wrapping_add(bytes);
            self.w = self.w.wrapping_add(TILES * bytes);
            self.block = 0;
            self.units -= 1;
            if self.units == 0 {
                self.units = self.segment.counts.iter().sum();
                self.x = self.x.wrapping_add(group * self.blocks.stride - self.units * bytes);
                self.w = self.segment.weights;
                self.left -= group;
            }
        }
    }
}
