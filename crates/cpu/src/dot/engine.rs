//! The few operations kernels are made of, and their meaning: the scalar engine.
//!
//! An engine works on `LANES` output rows of a tile at once. Its methods are inlined into functions compiled for its
//! instruction set, which is why they are `#[inline(always)]` and hold no closures.

use half::f16;

use super::spec::TILE;

/// Operations on `LANES` rows of a tile.
///
/// # Safety
/// All methods: the instruction set is present. Pointers to packed weights are those of the first lane and hold
/// `LANES` elements; pointers to activations hold four bytes (`step`, `pairs`) or one element.
pub(super) trait Engine {
    /// Output rows at once; divides the tile.
    const LANES: usize;
    /// Pieces are exact in 32 bits and begin with a start from the panel. If not, they are sums of pairs in 16 bits
    /// that begin with zero.
    const WIDE: bool;
    /// Four codes of each row.
    type Codes: Copy;
    /// Running sum of products, over at most `Spec::short_words` words if not wide, a piece of the format if to be scaled.
    type Piece: Copy;
    /// One i32 per row.
    type Int: Copy;
    /// One f32 per row.
    type Float: Copy;
    /// One sub-scale per row, as `add_scaled` wants it.
    type SubScale: Copy;

    /// Codes of this width are multiplied with their offset already removed; 0 if none are.
    const SIGNED_BITS: usize = 0;

    /// The codes of word `g` of a group. `bits` and `g` are constants wherever this is inlined.
    unsafe fn codes(bits: usize, g: usize, group: *const u8) -> Self::Codes;
    /// What codes of 4 bits stand for, plus 128, unless codes of 8 bits are multiplied without an offset.
    unsafe fn levels(codes: Self::Codes, levels: &'static [i8; 16]) -> Self::Codes;
    /// Plane `g` of a group, as it is.
    unsafe fn bytes(g: usize, group: *const u8) -> Self::Codes;
    /// Writes codes so that [`Engine::bytes`] reads them.
    unsafe fn store_bytes(codes: Self::Codes, g: usize, group: *mut u8);
    /// A piece that begins with this start.
    unsafe fn start(at: *const i32) -> Self::Piece;
    /// A piece that begins with zero.
    unsafe fn empty() -> Self::Piece;
    /// Adds the products of four columns.
    unsafe fn step(bits: usize, piece: Self::Piece, codes: Self::Codes, digits: *const i8) -> Self::Piece;
    /// The sum of a piece.
    unsafe fn total(piece: Self::Piece) -> Self::Int;

    /// The first sub-scale of each pair, or the second.
    unsafe fn sub_scale(pairs: *const u8, second: bool) -> Self::SubScale;
    /// `int + scale * total(piece)`.
    unsafe fn add_scaled(int: Self::Int, piece: Self::Piece, scale: Self::SubScale) -> Self::Int;
    /// The same for pieces of more than 16 bits, with the first or second of each pair.
    unsafe fn add_scaled_long(
        int: Self::Int,
        piece: Self::Piece,
        pairs: *const u8,
        second: bool,
    ) -> Self::Int {
        // SAFETY: the caller's duty.
        unsafe { Self::add_scaled(int, piece, Self::sub_scale(pairs, second)) }
    }
    /// `int` + first of the pair * low half of the sums + second * high half.
    unsafe fn add_pairs(int: Self::Int, pairs: *const u8, sums: *const i32) -> Self::Int;

    unsafe fn int(at: *const i32) -> Self::Int;
    unsafe fn int_zero() -> Self::Int;
    unsafe fn int_add(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn int_times(a: Self::Int, factor: i32) -> Self::Int;

    unsafe fn from_int(a: Self::Int) -> Self::Float;
    unsafe fn from_f16(at: *const u8) -> Self::Float;
    /// `2^(e - 128)` of bytes `e`, which are not 255.
    unsafe fn from_exponent(at: *const u8) -> Self::Float;
    unsafe fn splat(at: *const f32) -> Self::Float;
    unsafe fn zero() -> Self::Float;
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float;
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    unsafe fn times_128(a: Self::Float) -> Self::Float;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `-(a * b) + c`, rounded once.
    unsafe fn fnma(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    unsafe fn store(a: Self::Float, to: *mut f32);

    /// The same address, kept in one register: a product whose operand is addressed by two takes two slots.
    unsafe fn in_register(at: *const u8) -> *const u8 {
        at
    }
    /// Asks for the cache line at this address, which need not be mapped.
    unsafe fn prefetch(_at: *const u8) {}
    /// The same, into the second level.
    unsafe fn prefetch_l2(_at: *const u8) {}
}

/// Plain Rust, one row after the other.
pub(super) struct Scalar;

impl Engine for Scalar {
    const LANES: usize = TILE;
    const WIDE: bool = true;
    type Codes = [u8; 4 * TILE];
    type Piece = [i32; TILE];
    type Int = [i32; TILE];
    type Float = [f32; TILE];
    type SubScale = [i32; TILE];

    #[inline(always)]
    unsafe fn codes(bits: usize, g: usize, group: *const u8) -> Self::Codes {
        let mut codes = [0; 4 * TILE];
        for i in 0..4 * TILE {
            // SAFETY: a group has `bits` planes of 64 bytes.
            let plane = |p: usize| unsafe { *group.add(64 * p + i) };
            codes[i] = match bits {
                8 => plane(g),
                _ => plane(g / 2) >> (4 * (g % 2)) & 15,
            };
            codes[i] |= match bits {
                5 => (plane(4) >> g & 1) << 4,
                6 => (plane(4 + g / 4) >> (2 * (g % 4)) & 3) << 4,
                _ => 0,
            };
        }
        codes
    }

    #[inline(always)]
    unsafe fn levels(mut codes: Self::Codes, levels: &'static [i8; 16]) -> Self::Codes {
        for code in &mut codes {
            *code = levels[usize::from(*code & 15)] as u8 ^ 0x80;
        }
        codes
    }

    #[inline(always)]
    unsafe fn bytes(g: usize, group: *const u8) -> Self::Codes {
        // SAFETY: the trait's duty.
        unsafe { group.add(64 * g).cast::<Self::Codes>().read() }
    }

    #[inline(always)]
    unsafe fn store_bytes(codes: Self::Codes, g: usize, group: *mut u8) {
        // SAFETY: the trait's duty.
        unsafe { group.add(64 * g).cast::<Self::Codes>().write(codes) }
    }

    #[inline(always)]
    unsafe fn start(at: *const i32) -> Self::Piece {
        // SAFETY: the trait's duty.
        unsafe { Self::int(at) }
    }

    #[inline(always)]
    unsafe fn empty() -> Self::Piece {
        [0; TILE]
    }

    #[inline(always)]
    unsafe fn step(
        _bits: usize,
        mut piece: Self::Piece,
        codes: Self::Codes,
        digits: *const i8,
    ) -> Self::Piece {
        // SAFETY: the trait's duty.
        let digits = unsafe { digits.cast::<[i8; 4]>().read() };
        for lane in 0..TILE {
            for b in 0..4 {
                piece[lane] += i32::from(codes[4 * lane + b]) * i32::from(digits[b]);
            }
        }
        piece
    }

    #[inline(always)]
    unsafe fn total(piece: Self::Piece) -> Self::Int {
        piece
    }

    #[inline(always)]
    unsafe fn sub_scale(pairs: *const u8, second: bool) -> Self::SubScale {
        let mut scale = [0; TILE];
        for lane in 0..TILE {
            // SAFETY: the trait's duty: LANES pairs.
            scale[lane] = i32::from(unsafe { *pairs.add(2 * lane + second as usize) } as i8);
        }
        scale
    }

    #[inline(always)]
    unsafe fn add_scaled(mut int: Self::Int, piece: Self::Piece, scale: Self::SubScale) -> Self::Int {
        for lane in 0..TILE {
            int[lane] += piece[lane] * scale[lane];
        }
        int
    }

    #[inline(always)]
    unsafe fn add_pairs(mut int: Self::Int, pairs: *const u8, sums: *const i32) -> Self::Int {
        // SAFETY: the trait's duty.
        let (sums, even, odd) =
            unsafe { (sums.read_unaligned(), Self::sub_scale(pairs, false), Self::sub_scale(pairs, true)) };
        for lane in 0..TILE {
            int[lane] += even[lane] * i32::from(sums as i16) + odd[lane] * (sums >> 16);
        }
        int
    }

    #[inline(always)]
    unsafe fn int(at: *const i32) -> Self::Int {
        // SAFETY: the trait's duty.
        [unsafe { at.read_unaligned() }; TILE]
    }

    #[inline(always)]
    unsafe fn int_zero() -> Self::Int {
        [0; TILE]
    }

    #[inline(always)]
    unsafe fn int_add(mut a: Self::Int, b: Self::Int) -> Self::Int {
        for lane in 0..TILE {
            a[lane] += b[lane];
        }
        a
    }

    #[inline(always)]
    unsafe fn int_times(mut a: Self::Int, factor: i32) -> Self::Int {
        for lane in 0..TILE {
            a[lane] *= factor;
        }
        a
    }

    #[inline(always)]
    unsafe fn from_int(a: Self::Int) -> Self::Float {
        let mut out = [0.0; TILE];
        for lane in 0..TILE {
            out[lane] = a[lane] as f32;
        }
        out
    }

    #[inline(always)]
    unsafe fn from_f16(at: *const u8) -> Self::Float {
        let mut out = [0.0; TILE];
        for lane in 0..TILE {
            // SAFETY: the trait's duty: LANES values.
            out[lane] = f16::from_bits(unsafe { at.cast::<u16>().add(lane).read_unaligned() }).to_f32();
        }
        out
    }

    #[inline(always)]
    unsafe fn from_exponent(at: *const u8) -> Self::Float {
        let mut out = [0.0; TILE];
        for lane in 0..TILE {
            // SAFETY: the trait's duty: LANES values.
            let e = u32::from(unsafe { *at.add(lane) });
            out[lane] = f32::from_bits((e << 23).max(1 << 22)) * 0.5;
        }
        out
    }

    #[inline(always)]
    unsafe fn splat(at: *const f32) -> Self::Float {
        // SAFETY: the trait's duty.
        [unsafe { at.read_unaligned() }; TILE]
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Float {
        [0.0; TILE]
    }

    #[inline(always)]
    unsafe fn add(mut a: Self::Float, b: Self::Float) -> Self::Float {
        for lane in 0..TILE {
            a[lane] += b[lane];
        }
        a
    }

    #[inline(always)]
    unsafe fn mul(mut a: Self::Float, b: Self::Float) -> Self::Float {
        for lane in 0..TILE {
            a[lane] *= b[lane];
        }
        a
    }

    #[inline(always)]
    unsafe fn times_128(mut a: Self::Float) -> Self::Float {
        for lane in 0..TILE {
            a[lane] *= 128.0;
        }
        a
    }

    #[inline(always)]
    unsafe fn fma(mut a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        for lane in 0..TILE {
            a[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        a
    }

    #[inline(always)]
    unsafe fn fnma(mut a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        for lane in 0..TILE {
            a[lane] = (-a[lane]).mul_add(b[lane], c[lane]);
        }
        a
    }

    #[inline(always)]
    unsafe fn store(a: Self::Float, to: *mut f32) {
        // SAFETY: the trait's duty: room for LANES values.
        unsafe { to.cast::<Self::Float>().write_unaligned(a) }
    }
}
