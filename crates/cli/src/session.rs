//! From flags to a model that is ready: find the file, map it, load the device, build the tokenizer beside it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_cuda::compile::Search;
use ingle_cuda::driver::Driver;
use ingle_cuda::survey::survey;
use ingle_cuda::{Cuda, CudaOptions};
use ingle_engine::handle::{Handle, Language, Reply};
use ingle_engine::runner::{Plan, Runner, buckets, kv_bytes, kv_plan};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::options::Placement;
use ingle_graph::split::Split;
use ingle_graph::{Backend, Bucket, FloatArithmetic, Graph, Numerics, PlanOptions, Program};
use ingle_models::Model;
use ingle_tensor::Checkpoint;

use crate::error::{Error, Result};
use crate::flags::{Device, DeviceFlags, PlanFlags};
use crate::layout::Layout;
use crate::source::{self, Cache, Spec};
use crate::sys;
use crate::term::{self, bytes};
use crate::threads::Work;

/// Longest context that is taken without being asked for, in tokens.
const CONTEXT_MAX: usize = 8192;

/// The file or folder that a model flag means, fetched if it has to be.
pub fn resolve(spec: Option<&Spec>) -> Result<PathBuf> {
    Ok(source::resolve(spec.unwrap_or(&Spec::Default), &mut *term::progress())?)
}

/// What a model is called in reports: its file without `.gguf`, or its folder.
pub fn name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned();
    match name.to_ascii_lowercase().strip_suffix(".gguf") {
        Some(stem) if !stem.is_empty() => name[..stem.len()].to_string(),
        _ => name,
    }
}

/// Opens a model's files.
///
/// # Errors
/// What is wrong with them, and what to do about it.
pub fn open_files(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(path).map_err(|error| match error.says_what_to_do() {
        true => error.into(),
        false => Error::Refused(format!("{error}: fetch it again, or see `ingle check {}`", path.display())),
    })
}

/// Refuses a GPU that this machine lacks, before anything is read.
///
/// # Errors
/// A GPU that cannot be used, with the reason: bad usage.
pub fn require_gpu(flags: &DeviceFlags) -> Result<()> {
    if let Device::Cuda { index } = flags.device
        && let Some(error) = survey(&Search::from_env()).obstacle()
    {
        return Err(Error::Usage(format!(
            "--device cuda:{index}: {error}; or leave --device out: see ingle doctor"
        )));
    }
    Ok(())
}

/// The same for commands that run a model.
///
/// # Errors
/// As [`require_gpu`]; memory on a GPU that is not used: bad usage.
pub fn require_device(flags: &DeviceFlags) -> Result<()> {
    require_gpu(flags)?;
    if flags.gpu_memory.is_some() && cuda_options(flags).is_none() {
        return Err(Error::Usage(
            "--gpu-memory limits what of a GPU is used: add --device cuda, or leave it out".into(),
        ));
    }
    Ok(())
}

/// Which GPU, if one was asked for, or there is one that can be used and nobody asked for the host.
pub fn cuda_options(flags: &DeviceFlags) -> Option<CudaOptions> {
    // Nothing is compiled where there is no driver. What keeps a GPU from being used is for `ingle doctor` to say.
    static USABLE: OnceLock<Option<usize>> = OnceLock::new();
    let look = || Driver::get().ok().and_then(|_| survey(&Search::from_env()).usable());
    let device = match flags.device {
        Device::Cpu => None,
        Device::Cuda { index } => Some(index as usize),
        Device::Auto => *USABLE.get_or_init(look),
    };
    let cache = Cache::from_env().ok().map(|cache| cache.kernels());
    device.map(|device| CudaOptions { device, cache, search: Search::from_env(), ..CudaOptions::default() })
}

/// The host with nothing loaded.
pub fn cpu(flags: &DeviceFlags) -> ingle_graph::Result<Box<dyn Backend>> {
    let options = CpuOptions { threads: threads(flags), isa: None };
    Ok(Box::new(Cpu::new(&options)?))
}

/// The host for a plan: it chooses tokens outside of programs.
///
/// # Errors
/// As [`Cpu::new`].
pub fn host(flags: &DeviceFlags, plan: Plan<'_>) -> ingle_graph::Result<Box<dyn Backend>> {
    plan.options.sample = false;
    cpu(flags)
}

/// Threads that work: those asked for, of which no more than there are processors, for the others would only make these
/// wait (a third of a small model's generated tokens with twice as many); else one for each physical core.
pub fn threads(flags: &DeviceFlags) -> usize {
    flags
        .threads
        .map_or_else(ingle_cpu::physical_cores, |asked| usize::from(asked).min(ingle_cpu::processors()))
}

/// A GPU, and what would lie where on it.
///
/// # Errors
/// What keeps it from being used; no room for a layer, with the numbers.
fn on_gpu(options: &CudaOptions, limit: Option<u64>, plan: &Plan<'_>) -> ingle_graph::Result<(Cuda, Layout)> {
    let gpu = Cuda::new(options)?;
    let layout = Layout::new(plan, gpu.room()?, limit)?;
    layout.check(&gpu.describe())?;
    Ok((gpu, layout))
}

/// Where nobody asked for a GPU, one that cannot be used is told of, and the host takes all.
fn unless_auto<T>(flags: &DeviceFlags, found: ingle_graph::Result<T>) -> ingle_graph::Result<Option<T>> {
    match found {
        Err(error) if flags.device == Device::Auto => {
            term::say(&format!("note: all layers are on the CPU: {error}"));
            Ok(None)
        }
        found => found.map(Some),
    }
}

/// What would lie where on the device that was asked for, or on any GPU with so much memory; `None` on the host alone. The
/// options get the placement.
///
/// # Errors
/// As [`device`].
pub fn layout(flags: &DeviceFlags, plan: Plan<'_>) -> ingle_graph::Result<Option<Layout>> {
    let found = match (cuda_options(flags), flags.gpu_memory) {
        (Some(options), limit) => {
            unless_auto(flags, on_gpu(&options, limit, &plan))?.map(|(_, layout)| layout)
        }
        (None, Some(limit)) => {
            let layout = Layout::within(&plan, limit)?;
            layout.check("cuda")?;
            Some(layout)
        }
        (None, None) => None,
    };
    plan.options.float = float(found.as_ref(), plan.options, plan.graph);
    plan.options.placement = found.as_ref().map_or_else(Placement::default, |found| found.fit.placement());
    plan.options.sample &= found.as_ref().is_some_and(|found| found.fit.is_whole());
    Ok(found)
}

/// Opens the device that was asked for, with nothing loaded: a GPU with as many layers as its memory holds, and the host with
/// the others. Says so on standard error, the first time. The options get the placement.
///
/// # Errors
/// What keeps the device from being used; a GPU that has no room for a layer, with the numbers.
pub fn device(
    flags: &DeviceFlags,
    eager: bool,
    layout: &mut Option<Layout>,
    plan: Plan<'_>,
) -> ingle_graph::Result<Box<dyn Backend>> {
    let Some(options) = cuda_options(flags) else { return host(flags, plan) };
    let found = on_gpu(&CudaOptions { eager, ..options }, flags.gpu_memory, &plan);
    let Some((gpu, found)) = unless_auto(flags, found)? else { return host(flags, plan) };
    let split = !found.fit.is_whole();
    plan.options.placement = found.fit.placement();
    plan.options.sample &= !split;
    if split && layout.is_none() {
        term::say(&format!("note: {}", found.line()));
    }
    *layout = Some(found);
    Ok(if split { Box::new(Split::new(vec![Box::new(gpu), cpu(flags)?])) } else { Box::new(gpu) })
}

/// Says so on standard error where fewer threads work than were asked for.
pub fn warn_of_threads(flags: &DeviceFlags) {
    let (works, asked) = (threads(flags), flags.threads.map_or(0, usize::from));
    if asked > works {
        term::say(&format!(
            "note: {works} of {asked} threads work, one for each processor this process may use"
        ));
    }
}

/// The float arithmetic that a mode stands for, for this model: of the host alone, of a GPU that has all of it, or where each
/// has a part, the one that both have.
pub fn float(layout: Option<&Layout>, options: &PlanOptions, graph: &Graph) -> FloatArithmetic {
    match layout {
        None => Isa::detect().float_for(options.numerics, graph),
        Some(layout) if layout.fit.is_whole() => ingle_cuda::float_for(options.numerics, graph, options.kv),
        Some(_) => FloatArithmetic::F32x32,
    }
}

/// The options of every program of a model, but for what depends on the device, which chooses tokens if it can.
pub fn plan_options(flags: &PlanFlags) -> PlanOptions {
    PlanOptions {
        numerics: flags.numerics,
        kv: flags.kv,
        activations: flags.activations,
        sample: true,
        ..PlanOptions::default()
    }
}

/// Tokens of context: those asked for, else the model's own up to a limit.
pub fn context(model: &Model, asked: Option<usize>) -> usize {
    asked.unwrap_or(model.config.context.min(CONTEXT_MAX))
}

/// The arithmetics that a program runs, by name, with the activations of its integer products.
pub fn arithmetics(program: &Program) -> String {
    let activations: BTreeSet<(usize, &str)> =
        program.products().filter_map(|(_, elem)| Some((elem.digits()?.1, elem.name()))).collect();
    let activations: Vec<&str> = activations.into_iter().map(|(_, name)| name).collect();
    let int = (!activations.is_empty()).then(|| format!("int ({} activations)", activations.join(" and ")));
    let float = FloatArithmetic::F32x32.to_string();
    let attention = program.key.options.float;
    let attention = (attention != FloatArithmetic::F32x32).then(|| format!("{attention} (attention)"));
    int.into_iter().chain([float]).chain(attention).collect::<Vec<_>>().join(", ")
}

/// A model on a device, with its tokenizer.
pub struct Session {
    /// Text in, text out.
    pub handle: Handle,
    /// What the model is called.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
    /// Device, instruction set and threads.
    pub device: String,
    /// The mode asked for.
    pub numerics: Numerics,
    /// The arithmetics it stands for here.
    pub arithmetics: String,
    /// What lies where, if a GPU is used.
    pub layout: Option<Layout>,
    /// From the open of a file that is there to the first step that could run.
    pub load_ms: f64,
}

impl Session {
    /// The same error; where no token could be chosen, with what to do.
    pub fn advised(&self, error: ingle_engine::handle::Error) -> Error {
        match error {
            ingle_engine::handle::Error::Sample(what) => {
                Error::Refused(format!("{what}: {}", weights_to_check(&self.path)))
            }
            error => error.into(),
        }
    }

    /// Warns of a reply whose tokens were chosen although some logits were NaN: a line on standard error.
    pub fn warn_of_nan(&mut self, reply: &Reply) {
        let Some((position, nan)) = reply.nan else { return };
        let logits = self.handle.engine().runner().model().config.vocabulary;
        term::say(&format!(
            "warning: {nan} of {logits} logits were NaN at position {position}, and tokens were chosen among the others: {}",
            weights_to_check(&self.path)
        ));
    }
}

/// What to do about logits that are not numbers.
fn weights_to_check(path: &Path) -> String {
    format!("`ingle check {}` finds weights that are not finite", path.display())
}

/// Opens a model for one conversation: the device packs weights while another thread builds the tokenizer.
pub fn open(model: Option<&Spec>, device: &DeviceFlags, plan: &PlanFlags) -> Result<Session> {
    require_device(device)?;
    let path = resolve(model)?;
    let start = Instant::now();
    let checkpoint = Arc::new(open_files(&path)?);
    warn_of_threads(device);
    let (language, loaded) = thread::scope(|scope| {
        let language = Work::begin(scope, || Language::open(&checkpoint));
        let loaded = load(&checkpoint, device, plan_options(plan), plan.context, 1);
        (language.end(), loaded)
    });
    let language = language?;
    let (mut runner, layout) = loaded?;
    let arithmetics = arithmetics(&*runner.prepare(Bucket::holding(1, 1, 1))?);
    let device = runner.backend().describe();
    let engine = Engine::new(runner, checkpoint.fingerprint(), EngineOptions::default());
    let handle = Handle::new(engine, language)?;
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let (name, numerics) = (name(&path), plan.numerics);
    Ok(Session { handle, name, path, device, numerics, arithmetics, layout, load_ms })
}

/// Loads a checkpoint on a device, with room for `sequences` sequences; the options get float arithmetic and placement. A
/// context that the model was not made for gets a note.
///
/// # Errors
/// A context whose keys and values this machine cannot hold, with the numbers; what the device cannot serve.
pub fn load(
    checkpoint: &Arc<Checkpoint>,
    flags: &DeviceFlags,
    mut options: PlanOptions,
    context: Option<usize>,
    sequences: usize,
) -> Result<(Runner, Option<Layout>)> {
    let model = Arc::new(Model::open(checkpoint)?);
    let context = self::context(&model, context);
    let engine = EngineOptions::default();
    let kv = kv_plan(&model.graph, context, sequences, engine.chunk);
    let buckets = buckets(engine.step_tokens.min(context.saturating_mul(sequences)), sequences);
    let plan = Plan { graph: &model.graph, options: &mut options, kv: &kv, buckets };
    let mut layout = None;
    let backend = device(flags, false, &mut layout, plan)?;
    options.float = float(layout.as_ref(), &options, &model.graph);
    let wanted =
        layout.as_ref().map_or_else(|| kv_bytes(&model.graph, options.kv, &kv), |layout| layout.host_kv);
    if let Some(held) = sys::memory_bytes("MemTotal:")
        && wanted > held
    {
        return Err(Error::Refused(format!(
            "the keys and values of {context} tokens (for each of {sequences}) take {wanted} bytes ({}), but this \
             machine has {held} ({}): give a shorter context, or --kv q8_0",
            bytes(wanted),
            bytes(held)
        )));
    }
    let made_for = model.config.context;
    if context > made_for {
        term::say(&format!(
            "note: a context of {context} tokens is more than the {made_for} this model was made for; expect worse \
             answers"
        ));
    }
    Ok((Runner::new(backend, model, checkpoint.clone(), options, kv)?, layout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_and_folders() {
        for (path, want) in [
            ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
            ("/m/Qwen3-0.6B", "Qwen3-0.6B"),
            ("/m/A.GGUF", "A"),
            ("/m/.gguf", ".gguf"),
        ] {
            assert_eq!(name(Path::new(path)), want);
        }
    }
}
