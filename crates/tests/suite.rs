//! One integration crate: `ops` compares every op with the scalar reference as bits; `golden` runs whole models.

mod golden;
mod ops;

use std::fmt;
use std::io::{Write, stderr};
use std::sync::OnceLock;

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_cuda::{Cuda, CudaOptions};
use ingle_graph::{Backend, FloatArithmetic, Numerics};

/// A path of a device that the suite asks for.
#[derive(Clone, Copy)]
pub enum Device {
    Cpu {
        isa: Isa,
        threads: usize,
    },
    /// An NVIDIA GPU, the first there is.
    Cuda,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu { isa, threads } => write!(f, "cpu {} x{threads}", isa.name()),
            Device::Cuda => f.write_str("cuda"),
        }
    }
}

impl Device {
    /// Whether this path runs attention in this arithmetic.
    pub fn runs(&self, float: FloatArithmetic) -> bool {
        let fast = match self {
            Device::Cpu { isa, .. } => isa.float(Numerics::Fast),
            Device::Cuda => FloatArithmetic::F32x32,
        };
        float == FloatArithmetic::F32x32 || float == fast
    }

    /// An empty backend on this path; `None` where the machine lacks it.
    pub fn open(&self) -> Option<Box<dyn Backend>> {
        match *self {
            Device::Cpu { isa, threads } => isa.available().then(|| cpu(threads, Some(isa))),
            Device::Cuda => {
                let search = ingle_cuda::compile::Search::from_env();
                static USABLE: OnceLock<bool> = OnceLock::new();
                let usable = USABLE.get_or_init(|| ingle_cuda::survey(&search).obstacle().is_none());
                // Every case opens the device anew.
                let cache = Some(std::env::temp_dir().join("ingle-kernels"));
                let options = CudaOptions { cache, search: search.clone(), ..CudaOptions::default() };
                usable.then(|| -> Box<dyn Backend> { Box::new(Cuda::new(&options).expect("a usable GPU")) })
            }
        }
    }
}

/// The host, on the path it would choose or on the one asked for.
pub fn cpu(threads: usize, isa: Option<Isa>) -> Box<dyn Backend> {
    Box::new(Cpu::new(&CpuOptions { threads, isa }).expect("a path the machine has"))
}

/// Says and counts what did not run, on standard error itself: the test runner shows nothing that a passing test prints.
pub fn not_run(what: &[String]) {
    if !what.is_empty() {
        let _ = writeln!(stderr(), "not run, missing on this machine: {} ({})", what.len(), what.join(", "));
    }
}

/// Every path of every device, with one thread and with two; with `INGLE_TEST_DEVICE=cuda` (or `cpu`) only those.
pub fn devices() -> Vec<Device> {
    let cpu = Isa::ALL.iter().flat_map(|&isa| [1, 2].map(|threads| Device::Cpu { isa, threads }));
    let only = std::env::var("INGLE_TEST_DEVICE").unwrap_or_default();
    let wanted = |device: &Device| device.to_string().starts_with(&only);
    cpu.chain([Device::Cuda]).filter(wanted).collect()
}
