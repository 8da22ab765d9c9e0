//! One integration crate: `ops` compares every op with the scalar reference as bits; `golden` runs whole models.

mod golden;
mod ops;

use std::fmt;
use std::io::{Write, stderr};

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_graph::{Backend, FloatArithmetic, Numerics};

/// A path of a device that the suite asks for.
#[derive(Clone, Copy)]
pub struct Device {
    isa: Isa,
    threads: usize,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu {} x{}", self.isa.name(), self.threads)
    }
}

impl Device {
    /// Whether this path runs attention in this arithmetic.
    pub fn runs(&self, float: FloatArithmetic) -> bool {
        float == FloatArithmetic::F32x32 || float == self.isa.float(Numerics::Fast)
    }

    /// An empty backend on this path; `None` where the machine lacks it.
    pub fn open(&self) -> Option<Box<dyn Backend>> {
        self.isa.available().then(|| cpu(self.threads, Some(self.isa)))
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

/// Every path of every device, with one thread and with two.
pub fn devices() -> Vec<Device> {
    Isa::ALL.iter().flat_map(|&isa| [1, 2].map(|threads| Device { isa, threads })).collect()
}
