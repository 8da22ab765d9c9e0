//! One damaged input after the other, each judged. An input is a pure function of (target, seed, iteration), so two
//! numbers and a name are enough to have it again.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use super::walk::{self, Outcome};
use super::watch::{self, Usage};
use super::{mutations, seeds};
use crate::Random;

/// The longest that one input may take: by the clock, and where the system says so also on a processor, so that a busy
/// machine is no finding.
pub const SLOW: Duration = Duration::from_secs(1);

/// What is attacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// A GGUF model, whole.
    Gguf,
    /// A safetensors folder, whole: weights, index, config and the small files.
    SafeTensors,
    /// A tokenizer, of a GGUF file or a `tokenizer.json`.
    Tokenizer,
    /// A chat template.
    Template,
    /// Nothing: a fault that the driver must report.
    Planted(Planted),
}

/// Faults that show the driver to be awake. Each comes at iteration [`PLANTED_AT`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// A panic.
    Panic,
    /// The end of the process.
    Abort,
    /// A request for 1 GiB.
    Memory,
    /// More than [`SLOW`].
    Slow,
    /// No end.
    Hang,
}

/// Where planted faults are.
pub const PLANTED_AT: u64 = 3;

impl Target {
    /// Those that are attacked.
    pub const ALL: [Target; 4] = [Target::Gguf, Target::SafeTensors, Target::Tokenizer, Target::Template];

    /// The planted ones.
    pub const PLANTED: [Target; 5] = [
        Target::Planted(Planted::Panic),
        Target::Planted(Planted::Abort),
        Target::Planted(Planted::Memory),
        Target::Planted(Planted::Slow),
        Target::Planted(Planted::Hang),
    ];

    /// The name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Target::Gguf => "gguf",
            Target::SafeTensors => "safetensors",
            Target::Tokenizer => "tokenizer",
            Target::Template => "template",
            Target::Planted(Planted::Panic) => "planted-panic",
            Target::Planted(Planted::Abort) => "planted-abort",
            Target::Planted(Planted::Memory) => "planted-memory",
            Target::Planted(Planted::Slow) => "planted-slow",
            Target::Planted(Planted::Hang) => "planted-hang",
        }
    }

    /// The target of this name.
    pub fn named(name: &str) -> Option<Target> {
        Self::ALL.into_iter().chain(Self::PLANTED).find(|target| target.name() == name)
    }
}

/// Files with their names.
pub type Input = Vec<seeds::File>;

/// The input of an iteration: a seed with one to eight damages.
pub fn input(target: Target, seed: u64, iteration: u64) -> Input {
    let mut random = Random::new(seed ^ iteration.wrapping_mul(0xD6E8_FEB8_6659_FD93));
    let rounds = 1 + random.below(4) * random.below(3);
    let byte_level = random.below(2) == 0;
    match target {
        Target::Gguf => {
            let mut data = seeds::gguf(byte_level);
            (0..rounds).for_each(|_| mutations::gguf(&mut random, &mut data));
            vec![("m.gguf".into(), data)]
        }
        Target::SafeTensors => {
            let mut files = seeds::folder(random.below(4) == 0);
            for _ in 0..rounds {
                let at = random.below(files.len());
                let (name, data) = &mut files[at];
                match name.ends_with(".safetensors") {
                    true => mutations::safetensors(&mut random, data),
                    false => mutations::json(&mut random, data),
                }
            }
            files
        }
        Target::Tokenizer if random.below(3) == 0 => {
            let mut data = seeds::gguf_vocabulary(byte_level);
            (0..rounds).for_each(|_| mutations::gguf(&mut random, &mut data));
            vec![("m.gguf".into(), data)]
        }
        Target::Tokenizer => {
            let files = seeds::folder(false).into_iter();
            let mut files: Input = files.filter(|(name, _)| name == "tokenizer.json").collect();
            for (_, data) in &mut files {
                (0..rounds).for_each(|_| mutations::json(&mut random, data));
            }
            files
        }
        Target::Template => {
            let mut source = if byte_level { seeds::TEMPLATE.to_string() } else { String::new() };
            (0..2 * rounds).for_each(|_| mutations::template(&mut random, &mut source));
            vec![("template.jinja".into(), source.into_bytes())]
        }
        Target::Planted(_) => vec![("iteration".into(), iteration.to_le_bytes().to_vec())],
    }
}

/// Walks an input.
fn exercise(target: Target, input: &Input) -> Outcome {
    match (target, &input[..]) {
        (Target::Gguf, [(_, data)]) => walk::gguf(data),
        (Target::Tokenizer, [(_, data)]) => walk::tokenizer(data),
        (Target::Template, [(_, data)]) => walk::template(&String::from_utf8_lossy(data)),
        (Target::Planted(fault), [(_, data)]) => {
            if data[..] == PLANTED_AT.to_le_bytes() {
                commit(fault);
            }
            Ok(())
        }
        _ => {
            let files: Vec<(&str, &[u8])> = input.iter().map(|(name, data)| (&name[..], &data[..])).collect();
            walk::folder(&files)
        }
    }
}

/// Does what a fault does.
fn commit(fault: Planted) {
    match fault {
        Planted::Panic => panic!("planted"),
        Planted::Abort => std::process::abort(),
        Planted::Memory => drop(std::hint::black_box(vec![0u8; 1 << 30])),
        Planted::Slow => {
            let (start, used) = (Instant::now(), processor_time());
            let spent = || processor_time().zip(used).map_or(Duration::MAX, |(now, before)| now - before);
            while start.elapsed() < SLOW || spent() <= SLOW {}
        }
        Planted::Hang => std::thread::sleep(Duration::from_secs(3600)),
    }
}

/// What an input did that none may do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It panicked, with these words.
    Panic(String),
    /// It asked for more memory than its size accounts for.
    Memory {
        /// What it asked for.
        usage: Usage,
        /// What it may hold.
        limit: usize,
    },
    /// It took longer than [`SLOW`].
    Slow(Duration),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Panic(words) => write!(f, "panic: {words}"),
            Fault::Memory { usage, limit } => write!(
                f,
                "memory: {} bytes at once, {} held, where {limit} are accounted for",
                usage.largest, usage.peak
            ),
            Fault::Slow(time) => {
                write!(f, "slow: {} ms, and at most {} are allowed", time.as_millis(), SLOW.as_millis())
            }
        }
    }
}

/// Bytes that an input may hold: what a small model takes whatever its file says (rotary tables, a regex, a template's
/// budget), and a multiple of its size.
pub fn allowance(input: &Input) -> usize {
    let bytes: usize = input.iter().map(|(_, data)| data.len()).sum();
    (48 << 20) + 64 * bytes
}

/// Walks an input and judges how. Slow is what is so each of three times: other tests count in the time too.
pub fn judge(target: Target, input: &Input) -> Result<Outcome, Fault> {
    let mut judged = judge_once(target, input);
    for _ in 1..3 {
        if matches!(judged, Err(Fault::Slow(_))) {
            judged = judge_once(target, input);
        }
    }
    judged
}

fn judge_once(target: Target, input: &Input) -> Result<Outcome, Fault> {
    let limit = allowance(input);
    // Timed inside the measurement, which waits for others.
    let ((result, time), usage) =
        watch::measure(|| timed(|| panic::catch_unwind(AssertUnwindSafe(|| exercise(target, input)))));
    match result {
        Err(panic) => Err(Fault::Panic(words(&*panic))),
        Ok(_) if usage.peak > limit => Err(Fault::Memory { usage, limit }),
        Ok(_) if time > SLOW => Err(Fault::Slow(time)),
        Ok(outcome) => Ok(outcome),
    }
}

/// What `work` returns and how long it took: by the clock or, where the system says so and it is less, on processors.
pub fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let (start, used) = (Instant::now(), processor_time());
    let result = work();
    let time = match (used, processor_time()) {
        (Some(before), Some(after)) => start.elapsed().min(after - before),
        _ => start.elapsed(),
    };
    (result, time)
}

/// Time that this process has spent on processors, where the system has a file that says so.
fn processor_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // After the name in brackets: state, ..., and as fields 12 and 13 hundredths of seconds for the program and for the
    // system on its behalf.
    let fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
    let ticks: u64 = fields.take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
    Some(Duration::from_millis(10 * ticks))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without words").to_string()
}

/// Counts of a run.
#[derive(Debug, Default)]
pub struct Tally {
    /// Inputs walked.
    pub executions: u64,
    /// Inputs that were answered.
    pub accepted: u64,
    /// Refusals, told apart by their words without numbers and names.
    pub kinds: BTreeSet<String>,
}

impl Tally {
    /// Counts an outcome.
    pub fn add(&mut self, outcome: &Outcome) {
        self.executions += 1;
        match outcome {
            Ok(()) => self.accepted += 1,
            Err(message) => drop(self.kinds.insert(kind(message))),
        }
    }
}

/// The start of a message without paths, numbers and what is between quotes: near enough to a kind.
fn kind(message: &str) -> String {
    let start: String = message.chars().take(400).collect();
    let words = start.split(' ').filter(|word| !word.contains('/'));
    let mut out = String::new();
    let mut quote = None;
    for c in words.flat_map(|word| [" ", word]).flat_map(str::chars).skip(1) {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '`') => {
                quote = Some(c);
                out.push('~');
            }
            (None, c) if !c.is_ascii_digit() => out.push(c),
            _ => {}
        }
    }
    out.chars().take(60).collect()
}

/// Iterations from `first` on until `go_on` says no, which is asked before each with its number. Ends at the first
/// fault, with its iteration.
pub fn run(
    target: Target,
    seed: u64,
    first: u64,
    mut go_on: impl FnMut(u64) -> bool,
) -> (Tally, Option<(u64, Fault)>) {
    let mut tally = Tally::default();
    for iteration in first.. {
        if !go_on(iteration) {
            break;
        }
        match judge(target, &input(target, seed, iteration)) {
            Ok(outcome) => tally.add(&outcome),
            Err(fault) => return (tally, Some((iteration, fault))),
        }
    }
    (tally, None)
}
