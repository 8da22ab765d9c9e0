//! Speed of products with matrices of floats, all threads of the backend: type by instruction set by rows of activations.
//!
//!     cargo bench -p ingle-cpu --bench floats [-- TYPE | PATH]...
//!
//! One row is bound by reading weights, so its figure is GB/s over a matrix of 64 MiB; more rows are bound by arithmetic,
//! and theirs is GFLOP/s (two for a product and its addition). Each figure is the best of several runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_graph::{Backend, Bucket, Builder, Graph, Inputs, KvPlan, PAGE, PlanKey, PlanOptions, passes};
use ingle_tensor::{Checkpoint, DType, gguf};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Outputs and columns of the matrix that many rows are multiplied with, and what a matrix for one row has in all.
const SHAPE: (usize, usize) = (1536, 576);
const WEIGHTS: usize = 64 << 20;

const ROWS: [usize; 7] = [2, 4, 8, 16, 32, 64, 512];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    // Names of one kind choose among it; no name of a kind chooses all.
    let chosen = |name: String, all: &[String]| {
        wanted.contains(&name) || !wanted.iter().any(|wanted| all.contains(wanted))
    };
    let types = TYPES.map(|dtype| dtype.to_string());
    let paths = Isa::ALL.map(|isa| isa.to_string());
    println!("{:6} {:8} {:>10} {:>40}", "type", "path", "1: GB/s", "2, 4, 8, 16, 32, 64, 512 rows: GFLOP/s");
    for dtype in TYPES.into_iter().filter(|dtype| chosen(dtype.to_string(), &types)) {
        let (outputs, cols) = SHAPE;
        let bytes = dtype.row_bytes(cols).expect("whole elements");
        let (tall, small) = (model(dtype, WEIGHTS / bytes, cols), model(dtype, outputs, cols));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available() && chosen(isa.to_string(), &paths)) {
            let mut cpu = Cpu::new(&CpuOptions { threads: 0, isa: Some(isa) }).expect("threads");
            let rate = (WEIGHTS / bytes * bytes) as f64 / time(&mut cpu, &tall, 1) / 1e9;
            let mut line = format!("{:6} {:8} {rate:10.1}", dtype.to_string(), isa.name());
            for rows in ROWS {
                let flops = 2.0 * (outputs * cols * rows) as f64;
                line += &format!(" {:7.1}", flops / time(&mut cpu, &small, rows) / 1e9);
            }
            println!("{line}");
        }
    }
}

/// One product of rows of a table.
fn model(dtype: DType, outputs: usize, cols: usize) -> (Graph, Arc<Checkpoint>) {
    let mut writer = gguf::Writer::new();
    writer.set("general.architecture", "bench").expect("a fresh key");
    let values = |n: usize| (0..n).map(|i| ((i * 7919 + i / 83) % 1009) as f32 / 500.0 - 1.0);
    let table: Vec<u8> = values(cols).flat_map(f32::to_le_bytes).collect();
    writer.tensor("x", DType::F32, &[1, cols], table).expect("a fresh tensor");
    let values: Vec<f32> = values(outputs * cols).collect();
    let mut weights = vec![0; dtype.row_bytes(values.len()).expect("whole elements")];
    assert!(ingle_tensor::quant::encode_row(dtype, &values, &mut weights), "{dtype} has an encoder");
    writer.tensor("w", dtype, &[outputs, cols], weights).expect("a fresh tensor");
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    writer.write(&mut file.as_file()).expect("room for the file");
    let checkpoint = Arc::new(Checkpoint::open(file.path()).expect("the file just written"));
    let mut b = Builder::new(&checkpoint);
    b.set_layer(Some(0));
    let x = b.embed("x", 1, cols, 1.0);
    let w = b.matrix("w", outputs, cols);
    let y = b.linear("product", x, w, None);
    b.output("y", y);
    (b.finish().expect("a small graph"), checkpoint)
}

/// Seconds of one product: the best of at least five, and of a fifth of a second.
fn time(cpu: &mut Cpu, model: &(Graph, Arc<Checkpoint>), rows: usize) -> f64 {
    let (graph, checkpoint) = model;
    let options = PlanOptions::default();
    cpu.load(graph, checkpoint.clone(), &options, KvPlan::uniform(graph, 1, PAGE)).expect("a small model");
    let mut inputs = Inputs::default();
    for row in 0..rows as u32 {
        inputs.tokens.push(0);
        inputs.positions.push(row);
        inputs.sequences.push(0);
        inputs.wanted.push(row);
    }
    let key = PlanKey { bucket: Bucket::holding(rows, 1, rows), options };
    let program = Arc::new(passes::compile(graph, &key).expect("a small graph"));
    let prepared = cpu.prepare(program).expect("a small program");
    cpu.set_profile(true);
    let (mut best, start) = (f64::MAX, Instant::now());
    let mut runs = 0;
    while runs < 5 || start.elapsed() < Duration::from_millis(200) {
        cpu.run(prepared, &inputs).expect("a step");
        let profile = cpu.profile().expect("a profiled run");
        let times = profile.program.steps().zip(&profile.times);
        let linear = times.filter(|(step, _)| step.op.name() == "linear");
        best = best.min(linear.map(|(_, time)| time.seconds).sum());
        runs += 1;
    }
    best
}
