//! A benchmark's results as a table and as JSON.

use std::io::{Write, stdout};

use serde_json::{Value, json};

use super::limits::Limits;
use super::ops::{Arithmetic, OVERHEAD, OpTime, Ops};
use super::workload::{Kind, Sample, Test, Work};
use crate::error::Result;
use crate::sys::{cpu_name, memory_bytes};
use crate::term::{Paint, bytes};

/// What is the same for all results.
pub struct Machine {
    /// Device, instruction set and threads.
    pub device: String,
    /// Threads of the device.
    pub threads: usize,
    /// What this machine can do.
    pub limits: Limits,
    /// Most memory used while the tests ran.
    pub peak_memory_bytes: Option<u64>,
    /// From the open of the file to the first step that could run.
    pub load_ms: f64,
    /// What the model is called.
    pub model: String,
}

/// One test's repetitions, summed up.
pub struct Outcome {
    test: Test,
    /// Tokens a second: median, least, most.
    rate: [f64; 3],
    weight_gb_per_second: f64,
    kv_gb_per_second: f64,
    /// Of the read bandwidth for decode, of the int8 rate for prefill.
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
        Self {
            test: *test,
            rate: [tokens / median, tokens / most, tokens / least],
            weight_gb_per_second: weight,
            kv_gb_per_second: kv,
            share_of_limit: match test.kind {
                Kind::Decode => (weight + kv) / limits.read_gb_per_second,
                Kind::Prefill => work.operations / median / 1e12 / limits.int8_tops,
            },
        }
    }
}

/// Where the time of each test goes.
pub struct ByOp {
    /// By test.
    pub times: Vec<Option<Ops>>,
    /// f32 multiplications and additions this machine can do, 10^12 a second, all threads together.
    pub f32_tflops: f64,
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
    fn new(op: &OpTime, ops: &Ops, limits: &Limits, f32_tflops: f64) -> Self {
        let seconds = op.seconds.max(1e-12);
        let (gb_per_second, gops) = (op.bytes / seconds / 1e9, op.operations / seconds / 1e9);
        let tops = match op.arithmetic {
            Arithmetic::Int8 => limits.int8_tops,
            Arithmetic::F32 => f32_tflops,
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

/// Tables for people.
pub fn print_table(machine: &Machine, outcomes: &[Outcome], by_op: Option<&ByOp>) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    let Limits { read_gb_per_second, read_bytes, int8_tops } = machine.limits;
    let peak = machine.peak_memory_bytes.map_or("unknown".into(), bytes);
    writeln!(out, "{} {} on {}", paint.bold("model"), machine.model, machine.device)?;
    writeln!(out, "load {:.0} ms, peak memory {peak}", machine.load_ms)?;
    writeln!(
        out,
        "this machine, now: reads {read_gb_per_second:.1} GB/s (the same {:.1} MB each time), int8 {int8_tops:.2} TOPS on vectors\n",
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
        let limit = match o.test.kind {
            Kind::Decode => "read bandwidth",
            Kind::Prefill => "int8 rate",
        };
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
    let Some(by_op) = by_op else { return Ok(()) };
    writeln!(out, "\nf32 {:.2} TFLOPS", by_op.f32_tflops)?;
    for (o, ops) in outcomes.iter().zip(&by_op.times) {
        if let Some(ops) = ops {
            print_ops(&mut out, &paint, o, ops, &machine.limits, by_op.f32_tflops)?;
        }
    }
    Ok(())
}

/// One line for each kind of op: figures of one step.
fn print_ops(
    out: &mut impl Write,
    paint: &Paint,
    outcome: &Outcome,
    ops: &Ops,
    limits: &Limits,
    f32_tflops: f64,
) -> Result<()> {
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
        let shares = Shares::new(op, ops, limits, f32_tflops);
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

/// The object that scripts read.
pub fn print_json(machine: &Machine, outcomes: &[Outcome], by_op: Option<&ByOp>) -> Result<()> {
    let Limits { read_gb_per_second, int8_tops, .. } = machine.limits;
    let results: Vec<Value> = outcomes
        .iter()
        .enumerate()
        .map(|(i, o)| {
            let [median, min, max] = o.rate;
            let mut result = json!({
                "test": o.test.name(),
                "batch": o.test.batch,
                "threads": machine.threads,
                "device": machine.device,
                "tokens_per_second": { "median": median, "min": min, "max": max },
                "gb_per_second": o.weight_gb_per_second + o.kv_gb_per_second,
                "share_of_limit": o.share_of_limit,
                "limit": { "read_gb_per_second": read_gb_per_second, "int8_tops": int8_tops },
                "peak_memory_bytes": machine.peak_memory_bytes,
                "load_ms": machine.load_ms,
            });
            if let Some((by_op, ops)) = by_op.and_then(|by_op| Some((by_op, by_op.times.get(i)?.as_ref()?))) {
                let steps = ops.steps as f64;
                let row = |op: &OpTime| {
                    let shares = Shares::new(op, ops, &machine.limits, by_op.f32_tflops);
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
                result["limit"]["f32_tflops"] = by_op.f32_tflops.into();
                result["ops"] = ops.rows.iter().map(row).chain([overhead]).collect();
            }
            result
        })
        .collect();
    let host = json!({ "cpu": cpu_name(), "threads": machine.threads, "memory_bytes": memory_bytes("MemTotal:"),
        "os": std::env::consts::OS, "arch": std::env::consts::ARCH });
    writeln!(stdout(), "{:#}", json!({ "machine": host, "model": machine.model, "results": results }))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_the_median_and_its_share() {
        let limits = Limits { read_gb_per_second: 10.0, read_bytes: 1 << 20, int8_tops: 2.0 };
        let work = Work { weight_bytes: 4e9, kv_bytes: 1e9, step_bytes: 5e7, operations: 1e12 };
        let samples: Vec<Sample> =
            [1.0, 4.0, 2.0].iter().map(|&seconds| Sample { seconds, tokens: 100 }).collect();
        let decode = Test { kind: Kind::Decode, tokens: 100, depth: 0, batch: 1 };
        let outcome = Outcome::new(&decode, &samples, work, &limits);
        assert_eq!((outcome.rate, outcome.share_of_limit), ([50.0, 25.0, 100.0], 0.25));
        let prefill = Test { kind: Kind::Prefill, ..decode };
        assert_eq!(Outcome::new(&prefill, &samples, work, &limits).share_of_limit, 0.25);
    }
}
