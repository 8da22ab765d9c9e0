//! A benchmark's results as a table and as JSON.

use std::io::{Write, stdout};

use serde_json::{Value, json};

use super::limits::Limits;
use super::workload::{Kind, OpTime, Sample, Test, Work};
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

/// Tables for people.
pub fn print_table(machine: &Machine, outcomes: &[Outcome], ops: &[Vec<OpTime>]) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    let Limits { read_gb_per_second, int8_tops } = machine.limits;
    let peak = machine.peak_memory_bytes.map_or("unknown".into(), bytes);
    writeln!(out, "{} {} on {}", paint.bold("model"), machine.model, machine.device)?;
    writeln!(out, "load {:.0} ms, peak memory {peak}", machine.load_ms)?;
    writeln!(out, "this machine, now: reads {read_gb_per_second:.1} GB/s, int8 {int8_tops:.2} TOPS\n")?;
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
    for (o, ops) in outcomes.iter().zip(ops) {
        let total: f64 = ops.iter().map(|op| op.seconds).sum();
        writeln!(
            out,
            "\n{} batch {}: {:.2} ms in ops",
            paint.bold(&o.test.name()),
            o.test.batch,
            1e3 * total
        )?;
        for OpTime { op, count, seconds, weight_bytes } in ops {
            let (share, rate) = (100.0 * seconds / total, weight_bytes / seconds.max(1e-9) / 1e9);
            writeln!(
                out,
                "  {op:<12} {count:>7} x {:>10.3} ms {share:>6.1}% {rate:>8.1} GB/s",
                1e3 * seconds
            )?;
        }
    }
    Ok(())
}

/// The object that scripts read.
pub fn print_json(machine: &Machine, outcomes: &[Outcome], ops: &[Vec<OpTime>]) -> Result<()> {
    let Limits { read_gb_per_second, int8_tops } = machine.limits;
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
            if let Some(ops) = ops.get(i) {
                let row = |t: &OpTime| json!({ "op": t.op, "count": t.count, "ms": 1e3 * t.seconds, "weight_bytes": t.weight_bytes });
                result["ops"] = ops.iter().map(row).collect();
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
        let limits = Limits { read_gb_per_second: 10.0, int8_tops: 2.0 };
        let work = Work { weight_bytes: 4e9, kv_bytes: 1e9, operations: 1e12 };
        let samples: Vec<Sample> =
            [1.0, 4.0, 2.0].iter().map(|&seconds| Sample { seconds, tokens: 100 }).collect();
        let decode = Test { kind: Kind::Decode, tokens: 100, depth: 0, batch: 1 };
        let outcome = Outcome::new(&decode, &samples, work, &limits);
        assert_eq!((outcome.rate, outcome.share_of_limit), ([50.0, 25.0, 100.0], 0.25));
        let prefill = Test { kind: Kind::Prefill, ..decode };
        assert_eq!(Outcome::new(&prefill, &samples, work, &limits).share_of_limit, 0.25);
    }
}
