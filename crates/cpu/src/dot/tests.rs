//! Bits of every format, instruction set and shape against the reference interpreter.

use ingle_graph::quantize::{Layout, quantize_row};
use ingle_graph::reference;
use ingle_tensor::quant::{self, Format, Minimum};

use super::*;

/// A small generator (xorshift64*): tests draw the same numbers everywhere.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// The bits of a value, with one pattern for every NaN.
pub(super) fn bits(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

/// Offsets of the f16 scales in a block.
fn scales_at(format: &Format) -> &'static [usize] {
    match format.dtype {
        DType::Q6K => &[208],
        DType::MXFP4 => &[],
        _ if format.minimum != Minimum::None => &[0, 2],
        _ => &[0],
    }
}

/// Random file bytes: any codes and sub-scales, all extreme in some blocks; scales mostly ordinary, some of them
/// zero, subnormal, negative or huge.
fn random_weights(format: &Format, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut data = vec![0u8; format.dtype.row_bytes(cols).unwrap() * rows];
    for block in data.chunks_exact_mut(format.dtype.block_bytes()) {
        match random.below(8) {
            0 => block.fill(0xFF),
            1 => block.fill(0x00),
            2 => block.fill(0x80),
            3 => block.fill(0x7F),
            _ => block.iter_mut().for_each(|b| *b = random.next() as u8),
        }
        for &at in scales_at(format) {
            let scale: u16 = match random.below(16) {
                0 => 0x0000,
                1 => 0x8001,
                2 => 0x7BFF,
                3 => 0x03FF,
                _ => (random.next() as u16 & 0x83FF) | (8 + random.below(8) as u16) << 10,
            };
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if format.dtype == DType::MXFP4 {
            // The code that means "not a number" is refused at load.
            block[0] = block[0].min(254);
        }
    }
    data
}

/// Random activations; of each eight rows one is zero, one has tiny units, one all extreme values, one a NaN.
fn random_activations(layout: &Layout, random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0u8; layout.bytes()];
    let mut x = vec![0.0f32; layout.cols];
    for row in 0..layout.rows {
        let kind = (row + random.below(2)) % 8;
        for x in &mut x {
            *x = match kind {
                1 => 0.0,
                2 => random.unit() * 1e-37,
                3 => 3.0,
                4 => -3.0,
                _ => random.unit() * 10.0,
            };
        }
        if kind == 5 {
            x[random.below(layout.cols)] = f32::NAN;
        }
        quantize_row(layout, &x, row, &mut bytes);
    }
    bytes
}

pub(super) fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.iter().copied().filter(|isa| isa.available())
}

/// One case: every instruction set against the reference, with and without a tail.
fn check(format: &Format, digits: usize, rows: usize, units: usize, x_rows: usize) {
    let cols = units * format.unit;
    let mut random = Random::new((rows * 7919 + units * 104_729 + x_rows * 31 + digits) as u64);
    let data = random_weights(format, rows, cols, &mut random);
    let layout = Layout::new(x_rows, cols, format.unit, digits);
    let x = random_activations(&layout, &mut random);
    let bias: Vec<f32> = (0..rows).map(|_| random.unit()).collect();
    let packed = Packed::new(format.dtype, rows, cols, &data, &Team::new(1).unwrap()).unwrap();
    let activations = Activations::new(layout, &x);
    let row_bytes = format.dtype.row_bytes(cols).unwrap();
    let wanted: Vec<f32> = (0..x_rows)
        .flat_map(|r| data.chunks_exact(row_bytes).map(move |w| (r, w)))
        .map(|(r, w)| reference::int_dot(w, format, &x, &layout, r))
        .collect();
    let stride = rows + 3;
    let mut scratch = Scratch::default();
    for isa in available() {
        let mut out = vec![7.0f32; x_rows * stride];
        let mut product = |x_rows: Range<usize>, tiles: Range<usize>, tail: Tail<'_>, out: &mut [f32]| {
            let out = OutPtr::new(out.as_mut_ptr(), stride);
            // SAFETY: the output has all rows, and this is the only thread.
            unsafe { packed.product(isa, &activations, x_rows, tiles, out, tail, &mut scratch) };
        };
        let compare = |out: &[f32], wanted: &dyn Fn(usize, usize) -> f32, what: &str| {
            for (i, &y) in out.iter().enumerate() {
                let (r, n) = (i / stride, i % stride);
                let expected = if n < rows { wanted(r, n) } else { 7.0 };
                assert_eq!(
                    bits(y),
                    bits(expected),
                    "{what}: {} {isa:?} digits {digits} [{rows}, {cols}] x {x_rows}, row {r} output {n}: {y} for {expected}",
                    format.dtype
                );
            }
        };
        let dot = |r: usize, n: usize| wanted[r * rows + n];
        product(0..x_rows, 0..packed.tiles(), Tail::default(), &mut out);
        compare(&out, &dot, "whole");
        // In parts, onto itself as the residual, with a bias.
        let before = out.clone();
        let tail = Tail { bias: Some(&bias), residual: Some(InPtr::new(out.as_ptr(), stride)) };
        let middle = packed.tiles() / 2;
        let split = x_rows / 3;
        product(0..split, 0..packed.tiles(), tail, &mut out);
        product(split..x_rows, middle..packed.tiles(), tail, &mut out);
        product(split..x_rows, 0..middle, tail, &mut out);
        compare(&out, &|r, n| before[r * stride + n] + (dot(r, n) + bias[n]), "parts with tail");
    }
}

#[test]
fn every_format_and_shape_has_the_reference_bits() {
    for format in quant::FORMATS.iter().filter(|format| spec::spec(format.dtype).is_some()) {
        for digits in [1, 2] {
            for rows in [1, 15, 16, 17, 33] {
                for units in [1, 2, 7, 9, 18] {
                    for x_rows in [1, 2, 7] {
                        check(format, digits, rows, units, x_rows);
                    }
                }
            }
            // Blocks of sixteen rows, full and not, with every number of units to an accumulator.
            for (units, x_rows) in [
                (1, 24),
                (7, 31),
                (8, 33),
                (9, 64),
                (18, 47),
                (50, 25),
                (9, 9),
                (2, 13),
                (19, 16),
                (24, 17),
                (8, 11),
            ] {
                check(format, digits, 33, units, x_rows);
            }
        }
    }
}

/// More rows than panels are kept for at once, and more weights than are kept for several groups of panels.
#[test]
fn blocks_of_rows_and_tiles_change_nothing() {
    for format in [&quant::q8_0::FORMAT, &quant::q5_k::FORMAT] {
        check(format, 1, 65, 4096 / format.unit, 211);
    }
    check(&quant::q4_1::FORMAT, 1, 33, 4096 / 32, 400);
    check(&quant::q4_k::FORMAT, 2, 17, 4096 / 256, 400);
}

/// The largest integers of the contract: every code, sub-scale and activation at its limit.
#[test]
fn extreme_units_do_not_overflow() {
    for format in quant::FORMATS.iter().filter(|format| spec::spec(format.dtype).is_some()) {
        let cols = 2 * format.unit;
        for fill in [0x00u8, 0x7F, 0x80, 0xFF] {
            let mut data = vec![fill; format.dtype.row_bytes(cols).unwrap()];
            for block in data.chunks_exact_mut(format.dtype.block_bytes()) {
                for &at in scales_at(format) {
                    block[at..at + 2].copy_from_slice(&0x3C00u16.to_le_bytes());
                }
                if format.dtype == DType::MXFP4 {
                    block[0] = 128;
                }
            }
            for digits in [1, 2] {
                for (value, rows) in [(127.0f32, 1), (-127.0, 1), (127.0, 32), (-127.0, 32)] {
                    let layout = Layout::new(rows, cols, format.unit, digits);
                    let mut x = vec![0u8; layout.bytes()];
                    (0..rows).for_each(|row| quantize_row(&layout, &vec![value; cols], row, &mut x));
                    let packed = Packed::new(format.dtype, 1, cols, &data, &Team::new(1).unwrap()).unwrap();
                    let wanted = reference::int_dot(&data, format, &x, &layout, 0);
                    for isa in available() {
                        let mut y = vec![0.0f32; rows];
                        let out = OutPtr::new(y.as_mut_ptr(), 1);
                        let activations = Activations::new(layout, &x);
                        // SAFETY: so many rows of one output.
                        unsafe {
                            packed.product(
                                isa,
                                &activations,
                                0..rows,
                                0..1,
                                out,
                                Tail::default(),
                                &mut Scratch::default(),
                            );
                        }
                        assert!(
                            y.iter().all(|&y| bits(y) == bits(wanted)),
                            "{} {isa:?} {fill:#x} {value} digits {digits}: {y:?} for {wanted}",
                            format.dtype
                        );
                    }
                }
            }
        }
    }
}

/// The comparison of these tests sees one ULP, and a sign of zero, but not a NaN's payload.
#[test]
fn one_ulp_is_seen() {
    let y = 1.5f32;
    assert_ne!(bits(y), bits(f32::from_bits(y.to_bits() + 1)));
    assert_ne!(bits(0.0), bits(-0.0));
    assert_eq!(bits(f32::NAN), bits(f32::from_bits(0x7FC0_1234)));
}

/// Decode is bound by memory: packing must not make the weights larger than their file by more than 3%.
#[test]
fn packed_bytes_are_near_the_file_bytes() {
    for format in quant::FORMATS.iter().filter(|format| spec::spec(format.dtype).is_some()) {
        let (rows, cols) = (64, 4096);
        let data = vec![0u8; format.dtype.row_bytes(cols).unwrap() * rows];
        let packed = Packed::new(format.dtype, rows, cols, &data, &Team::new(1).unwrap()).unwrap();
        assert_eq!(Packed::planned_bytes(format.dtype, rows, cols), Some(packed.bytes()));
        assert!(
            packed.bytes() * 100 <= data.len() * 103,
            "{}: {} for {}",
            format.dtype,
            packed.bytes(),
            data.len()
        );
    }
}

#[test]
fn what_cannot_be_packed_is_refused_with_the_numbers() {
    let team = Team::new(1).unwrap();
    let error = Packed::new(DType::F16, 1, 32, &[0; 64], &team).unwrap_err().to_string();
    assert_eq!(error, "f16 weights have no packed form; use the float product");
    let error = Packed::new(DType::Q8_0, 2, 32, &[0; 67], &team).unwrap_err().to_string();
    assert_eq!(error, "67 bytes do not hold 2 rows of 32 values of q8_0");
    let error = Packed::new(DType::Q4K, 1, 32, &[0; 18], &team).unwrap_err().to_string();
    assert_eq!(error, "18 bytes do not hold 1 rows of 32 values of q4_k");
}
