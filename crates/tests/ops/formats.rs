//! One line for each element type: what decodes, what executes, whose bits are equal, what is lost.
//!
//! `cargo test --release -p ingle-tests formats -- --nocapture` prints the table. A type without a line, or with a line
//! that does not hold, fails the test.

#[path = "../../tensor/src/quant/by_hand.rs"]
mod by_hand;

use ingle_graph::FloatArithmetic;
use ingle_graph::op::UNITS;
use ingle_graph::quantize::{Layout, quantize_row};
use ingle_graph::reference;
use ingle_tensor::{DType, quant};
use ingle_tests::Random;

use super::cases::Case;
use super::{Cell, Table, check};

/// Blocks and values from the published decoder.
fn fixture(name: &str) -> Option<Vec<u8>> {
    std::fs::read(crate::golden::fixture(&format!("quants/{name}"))).ok()
}

fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    quant::decode_row(dtype, bytes, &mut values);
    values
}

/// Values equal bit for bit, values compared, and where they come from.
struct Decoded {
    equal: usize,
    compared: usize,
    source: &'static str,
}

fn decoded(dtype: DType) -> Decoded {
    let name = dtype.name().to_uppercase();
    let oracle = ["", ".real"].iter().filter_map(|kind| {
        let f32s = fixture(&format!("{name}{kind}.f32"))?;
        Some((fixture(&format!("{name}{kind}.bin"))?, values(DType::F32, &f32s)))
    });
    let mut pairs: Vec<(Vec<u8>, Vec<f32>)> = oracle.collect();
    let source = if pairs.is_empty() { "by hand" } else { "oracle" };
    if pairs.is_empty() {
        pairs
            .extend(by_hand::cases().into_iter().filter(|case| case.0 == dtype).map(|case| (case.1, case.2)));
    }
    let mut found = Decoded { equal: 0, compared: 0, source };
    for (bytes, want) in pairs {
        let got = values(dtype, &bytes);
        assert_eq!(got.len(), want.len(), "{dtype}");
        found.compared += want.len();
        found.equal += got.iter().zip(&want).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
    }
    found
}

/// `values` as this type: by its encoder, or as integers, for which they should be whole.
fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; dtype.row_bytes(values.len()).expect("whole blocks")];
    if !quant::encode_row(dtype, values, &mut bytes) {
        for (bytes, &value) in bytes.chunks_exact_mut(dtype.block_bytes()).zip(values) {
            let size = bytes.len();
            bytes.copy_from_slice(&(value as i64).to_le_bytes()[..size]);
        }
    }
    bytes
}

/// Values, made whole for an integer type.
fn whole_if_integer(dtype: DType, values: Vec<f32>) -> Vec<f32> {
    match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
            values.iter().map(|v| (v * 25.0).round()).collect()
        }
        _ => values,
    }
}

/// The root mean square of the differences, as a share of that of `want`.
fn relative_rms(got: impl Iterator<Item = f64>, want: impl Iterator<Item = f64>) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (got, want) in got.zip(want) {
        error += (got - want).powi(2);
        size += want.powi(2);
    }
    (error / size).sqrt()
}

/// What one row of normal values loses as this type, by the encoder here and, where it is known, by ggml's.
fn weight_loss(dtype: DType) -> (f64, Option<f64>) {
    let bytes = fixture("normal_4x512.f32").expect("the normal values");
    let row = whole_if_integer(dtype, values(DType::F32, &bytes[..4 * 512]));
    let loss =
        |back: Vec<f32>| relative_rms(back.into_iter().map(f64::from), row.iter().map(|&v| f64::from(v)));
    let theirs = fixture(&format!("{}.real.f32", dtype.name().to_uppercase()));
    (loss(values(dtype, &encoded(dtype, &row))), theirs.map(|bytes| loss(values(DType::F32, &bytes))))
}

/// What products lose against those of the same weights in f64: what quantized activations and f32 sums cost.
fn product_loss(dtype: DType) -> f64 {
    const ROWS: usize = 4;
    const OUTPUTS: usize = 16;
    const COLS: usize = 1024;
    let mut random = Random::new(11);
    let mut normal = || -> Vec<f32> { (0..COLS).map(|_| random.normal()).collect() };
    let x: Vec<Vec<f32>> = (0..ROWS).map(|_| normal()).collect();
    let layout = Layout::new(ROWS, COLS, dtype.block_len().max(UNITS[0]), 1);
    let mut digits = vec![0; layout.bytes()];
    x.iter().enumerate().for_each(|(row, x)| quantize_row(&layout, x, row, &mut digits));
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for _ in 0..OUTPUTS {
        let bytes = encoded(dtype, &whole_if_integer(dtype, normal()));
        let weights = values(dtype, &bytes);
        for (row, x) in x.iter().enumerate() {
            got.push(f64::from(match quant::format(dtype) {
                Some(format) => reference::int_dot(&bytes, format, &digits, &layout, row),
                None => reference::dot(&weights, x),
            }));
            want.push(weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum());
        }
    }
    relative_rms(got.into_iter(), want.into_iter())
}

/// Most that our encoder may lose where ggml's is not known.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 | DType::F64 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0.0,
        DType::F16 => 0.0003,
        DType::BF16 => 0.002,
        DType::Q8_1 | DType::Q8K => 0.008,
        DType::Q1_0 => 0.62,
        DType::Q2_0 => 0.38,
        other => panic!("{other} needs a limit here"),
    }
}

/// All that was run of a type: cases of every number of activation digits, scaled or not, on all paths.
fn executed(dtype: DType, table: &Table) -> Cell {
    let mut sum = Cell::default();
    let groups = table.iter().filter(|(group, _)| {
        group.strip_prefix(&format!("linear {dtype}")).is_some_and(|rest| rest.starts_with([' ', ',']))
    });
    for cell in groups.flat_map(|(_, row)| row.values()) {
        sum.equal += cell.equal;
        sum.cases += cell.cases;
        sum.paths.extend(cell.paths.iter().cloned());
    }
    sum
}

/// The table. What ran is what the backend counted; `view` is the integer view, `f32x32` also stands for the arm with f32
/// activations of quantized types.
#[test]
fn formats() {
    let table = check(FloatArithmetic::F32x32, |case| matches!(case, Case::Linear { .. }));
    println!(
        "{:8} {:>17} {:>9} {:>11}  {:>9} {:>9} {:>9}  executed",
        "type", "values equal", "source", "bits equal", "rms", "ggml's", "product"
    );
    for dtype in DType::all() {
        let (decoded, run) = (decoded(dtype), executed(dtype, &table));
        let ((ours, theirs), product) = (weight_loss(dtype), product_loss(dtype));
        let paths: Vec<&str> = run.paths.iter().map(|path| path.trim_start_matches("linear.")).collect();
        println!(
            "{dtype:8} {:>17} {:>9} {:>11}  {ours:>9.6} {:>9} {product:>9.1e}  {}",
            format!("{}/{}", decoded.equal, decoded.compared),
            decoded.source,
            format!("{}/{}", run.equal, run.cases),
            theirs.map_or("-".into(), |theirs| format!("{theirs:.6}")),
            paths.join(" "),
        );
        assert!(decoded.compared > 0 && decoded.equal == decoded.compared, "{dtype} does not decode");
        assert!(run.cases > 0 && run.equal == run.cases, "{dtype} does not execute");
        let integer = run.paths.iter().any(|path| !path.starts_with("linear.f32x32"));
        assert_eq!(integer, dtype.is_quantized(), "{dtype} ran as {:?}", run.paths);
        let most = theirs.map_or_else(|| limit(dtype), |theirs| theirs * 1.13);
        assert!(ours <= most, "{dtype}: our encoder loses {ours}, more than {most}");
        let most = if dtype.is_quantized() { 0.01 } else { 1e-6 };
        assert!(product <= most, "{dtype}: products lose {product}, more than {most}");
    }
}
