//! Every format against blocks and values made by the format's own tools: bits, not tolerances.

use super::*;

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/../tests/fixtures/quants/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn floats(name: &str) -> Vec<f32> {
    let bytes = fixture(name);
    let mut out = vec![0.0; bytes.len() / 4];
    decode_row(DType::F32, &bytes, &mut out);
    out
}

/// Positions where two rows differ in bits; +0 and -0 differ.
fn differing(a: &[f32], b: &[f32]) -> Vec<usize> {
    assert_eq!(a.len(), b.len());
    (0..a.len()).filter(|&i| a[i].to_bits() != b[i].to_bits()).collect()
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    decode_row(dtype, bytes, &mut out);
    out
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0xff; dtype.row_bytes(values.len()).unwrap()];
    assert!(encode_row(dtype, values, &mut out));
    out
}

fn rms(values: impl Iterator<Item = f32>) -> f64 {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), v| (sum + f64::from(v) * f64::from(v), n + 1));
    (sum / f64::from(n)).sqrt()
}

const NONE: [usize; 0] = [];

const ENCODED_LIKE_THE_TOOLS: [DType; 6] =
    [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::BF16];

#[test]
fn every_quantized_dtype_has_one_format() {
    for dtype in DType::all() {
        let formats = FORMATS.iter().filter(|format| format.dtype == dtype).count();
        assert_eq!(formats, usize::from(dtype.is_quantized()), "{dtype}");
    }
}

#[test]
fn decoding_equals_the_tools_bit_for_bit() {
    for dtype in DType::all().filter(|dtype| dtype.is_quantized()) {
        let name = dtype.name().to_uppercase();
        for kind in ["", ".real"] {
            let values = decoded(dtype, &fixture(&format!("{name}{kind}.bin")));
            assert!(values.len() >= 512);
            assert_eq!(differing(&values, &floats(&format!("{name}{kind}.f32"))), NONE, "{name}{kind}");
        }
    }
    assert_eq!(differing(&decoded(DType::BF16, &fixture("BF16.bin")), &floats("BF16.f32")), NONE);
}

/// The comparison above can fail: one ULP in one value is seen.
#[test]
fn one_ulp_is_a_difference() {
    let mut values = floats("Q4_K.f32");
    values[700] = f32::from_bits(values[700].to_bits() + 1);
    assert_eq!(differing(&decoded(DType::Q4K, &fixture("Q4_K.bin")), &values), [700]);
}

#[test]
fn encoding_equals_the_tools_byte_for_byte() {
    for dtype in ENCODED_LIKE_THE_TOOLS {
        let name = dtype.name().to_uppercase();
        let bytes = encoded(dtype, &floats(&format!("{name}.quant_in.f32")));
        assert!(bytes == fixture(&format!("{name}.quant_out.bin")), "{name}");
    }
}

/// Half a step of the decoded block bounds the error of every value (plus what f16 scales lose), for real rows.
#[test]
fn encoding_stays_within_its_step() {
    let values = floats("normal_4x512.f32");
    for format in FORMATS {
        let (len, size) = (format.dtype.block_len(), format.dtype.block_bytes());
        let bytes = encoded(format.dtype, &values);
        let back = decoded(format.dtype, &bytes);
        for (b, block) in bytes.chunks_exact(size).enumerate() {
            let mut view = UnitView::default();
            (format.unit_view)(block, &mut view);
            // The step: a sub-scale's when there are any, found as the gap between neighbouring integers.
            let widest = values[b * len..][..len].iter().fold(0.0, |a: f32, v| a.max(v.abs()));
            let bound = match format.dtype {
                DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::Q4_1 | DType::Q5_1 => {
                    // The code next to the extreme one's mirror image is missing in symmetric formats: one step.
                    view.d.abs() * if format.has_min || format.dtype == DType::Q8_0 { 0.5 } else { 1.0 }
                }
                DType::Q4K => widest * 2.0 / 15.0 * 0.75,
                DType::Q5K => widest * 2.0 / 31.0 * 0.85,
                DType::Q6K => widest / 32.0 * 1.1,
                // These search, and clip where that loses less: what they do, rounded up.
                DType::Q2K => widest * 0.35,
                DType::Q3K => widest * 0.16,
                DType::IQ2S => widest * 0.33,
                DType::IQ3XXS => widest * 0.23,
                DType::IQ3S => widest * 0.21,
                DType::IQ4NL => widest * 0.1,
                DType::IQ4XS => widest * 0.13,
                other => panic!("{other} needs a bound here"),
            };
            for k in 0..len {
                let error = (values[b * len + k] - back[b * len + k]).abs();
                assert!(error <= bound + widest * 0.001, "{}: {error} > {bound} at {k}", format.dtype);
            }
        }
    }
}

/// Encoders that are not ggml's own lose as stated against its searching ones: a few percent, or nothing.
#[test]
fn plain_encoders_are_nearly_as_good_as_the_tools() {
    const ALLOWED: [(DType, f64); 10] = [
        (DType::Q2K, 0.9),
        (DType::Q3K, 0.96),
        (DType::Q4K, 1.12),
        (DType::Q5K, 1.12),
        (DType::Q6K, 1.12),
        (DType::IQ2S, 0.96),
        (DType::IQ3XXS, 0.88),
        (DType::IQ3S, 0.81),
        (DType::IQ4NL, 1.01),
        (DType::IQ4XS, 0.97),
    ];
    let values = floats("normal_4x512.f32");
    let row = &values[..512];
    for (dtype, allowed) in ALLOWED {
        let ours = decoded(dtype, &encoded(dtype, row));
        let theirs = floats(&format!("{}.real.f32", dtype.name().to_uppercase()));
        let loss = |back: &[f32]| rms(row.iter().zip(back).map(|(v, b)| v - b));
        let (ours, theirs) = (loss(&ours), loss(&theirs));
        assert!(ours <= theirs * allowed, "{dtype}: rms {ours:.5} against {theirs:.5}");
    }
}

/// What NUMERICS.md section 2 multiplies is what decoding yields: bit for bit without sub-scales, exactly for
/// IQ, within the roundings of `d * sub-scale`, the product and the sum for K.
#[test]
fn the_integer_view_is_the_decoded_block() {
    for format in FORMATS {
        let name = format.dtype.name().to_uppercase();
        let has_sub_scales = format.unit == 256;
        let roundings = if name.starts_with("IQ") { 0.0 } else { 4.0 };
        for file in [format!("{name}.bin"), format!("{name}.real.bin")] {
            for block in fixture(&file).chunks_exact(format.dtype.block_bytes()) {
                let values = decoded(format.dtype, block);
                let mut view = UnitView { len: 7, w: [7; 256], d: 7.0, m: [7; 256], min: 7.0 };
                (format.unit_view)(block, &mut view);
                assert_eq!(view.len, format.unit);
                assert_eq!(view.len, format.dtype.block_len());
                assert!(format.has_min || (view.min == 0.0 && view.m == [0; 256]));
                assert!(view.w[view.len..].iter().chain(&view.m[view.len..]).all(|&v| v == 0));
                for k in 0..view.len {
                    let (weight, min) = (view.d * f32::from(view.w[k]), view.min * f32::from(view.m[k]));
                    let sum = if format.has_min { weight + min } else { weight };
                    if has_sub_scales {
                        let bound = (weight.abs() + min.abs()) * roundings * f32::EPSILON;
                        assert!((sum - values[k]).abs() <= bound, "{name} {k}: {sum} {}", values[k]);
                    } else {
                        assert_eq!(sum.to_bits(), values[k].to_bits(), "{name} {k}");
                    }
                }
            }
        }
    }
}

/// Integer weights of arbitrary bytes stay inside what each file's module doc promises.
#[test]
fn integer_weights_stay_in_range() {
    const PATTERNS: [u8; 4] = [0, 0x7f, 0x80, 0xff];
    let promised = |dtype| match dtype {
        DType::Q4_0 => -8..=7,
        DType::Q5_0 => -16..=15,
        DType::Q4_1 => 0..=15,
        DType::Q5_1 => 0..=31,
        DType::Q8_0 => -128..=127,
        DType::Q2K => 0..=45,
        DType::Q3K => -124..=128,
        DType::Q4K => 0..=945,
        DType::Q5K => 0..=1953,
        DType::Q6K => -4064..=4096,
        DType::IQ2S => -1333..=1333,
        DType::IQ3XXS => -1922..=1922,
        DType::IQ3S => -465..=465,
        DType::IQ4NL => -127..=113,
        DType::IQ4XS => -3937..=4064,
        other => panic!("{other} needs a range here"),
    };
    for format in FORMATS {
        let range = promised(format.dtype);
        let mut seen = (i16::MAX, i16::MIN);
        // Two fillings, changing over where scales end (8 or 16 bytes) or begin (Q3_K, Q6_K).
        for (a, b) in PATTERNS.iter().flat_map(|a| PATTERNS.map(|b| (*a, b))) {
            for border in [8, 16, 96, 192] {
                let size = format.dtype.block_bytes();
                let block: Vec<u8> = (0..size).map(|i| if i < border { a } else { b }).collect();
                let mut view = UnitView::default();
                (format.unit_view)(&block, &mut view);
                for &w in &view.w[..view.len] {
                    assert!(range.contains(&w), "{}: {w}", format.dtype);
                    seen = (seen.0.min(w), seen.1.max(w));
                }
            }
        }
        assert_eq!(seen, (*range.start(), *range.end()), "{}", format.dtype);
    }
}

/// Inputs that no scale fits: zero, constants, subnormals, infinities, NaN. Codes may be anything, panics not;
/// zero and constants come back (the codebooks of IQ3 have no rows of equal high levels, and keep half of them).
#[test]
fn encoders_are_total() {
    for format in FORMATS {
        let len = format.dtype.block_len();
        let tolerance = if matches!(format.dtype, DType::IQ3XXS | DType::IQ3S) { 0.6 } else { 0.01 };
        for value in
            [0.0, -0.0, 1.0, -2.5, 1e-30, f32::MIN_POSITIVE, 1e-45, 7e4, f32::MAX, f32::INFINITY, f32::NAN]
        {
            let bytes = encoded(format.dtype, &vec![value; len]);
            let back = decoded(format.dtype, &bytes);
            if value.abs() <= 2.5 && value.abs() != 1e-30 {
                let error = back.iter().fold(0.0, |a: f32, b| a.max((b - value).abs()));
                assert!(error <= value.abs() * tolerance + 1e-6, "{} {value}: {error}", format.dtype);
            }
        }
        let mut mixed: Vec<f32> = (0..len).map(|i| i as f32 - 9.0).collect();
        mixed[3] = f32::NAN;
        mixed[17] = f32::NEG_INFINITY;
        encoded(format.dtype, &mixed);
    }
}

#[test]
fn plain_types_decode_and_encode() {
    assert_eq!(decoded(DType::F16, &[0, 0x3c, 1, 0, 0, 0xfc]), [1.0, 2f32.powi(-24), f32::NEG_INFINITY]);
    assert_eq!(decoded(DType::F64, &1.1f64.to_le_bytes()), [1.1]);
    assert_eq!(decoded(DType::I8, &[0x80, 127]), [-128.0, 127.0]);
    assert_eq!(decoded(DType::I16, &[0, 0x80]), [-32768.0]);
    assert_eq!(decoded(DType::I32, &(-7i32).to_le_bytes()), [-7.0]);
    assert_eq!(decoded(DType::I64, &(1i64 << 40).to_le_bytes()), [1_099_511_627_776.0]);
    assert_eq!(encoded(DType::F16, &[1.0, 1e6]), [0, 0x3c, 0, 0x7c]);
    assert_eq!(encoded(DType::F64, &[0.5]), 0.5f64.to_le_bytes());
    assert!(!encode_row(DType::I8, &[1.0], &mut [0]));
}

/// Rows may begin at any address: safetensors aligns nothing.
#[test]
fn unaligned_rows_decode() {
    let mut bytes = vec![0xee];
    bytes.extend(fixture("normal_4x512.f32"));
    assert_eq!(differing(&decoded(DType::F32, &bytes[1..]), &floats("normal_4x512.f32")), NONE);
}

#[test]
#[should_panic(expected = "17 bytes do not hold 32 values of q4_0")]
fn a_row_of_the_wrong_size_is_a_caller_error() {
    decode_row(DType::Q4_0, &[0; 17], &mut [0.0; 32]);
}
