//! `ingle verify`: a model against what another implementation computed from the same weights.

use std::io::{Write, stdout};
use std::path::Path;
use std::sync::Arc;

use ingle_engine::parity::{self, Closeness, Difference, Parity};
use ingle_engine::runner::{Open, Plan};
use ingle_engine::verify::{self, Check, Miss, Report};
use ingle_graph::{Numerics, PlanOptions};
use ingle_tensor::Checkpoint;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::files;
use crate::flags::{Device, Verify};
use crate::session;
use crate::term::{self, Paint};

/// Largest reference file, and largest file of tensors beside it: both are read whole.
const REFERENCE_BYTES_MAX: u64 = 256 << 20;

/// Missed tokens that are printed one by one.
const TOLD: usize = 8;

/// The arms, and what runs in each.
const ARMS: [(char, &str); 4] = [
    ('a', "weights, activations and KV in f32, exact mode: proves file and model"),
    ('b', "the same with f16 KV"),
    ('c', "float weights as they run by default"),
    ('d', "quantized weights as they run by default"),
];

/// The arms for the help text, a line each.
pub fn arms() -> String {
    ARMS.map(|(arm, what)| format!("{arm}  {what}")).join("\n      ")
}

/// What a model is compared with.
enum With<'a> {
    Reference(&'a Path),
    Gpu,
}

/// Makes every comparison and prints it.
///
/// # Errors
/// [`Error::Differs`] when one is outside its limit.
pub fn verify(flags: &Verify) -> Result<()> {
    session::require_device(&flags.device)?;
    let with = match (&flags.against, flags.device.device) {
        (Some(against), _) => With::Reference(against),
        (None, Device::Cuda { .. }) => With::Gpu,
        (None, _) => {
            let what = "verify compares a model with a reference (--against FILE) or a GPU with the CPU (--device cuda)";
            return Err(Error::Usage(format!("{what}: give one")));
        }
    };
    let path = session::resolve(flags.model.named())?;
    let checkpoint = Arc::new(session::open_files(&path)?);
    let against = match with {
        With::Reference(against) => against,
        With::Gpu => return devices(flags, &checkpoint),
    };
    files::require(against, REFERENCE_BYTES_MAX)?;
    let tensors = against.with_extension("safetensors");
    if tensors.exists() {
        files::require(&tensors, REFERENCE_BYTES_MAX)?;
    }
    let counter = term::counter("comparing tokens", 0);
    let mut watch = |done, total| {
        counter.set_length(total);
        counter.set_position(done);
    };
    let mut layout = None;
    let mut open = |plan: Plan<'_>| session::device(&flags.device, false, &mut layout, plan);
    let report = verify::against(&checkpoint, against, &mut open, &mut watch);
    counter.finish_and_clear();
    let report = report?;
    if flags.json {
        writeln!(stdout(), "{}", json(&report))?;
    } else {
        print(&report)?;
    }
    let failed = report.checks.iter().filter(|c| !c.passed()).count();
    match report.passed() {
        true => Ok(()),
        false => Err(Error::Differs { failed, made: report.checks.len() }),
    }
}

/// Compares a GPU with the CPU, or its graphs with eager execution.
fn devices(flags: &Verify, checkpoint: &Arc<Checkpoint>) -> Result<()> {
    let counter = term::counter("comparing tokens", 0);
    let mut watch = |done, total| {
        counter.set_length(total);
        counter.set_position(done);
    };
    let (mut layout, mut eager) = (None, None);
    // The GPU in its mode: of replays, both.
    let gpu = |eager: bool, layout: &mut Option<_>, plan: Plan<'_>| {
        let Plan { graph, options, kv, buckets } = plan;
        if options.numerics == Numerics::Fast {
            session::layout(
                &flags.device,
                Plan { graph, options: &mut *options, kv, buckets: buckets.clone() },
            )?;
        }
        session::device(&flags.device, eager, layout, Plan { graph, options, kv, buckets })
    };
    let mut first = |plan: Plan<'_>| match flags.replay {
        true => gpu(true, &mut eager, plan),
        false => session::host(&flags.device, plan),
    };
    let mut second = |plan: Plan<'_>| gpu(false, &mut layout, plan);
    let mode = flags.numerics;
    let modes = [if flags.replay { mode } else { Numerics::Exact }, mode];
    let names = if flags.replay { ["eager", "replayed"] } else { ["on the CPU", "on the GPU"] };
    let generated = usize::from(flags.generate.unwrap_or(if flags.replay { 256 } else { 64 }));
    let open: [&mut Open<'_>; 2] = [&mut first, &mut second];
    let parity = parity::devices(checkpoint, PlanOptions::default(), modes, generated, open, &mut watch);
    counter.finish_and_clear();
    let Parity { steps, tensors, values, tokens, first, closeness, replays, declined } = parity?;
    // Without replays, eager execution would have been compared with itself.
    let idle = flags.replay && (replays == 0 || !declined.is_empty());
    let far = closeness.as_ref().is_some_and(|closeness| !closeness.passed());
    let mut out = stdout().lock();
    if flags.json {
        let first = first.as_ref().map(|first| {
            let bits = first.values.map(f32::to_bits);
            json!({ "tensor": first.tensor, "position": first.position, "column": first.column, "bits": bits })
        });
        let report = json!({ "ok": first.is_none() && !idle && !far, "contract": ingle_graph::CONTRACT_VERSION, "steps": steps,
            "tensors": tensors, "values": values, "tokens": tokens, "replays": replays, "declined": declined, "first": first,
            "numerics": mode.to_string(), "closeness": closeness.as_ref().map(of_closeness) });
        writeln!(out, "{report}")?;
    } else {
        let of_graphs = if flags.replay { format!("; {replays} replays of graphs") } else { String::new() };
        writeln!(
            out,
            "{steps} steps, {tensors} tensors, {values} values compared{}, in {mode} mode; {tokens} tokens that the GPU \
             chose{of_graphs}",
            if closeness.is_some() { "" } else { " as bits" }
        )?;
        if let Some(closeness) = &closeness {
            print_closeness(&mut out, closeness)?;
        }
        if let Some(Difference { tensor, position, column, values: [a, b] }) = &first {
            writeln!(
                out,
                "first to differ: {tensor} at position {position}, column {column}: {a:e} ({:08x}) {}, {b:e} \
                 ({:08x}) {}",
                a.to_bits(),
                names[0],
                b.to_bits(),
                names[1]
            )?;
        }
    }
    match first {
        None if idle => {
            let why = if declined.is_empty() { "no step had a graph".into() } else { declined.join("; ") };
            Err(Error::Refused(format!("no replay was compared with eager execution: {why}")))
        }
        None if !far => Ok(()),
        _ => Err(Error::Differs { failed: 1, made: tensors }),
    }
}

fn of_closeness(closeness: &Closeness) -> Value {
    let Closeness { positions, mean, largest, likeliest, first_layer } = closeness;
    json!({ "positions": positions, "kl_mean": mean, "kl_largest": largest, "likeliest": likeliest, "first_layer": first_layer,
        "ok": closeness.passed() })
}

/// What a GPU in fast mode differs by from the CPU in exact mode, beside its limits.
fn print_closeness(out: &mut impl Write, closeness: &Closeness) -> Result<()> {
    let Closeness { positions, mean, largest, likeliest, first_layer } = closeness;
    let share = *likeliest as f64 / *positions as f64;
    for (what, value, relation, limit) in [
        ("KL divergence in nats, mean", *mean, "at most", parity::MEAN_MAX),
        ("KL divergence in nats, largest", *largest, "at most", parity::LARGEST_MAX),
        ("share of positions with the same likeliest token", share, "at least", parity::LIKELIEST_MIN),
        ("difference of the first layer", *first_layer, "at most", parity::FIRST_LAYER_MAX),
    ] {
        writeln!(out, "{what:<50} {:<10} {relation:<8} {limit}", figure(value))?;
    }
    Ok(())
}

fn print(report: &Report) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    for (arm, what) in ARMS.iter().filter(|(arm, _)| report.checks.iter().any(|check| check.arm == *arm)) {
        writeln!(out, "{}", paint.dim(&format!("{arm}  is {what}")))?;
    }
    for check in &report.checks {
        let Check { arm, what, value, limit, at_least } = check;
        let verdict = if check.passed() { paint.good("ok") } else { paint.bad("FAIL") };
        let relation = if *at_least { "at least" } else { "at most" };
        writeln!(out, "{arm}  {what:<44} {:<10} {relation:<8} {limit:<8} {verdict}", figure(*value))?;
    }
    for Miss { arm, at: (prompt, step), ours, reference, margin } in report.misses.iter().take(TOLD) {
        let theirs = reference.iter().map(u32::to_string).collect::<Vec<_>>().join(" then ");
        writeln!(
            out,
            "{arm}  prompt {prompt} step {step}: token {ours}, but the reference has {theirs} (margin {margin:.4})"
        )?;
    }
    if report.misses.len() > TOLD {
        writeln!(out, "and {} more tokens differ (--json lists all)", report.misses.len() - TOLD)?;
    }
    for (arm, why) in &report.skipped {
        writeln!(out, "{}", paint.dim(&format!("{arm}  does not apply: {why}")))?;
    }
    if let Some(first) = &report.first_layer {
        writeln!(out, "first to differ in arm a: {first}")?;
    }
    if 2 * report.misses.len() > report.tokens {
        let (missed, tokens) = (report.misses.len(), report.tokens);
        writeln!(
            out,
            "{missed} of {tokens} tokens differ: the reference may be of other weights than this model's"
        )?;
    }
    Ok(())
}

/// Counts as they are, small errors by their power of ten.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v == v.trunc() => format!("{value}"),
        v if v < 0.001 => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

fn json(report: &Report) -> Value {
    let checks: Vec<Value> = report
        .checks
        .iter()
        .map(|c| {
            json!({ "arm": c.arm.to_string(), "what": c.what, "value": c.value, "limit": c.limit,
                "at_least": c.at_least, "ok": c.passed() })
        })
        .collect();
    let misses: Vec<Value> = report
        .misses
        .iter()
        .map(|m| {
            json!({ "arm": m.arm.to_string(), "prompt": m.at.0, "step": m.at.1, "id": m.ours,
                "reference": m.reference, "margin": m.margin })
        })
        .collect();
    let skipped: Vec<Value> =
        report.skipped.iter().map(|(arm, why)| json!({ "arm": arm.to_string(), "why": why })).collect();
    json!({ "ok": report.passed(), "contract": ingle_graph::CONTRACT_VERSION, "checks": checks, "misses": misses,
        "skipped": skipped, "first_layer": report.first_layer })
}
