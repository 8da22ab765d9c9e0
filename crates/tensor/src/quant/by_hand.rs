//! Blocks and values derived by hand from the published layouts, for the types that the public decoder does not have:
//! Q8_1, Q8_K, Q1_0, Q2_0 and plain ones.

use super::DType;

/// A type, some bytes, and the values they stand for.
pub type Case = (DType, Vec<u8>, Vec<f32>);

/// All of them.
pub fn cases() -> Vec<Case> {
    let f32s = |values: &[f32]| values.to_vec();
    vec![
        (DType::F32, vec![0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0], f32s(&[1.0, -2.5])),
        (
            DType::F16,
            vec![0x00, 0x3c, 0x01, 0x00, 0x00, 0xfc],
            f32s(&[1.0, 2f32.powi(-24), f32::NEG_INFINITY]),
        ),
        (DType::BF16, vec![0x80, 0x3f, 0x20, 0xc0], f32s(&[1.0, -2.5])),
        // 1 + 2^-24 is halfway between two f32 and goes to the even one.
        (
            DType::F64,
            [1.1f64.to_le_bytes(), (1.0 + 2f64.powi(-24)).to_le_bytes()].concat(),
            f32s(&[1.1, 1.0]),
        ),
        (DType::I8, vec![0x80, 0x7f, 0xff], f32s(&[-128.0, 127.0, -1.0])),
        (DType::I16, vec![0x00, 0x80, 0xff, 0x7f], f32s(&[-32768.0, 32767.0])),
        // 2^24 + 1 and 2^24 + 3 are halfway: one goes down, one up.
        (
            DType::I32,
            vec![0xf9, 0xff, 0xff, 0xff, 1, 0, 0, 1, 3, 0, 0, 1],
            f32s(&[-7.0, 16777216.0, 16777220.0]),
        ),
        (
            DType::I64,
            [(1i64 << 40).to_le_bytes(), i64::MIN.to_le_bytes()].concat(),
            f32s(&[2f32.powi(40), -(2f32.powi(63))]),
        ),
        q8_1(),
        q8_k(),
        q1_0(),
        q2_0(),
    ]
}

/// Scale 0.5, a sum that decoding does not read, then the codes.
fn q8_1() -> Case {
    let codes: [i8; 32] = [
        0, 1, -1, 2, -2, 3, -3, 127, -127, -128, 64, -64, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120,
        -5, -15, -25, -35, -45, -55, -65, -75,
    ];
    let values = vec![
        0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 63.5, -63.5, -64.0, 32.0, -32.0, 5.0, 10.0, 15.0, 20.0, 25.0,
        30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0, -2.5, -7.5, -12.5, -17.5, -22.5, -27.5, -32.5, -37.5,
    ];
    (DType::Q8_1, [0x00, 0x38, 0x00, 0x7c].into_iter().chain(codes.map(|q| q as u8)).collect(), values)
}

/// Scale 0.25, the codes 0 to 127 and -128 to -1, sums that decoding does not read.
fn q8_k() -> Case {
    let head = [0x00, 0x00, 0x80, 0x3e];
    let bytes = head.into_iter().chain(0..=255u8).chain([0xff; 32]).collect();
    let values = (0..256i16).map(|k| if k < 128 { k } else { k - 256 }).map(|q| f32::from(q) / 4.0);
    (DType::Q8K, bytes, values.collect())
}

/// Scale 1.5; the low bit of a byte comes first.
fn q1_0() -> Case {
    let bytes = [
        0x00, 0x3e, 0x01, 0x80, 0xff, 0x00, 0x0f, 0xf0, 0x55, 0xaa, 0x03, 0xc0, 0x7f, 0xfe, 0x10, 0xef, 0x92,
        0x6d,
    ];
    let signs = "+------- -------+ ++++++++ -------- ++++---- ----++++ +-+-+-+- -+-+-+-+ \
                 ++------ ------++ +++++++- -+++++++ ----+--- ++++-+++ -+--+--+ +-++-++-";
    let values = signs.chars().filter(|sign| !sign.is_whitespace());
    (DType::Q1_0, bytes.to_vec(), values.map(|sign| if sign == '+' { 1.5 } else { -1.5 }).collect())
}

/// Scale -0.5; the low two bits of a byte come first, and code 1 is zero.
fn q2_0() -> Case {
    let quarter = [0b_11_10_01_00, 0b_00_01_10_11, 0b_00_00_00_00, 0b_11_11_11_11];
    let values = [0.5, -0.0, -0.5, -1.0, -1.0, -0.5, -0.0, 0.5, 0.5, 0.5, 0.5, 0.5, -1.0, -1.0, -1.0, -1.0];
    let bytes = [0x00, 0xb8].into_iter().chain([quarter; 4].into_iter().flatten());
    (DType::Q2_0, bytes.collect(), [values; 4].concat())
}
