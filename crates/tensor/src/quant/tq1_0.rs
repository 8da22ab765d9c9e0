//! TQ1_0: 256 values in 54 bytes, `value = d * (t - 1)` with `t` one digit of base three.
//!
//! Layout: 48 bytes of five digits each, then 4 bytes of four; `d` f16. A byte is the fraction
//! `0.t0 t1 t2 t3 t4` (base three) in 256ths, rounded up: `t0` is what three times it carries over, and so on.
//! Byte `i` of the first 32 holds values `i`, `32 + i`, ..., `128 + i`; byte `i` of the next 16 values `160 + i`,
//! `176 + i`, ...; byte `i` of the last 4 values `240 + i`, `244 + i`, `248 + i`, `252 + i`. Integer view: unit
//! 256, `w = t - 1` in -1..=1, one int8 digit, no minimum, no activation sums; scale `d`.

use super::{Format, Minimum, UnitView, extreme, inverse, read_f16, write_f16};
use crate::DType;

/// This format's row.
pub const FORMAT: Format =
    Format { dtype: DType::TQ1_0, unit: 256, minimum: Minimum::None, decode_block, encode_block, unit_view };

/// Where the scale begins.
const D: usize = 52;

/// Runs of bytes that hold their values alike: first byte, bytes, first value, digits in a byte.
const RUNS: [(usize, usize, usize, usize); 3] = [(0, 32, 0, 5), (32, 16, 160, 5), (48, 4, 240, 4)];

/// The weights of 256 values.
fn weights(block: &[u8]) -> [i8; 256] {
    let mut weights = [0; 256];
    for (byte, bytes, value, digits) in RUNS {
        for i in 0..bytes {
            let mut fraction = block[byte + i];
            for digit in 0..digits {
                let product = 3 * u16::from(fraction);
                weights[value + digit * bytes + i] = (product >> 8) as i8 - 1;
                fraction = product as u8;
            }
        }
    }
    weights
}

fn unit_view(block: &[u8], _: usize, view: &mut UnitView) {
    *view = UnitView { len: 256, d: read_f16(block, D), ..UnitView::default() };
    for (w, t) in view.w.iter_mut().zip(weights(block)) {
        *w = i16::from(t);
    }
}

fn decode_block(block: &[u8], out: &mut [f32]) {
    let d = read_f16(block, D);
    for (out, t) in out.iter_mut().zip(weights(block)) {
        *out = d * f32::from(t);
    }
}

/// The scale and the digits (-1..=1) that TQ1_0 and TQ2_0 give 256 values: in thirds of the widest one.
pub(super) fn encode(values: &[f32]) -> (f32, [u8; 256]) {
    let d = extreme(values).abs();
    let id = inverse(d);
    (d, std::array::from_fn(|k| ((values[k] * id).round().clamp(-1.0, 1.0) as i8 + 1) as u8))
}

fn encode_block(values: &[f32], out: &mut [u8]) {
    let (d, digits) = encode(values);
    write_f16(out, D, d);
    for (byte, bytes, value, count) in RUNS {
        for i in 0..bytes {
            // A byte of four digits has a last one of 0.
            let digit = |n: usize| if n < count { digits[value + n * bytes + i] } else { 0 };
            let number = (0..5).fold(0, |number, n| 3 * number + u16::from(digit(n)));
            out[byte + i] = (number * 256).div_ceil(243) as u8;
        }
    }
}
