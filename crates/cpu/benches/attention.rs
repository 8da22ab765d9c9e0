//! Speed of attention alone, at the shapes of two small models: GFLOP/s (two for each product of a query's or a
//! weight's element) and the share of the rate of fused multiply-adds measured beside it.
//!
//!     cargo bench -p ingle-cpu --bench attention [-- [threads] [parts of a name]]

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ingle_cpu::{Cpu, CpuOptions, Isa, Team};
use ingle_graph::op::AttentionSpec;
use ingle_graph::{
    Backend, Bucket, Builder, FloatArithmetic, Graph, Inputs, KvInputs, KvPlan, KvType, Numerics, PAGE,
    PlanKey, PlanOptions, passes,
};
use ingle_tensor::{Checkpoint, DType, gguf};

/// Name, query heads, heads of keys and values, elements of a head.
const SHAPES: [(&str, usize, usize, usize); 2] = [("smollm2-135m", 9, 3, 64), ("gemma-3-270m", 4, 1, 256)];

/// Rows of the input tables.
const TABLE: usize = 61;

/// Most rows of a step.
const CHUNK: usize = 512;

/// Sequences of a batch that decodes, and steps before it comes back to the same keys: as many as a small model's
/// layers, so that keys and values come from beyond the second cache.
const BATCH: usize = 8;
const SETS: usize = 30;

/// Measurements of one line, of which the median counts; each as long as so many flops take.
const REPEATS: usize = 7;
const FLOPS: f64 = 2e9;

fn main() {
    // `cargo bench` passes flags of its own.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let threads = args.first().and_then(|arg| arg.parse().ok());
    let only = &args[usize::from(threads.is_some()).min(args.len())..];
    let mut cpu = Cpu::new(&CpuOptions { threads: threads.unwrap_or(0), isa: None }).expect("threads");
    let fma = Fma(Team::new(cpu.threads()).expect("threads"), cpu.isa());
    println!("{}, {:.0} GFLOP/s of fused multiply-adds", cpu.describe(), fma.rate());
    for (model, heads, kv_heads, head_dim) in SHAPES {
        let arithmetics = [FloatArithmetic::F32x32, cpu.isa().float(Numerics::Fast)];
        let kinds =
            [(KvType::F16, arithmetics[0]), (KvType::F16, arithmetics[1]), (KvType::Q8_0, arithmetics[0])];
        for (i, (kv, float)) in kinds.into_iter().enumerate() {
            if kinds[..i].contains(&(kv, float)) {
                continue;
            }
            let alone =
                [1, 8, 32, 512].into_iter().flat_map(|rows| [128, 512, 2048].map(|keys| (rows, keys)));
            let cases = alone.map(|(rows, keys)| Case { sets: 1, sequences: 1, rows, keys });
            let batch = [160, 512].map(|keys| Case { sets: SETS, sequences: BATCH, rows: 1, keys });
            let long = [160, 2048].map(|keys| Case { sets: SETS, sequences: 1, rows: 1, keys });
            for case in cases.chain(batch).chain(long) {
                let Case { sets, sequences, rows, keys } = case;
                let cold = if sets > 1 { "cold" } else { "warm" };
                let name = format!("{model} {kv} {float} {cold} {sequences} x rows {rows} keys {keys}");
                if rows > keys || !only.iter().all(|part| name.contains(part.as_str())) {
                    continue;
                }
                let spec = AttentionSpec {
                    layer: 0,
                    heads,
                    kv_heads,
                    head_dim,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                    window: None,
                    softcap: None,
                };
                println!("{}", line(&mut cpu, &fma, &name, &spec, (kv, float), case));
            }
        }
    }
}

/// Rows at the end of some sequences of some length.
#[derive(Clone, Copy)]
struct Case {
    /// Groups of sequences that take turns.
    sets: usize,
    sequences: usize,
    /// Rows of each sequence in a step.
    rows: usize,
    keys: usize,
}

/// Fills the cache with the keys before the last rows, then measures steps of those rows.
fn line(
    cpu: &mut Cpu,
    fma: &Fma,
    name: &str,
    spec: &AttentionSpec,
    (kv, float): (KvType, FloatArithmetic),
    case: Case,
) -> String {
    let Case { sets, sequences, rows, keys } = case;
    let (graph, checkpoint) = model(spec);
    let options = PlanOptions { kv, float, ..PlanOptions::default() };
    let plan = KvPlan::uniform(&graph, 1 + sets * sequences * keys.div_ceil(PAGE), keys);
    cpu.load(&graph, checkpoint, &options, plan).expect("a small model");
    for sequence in 0..sets * sequences {
        let mut done = 0;
        while done < keys - rows {
            let n = CHUNK.min(keys - rows - done);
            run(cpu, &graph, &options, &step(sequence..sequence + 1, done..done + n, keys));
            done += n;
        }
    }
    let positions = keys - rows..keys;
    let products = |p: usize| (p + 1) as f64 * 4.0 * (spec.heads * spec.head_dim) as f64;
    let flops: f64 = sequences as f64 * positions.clone().map(products).sum::<f64>();
    cpu.set_profile(true);
    let inputs: Vec<Inputs> =
        (0..sets).map(|i| step(i * sequences..(i + 1) * sequences, positions.clone(), keys)).collect();
    let prepared = run(cpu, &graph, &options, &inputs[0]);
    let mut measured: Vec<(f64, f64)> = Vec::new();
    for _ in 0..REPEATS {
        let peak = fma.rate();
        let (mut seconds, steps) = (0.0, ((FLOPS / flops) as usize).clamp(1, 500));
        for i in 0..steps {
            cpu.run(prepared, &inputs[i % sets]).expect("a step");
            let profile = cpu.profile().expect("a profiled run");
            let times = profile.program.steps().zip(&profile.times);
            seconds +=
                times.filter(|(step, _)| step.op.name() == "attention").map(|(_, t)| t.seconds).sum::<f64>();
        }
        let rate = flops * steps as f64 / seconds / 1e9;
        measured.push((rate / peak, rate));
    }
    measured.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (share, rate) = measured[REPEATS / 2];
    let best = measured.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
    let mut line = format!("{name:52}");
    write!(line, "{rate:8.1} GFLOP/s {:5.1}% of FMA, best {best:6.1}", 100.0 * share).expect("a string");
    line
}

fn run(cpu: &mut Cpu, graph: &Graph, options: &PlanOptions, inputs: &Inputs) -> ingle_graph::Prepared {
    let bucket = Bucket::holding(inputs.tokens.len(), inputs.sequence_count(), inputs.wanted.len());
    let key = PlanKey { bucket, options: options.clone() };
    let program = Arc::new(passes::compile(graph, &key).expect("a small graph"));
    let prepared = cpu.prepare(program).expect("a small program");
    cpu.run(prepared, inputs).expect("a step");
    prepared
}

/// One layer's attention; queries, keys and values are rows of tables.
fn model(spec: &AttentionSpec) -> (Graph, Arc<Checkpoint>) {
    let mut writer = gguf::Writer::new();
    writer.set("general.architecture", "bench").expect("a fresh key");
    let tables = [("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)];
    for (name, heads) in tables {
        let cols = heads * spec.head_dim;
        let value = |i: usize| ((i * 7919 + i / 83) % 1009) as f32 / 500.0 - 1.0;
        let bytes: Vec<u8> = (0..TABLE * cols).flat_map(|i| value(i).to_le_bytes()).collect();
        writer.tensor(name, DType::F32, &[TABLE, cols], bytes).expect("a fresh tensor");
    }
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    writer.write(&mut file.as_file()).expect("room for a small file");
    let checkpoint = Arc::new(Checkpoint::open(file.path()).expect("the file just written"));
    let mut b = Builder::new(&checkpoint);
    b.set_layer(Some(0));
    let [q, k, v] = tables.map(|(name, heads)| b.embed(name, TABLE, heads * spec.head_dim, 1.0));
    let layer = b.kv_layer(spec.kv_heads, spec.head_dim, spec.window);
    b.kv_store(layer, k, v);
    let y = b.attention(q, spec.clone());
    b.output("y", y);
    (b.finish().expect("a small graph"), checkpoint)
}

/// Tokens at these positions of these sequences, each of at most `keys`.
fn step(sequences: Range<usize>, positions: Range<usize>, keys: usize) -> Inputs {
    let stride = keys.div_ceil(PAGE);
    let mut kv = KvInputs { table_stride: stride, ..KvInputs::default() };
    // Page 0 is nobody's.
    kv.tables = (1 + sequences.start * stride..1 + sequences.end * stride).map(|page| page as u32).collect();
    let mut inputs = Inputs::default();
    for sequence in 0..sequences.len() as u32 {
        for position in positions.clone() {
            kv.cells.push((kv.page(sequence, position) * PAGE + position % PAGE) as u32);
            inputs.tokens.push((position % TABLE) as u32);
            inputs.positions.push(position as u32);
            inputs.sequences.push(sequence);
            inputs.wanted.push(inputs.wanted.len() as u32);
        }
    }
    inputs.kv.push(kv);
    inputs
}

/// Chains of multiply-adds that fill the widest vectors: sixteen of them.
const WIDE: usize = 256;

/// The rate of fused multiply-adds of all threads.
struct Fma(Team, Isa);

impl Fma {
    /// GFLOP/s.
    fn rate(&self) -> f64 {
        const ROUNDS: usize = 400_000;
        let start = Instant::now();
        self.0.run(&|_, _| {
            std::hint::black_box(match self.1 {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the backend runs with this instruction set, so the processor has it.
                Isa::Avx512 | Isa::Amx => unsafe { rounds_avx512(ROUNDS) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx2 => unsafe { rounds_avx2(ROUNDS) },
                _ => rounds::<{ WIDE / 32 }>(ROUNDS),
            });
        });
        let width = match self.1 {
            Isa::Avx512 | Isa::Amx => WIDE,
            Isa::Avx2 => WIDE / 4,
            Isa::Scalar => WIDE / 32,
        };
        2.0 * (width * ROUNDS * self.0.size()) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// `N` chains of `n` fused multiply-adds.
#[inline(always)]
fn rounds<const N: usize>(n: usize) -> f32 {
    let mut x = [0.5f32; N];
    let (a, b) = std::hint::black_box((0.999, 0.001));
    for _ in 0..n {
        for x in &mut x {
            *x = x.mul_add(a, b);
        }
    }
    x.iter().sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,fma")]
fn rounds_avx512(n: usize) -> f32 {
    rounds::<WIDE>(n)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn rounds_avx2(n: usize) -> f32 {
    rounds::<{ WIDE / 4 }>(n)
}
