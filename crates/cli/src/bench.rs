//! `ingle bench`: tokens per second, and what share they are of what this machine can do.
//!
//! ```text
//! workload   what is timed: prefill and decode, with the bytes and operations they need
//! limits     what the machine can do
//! ops        where the time goes, op by op
//! report     table and JSON
//! ```

mod limits;
mod ops;
mod report;
mod workload;

use std::sync::Arc;
use std::time::Instant;

use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::{Bucket, PlanOptions, Program, Step, WeightId};
use ingle_models::Model;

use crate::error::{Error, Result};
use crate::flags::Bench;
use crate::session;
use crate::sys;
use crate::term;

use report::{Outcome, Settings};
use workload::{Sample, Test, Work};

/// Runs every test `--repetitions` times, in turns, and reports.
///
/// # Errors
/// A test that takes a longer context than the model was made for, with the numbers, before anything is loaded.
pub fn bench(flags: &Bench) -> Result<()> {
    let tests = tests(flags)?;
    session::require_device(&flags.device)?;
    let path = session::resolve(flags.model.named())?;
    let start = Instant::now();
    let checkpoint = Arc::new(session::open_files(&path)?);
    let made_for = Model::open(&checkpoint)?.config.context;
    if let Some(test) = tests.iter().find(|test| test.context() > made_for) {
        return Err(Error::Refused(test.too_long(made_for)));
    }
    let options = PlanOptions {
        numerics: flags.numerics,
        kv: flags.kv,
        activations: flags.activations,
        sample: true,
        ..PlanOptions::default()
    };
    let context = tests.iter().map(Test::context).max().unwrap_or(2);
    let sequences = tests.iter().map(|t| t.batch).max().unwrap_or(1);
    session::warn_of_threads(&flags.device);
    let (mut runner, layout) = session::load(&checkpoint, &flags.device, options, Some(context), sequences)?;
    let arithmetics = session::arithmetics(&*runner.prepare(Bucket::holding(1, 1, 1))?);
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let device = runner.backend().describe();
    let mut engine = Engine::new(runner, checkpoint.fingerprint(), EngineOptions::default());

    let counter = term::counter("measuring", tests.len() as u64 * (1 + u64::from(flags.repetitions)));
    // Programs are compiled and pages touched before anything is timed.
    for test in &tests {
        test.run(&mut engine, 0)?;
        counter.inc(1);
    }
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); tests.len()];
    for repetition in 1..=u64::from(flags.repetitions) {
        for (test, samples) in tests.iter().zip(&mut samples) {
            samples.push(test.run(&mut engine, repetition)?);
            counter.inc(1);
        }
    }
    counter.finish_and_clear();
    let mut times = Vec::new();
    if flags.ops {
        // Prompts that the prefix cache has not seen.
        let repetitions = 1 + u64::from(flags.repetitions)..1 + 2 * u64::from(flags.repetitions);
        for test in &tests {
            times.push(ops::by_op(test, &mut engine, repetitions.clone())?);
        }
    }
    let works: Vec<Work> = tests.iter().map(|test| test.work(&mut engine)).collect::<Result<_>>()?;
    let shares = shares(&*engine.runner().prepare(Bucket::holding(1, 1, 1))?);
    let peak_memory_bytes = sys::peak_memory_bytes();
    for path in engine.runner().backend().paths() {
        if let Some(why) = path.declined_graph() {
            term::say(&format!("note: {} is not used: {why}", path.path));
        }
    }
    drop(engine);
    let threads = session::threads(&flags.device);
    let step_bytes = works.iter().map(|work| work.step_bytes).fold(0.0, f64::max);
    let host = || {
        limits::measure(threads, step_bytes as usize).map_err(|error| {
            Error::Refused(format!(
                "the system refuses one of {threads} threads to measure this machine with ({error}): give fewer with \
                 --threads, or raise its limits (ulimit -u and -v)"
            ))
        })
    };
    let (limits, devices) = match layout.as_ref().and_then(|_| session::cuda_options(&flags.device)) {
        None => (host()?, None),
        Some(options) => {
            let gpu = limits::of_gpu(&options, step_bytes as usize)?;
            match shares {
                [1.0, 1.0] => (gpu, None),
                [reads, products] => {
                    let host = host()?;
                    (gpu.beside(host, reads, products), Some([gpu, host]))
                }
            }
        }
    };

    let outcomes: Vec<Outcome> = tests
        .iter()
        .zip(samples)
        .zip(works)
        .map(|((test, samples), work)| Outcome::new(test, &samples, work, &limits))
        .collect();
    let settings = Settings {
        numerics: flags.numerics,
        kv: flags.kv,
        activations: flags.activations,
        arithmetics,
        repetitions: flags.repetitions,
    };
    let model = session::name(&path);
    let bench = report::Bench {
        model,
        settings,
        device,
        layout,
        threads,
        limits,
        devices,
        peak_memory_bytes,
        load_ms,
    };
    match flags.json {
        true => report::print_json(&bench, &outcomes, &times),
        false => report::print_table(&bench, &outcomes, &times),
    }
}

/// What the first device has of the weights' bytes that a token reads, and of its products.
fn shares(program: &Program) -> [f64; 2] {
    let share = |of: &dyn Fn(&Step) -> u64| {
        let total = |device: Option<usize>| -> u64 {
            let segments = program.segments.iter().filter(|s| device.is_none_or(|device| s.device == device));
            segments.flat_map(|segment| &segment.steps).map(of).sum()
        };
        total(Some(0)) as f64 / total(None) as f64
    };
    let elements = |step: &Step| {
        let weights = step.products().map(|(WeightId(weight), _)| &program.weights[weight as usize]);
        weights.map(|weight| (weight.rows * weight.cols) as u64).sum()
    };
    [share(&|step| step.cost.weight_bytes), share(&elements)]
}

/// Prefill tests first, then decode tests by depth, for each batch size; each once.
fn tests(flags: &Bench) -> Result<Vec<Test>> {
    let mut tests: Vec<Test> = Vec::new();
    let mut add = |test: Test| {
        if test.tokens > 0 && !tests.contains(&test) {
            tests.push(test);
        }
    };
    for &batch in &flags.batch {
        let batch = usize::from(batch);
        for &depth in &flags.depth {
            for &tokens in &flags.prefill {
                add(Test { kind: workload::Kind::Prefill, tokens, depth, batch });
            }
        }
        for &depth in &flags.depth {
            for &tokens in &flags.decode {
                add(Test { kind: workload::Kind::Decode, tokens, depth, batch });
            }
        }
    }
    match tests.is_empty() {
        true => Err(Error::Usage("nothing to measure: -p and -n are both 0".into())),
        false => Ok(tests),
    }
}
