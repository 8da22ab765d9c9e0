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

const ENCODED_LIKE_THE_TOOLS: [DType; 9] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::MXFP4,
    DType::BF16,
];

/// Types of which the tools decode nothing.
const BY_HAND: [DType; 4] = [DType::Q8_1, DType::Q8K, DType::Q1_0, DType::Q2_0];

/// Bytes of this type: what the tools made, and what is written by hand.
fn samples(dtype: DType) -> Vec<u8> {
    if BY_HAND.contains(&dtype) {
        return by_hand::cases().into_iter().filter(|case| case.0 == dtype).flat_map(|case| case.1).collect();
    }
    let name = dtype.name().to_uppercase();
    [fixture(&format!("{name}.bin")), fixture(&format!("{name}.real.bin"))].concat()
}

/// The units of a block.
fn views(format: &Format, block: &[u8]) -> Vec<UnitView> {
    let units = 0..format.dtype.block_len() / format.unit;
    let view = |unit| {
        let mut view = UnitView { len: 7, w: [7; 256], d: 7.0, m: [7; 256], min: 7.0 };
        (format.unit_view)(block, unit, &mut view);
        view
    };
    units.map(view).collect()
}

#[test]
fn every_quantized_dtype_has_one_format() {
    for dtype in DType::all() {
        let formats = FORMATS.iter().filter(|format| format.dtype == dtype).count();
        assert_eq!(formats, usize::from(dtype.is_quantized()), "{dtype}");
    }
}

#[test]
fn decoding_equals_the_tools_bit_for_bit() {
    for dtype in DType::all().filter(|dtype| dtype.is_quantized() && !BY_HAND.contains(dtype)) {
        let name = dtype.name().to_uppercase();
        for kind in ["", ".real"] {
            let values = decoded(dtype, &fixture(&format!("{name}{kind}.bin")));
            assert!(values.len() >= 512);
            assert_eq!(differing(&values, &floats(&format!("{name}{kind}.f32"))), NONE, "{name}{kind}");
        }
    }
    assert_eq!(differing(&decoded(DType::BF16, &fixture("BF16.bin")), &floats("BF16.f32")), NONE);
}

#[test]
fn decoding_equals_what_was_derived_by_hand() {
    let cases = by_hand::cases();
    for dtype in DType::all().filter(|dtype| !dtype.is_quantized() || BY_HAND.contains(dtype)) {
        let (_, bytes, values) =
            cases.iter().find(|case| case.0 == dtype).expect("a case for every such type");
        assert_eq!(differing(&decoded(dtype, bytes), values), NONE, "{dtype}");
    }
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
            let view = &views(format, block)[0];
            // The step: a sub-scale's when there are any, found as the gap between neighbouring integers.
            let widest = values[b * len..][..len].iter().fold(0.0, |a: f32, v| a.max(v.abs()));
            let bound = match format.dtype {
                // The code next to the extreme one's mirror image is missing in these: one step.
                DType::Q4_0 | DType::Q5_0 => view.d.abs(),
                DType::Q4_1 | DType::Q5_1 | DType::Q8_0 | DType::Q8_1 | DType::Q8K => view.d.abs() * 0.5,
                // -1, 0 and 1 times the widest value.
                DType::TQ1_0 | DType::TQ2_0 => widest * 0.5,
                DType::Q4K => widest * 2.0 / 15.0 * 0.75,
                DType::Q5K => widest * 2.0 / 31.0 * 0.85,
                DType::Q6K => widest / 32.0 * 1.1,
                // These search, and clip where that loses less: what they do, rounded up.
                DType::Q2K => widest * 0.35,
                DType::Q3K => widest * 0.16,
                DType::IQ1S => widest * 0.61,
                DType::IQ1M => widest * 0.56,
                DType::IQ2XXS => widest * 0.39,
                DType::IQ2XS => widest * 0.35,
                DType::IQ2S => widest * 0.33,
                DType::IQ3XXS => widest * 0.23,
                DType::IQ3S => widest * 0.21,
                DType::IQ4NL => widest * 0.1,
                DType::IQ4XS => widest * 0.13,
                DType::MXFP4 => widest * 0.25,
                DType::NVFP4 => widest * 0.16,
                DType::Q1_0 => widest * 0.77,
                DType::Q2_0 => widest * 0.55,
                other => panic!("{other} needs a bound here"),
            };
            for k in 0..len {
                let error = (values[b * len + k] - back[b * len + k]).abs();
                assert!(error <= bound + widest * 0.001, "{}: {error} > {bound} at {k}", format.dtype);
            }
        }
    }
}

/// Values on the grid of a block come back as they are: what was rounded once is not changed by rounding it again. Only
/// IQ4_XS, whose codes need not reach the end of their levels, then finds another scale.
#[test]
fn rounding_twice_is_rounding_once() {
    let values = [floats("normal_4x512.f32"), floats("Q4_0.quant_in.f32")].concat();
    let values = &values[..values.len() / 256 * 256];
    let moved = |dtype| {
        let once = decoded(dtype, &encoded(dtype, values));
        differing(&once, &decoded(dtype, &encoded(dtype, &once))).len()
    };
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q5_0,
        DType::Q4_1,
        DType::Q5_1,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::IQ4NL,
    ] {
        assert_eq!(moved(dtype), 0, "{dtype}");
    }
    assert!(moved(DType::IQ4XS) > 0);
}

/// No value is further from its code than half a step of the coarsest grid that spans its block, which is what plain
/// rounding can promise; half a step more where the grid has no code for the extreme value's mirror image, and what the
/// rounding of the scales costs.
#[test]
fn plain_rounding_keeps_its_promise_in_every_block() {
    let values = floats("normal_4x512.f32");
    for (dtype, run, steps, slack) in [
        (DType::Q8_0, 32, 127.0, 0.57),
        (DType::Q4_0, 32, 8.0, 1.005),
        (DType::Q5_0, 32, 16.0, 1.01),
        // Of the block's span and not of its extreme.
        (DType::Q4_1, 32, 15.0, 0.515),
        (DType::Q5_1, 32, 31.0, 0.53),
        (DType::Q4K, 32, 15.0, 0.6),
        (DType::Q5K, 32, 31.0, 0.6),
        (DType::Q6K, 16, 32.0, 1.1),
        // Between the two widest of the uneven levels.
        (DType::IQ4NL, 32, 127.0 / 24.0, 0.6),
        (DType::IQ4XS, 32, 127.0 / 24.0, 0.75),
    ] {
        let has_min = format(dtype).unwrap().minimum != Minimum::None;
        let back = decoded(dtype, &encoded(dtype, &values));
        let mut worst = 0f32;
        for (values, back) in values.chunks_exact(run).zip(back.chunks_exact(run)) {
            let (lo, hi) = range(values);
            let step = if has_min { hi.max(0.0) - lo.min(0.0) } else { hi.max(-lo) } / steps;
            worst = values.iter().zip(back).fold(worst, |worst, (v, b)| worst.max((v - b).abs() / step));
        }
        assert!(worst <= slack, "{dtype}: {worst} steps");
        assert!(worst > 0.8 * slack, "{dtype}: {worst} steps, and {slack} are allowed");
    }
}

/// Encoders that are not ggml's own lose as stated against its searching ones: a few percent, or nothing.
#[test]
fn plain_encoders_are_nearly_as_good_as_the_tools() {
    const ALLOWED: [(DType, f64); 15] = [
        (DType::Q2K, 0.9),
        (DType::Q3K, 0.96),
        (DType::Q4K, 1.12),
        (DType::Q5K, 1.12),
        (DType::Q6K, 1.12),
        (DType::IQ1S, 0.89),
        (DType::IQ1M, 0.7),
        (DType::IQ2XXS, 0.96),
        (DType::IQ2XS, 0.99),
        (DType::IQ2S, 0.96),
        (DType::IQ3XXS, 0.88),
        (DType::IQ3S, 0.81),
        (DType::IQ4NL, 1.01),
        (DType::IQ4XS, 0.97),
        (DType::NVFP4, 0.91),
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
        let name = format.dtype.name();
        for block in samples(format.dtype).chunks_exact(format.dtype.block_bytes()) {
            let values = decoded(format.dtype, block);
            for (view, values) in views(format, block).iter().zip(values.chunks_exact(format.unit)) {
                assert_eq!(view.len, format.unit);
                let has_min = format.minimum != Minimum::None;
                assert!(has_min || (view.min == 0.0 && view.m == [0; 256]));
                assert!(view.w[view.len..].iter().chain(&view.m[view.len..]).all(|&v| v == 0));
                for k in 0..view.len {
                    let (weight, min) = (view.d * f32::from(view.w[k]), view.min * f32::from(view.m[k]));
                    let sum = if has_min { weight + min } else { weight };
                    if name.ends_with("_k") && format.dtype != DType::Q8K {
                        let bound = (weight.abs() + min.abs()) * 4.0 * f32::EPSILON;
                        assert!((sum - values[k]).abs() <= bound, "{name} {k}: {sum} {}", values[k]);
                    } else if name.starts_with("iq") {
                        assert_eq!(sum, values[k], "{name} {k}");
                    } else {
                        assert_eq!(sum.to_bits(), values[k].to_bits(), "{name} {k}");
                    }
                }
            }
        }
    }
}

/// Integer weights of arbitrary bytes stay inside what each file's module doc promises, and reach it.
#[test]
fn integer_weights_stay_in_range() {
    const PATTERNS: [u8; 7] = [0, 0x77, 0x7f, 0x80, 0x88, 0xf0, 0xff];
    let promised = |dtype| match dtype {
        DType::Q4_0 => -8..=7,
        DType::Q5_0 => -16..=15,
        DType::Q4_1 => 0..=15,
        DType::Q5_1 => 0..=31,
        DType::Q8_0 | DType::Q8_1 | DType::Q8K => -128..=127,
        DType::Q2K => 0..=45,
        DType::Q3K => -124..=128,
        DType::Q4K => 0..=945,
        DType::Q5K => 0..=1953,
        DType::Q6K => -4064..=4096,
        DType::IQ1S | DType::IQ1M => -135..=135,
        DType::IQ2XXS | DType::IQ2XS | DType::IQ2S => -1333..=1333,
        DType::IQ3XXS => -1922..=1922,
        DType::IQ3S => -465..=465,
        DType::IQ4NL => -127..=113,
        DType::IQ4XS => -3937..=4064,
        DType::TQ1_0 | DType::Q1_0 => -1..=1,
        DType::TQ2_0 | DType::Q2_0 => -1..=2,
        DType::MXFP4 | DType::NVFP4 => -12..=12,
        other => panic!("{other} needs a range here"),
    };
    for format in FORMATS {
        let range = promised(format.dtype);
        let mut seen = (i16::MAX, i16::MIN);
        // Three fillings: up to a border, where scales end or begin in some format, then even and odd bytes.
        for (a, b, c) in PATTERNS
            .iter()
            .flat_map(|a| PATTERNS.map(|b| (*a, b)))
            .flat_map(|(a, b)| PATTERNS.map(|c| (a, b, c)))
        {
            for border in [8, 16, 34, 48, 96, 192] {
                let byte = |i: usize| if i < border { a } else { [b, c][i % 2] };
                let block: Vec<u8> = (0..format.dtype.block_bytes()).map(byte).collect();
                for view in views(format, &block) {
                    for &w in &view.w[..view.len] {
                        assert!(range.contains(&w), "{}: {w}", format.dtype);
                        seen = (seen.0.min(w), seen.1.max(w));
                    }
                }
            }
        }
        assert_eq!(seen, (*range.start(), *range.end()), "{}", format.dtype);
    }
}

/// Inputs that no scale fits: zero, constants, subnormals, infinities, NaN. Codes may be anything, panics not;
/// zero and constants come back, as well as the format can (some codebooks have no rows of equal high levels, and
/// keep a part of them; the scales of 4-bit floats are coarse).
#[test]
fn encoders_are_total() {
    for format in FORMATS {
        let len = format.dtype.block_len();
        let tolerance = match format.dtype {
            DType::IQ2XXS => 0.82,
            DType::IQ3XXS | DType::IQ3S => 0.6,
            DType::MXFP4 => 0.21,
            DType::NVFP4 => 0.04,
            _ => 0.01,
        };
        for value in
            [0.0, -0.0, 1.0, -2.5, 1e-30, f32::MIN_POSITIVE, 1e-45, 7e4, f32::MAX, f32::INFINITY, f32::NAN]
        {
            let bytes = encoded(format.dtype, &vec![value; len]);
            let back = decoded(format.dtype, &bytes);
            if value.abs() <= 2.5 && value.abs() != 1e-30 {
                let error = back.iter().fold(0.0, |a: f32, b| a.max((b - value).abs()));
                assert!(error <= value.abs() * tolerance + 1e-6, "{} {value}: {error}", format.dtype);
            }
            assert!(check_scales(format.dtype, &bytes).is_ok(), "{} {value}", format.dtype);
        }
        let mut mixed: Vec<f32> = (0..len).map(|i| i as f32 - 9.0).collect();
        mixed[3] = f32::NAN;
        mixed[17] = f32::NEG_INFINITY;
        encoded(format.dtype, &mixed);
    }
}

/// "Not a number" as a scale is found wherever it stands, and nothing else is.
#[test]
fn scale_codes_without_a_finite_meaning_are_found() {
    for (dtype, scales, bad) in
        [(DType::MXFP4, 1, &[0xff][..]), (DType::NVFP4, 4, &[0x7f, 0xff]), (DType::Q8_0, 2, &[])]
    {
        let size = dtype.block_bytes();
        for code in 0..=255 {
            for at in 0..scales {
                let mut bytes = vec![0xff; 3 * size];
                (0..3).for_each(|block| bytes[block * size..][..scales].fill(1));
                bytes[size + at] = code;
                let found = check_scales(dtype, &bytes).map_err(|error| error.to_string());
                match found {
                    Ok(()) => assert!(!bad.contains(&code), "{dtype} {code:#x}"),
                    Err(error) => {
                        assert!(bad.contains(&code), "{error}");
                        assert!(
                            error.starts_with(&format!("block 1 has the scale code {code:#04x}")),
                            "{error}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn plain_types_encode() {
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
