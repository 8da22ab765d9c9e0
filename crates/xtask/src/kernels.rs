//! Compiles every CUDA kernel for every architecture, without a GPU, and checks what came out: parameters as declared, hardly a
//! register spilled to memory, no array there, and nothing flushed or approximated, which the numeric contract forbids.

use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use ingle_cuda::compile::{Compiler, Search};
use ingle_cuda::driver::{Compiled, Param};
use ingle_cuda::kernels::{ARCHS, SOURCES, Source};

/// One kernel as compiled.
#[derive(Debug, PartialEq, Eq)]
struct Report {
    kernel: String,
    registers: usize,
    /// Stores and loads of spilled registers.
    spill_bytes: usize,
    /// A thread's memory outside of registers.
    local_bytes: usize,
}

/// `kernels [ARCH...]`: all of [`ARCHS`], or those that are named.
pub fn run(arguments: &[String]) -> ExitCode {
    let named = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    match if named.is_empty() { ARCHS } else { &named } {
        [arch] => compile(arch),
        archs => apart(archs),
    }
}

/// A process for each architecture, as many at a time as there are processors: NVRTC compiles one file at a time in one.
fn apart(archs: &[&str]) -> ExitCode {
    let start = Instant::now();
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("kernels: this program is not found: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        while let Some(arch) = archs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let sound = match Command::new(&program).args(["kernels", arch]).output() {
                Ok(done) => {
                    // What one says stays together.
                    let mut out = std::io::stdout().lock();
                    let said = out.write_all(&done.stdout).and_then(|()| out.flush());
                    said.and_then(|()| std::io::stderr().write_all(&done.stderr)).is_ok()
                        && done.status.success()
                }
                Err(error) => {
                    eprintln!("kernels: {arch}: {error}");
                    false
                }
            };
            failed.fetch_add(usize::from(!sound), Ordering::Relaxed);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(archs.len());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let (seconds, failed) = (start.elapsed().as_secs_f64(), failed.into_inner());
    println!("kernels: {} architectures in {seconds:.1} s, {failed} of them with problems", archs.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All files for one architecture.
fn compile(arch: &str) -> ExitCode {
    let compiler = match Search::from_env().open() {
        Ok(nvrtc) => Compiler::new(nvrtc, None),
        Err(error) => {
            eprintln!("kernels: NOTHING WAS COMPILED: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{:?}", compiler.nvrtc());
    println!(
        "{:<14} {:<9} {:>7}  {:<34} {:>6} {:>6}",
        "file", "arch", "kernels", "most registers", "spills", "ms"
    );
    let (mut problems, mut compiled, start) = (Vec::new(), 0, Instant::now());
    for source in SOURCES {
        let started = Instant::now();
        let made = match compiler.compile(source, arch, &["--ptxas-options=-v"]) {
            Ok(made) => made,
            Err(error) => {
                problems.push(error.to_string());
                continue;
            }
        };
        let ms = started.elapsed().as_millis();
        let reports = reports(&made.log);
        let most = reports.iter().max_by_key(|report| report.registers);
        let most = most.map_or_else(String::new, |most| format!("{} {}", most.registers, most.kernel));
        let spills: usize = reports.iter().map(|report| report.spill_bytes).sum();
        println!("{:<14} {arch:<9} {:>7}  {most:<34} {spills:>6} {ms:>6}", source.name, reports.len());
        compiled += reports.len();
        problems.extend(
            check(source, &made, &reports).into_iter().map(|p| format!("{}.cu, {arch}: {p}", source.name)),
        );
    }
    for problem in &problems {
        eprintln!("{problem}");
    }
    let (seconds, count) = (start.elapsed().as_secs_f64(), problems.len());
    println!("kernels: {compiled} compiled for {arch} in {seconds:.1} s, {count} problems");
    if problems.is_empty() && compiled > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Bytes of registers that a kernel may store and load: what a block keeps from one stage to the next, not what a loop works on.
const SPILLS_MAX: usize = 112;

/// What is wrong with a compiled file.
fn check(source: &Source, made: &Compiled, reports: &[Report]) -> Vec<String> {
    let mut problems = Vec::new();
    let found = entries(&made.ptx);
    for entry in source.entries {
        match found.iter().find(|(name, _)| name == entry.name) {
            None => problems.push(format!("{} is declared and not there", entry.name)),
            Some((_, params)) if params != entry.params => {
                problems.push(format!("{} takes {params:?}, declared as {:?}", entry.name, entry.params));
            }
            Some(_) => {}
        }
        if !reports.iter().any(|report| report.kernel == entry.name) {
            problems.push(format!("{}: the compiler says nothing of its registers", entry.name));
        }
    }
    for (name, _) in found.iter().filter(|(name, _)| !source.entries.iter().any(|entry| entry.name == name)) {
        problems.push(format!("{name} is there and not declared"));
    }
    for report in reports.iter().filter(|report| report.spill_bytes > SPILLS_MAX) {
        problems.push(format!("{} spills {} bytes of registers", report.kernel, report.spill_bytes));
    }
    // An array whose index the compiler does not know lies in memory, and costs several times its loads.
    for report in reports.iter().filter(|report| report.local_bytes > report.spill_bytes) {
        problems.push(format!("{} keeps {} bytes of arrays in memory", report.kernel, report.local_bytes));
    }
    for (n, line) in made.ptx.lines().enumerate() {
        if let Some(mark) = [".ftz", ".approx"].iter().find(|mark| line.contains(*mark)) {
            problems.push(format!("{mark} in line {} of its PTX: {}", n + 1, line.trim()));
        }
    }
    problems
}

/// Kernels and parameters of a PTX text.
fn entries(ptx: &str) -> Vec<(String, Vec<Param>)> {
    let mut found = Vec::new();
    for text in ptx.split(".entry ").skip(1) {
        let (name, rest) = text.split_once('(').unwrap_or((text, ""));
        let list = rest.split_once(')').map_or("", |(list, _)| list);
        let params =
            list.split(".param ").skip(1).filter_map(|param| match param.split_whitespace().next()? {
                ".u64" => Some(Param::Memory),
                ".u32" => Some(Param::U32),
                ".f32" => Some(Param::F32),
                _ => None,
            });
        found.push((name.trim().to_string(), params.collect()));
    }
    found
}

/// What the assembler says of each kernel with `-v`.
fn reports(log: &str) -> Vec<Report> {
    let before = |line: &str, what: &str| -> Option<usize> {
        line.split_once(what)?
            .0
            .split(|c: char| !c.is_ascii_digit())
            .rfind(|part| !part.is_empty())?
            .parse()
            .ok()
    };
    let mut found: Vec<Report> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            found.push(Report { kernel, registers: 0, spill_bytes: 0, local_bytes: 0 });
        }
        let Some(report) = found.last_mut() else { continue };
        if let (Some(stores), Some(loads)) =
            (before(line, " bytes spill stores"), before(line, " bytes spill loads"))
        {
            report.spill_bytes = stores + loads;
        }
        if let Some(bytes) = before(line, " bytes stack frame") {
            report.local_bytes = bytes;
        }
        if let Some(registers) = before(line, " registers") {
            report.registers = registers;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use ingle_cuda::driver::Entry;

    use super::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas         .     0 bytes stack frame, 100 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 19 registers, used 0 barriers
";
    const PTX: &str = ".visible .entry a(
\t.param .u64 .ptr .align 1 a_param_0,
\t.param .u32 a_param_1,
\t.param .f32 a_param_2
)
{
\tfma.rn.f32 \t%f1, %f2, %f3, %f4;
}
.visible .entry b()
{
\tret;
}
";
    const SOURCE: Source = Source {
        name: "s",
        text: "",
        entries: &[
            Entry { name: "a", params: &[Param::Memory, Param::U32, Param::F32] },
            Entry { name: "b", params: &[] },
        ],
    };

    fn problems(ptx: &str, log: &str) -> Vec<String> {
        let made = Compiled { cubin: Vec::new(), ptx: ptx.into(), log: log.into() };
        check(&SOURCE, &made, &reports(log))
    }

    #[test]
    fn logs_and_ptx_are_read() {
        assert_eq!(
            reports(LOG),
            [
                Report { kernel: "b".into(), registers: 255, spill_bytes: 116, local_bytes: 0 },
                Report { kernel: "a".into(), registers: 19, spill_bytes: 0, local_bytes: 0 },
            ]
        );
        assert_eq!(problems(PTX, LOG), ["b spills 116 bytes of registers"]);
    }

    /// Each fault alone is found.
    #[test]
    fn planted_faults_are_found() {
        let sound = LOG.replace("100 bytes spill stores", "96 bytes spill stores");
        assert_eq!(problems(PTX, &sound), [""; 0]);
        for (from, to, want) in [
            ("fma.rn.f32", "fma.rn.ftz.f32", ".ftz in line 7"),
            ("fma.rn.f32", "ex2.approx.f32", ".approx in line 7"),
            (".param .f32 a_param_2", ".param .u64 a_param_2", "a takes [Memory, U32, Memory], declared as"),
            ("entry b()", "entry c()", "b is declared and not there"),
        ] {
            let found = problems(&PTX.replace(from, to), &sound);
            assert!(found.iter().any(|problem| problem.starts_with(want)), "{want}: {found:?}");
        }
        let array = sound.replace("0 bytes stack frame", "128 bytes stack frame");
        let found = ["b keeps 128 bytes of arrays in memory", "a keeps 128 bytes of arrays in memory"];
        assert_eq!(problems(PTX, &array), found);
        assert!(problems(PTX, "").contains(&"a: the compiler says nothing of its registers".to_string()));
    }
}
