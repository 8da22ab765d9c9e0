//! Speed of the integer products of each format and instruction set, one thread:
//! GB/s of packed weights at one activation row, GOPS (two per weight and row) at many.
//!
//!     cargo run --release -p ingle-cpu --example dot_speed [format] [cols]

use std::time::Instant;

use ingle_cpu::dot::{Activations, OutPtr, Packed, Scratch, Tail};
use ingle_cpu::{Isa, Team};
use ingle_graph::quantize::{Layout, quantize_row};
use ingle_tensor::quant;

/// Weights of the measurement with one row: beyond the caches of most machines.
const DECODE_BYTES: usize = 512 << 20;

/// Activation rows of the other measurement, and its output rows.
const PREFILL: (usize, usize) = (512, 1024);

fn main() {
    let mut args = std::env::args().skip(1);
    let only = args.next().filter(|name| name != "all");
    let cols: usize = args.next().map_or(2048, |cols| cols.parse().expect("columns are a number"));
    let team = Team::new(1).unwrap();
    println!("{:6} {:8} {:>12} {:>14}", "format", "isa", "1 row GB/s", "512 rows GOPS");
    for format in quant::FORMATS {
        if only.as_ref().is_some_and(|name| *name != format.dtype.name()) {
            continue;
        }
        let row_bytes = format.dtype.row_bytes(cols).expect("columns are a multiple of the block");
        let pack = |rows: usize| {
            // Codes and scales of any kind: the speed depends on neither.
            let data: Vec<u8> = (0..rows * row_bytes).map(|i| (i * 31 + i / 97) as u8 & 0x3F).collect();
            Packed::new(format.dtype, rows, cols, &data, &team)
        };
        let (Ok(large), Ok(small)) = (pack(DECODE_BYTES / row_bytes), pack(PREFILL.1)) else { continue };
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            // The scalar path is there for its bits: a few rows tell its speed.
            let (rows, repeats) = if isa == Isa::Scalar { (4, 1) } else { (PREFILL.0, 7) };
            let decode = seconds(isa, &large, 1, repeats);
            let prefill = seconds(isa, &small, rows, repeats);
            println!(
                "{:6} {:8} {:>12.2} {:>14.0}",
                format.dtype.name(),
                isa.name(),
                large.bytes() as f64 / decode / 1e9,
                2.0 * (PREFILL.1 * cols * rows) as f64 / prefill / 1e9,
            );
        }
    }
}

/// Least time of `repeats` products of the whole matrix with `x_rows` rows.
fn seconds(isa: Isa, packed: &Packed, x_rows: usize, repeats: usize) -> f64 {
    let layout = Layout::new(x_rows, packed.cols(), packed.unit(), 1);
    let mut x = vec![0u8; layout.bytes()];
    let row: Vec<f32> = (0..packed.cols()).map(|k| (k % 61) as f32 - 30.0).collect();
    for r in 0..x_rows {
        quantize_row(&layout, &row, r, &mut x);
    }
    let activations = Activations::new(layout, &x);
    let mut out = vec![0.0f32; x_rows * packed.rows()];
    let mut scratch = Scratch::default();
    let mut best = f64::INFINITY;
    for _ in 0..repeats {
        let to = OutPtr::new(out.as_mut_ptr(), packed.rows());
        let start = Instant::now();
        // SAFETY: the output holds all rows, and this is the only thread.
        unsafe {
            packed.product(
                isa,
                &activations,
                0..x_rows,
                0..packed.tiles(),
                to,
                Tail::default(),
                &mut scratch,
            );
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}
