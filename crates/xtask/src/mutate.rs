//! Damaged files by the thousand: `xtask mutate`. The work is done in a child process, one for each target, so that an
//! input that ends the process or never ends is a finding like any other. Before the work, planted faults of every kind
//! must be found.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use ingle_tests::attack::driver::{self, PLANTED_AT, Planted, Target};

/// How long an input may go on, by the clock, before its process is ended: long enough for a busy machine to spend on it
/// what makes it slow.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for the planted fault that has no end.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// Where inputs of findings are kept, under the repository's root.
const FOLDER: &str = "target/mutate";

struct Options {
    seconds: f64,
    seed: u64,
    targets: Vec<Target>,
    from: u64,
    child: bool,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut options =
            Self { seconds: 60.0, seed: 1, targets: Target::ALL.to_vec(), from: 0, child: false };
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            if flag == "--child" {
                options.child = true;
                continue;
            }
            let value = args.next().ok_or_else(|| format!("{flag} wants a value"))?;
            let bad = || format!("{flag} {value}: not possible");
            match flag.as_str() {
                "--seconds" => {
                    let seconds = value.parse().ok().filter(|s| (0.0..=1e6).contains(s));
                    options.seconds = seconds.ok_or_else(bad)?;
                }
                "--seed" => options.seed = value.parse().map_err(|_| bad())?,
                "--from" => options.from = value.parse().map_err(|_| bad())?,
                "--target" if value == "all" => {}
                "--target" => options.targets = vec![Target::named(value).ok_or_else(bad)?],
                _ => return Err(format!("{flag} is unknown")),
            }
        }
        Ok(options)
    }
}

/// Runs the command.
pub fn run(args: &[String]) -> ExitCode {
    match Options::parse(args) {
        Err(what) => {
            eprintln!("mutate: {what}");
            ExitCode::from(2)
        }
        Ok(options) if options.child => child(&options),
        Ok(options) => parent(&options).unwrap_or_else(|error| {
            eprintln!("mutate: {error}");
            ExitCode::FAILURE
        }),
    }
}

/// The work of one target. Its current iteration is in the file `progress`, where the parent finds it whatever becomes
/// of this process.
fn child(options: &Options) -> ExitCode {
    // What panics is told by the driver, once.
    std::panic::set_hook(Box::new(|_| ()));
    let target = options.targets[0];
    let Ok(progress) = fs::File::create(progress(target)) else { return ExitCode::FAILURE };
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let (tally, fault) = driver::run(target, options.seed, options.from, |iteration| {
        progress.write_all_at(&iteration.to_le_bytes(), 0).is_ok() && Instant::now() < end
    });
    println!(
        "{:<12} {:>8} inputs: {} answered, {} refused in {} kinds",
        target.name(),
        tally.executions,
        tally.accepted,
        tally.executions - tally.accepted,
        tally.kinds.len()
    );
    if let Ok(mut file) = fs::File::create(folder().join(format!("{}-kinds.txt", target.name()))) {
        let _ = tally.kinds.iter().try_for_each(|kind| writeln!(file, "{kind}"));
    }
    match fault {
        None => ExitCode::SUCCESS,
        Some((_, fault)) => {
            println!("fault {fault}");
            ExitCode::FAILURE
        }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(FOLDER)
}

fn progress(target: Target) -> PathBuf {
    folder().join(format!("{}-progress", target.name()))
}

fn iteration(target: Target) -> Option<u64> {
    let bytes = fs::read(progress(target)).ok()?;
    Some(u64::from_le_bytes(bytes.first_chunk().copied()?))
}

fn parent(options: &Options) -> std::io::Result<ExitCode> {
    fs::create_dir_all(folder())?;
    println!("mutate: seed {}, from iteration {}, {} s", options.seed, options.from, options.seconds);
    for target in Target::PLANTED {
        let patience = if target == Target::Planted(Planted::Hang) { SHORT_PATIENCE } else { PATIENCE };
        let found = attack(target, options.seed, 0, 600.0, patience)?;
        let what = match target {
            Target::Planted(Planted::Panic) => "panic: planted",
            Target::Planted(Planted::Abort) => "the process ended: signal",
            Target::Planted(Planted::Memory) => "memory: 1073741824 bytes",
            Target::Planted(Planted::Slow) => "slow: ",
            _ => "no end: ",
        };
        if !found.as_ref().is_some_and(|(at, fault)| *at == PLANTED_AT && fault.starts_with(what)) {
            println!("{}: not found, but {found:?}: the driver is asleep", target.name());
            return Ok(ExitCode::FAILURE);
        }
    }
    println!("{} planted faults found", Target::PLANTED.len());
    let mut findings = 0;
    for &target in &options.targets {
        let seconds = options.seconds / options.targets.len() as f64;
        if let Some((at, fault)) = attack(target, options.seed, options.from, seconds, PATIENCE)? {
            findings += 1;
            println!("FINDING {} --seed {} --from {at}: {fault}", target.name(), options.seed);
            for (name, data) in driver::input(target, options.seed, at) {
                let path = folder().join(format!("{}-{}-{at}-{name}", target.name(), options.seed));
                fs::write(&path, data)?;
                println!("  kept as {FOLDER}/{}", path.file_name().unwrap_or_default().to_string_lossy());
            }
        }
    }
    println!("mutate: {findings} findings");
    Ok(if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a child for this target and returns the iteration at which it went wrong, and how.
fn attack(
    target: Target,
    seed: u64,
    from: u64,
    seconds: f64,
    patience: Duration,
) -> std::io::Result<Option<(u64, String)>> {
    let _ = fs::remove_file(progress(target));
    let mut child = Command::new(std::env::current_exe()?)
        .args(["mutate", "--child", "--target", target.name()])
        .args(["--seed", &seed.to_string(), "--from", &from.to_string(), "--seconds", &seconds.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let hung = watch(&mut child, target, patience)?;
    let status = child.wait()?;
    let mut fault = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        let line = line?;
        match line.strip_prefix("fault ") {
            Some(words) => fault = Some(words.to_string()),
            None if matches!(target, Target::Planted(_)) => {}
            None => println!("{line}"),
        }
    }
    let fault = match fault {
        _ if hung => Some(format!("no end: {} s and more", patience.as_secs())),
        None if !status.success() => Some(format!("the process ended: {status}")),
        fault => fault,
    };
    Ok(fault.map(|fault| (iteration(target).unwrap_or(from), fault)))
}

/// Waits for the child; ends it, and says so, when an iteration takes longer than `patience`.
fn watch(child: &mut Child, target: Target, patience: Duration) -> std::io::Result<bool> {
    let mut last = (iteration(target), Instant::now());
    while child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(20));
        let now = iteration(target);
        if now != last.0 {
            last = (now, Instant::now());
        } else if last.1.elapsed() > patience {
            child.kill()?;
            return Ok(true);
        }
    }
    Ok(false)
}
