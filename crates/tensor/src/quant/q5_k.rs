//! Q5_K: 256 values in 176 bytes, `value = (d * s) * q - dmin * m` with `s`, `m` per 32 values.
//!
//! Layout: `d` f16; `dmin` f16; 12 bytes of eight 6-bit (s, m) pairs; 32 bytes of high bits, bit `j` of byte
//! `i` being bit 4 of value `32 j + i`; 128 bytes of low four bits as in [Q4_K](super::q4_k). Integer view: unit
//! 256, `w = s * q` in 0..=1953, two digits of radix 32; `m` the sub-minimum with scale `-dmin`, so activation
//! sums per 32.

use super::{Format, Minimum, UnitView, k_scales};
use crate::DType;

/// This format's row.
pub const FORMAT: Format = Format {
    dtype: DType::Q5K,
    unit: 256,
    minimum: Minimum::OfSubUnits,
    decode_block,
    encode_block,
    unit_view,
};

/// The code of value `k`, from the block's bytes after its scales.
fn code(packed: &[u8], k: usize) -> u8 {
    let (high, low) = packed.split_at(32);
    let byte = low[k / 64 * 32 + k % 32];
    let low = if k % 64 < 32 { byte & 15 } else { byte >> 4 };
    low | (high[k % 32] >> (k / 32) & 1) << 4
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    k_scales::unit_view(block, |k| code(&block[16..], k), view);
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    k_scales::decode(block, |k| code(&block[16..], k), out);
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let codes = k_scales::encode(values, 31, out);
    for i in 0..32 {
        out[16 + i] = (0..8).fold(0, |high, j| high | codes[32 * j + i] >> 4 << j);
    }
    for i in 0..128 {
        let k = i / 32 * 64 + i % 32;
        out[48 + i] = codes[k] & 15 | codes[k + 32] << 4;
    }
}
