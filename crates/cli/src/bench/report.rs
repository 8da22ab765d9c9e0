//! A benchmark's results as a table and as JSON.

use std::io::{Write, stdout};

use ingle_graph::{Activations, CONTRACT_VERSION, KvType, Numerics};
use serde_json::{Value, json};

use super::limits::Limits;
use super::ops::{Arithmetic, OVERHEAD, OpTime, Ops};
use super::workload::{Kind, Sample, Test, Work};
use crate::error::Result;
use crate::layout::Layout;
use crate::sys::{cpu_name, memory_bytes};
use crate::term::{Paint, bytes};

/// Of the program that measured.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is the same for all results.
pub struct Bench {
    /// What the model is called.
    pub model: String,
    /// How it ran.
    pub settings: Settings,
    /// Device, instruction set and threads.
    pub device: String,
    /// What lies where, if a GPU is used.
    pub layout: Option<Layout>,
    /// Threads of the device.
    pub threads: usize,
    /// What this machine can do.
    pub limits: Limits,
    /// What each device can do, where the model is on two.
    pub devices: Option<[Limits; 2]>,
    /// Most memory used while the tests ran.
    pub peak_memory_bytes: Option<u64>,
    /// From the open of the file to the first step that could run.
    pub load_ms: f64,
}

/// What was measured, as far as flags decide it.
pub struct Settings {
    /// The mode asked for.
    pub numerics: Numerics,
    /// Type of cached keys and values.
    pub kv: KvType,
    /// Activations asked for.
    pub activations: Activations,
    /// The arithmetics all of it stands for here.
    pub arithmetics: String,
    /// Of each test.
    pub repetitions: u16,
}

/// What bounds a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    Read,
    Int8,
    F32,
}

impl Bound {
    /// Decode waits for memory, prefill for most of its multiplications.
    fn of(test: &Test, work: &Work) -> Self {
        match test.kind {
            Kind::Decode => Bound::Read,
            Kind::Prefill if work.float_operations > work.int_operations => Bound::F32,
            Kind::Prefill => Bound::Int8,
        }
    }

    /// `read_bandwidth`, `int8_rate`, `f32_rate`.
    fn name(self) -> &'static str {
        match self {
            Bound::Read => "read_bandwidth",
            Bound::Int8 => "int8_rate",
            Bound::F32 => "f32_rate",
        }
    }
}

/// One test's repetitions, summed up.
pub struct Outcome {
    test: Test,
    /// Tokens a second: median, least, most.
    rate: [f64; 3],
    weight_gb_per_second: f64,
    kv_gb_per_second: f64,
    bound: Bound,
    /// Of what bounds the test.
    share_of_limit: f64,
}

impl Outcome {
    /// Sums up at least one sample.
    pub fn new(test: &Test, samples: &[Sample], work: Work, limits: &Limits) -> Self {
        let mut seconds: Vec<f64> = samples.iter().map(|s| s.seconds.max(1e-9)).collect();
        seconds.sort_by(f64::total_cmp);
        let tokens = samples.first().map_or(0, |s| s.tokens) as f64;
        let (least, most) = (seconds[0], seconds[seconds.len() - 1]);
        let median = (seconds[(seconds.len() - 1) / 2] + seconds[seconds.len() / 2]) / 2.0;
        let (weight, kv) = (work.weight_bytes / median / 1e9, work.kv_bytes / median / 1e9);
        let bound = Bound::of(test, &work);
        let tops = (work.int_operations + work.float_operations) / median / 1e12;
        Self {
            test: *test,
            rate: [tokens / median, tokens / most, tokens / least],
            weight_gb_per_second: weight,
            kv_gb_per_second: kv,
            bound,
            share_of_limit: match bound {
                Bound::Read => (weight + kv) / limits.read_gb_per_second,
                Bound::Int8 => tops / limits.int8_tops,
                Bound::F32 => tops / limits.f32_tflops,
            },
        }
    }
}

/// An op's time beside what this machine can do in it.
struct Shares {
    /// Of the step.
    step: f64,
    gb_per_second: f64,
    /// Of the read bandwidth.
    read: f64,
    /// 10^9 operations a second.
    gops: f64,
    /// Of the rate of its arithmetic.
    rate: f64,
}

impl Shares {
    fn new(op: &OpTime, ops: &Ops, bench: &Bench) -> Self {
        let limits =
            bench.devices.as_ref().and_then(|devices| devices.get(op.device)).unwrap_or(&bench.limits);
        let seconds = op.seconds.max(1e-12);
        let (gb_per_second, gops) = (op.bytes / seconds / 1e9, op.operations / seconds / 1e9);
        let tops = match op.arithmetic {
            Arithmetic::Int8 => limits.int8_tops,
            Arithmetic::F32 => limits.f32_tflops,
        };
        Self {
            step: op.seconds / ops.seconds,
            gb_per_second,
            read: gb_per_second / limits.read_gb_per_second,
            gops,
            rate: gops / 1e3 / tops,
        }
    }
}

/// Tables for people. `times` says where the time of each test goes, and is empty where nobody asked.
pub fn print_table(bench: &Bench, outcomes: &[Outcome], times: &[Option<Ops>]) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    let Limits { read_gb_per_second, read_bytes, int8_tops, f32_tflops } = bench.limits;
    let Settings { numerics, kv, arithmetics, repetitions, .. } = &bench.settings;
    let peak = bench.peak_memory_bytes.map_or("unknown".into(), bytes);
    let plural = if *repetitions == 1 { "" } else { "s" };
    writeln!(out, "{} {} on {}, ingle {VERSION}", paint.bold("model"), bench.model, bench.device)?;
    writeln!(
        out,
        "numerics {numerics}: {arithmetics} (contract {CONTRACT_VERSION}), KV {kv}, {repetitions} repetition{plural}"
    )?;
    writeln!(out, "load {:.0} ms, peak memory {peak}", bench.load_ms)?;
    if let Some(layout) = &bench.layout {
        writeln!(out, "{}", layout.line())?;
    }
    writeln!(
        out,
        "this machine, now: reads {read_gb_per_second:.1} GB/s (the same {:.1} MB each time), int8 {int8_tops:.2} TOPS \
         and f32 {f32_tflops:.2} TFLOPS on vectors\n",
        read_bytes as f64 / 1e6
    )?;
    let head = format!(
        "{:<14} {:>5} {:>10} {:>22} {:>12} {:>9}  {}",
        "test", "batch", "tok/s", "[min max]", "weights GB/s", "KV GB/s", "share of limit"
    );
    writeln!(out, "{}", paint.bold(&head))?;
    for o in outcomes {
        let [median, min, max] = o.rate;
        let range = format!("[{min:.1} {max:.1}]");
        let limit = o.bound.name().replace('_', " ");
        writeln!(
            out,
            "{:<14} {:>5} {median:>10.1} {range:>22} {:>12.1} {:>9.2}  {:.0}% of {limit}",
            o.test.name(),
            o.test.batch,
            o.weight_gb_per_second,
            o.kv_gb_per_second,
            100.0 * o.share_of_limit
        )?;
    }
    for (o, ops) in outcomes.iter().zip(times) {
        if let Some(ops) = ops {
            print_ops(&mut out, &paint, o, ops, bench)?;
        }
    }
    Ok(())
}

/// One line for each kind of op: figures of one step.
fn print_ops(out: &mut impl Write, paint: &Paint, outcome: &Outcome, ops: &Ops, bench: &Bench) -> Result<()> {
    let steps = ops.steps as f64;
    let (name, batch) = (paint.bold(&outcome.test.name()), outcome.test.batch);
    let (ms, nodes) = (1e3 * ops.seconds / steps, ops.nodes as f64 / steps);
    writeln!(out, "\n{name} batch {batch}: {ms:.3} ms a step, {} steps of {nodes:.0} nodes", ops.steps)?;
    let width = ops.rows.iter().map(|op| op.label.len()).max().unwrap_or(0).max(OVERHEAD.len());
    let head = format!(
        "  {:<width$} {:>6} {:>9} {:>6} {:>9} {:>9} {:>7} {:>5} {:>8}  {}",
        "op", "calls", "ms", "share", "wait ms", "MB read", "GB/s", "", "GOPS", "share of rate"
    );
    writeln!(out, "{}", paint.bold(&head))?;
    for op in &ops.rows {
        let shares = Shares::new(op, ops, bench);
        let rate = match op.arithmetic {
            Arithmetic::Int8 => "int8",
            Arithmetic::F32 => "f32",
        };
        writeln!(
            out,
            "  {:<width$} {:>6} {:>9.4} {:>5.1}% {:>9.4} {:>9.3} {:>7.1} {:>4.0}% {:>8.1}  {:.1}% of {rate}",
            op.label,
            op.calls.div_ceil(ops.steps),
            1e3 * op.seconds / steps,
            100.0 * shares.step,
            1e3 * op.waited / steps,
            op.bytes / steps / 1e6,
            shares.gb_per_second,
            100.0 * shares.read,
            shares.gops,
            100.0 * shares.rate,
        )?;
    }
    let (ms, share) = (1e3 * ops.overhead() / steps, 100.0 * ops.overhead() / ops.seconds);
    writeln!(out, "  {OVERHEAD:<width$} {:>6} {ms:>9.4} {share:>5.1}%", 1)?;
    Ok(())
}

/// The object that scripts read; `times` as in [`print_table`].
pub fn print_json(bench: &Bench, outcomes: &[Outcome], times: &[Option<Ops>]) -> Result<()> {
    let Limits { read_gb_per_second, int8_tops, f32_tflops, .. } = bench.limits;
    let results: Vec<Value> = outcomes
        .iter()
        .enumerate()
        .map(|(i, o)| {
            let [median, min, max] = o.rate;
            let mut result = json!({
                "test": o.test.name(),
                "kind": o.test.kind.name(),
                "tokens": o.test.tokens,
                "depth": o.test.depth,
                "batch": o.test.batch,
                "threads": bench.threads,
                "device": bench.device,
                "tokens_per_second": { "median": median, "min": min, "max": max },
                "weights_gb_per_second": o.weight_gb_per_second,
                "kv_gb_per_second": o.kv_gb_per_second,
                "gb_per_second": o.weight_gb_per_second + o.kv_gb_per_second,
                "share_of_limit": o.share_of_limit,
                "limit": { "of": o.bound.name(), "read_gb_per_second": read_gb_per_second, "int8_tops": int8_tops,
                    "f32_tflops": f32_tflops },
                "peak_memory_bytes": bench.peak_memory_bytes,
                "load_ms": bench.load_ms,
            });
            if let Some(Some(ops)) = times.get(i) {
                let steps = ops.steps as f64;
                let row = |op: &OpTime| {
                    let shares = Shares::new(op, ops, bench);
                    json!({
                        "op": op.label,
                        "calls_per_step": op.calls as f64 / steps,
                        "ms_per_step": 1e3 * op.seconds / steps,
                        "wait_ms_per_step": 1e3 * op.waited / steps,
                        "share": shares.step,
                        "bytes_per_step": op.bytes / steps,
                        "gb_per_second": shares.gb_per_second,
                        "share_of_read": shares.read,
                        "gops": shares.gops,
                        "arithmetic": match op.arithmetic {
                            Arithmetic::Int8 => "int8",
                            Arithmetic::F32 => "f32",
                        },
                        "share_of_rate": shares.rate,
                    })
                };
                let overhead = json!({
                    "op": OVERHEAD,
                    "calls_per_step": 1.0,
                    "ms_per_step": 1e3 * ops.overhead() / steps,
                    "share": ops.overhead() / ops.seconds,
                });
                result["steps"] = ops.steps.into();
                result["nodes_per_step"] = (ops.nodes as f64 / steps).into();
                result["ms_per_step"] = (1e3 * ops.seconds / steps).into();
                result["ops"] = ops.rows.iter().map(row).chain([overhead]).collect();
            }
            result
        })
        .collect();
    let host = json!({ "cpu": cpu_name(), "threads": bench.threads, "memory_bytes": memory_bytes("MemTotal:"),
        "os": std::env::consts::OS, "arch": std::env::consts::ARCH });
    let Settings { numerics, kv, activations, arithmetics, repetitions } = &bench.settings;
    let mut report = json!({
        "machine": host,
        "model": bench.model,
        "version": VERSION,
        "contract": CONTRACT_VERSION,
        "numerics": numerics.to_string(),
        "arithmetic": arithmetics,
        "activations": activations.to_string(),
        "kv_type": kv.to_string(),
        "repetitions": repetitions,
        "results": results,
    });
    if let Some(layout) = &bench.layout {
        report["layout"] = layout.json();
    }
    writeln!(stdout(), "{report:#}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_the_median_and_its_share() {
        let limits =
            Limits { read_gb_per_second: 10.0, read_bytes: 1 << 20, int8_tops: 2.0, f32_tflops: 0.5 };
        let work = Work {
            weight_bytes: 4e9,
            kv_bytes: 1e9,
            step_bytes: 5e7,
            int_operations: 0.75e12,
            float_operations: 0.25e12,
        };
        let samples: Vec<Sample> =
            [1.0, 4.0, 2.0].iter().map(|&seconds| Sample { seconds, tokens: 100 }).collect();
        let decode = Test { kind: Kind::Decode, tokens: 100, depth: 0, batch: 1 };
        let outcome = Outcome::new(&decode, &samples, work, &limits);
        assert_eq!((outcome.rate, outcome.share_of_limit), ([50.0, 25.0, 100.0], 0.25));
        assert_eq!(outcome.bound, Bound::Read);
        // The arithmetic of most of the multiplications bounds a prefill.
        let prefill = Test { kind: Kind::Prefill, ..decode };
        let outcome = Outcome::new(&prefill, &samples, work, &limits);
        assert_eq!((outcome.bound, outcome.share_of_limit), (Bound::Int8, 0.25));
        let work = Work { int_operations: 0.25e12, float_operations: 0.75e12, ..work };
        let outcome = Outcome::new(&prefill, &samples, work, &limits);
        assert_eq!((outcome.bound, outcome.share_of_limit), (Bound::F32, 1.0));
    }
}
