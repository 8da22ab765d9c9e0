//! Element types: one row of the table below per type, and nothing else to change when one is added.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// One row of the table.
struct Row {
    dtype: DType,
    name: &'static str,
    ggml: Option<u32>,
    safetensors: Option<&'static str>,
    block_len: usize,
    block_bytes: usize,
}

macro_rules! dtypes {
    ($($(#[$doc:meta])* $id:ident = $name:literal, ggml: $ggml:expr, safetensors: $safetensors:expr,
       $len:literal values in $bytes:literal bytes;)*) => {
        /// The type of a tensor's elements as they are stored.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        pub enum DType { $($(#[$doc])* $id,)* }

        const ROWS: &[Row] = &[$(Row {
            dtype: DType::$id,
            name: $name,
            ggml: $ggml,
            safetensors: $safetensors,
            block_len: $len,
            block_bytes: $bytes,
        },)*];
    };
}

dtypes! {
    /// IEEE binary32.
    F32 = "f32", ggml: Some(0), safetensors: Some("F32"), 1 values in 4 bytes;
    /// IEEE binary16.
    F16 = "f16", ggml: Some(1), safetensors: Some("F16"), 1 values in 2 bytes;
    /// The upper half of a binary32.
    BF16 = "bf16", ggml: Some(30), safetensors: Some("BF16"), 1 values in 2 bytes;
    /// IEEE binary64.
    F64 = "f64", ggml: Some(28), safetensors: Some("F64"), 1 values in 8 bytes;
    /// Signed 8-bit integer.
    I8 = "i8", ggml: Some(24), safetensors: Some("I8"), 1 values in 1 bytes;
    /// Signed 16-bit integer.
    I16 = "i16", ggml: Some(25), safetensors: Some("I16"), 1 values in 2 bytes;
    /// Signed 32-bit integer.
    I32 = "i32", ggml: Some(26), safetensors: Some("I32"), 1 values in 4 bytes;
    /// Signed 64-bit integer.
    I64 = "i64", ggml: Some(27), safetensors: Some("I64"), 1 values in 8 bytes;
    /// 4-bit codes around 8, one scale: [`crate::quant::q4_0`].
    Q4_0 = "q4_0", ggml: Some(2), safetensors: None, 32 values in 18 bytes;
    /// 4-bit codes, scale and minimum: [`crate::quant::q4_1`].
    Q4_1 = "q4_1", ggml: Some(3), safetensors: None, 32 values in 20 bytes;
    /// 5-bit codes around 16, one scale: [`crate::quant::q5_0`].
    Q5_0 = "q5_0", ggml: Some(6), safetensors: None, 32 values in 22 bytes;
    /// 5-bit codes, scale and minimum: [`crate::quant::q5_1`].
    Q5_1 = "q5_1", ggml: Some(7), safetensors: None, 32 values in 24 bytes;
    /// Signed bytes, one scale: [`crate::quant::q8_0`].
    Q8_0 = "q8_0", ggml: Some(8), safetensors: None, 32 values in 34 bytes;
    /// Signed bytes, one scale and their sum: [`crate::quant::q8_1`].
    Q8_1 = "q8_1", ggml: Some(9), safetensors: None, 32 values in 36 bytes;
    /// 2-bit codes, 4-bit sub-scales and sub-minima per 16: [`crate::quant::q2_k`].
    Q2K = "q2_k", ggml: Some(10), safetensors: None, 256 values in 84 bytes;
    /// 3-bit codes around 4, 6-bit sub-scales per 16: [`crate::quant::q3_k`].
    Q3K = "q3_k", ggml: Some(11), safetensors: None, 256 values in 110 bytes;
    /// 4-bit codes, 6-bit sub-scales and sub-minima per 32: [`crate::quant::q4_k`].
    Q4K = "q4_k", ggml: Some(12), safetensors: None, 256 values in 144 bytes;
    /// 5-bit codes, 6-bit sub-scales and sub-minima per 32: [`crate::quant::q5_k`].
    Q5K = "q5_k", ggml: Some(13), safetensors: None, 256 values in 176 bytes;
    /// 6-bit codes around 32, 8-bit sub-scales per 16: [`crate::quant::q6_k`].
    Q6K = "q6_k", ggml: Some(14), safetensors: None, 256 values in 210 bytes;
    /// Signed bytes, one f32 scale and sums per 16: [`crate::quant::q8_k`].
    Q8K = "q8_k", ggml: Some(15), safetensors: None, 256 values in 292 bytes;
    /// Rows of 8 out of 2048, 3-bit sub-scales per 32: [`crate::quant::iq1_s`].
    IQ1S = "iq1_s", ggml: Some(19), safetensors: None, 256 values in 50 bytes;
    /// Rows of 8 out of 2048, 3-bit sub-scales per 16: [`crate::quant::iq1_m`].
    IQ1M = "iq1_m", ggml: Some(29), safetensors: None, 256 values in 56 bytes;
    /// Rows of 8 out of 256, signs, 4-bit sub-scales per 32: [`crate::quant::iq2_xxs`].
    IQ2XXS = "iq2_xxs", ggml: Some(16), safetensors: None, 256 values in 66 bytes;
    /// Rows of 8 out of 512, signs, 4-bit sub-scales per 16: [`crate::quant::iq2_xs`].
    IQ2XS = "iq2_xs", ggml: Some(17), safetensors: None, 256 values in 74 bytes;
    /// Rows of 8 out of 1024, signs, 4-bit sub-scales per 16: [`crate::quant::iq2_s`].
    IQ2S = "iq2_s", ggml: Some(22), safetensors: None, 256 values in 82 bytes;
    /// Rows of 4 out of 256, signs, 4-bit sub-scales per 32: [`crate::quant::iq3_xxs`].
    IQ3XXS = "iq3_xxs", ggml: Some(18), safetensors: None, 256 values in 98 bytes;
    /// Rows of 4 out of 512, signs, 4-bit sub-scales per 32: [`crate::quant::iq3_s`].
    IQ3S = "iq3_s", ggml: Some(21), safetensors: None, 256 values in 110 bytes;
    /// 4-bit codes for uneven levels, one scale: [`crate::quant::iq4_nl`].
    IQ4NL = "iq4_nl", ggml: Some(20), safetensors: None, 32 values in 18 bytes;
    /// 4-bit codes for uneven levels, 6-bit sub-scales per 32: [`crate::quant::iq4_xs`].
    IQ4XS = "iq4_xs", ggml: Some(23), safetensors: None, 256 values in 136 bytes;
    /// Digits of base three, one scale: [`crate::quant::tq1_0`].
    TQ1_0 = "tq1_0", ggml: Some(34), safetensors: None, 256 values in 54 bytes;
    /// 2-bit codes around 1, one scale: [`crate::quant::tq2_0`].
    TQ2_0 = "tq2_0", ggml: Some(35), safetensors: None, 256 values in 66 bytes;
    /// 4-bit floats, a power of two for scale: [`crate::quant::mxfp4`].
    MXFP4 = "mxfp4", ggml: Some(39), safetensors: None, 32 values in 17 bytes;
    /// 4-bit floats, 8-bit float scales per 16: [`crate::quant::nvfp4`].
    NVFP4 = "nvfp4", ggml: Some(40), safetensors: None, 64 values in 36 bytes;
    /// Signs, one scale: [`crate::quant::q1_0`].
    Q1_0 = "q1_0", ggml: Some(41), safetensors: None, 128 values in 18 bytes;
    /// 2-bit codes around 1, one scale: [`crate::quant::q2_0`].
    Q2_0 = "q2_0", ggml: Some(42), safetensors: None, 64 values in 18 bytes;
}

/// ggml types that the format once had, so that a refusal can name them.
const REMOVED_GGML_TYPES: &[(u32, &str)] = &[
    (4, "q4_2"),
    (5, "q4_3"),
    (31, "q4_0_4_4"),
    (32, "q4_0_4_8"),
    (33, "q4_0_8_8"),
    (36, "iq4_nl_4_4"),
    (37, "iq4_nl_4_8"),
    (38, "iq4_nl_8_8"),
];

impl DType {
    const fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Every element type, in the order of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.dtype)
    }

    /// The name used on the command line and in reports: `q4_k`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Values in one block; 1 for plain types.
    pub const fn block_len(self) -> usize {
        self.row().block_len
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Whether values come in blocks with a scale: exactly the types that [`crate::quant::format`] knows.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Whether this is a plain floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F64)
    }

    /// Bytes of a row of `cols` values. An error if blocks do not tile the row.
    pub fn row_bytes(self, cols: usize) -> Result<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return Err(Error::RowLength { dtype: self, cols });
        }
        (cols / self.block_len())
            .checked_mul(self.block_bytes())
            .ok_or_else(|| Error::TooLarge { dtype: self, shape: vec![cols] })
    }

    /// Bytes of a tensor of `shape`, outermost dimension first; a scalar (`[]`) is one row of one value. Every
    /// product is checked: bytes, and products of any of the dimensions, fit in 63 bits.
    pub fn tensor_bytes(self, shape: &[usize]) -> Result<u64> {
        let (cols, outer) = shape.split_last().map_or((1, shape), |(&cols, outer)| (cols, outer));
        let row_bytes = self.row_bytes(cols)?;
        // A dimension of 0 must not hide that the others overflow: somebody multiplies only those.
        let rows = outer.iter().try_fold(1u64, |n, &d| n.checked_mul(d.max(1) as u64));
        let fits =
            |per_row: usize| rows?.checked_mul(per_row.max(1) as u64).filter(|&n| n <= i64::MAX as u64);
        match (fits(cols), fits(row_bytes)) {
            (Some(_), Some(_)) if shape.contains(&0) => Ok(0),
            (Some(_), Some(bytes)) => Ok(bytes),
            _ => Err(Error::TooLarge { dtype: self, shape: shape.to_vec() }),
        }
    }

    /// The type with this number in GGUF files; the error names the number and, if the format once had it, its name.
    pub fn from_ggml_type(number: u32) -> Result<Self> {
        ROWS.iter().find(|row| row.ggml == Some(number)).map(|row| row.dtype).ok_or_else(|| {
            let found = match REMOVED_GGML_TYPES.iter().find(|(n, _)| *n == number) {
                Some((_, name)) => format!("{number} ({name}, removed from GGUF: convert the model again)"),
                None => format!("{number} (unknown)"),
            };
            Error::UnknownType { found }
        })
    }

    /// The number of this type in GGUF files.
    pub const fn ggml_type(self) -> Option<u32> {
        self.row().ggml
    }

    /// The type with this name in safetensors headers: `BF16`.
    pub fn from_safetensors(name: &str) -> Result<Self> {
        ROWS.iter()
            .find(|row| row.safetensors == Some(name))
            .map(|row| row.dtype)
            .ok_or_else(|| Error::UnknownType { found: format!("{name:?}") })
    }

    /// The name of this type in safetensors headers.
    pub const fn safetensors_name(self) -> Option<&'static str> {
        self.row().safetensors
    }

    /// All names, for messages.
    pub(crate) fn names() -> String {
        ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Reads a name as [`DType::name`] writes it, in either case.
    fn from_str(name: &str) -> Result<Self> {
        ROWS.iter()
            .find(|row| row.name.eq_ignore_ascii_case(name))
            .map(|row| row.dtype)
            .ok_or_else(|| Error::UnknownType { found: format!("{name:?}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_at_its_own_index_and_reads_back() {
        for (i, row) in ROWS.iter().enumerate() {
            assert_eq!(row.dtype as usize, i);
            assert_eq!(row.name.to_uppercase().parse::<DType>().unwrap(), row.dtype);
            assert_eq!(DType::from_ggml_type(row.dtype.ggml_type().unwrap()).unwrap(), row.dtype);
            if let Some(name) = row.dtype.safetensors_name() {
                assert_eq!(DType::from_safetensors(name).unwrap(), row.dtype);
            }
        }
        for (number, name) in REMOVED_GGML_TYPES {
            let error = DType::from_ggml_type(*number).unwrap_err().to_string();
            assert!(error.contains(&format!("{number} ({name}, removed")), "{error}");
        }
    }

    /// Every number up to the newest one is a type or a removed one, and none is both.
    #[test]
    fn every_number_is_accounted_for() {
        for number in 0..=42 {
            let removed = REMOVED_GGML_TYPES.iter().any(|(n, _)| *n == number);
            assert_eq!(DType::from_ggml_type(number).is_err(), removed, "{number}");
        }
        let error = DType::from_ggml_type(43).unwrap_err().to_string();
        assert!(error.contains("43 (unknown)"), "{error}");
    }

    #[test]
    fn a_row_that_blocks_do_not_tile_is_refused() {
        assert_eq!(DType::Q4K.row_bytes(512).unwrap(), 288);
        for dtype in DType::all().filter(|dtype| dtype.is_quantized()) {
            for cols in [1, dtype.block_len() / 2, dtype.block_len() + 1, 3 * dtype.block_len() - 1] {
                let found = dtype.row_bytes(cols);
                assert!(
                    matches!(found, Err(Error::RowLength { cols: c, .. }) if c == cols),
                    "{dtype} {cols}"
                );
            }
        }
        let error = DType::Q4K.row_bytes(896).unwrap_err().to_string();
        assert_eq!(error, "rows of 896 values cannot be stored as q4_k, whose blocks hold 256");
    }

    /// ggml-org/llama.cpp#6614: the row counts, not the total, which 256 would divide here.
    #[test]
    fn the_row_counts_and_not_the_total() {
        assert!(matches!(DType::Q4K.tensor_bytes(&[256, 896]), Err(Error::RowLength { cols: 896, .. })));
        assert_eq!(DType::Q8_0.tensor_bytes(&[256, 896]).unwrap(), 256 * 28 * 34);
    }

    /// ggml-org/llama.cpp#18674, huggingface/candle#3588: products that wrap to something small.
    #[test]
    fn products_do_not_wrap() {
        for shape in [
            &[1 << 32, 1 << 32][..],
            &[1 << 31, 1 << 31],
            &[1 << 62],
            &[usize::MAX],
            &[1 << 21; 3],
            &[1 << 40, 1 << 40, 0],
        ] {
            assert!(matches!(DType::F32.tensor_bytes(shape), Err(Error::TooLarge { .. })), "{shape:?}");
        }
        assert_eq!(DType::F32.tensor_bytes(&[]).unwrap(), 4);
        for empty in [&[3, 0][..], &[0, 3], &[0]] {
            assert_eq!(DType::F32.tensor_bytes(empty).unwrap(), 0);
        }
    }
}
