//! Block formats: how a row of weights is packed, and the integers that quantized matmul multiplies.
//!
//! One file per format. Each states its layout, decodes and encodes one block in scalar code (the meaning of
//! the format; kernels elsewhere are held to it bit for bit), and gives the integer view of NUMERICS.md
//! section 2: `weight = d * w[k] + min * m[k]` with integers `w` and `m`.
//!
//! Encoders are total: a value or scale that is not finite, or a scale beyond f16, gives a block that is not
//! finite or arbitrary codes, never a panic. Who quantizes a model checks its inputs first.

pub mod codebook;
mod iq1;
pub mod iq1_m;
pub mod iq1_s;
pub mod iq2_s;
pub mod iq2_xs;
pub mod iq2_xxs;
pub mod iq3_s;
pub mod iq3_xxs;
pub mod iq4_nl;
pub mod iq4_xs;
mod k_scales;
pub mod mxfp4;
pub mod nvfp4;
pub mod q1_0;
pub mod q2_0;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;
pub mod q8_1;
pub mod q8_k;
pub mod tq1_0;
pub mod tq2_0;

use std::ops::RangeInclusive;

use half::{bf16, f16};

use crate::{DType, Error, Result};

/// One block format: sizes, scalar decode and encode, integer view.
#[derive(Debug)]
pub struct Format {
    /// The element type; it holds the block's length and bytes.
    pub dtype: DType,
    /// Values in one unit of the integer dot product, which has one scale: a block, but for NVFP4, whose blocks hold
    /// four. Activations have one scale per block.
    pub unit: usize,
    /// Its minimum, which decides the sums of activations that a dot product needs.
    pub minimum: Minimum,
    /// Decodes one block: `[block_bytes]` to `[block_len]`.
    pub decode_block: fn(&[u8], &mut [f32]),
    /// Encodes one block: `[block_len]` to `[block_bytes]`.
    pub encode_block: fn(&[f32], &mut [u8]),
    /// The integers of one unit of a block: `[block_bytes]`, which unit.
    pub unit_view: fn(&[u8], usize, &mut UnitView),
}

/// How a format has a minimum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Minimum {
    /// Not at all.
    #[default]
    None,
    /// One for each unit: it multiplies the sum of the unit's activations.
    OfUnit,
    /// An integer for each part of a unit, with a scale for all.
    OfSubUnits,
}

/// Every block format.
pub const FORMATS: &[&Format] = &[
    &q4_0::FORMAT,
    &q4_1::FORMAT,
    &q5_0::FORMAT,
    &q5_1::FORMAT,
    &q8_0::FORMAT,
    &q8_1::FORMAT,
    &q2_k::FORMAT,
    &q3_k::FORMAT,
    &q4_k::FORMAT,
    &q5_k::FORMAT,
    &q6_k::FORMAT,
    &q8_k::FORMAT,
    &iq1_s::FORMAT,
    &iq1_m::FORMAT,
    &iq2_xxs::FORMAT,
    &iq2_xs::FORMAT,
    &iq2_s::FORMAT,
    &iq3_xxs::FORMAT,
    &iq3_s::FORMAT,
    &iq4_nl::FORMAT,
    &iq4_xs::FORMAT,
    &tq1_0::FORMAT,
    &tq2_0::FORMAT,
    &mxfp4::FORMAT,
    &nvfp4::FORMAT,
    &q1_0::FORMAT,
    &q2_0::FORMAT,
];

/// The block format of `dtype`, if it is quantized.
pub fn format(dtype: DType) -> Option<&'static Format> {
    FORMATS.iter().copied().find(|format| format.dtype == dtype)
}

/// The integers of one unit: `weight[k] = d * w[k] + min * m[k]` for `k < len`.
///
/// For formats without sub-scales this equals the decoded value bit for bit (each product and the sum rounded
/// once), and for IQ formats, whose products are exact, up to the sign of a zero; with the sub-scales of K
/// formats, decoding rounds `d * sub-scale` first, so they agree within a few roundings.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitView {
    /// Values in the unit, at most 256.
    pub len: usize,
    /// Integer weights, sub-scale included; the first `len` count.
    pub w: [i16; 256],
    /// The unit's scale, widened exactly; for formats whose integers carry a multiplier (8 for IQ1 and IQ2, 4 for
    /// IQ3_XXS, 2 for 4-bit floats) divided by it, which is exact too.
    pub d: f32,
    /// Integer minima: 1 for Q4_1 and Q5_1, the sub-minimum for Q2_K, Q4_K and Q5_K, else 0.
    pub m: [i16; 256],
    /// The scale of `m` with its sign: `m` for Q4_1 and Q5_1, `-dmin` for K formats, else 0.
    pub min: f32,
}

impl Default for UnitView {
    fn default() -> Self {
        Self { len: 0, w: [0; 256], d: 0.0, m: [0; 256], min: 0.0 }
    }
}

/// Checks what only the bytes can tell: that no scale code says "not a number", which MXFP4 and NVFP4 can. `bytes`
/// are whole blocks of `dtype`.
pub fn check_scales(dtype: DType, bytes: &[u8]) -> Result<()> {
    let bad = |scale: u8| match dtype {
        DType::MXFP4 => scale == mxfp4::NAN,
        _ => scale & 0x7f == nvfp4::NAN,
    };
    let scales = match dtype {
        DType::MXFP4 => 1,
        DType::NVFP4 => dtype.block_len() / nvfp4::FORMAT.unit,
        _ => return Ok(()),
    };
    for (block, bytes) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
        if let Some(&code) = bytes[..scales].iter().find(|&&scale| bad(scale)) {
            return Err(Error::ScaleCode { dtype, block, code });
        }
    }
    Ok(())
}

/// Decodes one row of any element type to f32; 64-bit types round to nearest even.
///
/// # Panics
/// If `bytes` is not exactly `out.len()` values of `dtype`.
pub fn decode_row(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    assert!(
        out.len().is_multiple_of(len) && bytes.len() == out.len() / len * size,
        "{} bytes do not hold {} values of {dtype}",
        bytes.len(),
        out.len(),
    );
    match dtype {
        DType::F32 => decode(bytes, out, f32::from_le_bytes),
        DType::F16 => decode(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => decode(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F64 => decode(bytes, out, |b| f64::from_le_bytes(b) as f32),
        DType::I8 => decode(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
        DType::I16 => decode(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
        DType::I32 => decode(bytes, out, |b| i32::from_le_bytes(b) as f32),
        DType::I64 => decode(bytes, out, |b| i64::from_le_bytes(b) as f32),
        _ => {
            let format =
                format(dtype).expect("every quantized dtype has a row in FORMATS; a test holds this");
            for (block, values) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(len)) {
                (format.decode_block)(block, values);
            }
        }
    }
}

/// Encodes one row of f32 as a floating-point or quantized type, rounding to nearest even where rounding is
/// all there is to do. False, and nothing written, for the integer types, which no f32 row is stored as.
///
/// # Panics
/// If `out` is not exactly `values.len()` values of `dtype`.
#[must_use]
pub fn encode_row(dtype: DType, values: &[f32], out: &mut [u8]) -> bool {
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    assert!(
        values.len().is_multiple_of(len) && out.len() == values.len() / len * size,
        "{} values of {dtype} do not fill {} bytes",
        values.len(),
        out.len(),
    );
    match dtype {
        DType::F32 => encode(values, out, f32::to_le_bytes),
        DType::F16 => encode(values, out, |v| f16::from_f32(v).to_le_bytes()),
        DType::BF16 => encode(values, out, |v| bf16::from_f32(v).to_le_bytes()),
        DType::F64 => encode(values, out, |v| f64::from(v).to_le_bytes()),
        _ => {
            let Some(format) = format(dtype) else { return false };
            for (block, values) in out.chunks_exact_mut(size).zip(values.chunks_exact(len)) {
                (format.encode_block)(values, block);
            }
        }
    }
    true
}

fn decode<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (b, out) in bytes.as_chunks().0.iter().zip(out) {
        *out = value(*b);
    }
}

fn encode<const N: usize>(values: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (value, out) in values.iter().zip(out.as_chunks_mut().0) {
        *out = bytes(*value);
    }
}

/// Reads the f16 at byte `at` of a block, widened exactly.
fn read_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes `value` as f16 at byte `at` of a block, and returns what it was rounded to.
fn write_f16(block: &mut [u8], at: usize, value: f32) -> f32 {
    let rounded = f16::from_f32(value);
    block[at..at + 2].copy_from_slice(&rounded.to_le_bytes());
    rounded.to_f32()
}

/// `1 / d`, or 0 for a block whose scale is 0.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value of largest magnitude, the first of equals, with its sign.
fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &v| if v.abs() > best.abs() { v } else { best })
}

/// The smallest and the largest value.
fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| (lo.min(v), hi.max(v)))
}

/// The candidate that loses least, the first of equals; the first of all if no loss is finite.
fn least(candidates: RangeInclusive<i16>, loss: impl Fn(i16) -> f32) -> i16 {
    let first = *candidates.start();
    let better = |best: (i16, f32), next: (i16, f32)| if next.1 < best.1 { next } else { best };
    candidates.map(|candidate| (candidate, loss(candidate))).fold((first, f32::INFINITY), better).0
}

#[cfg(test)]
mod by_hand;
#[cfg(test)]
mod tests;
