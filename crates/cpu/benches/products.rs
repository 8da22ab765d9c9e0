//! Speed of the quantized products on one thread: format by instruction set by rows of activations.
//!
//!     cargo bench -p ingle-cpu --bench products -- [FORMAT | PATH | ROWS]...
//!
//! One row is bound by reading weights, so its figure is GB/s over matrices of 64 MiB; more rows are bound by arithmetic,
//! and theirs is GOPS (two operations for a product and its addition). Each figure is the best of several runs.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ingle_cpu::dot::{Activations, OutPtr, Packed, Scratch, Tail};
use ingle_cpu::{Isa, Team};
use ingle_graph::quantize::{Layout, quantize_row};
use ingle_tensor::DType;

const FORMATS: [DType; 11] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4NL,
    DType::IQ4XS,
    DType::MXFP4,
];

const ROWS: [usize; 7] = [4, 8, 12, 16, 32, 64, 512];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let team = Team::new(1).expect("a thread");
    println!("{:6} {:8} {:>10} {:>40}", "format", "path", "1: GB/s", "4, 8, 12, 16, 32, 64, 512 rows: GOPS");
    // Names of one kind choose among it; no name of a kind chooses all.
    let chosen = |name: &str, all: &[String]| {
        wanted.iter().any(|w| w == name) || !wanted.iter().any(|w| all.contains(w))
    };
    let formats = FORMATS.map(|dtype| dtype.to_string());
    let paths = Isa::ALL.map(|isa| isa.name().to_string());
    for dtype in FORMATS.into_iter().filter(|dtype| chosen(&dtype.to_string(), &formats)) {
        let (rows, cols) = (768, 2048);
        let packed = pack(dtype, rows, cols, &team);
        let wide = pack(dtype, 64 << 20 >> 12, 4096 * 8 / 8, &team);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available() && chosen(isa.name(), &paths)) {
            let bytes = wide.bytes() as f64;
            let mut line = format!(
                "{:6} {:8} {:10.1}",
                dtype.to_string(),
                isa.name(),
                bytes / time(&wide, isa, 1) / 1e9
            );
            for x_rows in ROWS.into_iter().filter(|n| chosen(&n.to_string(), &ROWS.map(|n| n.to_string()))) {
                let seconds = time(&packed, isa, x_rows);
                line += &format!(" {:7.0}", 2.0 * (rows * cols * x_rows) as f64 / seconds / 1e9);
            }
            println!("{line}");
        }
    }
}

/// A matrix of any codes and ordinary scales.
fn pack(dtype: DType, rows: usize, cols: usize, team: &Team) -> Packed {
    let bytes = dtype.row_bytes(cols).expect("whole blocks") * rows;
    // Every pair of bytes is an ordinary half-precision number.
    let data: Vec<u8> =
        (0..bytes).map(|i| if i % 2 == 0 { (i * 37) as u8 } else { 0x20 | (i * 11) as u8 & 0x0F }).collect();
    Packed::new(dtype, rows, cols, &data, team).expect("a packed format")
}

/// Seconds of one product: the best of at least five, and of a fifth of a second.
fn time(packed: &Packed, isa: Isa, x_rows: usize) -> f64 {
    let layout = Layout::new(x_rows, packed.cols(), packed.unit(), 1);
    let mut bytes = vec![0u8; layout.bytes()];
    for row in 0..x_rows {
        let x: Vec<f32> = (0..packed.cols()).map(|i| ((i * 31 + row * 17) % 255) as f32 - 127.0).collect();
        quantize_row(&layout, &x, row, &mut bytes);
    }
    let x = Activations::new(layout, &bytes);
    let mut out = vec![0.0f32; x_rows * packed.rows()];
    let mut scratch = Scratch::default();
    scratch.reserve(packed.scratch_bytes(1, x_rows));
    let (mut best, start) = (f64::MAX, Instant::now());
    let mut runs = 0;
    while runs < 5 || start.elapsed() < Duration::from_millis(200) {
        let begin = Instant::now();
        let to = OutPtr::new(out.as_mut_ptr(), packed.rows());
        // SAFETY: the output has all rows and columns, the instruction set is available, and nobody else is here.
        unsafe { packed.product(isa, &x, 0..x_rows, 0..packed.tiles(), to, Tail::default(), &mut scratch) };
        best = best.min(begin.elapsed().as_secs_f64());
        runs += 1;
    }
    black_box(&out);
    best
}
