//! One integration crate: `ops` compares every op with the scalar reference as bits; `golden` runs whole models.

mod golden;
mod ops;

use std::fmt;
use std::io::{Write, stderr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_cuda::compile::Search;
use ingle_cuda::{Cuda, CudaOptions};
use ingle_graph::backend::PathCount;
use ingle_graph::{
    Backend, FloatArithmetic, Graph, Inputs, KvPlan, Numerics, PlanOptions, Prepared, Profile, Program,
    Result,
};
use ingle_tensor::Checkpoint;

/// A path of a device that the suite asks for.
#[derive(Clone, Copy)]
pub enum Device {
    /// The host on one path, with so many workers.
    Cpu {
        /// Instruction set.
        isa: Isa,
        /// Workers.
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
            Device::Cuda => FloatArithmetic::Mma,
        };
        float == FloatArithmetic::F32x32 || float == fast
    }

    /// An empty backend on this path; `None` where the machine lacks it.
    pub fn open(&self) -> Option<Box<dyn Backend>> {
        match *self {
            Device::Cpu { isa, threads } => isa.available().then(|| cpu(threads, Some(isa))),
            Device::Cuda => gpu(false).map(|lent| Box::new(lent) as Box<dyn Backend>),
        }
    }
}

/// Devices that tests are done with, and whether they run everything eagerly.
fn kept() -> MutexGuard<'static, Vec<(bool, Cuda)>> {
    static KEPT: Mutex<Vec<(bool, Cuda)>> = Mutex::new(Vec::new());
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first GPU, if there is one that can be used. Opening it takes longer than most tests, so it is kept for the next.
pub fn gpu(eager: bool) -> Option<Lent> {
    static USABLE: OnceLock<Option<Search>> = OnceLock::new();
    let usable = || Some(Search::from_env()).filter(|search| ingle_cuda::survey(search).obstacle().is_none());
    let search = USABLE.get_or_init(usable).clone()?;
    let mut all = kept();
    let found = all.iter().position(|(is_eager, _)| *is_eager == eager).map(|at| all.swap_remove(at).1);
    drop(all);
    // Where `ingle` keeps them, so that no kernel is compiled twice, or apart from what a user has.
    let own = std::env::var_os("INGLE_CACHE").map(|root| PathBuf::from(root).join("kernels"));
    let cache = Some(own.unwrap_or_else(|| std::env::temp_dir().join("ingle-kernels")));
    let options = CudaOptions { cache, search, eager, ..CudaOptions::default() };
    let cuda = found.unwrap_or_else(|| Cuda::new(&options).expect("a usable GPU"));
    Some(Lent { eager, cuda: Some(cuda) })
}

/// A device that goes back when a test is done with it.
pub struct Lent {
    eager: bool,
    cuda: Option<Cuda>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Not one that a failed test may have left in pieces.
        if let (Some(cuda), false) = (self.cuda.take(), std::thread::panicking()) {
            kept().push((self.eager, cuda));
        }
    }
}

impl Lent {
    /// The device itself.
    pub fn cuda(&self) -> &Cuda {
        self.cuda.as_ref().expect("it is lent")
    }

    fn cuda_mut(&mut self) -> &mut Cuda {
        self.cuda.as_mut().expect("it is lent")
    }
}

impl Backend for Lent {
    fn describe(&self) -> String {
        self.cuda().describe()
    }
    fn load(
        &mut self,
        graph: &Graph,
        file: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()> {
        self.cuda_mut().load(graph, file, options, kv)
    }
    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared> {
        self.cuda_mut().prepare(program)
    }
    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()> {
        self.cuda_mut().run(prepared, inputs)
    }
    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        self.cuda_mut().read(prepared, output)
    }
    fn set_profile(&mut self, on: bool) {
        self.cuda_mut().set_profile(on);
    }
    fn profile(&self) -> Option<&Profile> {
        self.cuda().profile()
    }
    fn paths(&self) -> Vec<PathCount> {
        self.cuda().paths()
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
