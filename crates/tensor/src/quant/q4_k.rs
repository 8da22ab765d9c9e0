//! Q4_K: 256 values in 144 bytes, `value = (d * s) * q - dmin * m` with `s`, `m` per 32 values.
//!
//! Layout: `d` f16; `dmin` f16; 12 bytes of eight 6-bit (s, m) pairs; 128 bytes of codes: of each 32 bytes, the
//! low nibbles are 32 values and the high nibbles the 32 after. Integer view: unit 256, `w = s * q` in
//! 0..=945, two digits of radix 32; `m` the sub-minimum with scale `-dmin`, so activation sums per 32.

use super::{Format, Minimum, UnitView, k_scales};
use crate::DType;

/// This format's row.
pub const FORMAT: Format = Format {
    dtype: DType::Q4K,
    unit: 256,
    minimum: Minimum::OfSubUnits,
    decode_block,
    encode_block,
    unit_view,
};

/// The code of value `k`.
fn code(codes: &[u8], k: usize) -> u8 {
    let byte = codes[k / 64 * 32 + k % 32];
    if k % 64 < 32 { byte & 15 } else { byte >> 4 }
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    k_scales::unit_view(block, |k| code(&block[16..], k), view);
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    k_scales::decode(block, |k| code(&block[16..], k), out);
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let codes = k_scales::encode(values, 15, out);
    for i in 0..128 {
        let k = i / 32 * 64 + i % 32;
        out[16 + i] = codes[k] | codes[k + 32] << 4;
    }
}
