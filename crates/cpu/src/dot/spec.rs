//! What distinguishes the packed formats: one constant row each.

use ingle_tensor::DType;
use ingle_tensor::quant::{iq4_nl, mxfp4};

/// Output rows interleaved in a packed tile.
pub const TILE: usize = 16;

/// How a format's minimum enters the sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Min {
    /// There is none.
    None,
    /// `acc += min * fl(da * M)` with M the activation sum of the unit (Q4_1, Q5_1).
    Add,
    /// `acc -= fl(dmin * da) * M` with M the sum of sub-minimum times activation sum (Q4_K, Q5_K).
    Subtract,
}

/// How a unit's scale is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scale {
    /// IEEE binary16.
    F16,
    /// A byte `e` for `2^(e - 128)`, which is subnormal for the two smallest.
    Exponent,
}

impl Scale {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            Scale::F16 => 2,
            Scale::Exponent => 1,
        }
    }
}

/// One packed format. A *group* is 32 columns of a tile, a *word* the codes of four consecutive columns of one row.
///
/// A group holds, for each of its words 0..8, sixteen 4-byte words, one per row:
/// - 8 bits: eight planes of 64 bytes, `code = w + 128`;
/// - 4 bits: four planes, word `2p` in the low nibbles of plane `p`, word `2p + 1` in the high nibbles;
/// - 5 bits: the same, then one plane whose bit `g` of each byte is bit 4 of word `g`;
/// - 6 bits: the same, then two planes; bits `2 (g % 4)..` of each byte of plane `g / 4` are bits 4 and 5 of word `g`.
///
/// A unit's scale record is `d` of 16 rows; with a minimum, `min` f16 of 16 rows; with sub-scales, for each two
/// of them 16 x 2 int8; with sub-minima, the same for those.
#[derive(Debug)]
pub(super) struct Spec {
    pub dtype: DType,
    /// Bits of a code in memory.
    pub bits: usize,
    /// What the codes, of 4 bits, stand for; if not given, for themselves.
    pub levels: Option<&'static [i8; 16]>,
    /// `w = code - offset`; with levels, the code is `level + 128`.
    pub offset: i32,
    pub scale: Scale,
    /// Columns per sub-scale; 0 if the unit has one scale only.
    pub sub: usize,
    pub min: Min,
}

impl Spec {
    /// Columns of one unit.
    pub const fn unit(&self) -> usize {
        if self.sub == 0 { 32 } else { 256 }
    }

    /// Bits of a code when it is multiplied.
    pub const fn width(&self) -> usize {
        if self.levels.is_some() { 8 } else { self.bits }
    }

    /// Bytes of one group of 32 columns.
    pub const fn group_bytes(&self) -> usize {
        self.bits * 64
    }

    /// Bytes of the codes of one unit.
    pub const fn code_bytes(&self) -> usize {
        self.unit() / 32 * self.group_bytes()
    }

    /// Pairs of sub-scales in a unit.
    pub const fn pairs(&self) -> usize {
        match self.unit().checked_div(self.sub) {
            Some(sub_scales) => sub_scales / 2,
            None => 0,
        }
    }

    /// Offset of the sub-scales in a scale record.
    pub const fn sub_scale_at(&self) -> usize {
        self.scale.bytes() * if matches!(self.min, Min::None) { TILE } else { 2 * TILE }
    }

    /// Offset of the sub-minima in a scale record.
    pub const fn sub_min_at(&self) -> usize {
        self.sub_scale_at() + self.pairs() * 2 * TILE
    }

    /// Bytes of the scale record of one unit.
    pub const fn scale_bytes(&self) -> usize {
        let kinds = if matches!(self.min, Min::None) { 1 } else { 2 };
        self.sub_scale_at() + kinds * self.pairs() * 2 * TILE
    }

    /// Words whose products with int8 may be added up in 16 bits: by pairs of columns as they are, or by four
    /// columns with the middle of the code's range subtracted. Both limits happen to be the same.
    pub const fn short_words(&self) -> usize {
        match self.width() {
            4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        }
    }

    /// Words of a piece where pieces are exact in 32 bits: codes of 8 bits gain nothing from 16.
    pub const fn piece_words(&self) -> usize {
        if self.is_long() { 8 } else { self.short_words() }
    }

    /// Whether pieces that are exact in 32 bits have more than 16.
    pub const fn is_long(&self) -> bool {
        self.width() == 8
    }

    /// Pieces of a unit.
    pub const fn pieces(&self) -> usize {
        self.unit() / 4 / self.piece_words()
    }

    /// Starting values in a panel, per digit row and unit: what a sum of products begins with so that codes need no
    /// offset; one for each piece with sub-scales, else one for the unit, none if codes are weights.
    pub const fn starts(&self) -> usize {
        match (self.sub, self.offset) {
            (0, 0) => 0,
            (0, _) => 1,
            _ => self.pieces(),
        }
    }

    /// Sums of activations in a panel, per digit row and unit: f32 of the whole unit, times its scale, for a minimum,
    /// pairs of int16 per sub-scale.
    pub const fn sums(&self) -> usize {
        match (self.sub, self.min) {
            (0, Min::None) => 0,
            (0, _) => 1,
            _ => self.pairs(),
        }
    }

    /// The middle of the code's range.
    pub const fn center(&self) -> i32 {
        1 << (self.width() - 1)
    }
}

/// A format as a type, so that kernels are compiled for it.
pub(super) trait Format {
    const SPEC: Spec;
}

macro_rules! formats {
    ($($name:ident: $bits:literal bits, $levels:expr, offset $offset:literal, $scale:ident, sub $sub:literal, $min:ident;)*) => {
        $(#[allow(non_camel_case_types)] pub(super) struct $name;
        impl Format for $name {
            const SPEC: Spec = Spec {
                dtype: DType::$name,
                bits: $bits,
                levels: $levels,
                offset: $offset,
                scale: Scale::$scale,
                sub: $sub,
                min: Min::$min,
            };
        })*

        /// The row of `dtype`, if it can be packed.
        pub(super) fn spec(dtype: DType) -> Option<&'static Spec> {
            match dtype {
                $(DType::$name => Some(const { &$name::SPEC }),)*
                _ => None,
            }
        }
    };
}

formats! {
    Q4_0: 4 bits, None, offset 8, F16, sub 0, None;
    Q4_1: 4 bits, None, offset 0, F16, sub 0, Add;
    Q5_0: 5 bits, None, offset 16, F16, sub 0, None;
    Q5_1: 5 bits, None, offset 0, F16, sub 0, Add;
    Q8_0: 8 bits, None, offset 128, F16, sub 0, None;
    Q4K: 4 bits, None, offset 0, F16, sub 32, Subtract;
    Q5K: 5 bits, None, offset 0, F16, sub 32, Subtract;
    Q6K: 6 bits, None, offset 32, F16, sub 16, None;
    IQ4NL: 4 bits, Some(&iq4_nl::LEVELS), offset 128, F16, sub 0, None;
    IQ4XS: 4 bits, Some(&iq4_nl::LEVELS), offset 128, F16, sub 32, None;
    MXFP4: 4 bits, Some(&mxfp4::LEVELS), offset 128, Exponent, sub 0, None;
}
