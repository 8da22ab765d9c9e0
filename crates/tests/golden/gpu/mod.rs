//! Whole models on a GPU where there is one, and on the stand-in everywhere else: what replays of graphs, and steps one after
//! the other, must not change.
//!
//! The stand-in runs a step of the smallest model in some milliseconds, a GPU in microseconds: where that matters a test does
//! less on the stand-in, and says so on standard error.

mod replays;
mod steps;

use std::sync::Arc;

use ingle_cuda::driver::Context;
use ingle_cuda::stand_in::StandIn;
use ingle_engine::batch::{self, Part};
use ingle_engine::kv::Span;
use ingle_engine::runner::{Runner, kv_plan_of_all};
use ingle_graph::sample::{Change, Chosen, Sampling};
use ingle_graph::{Backend, Inputs, Numerics, PAGE, PlanOptions};
use ingle_models::Model;
use ingle_tensor::gguf::Writer;
use ingle_tensor::{Checkpoint, Source, TensorInfo};

use super::checkpoint;
use super::cuda::{self, graphs};
use crate::{Device, devices, gpu};

/// What runs the tests.
pub enum Gpu {
    /// The machine's first GPU.
    Real,
    /// The stand-in, as a device of two multiprocessors: of what a block does for itself the host has to do less.
    StandIn(StandIn),
}

impl Gpu {
    /// A GPU where there is one that is wanted (`INGLE_TEST_DEVICE`), else the stand-in; `None`, with a word on standard
    /// error, where there is neither. `what` is not run then.
    pub fn new(what: &str) -> Option<Self> {
        let wanted = devices().into_iter().any(|device| matches!(device, Device::Cuda));
        if wanted && gpu(false).is_some() {
            return Some(Self::Real);
        }
        let device = StandIn::new(what)?;
        device.set_multiprocessors(2);
        Some(Self::StandIn(device))
    }

    /// Whether it is fast.
    pub fn is_real(&self) -> bool {
        matches!(self, Self::Real)
    }

    /// The stand-in, for what only it can be asked.
    pub fn stand_in(&self) -> Option<&StandIn> {
        match self {
            Self::Real => None,
            Self::StandIn(device) => Some(device),
        }
    }

    /// As a backend, and where that allocates.
    pub fn open_in(&self, eager: bool) -> (Box<dyn Backend>, Context) {
        match self {
            Self::Real => {
                let lent = gpu(eager).expect("it was there");
                let context = lent.cuda().context().clone();
                (Box::new(lent), context)
            }
            Self::StandIn(device) => {
                let cuda = cuda::open(device, eager);
                let context = cuda.context().clone();
                (Box::new(cuda), context)
            }
        }
    }

    /// As a backend.
    pub fn open(&self, eager: bool) -> Box<dyn Backend> {
        self.open_in(eager).0
    }
}

/// A model on a GPU, with room for so many sequences of so many tokens, as a user gets it: tokens are chosen by the program,
/// and attention runs in the arithmetic of the mode.
pub fn load(
    backend: Box<dyn Backend>,
    checkpoint: &Arc<Checkpoint>,
    numerics: Numerics,
    [sequences, context]: [usize; 2],
) -> Runner {
    let model = Arc::new(Model::open(checkpoint).expect("a fixture"));
    let mut options = PlanOptions { numerics, sample: true, ..PlanOptions::default() };
    options.float = ingle_cuda::float_for(numerics, &model.graph, options.kv);
    let kv = kv_plan_of_all(&model.graph, context, sequences);
    Runner::new(backend, model, checkpoint.clone(), options, kv).expect("it loads")
}

/// A GGUF fixture with other tensors: `change` may change the bytes of each, and says whether it is kept.
pub fn rewritten(
    path: &str,
    layers: Option<u32>,
    change: impl Fn(&TensorInfo, &mut Vec<u8>) -> bool,
) -> Arc<Checkpoint> {
    let from = checkpoint(path);
    let Source::Gguf(metadata) = from.source() else { panic!("{path} is GGUF") };
    let mut writer = Writer::new();
    let other: &[&str] = if layers.is_some() { &["llama.block_count"] } else { &[] };
    writer.copy(metadata, other).expect("fresh keys");
    layers.into_iter().for_each(|n| writer.set("llama.block_count", &n).expect("a fresh key"));
    for tensor in from.tensors() {
        let mut bytes = from.data(tensor).to_vec();
        if change(tensor, &mut bytes) {
            writer.tensor(&tensor.name, tensor.dtype, &tensor.shape, bytes).expect("a fresh tensor");
        }
    }
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    writer.write(&mut file.as_file()).expect("room for a small file");
    Arc::new(Checkpoint::open(file.path()).expect("the file just written"))
}

/// The first layer of a Llama: a step of it takes the stand-in a third of the time.
pub fn one_layer() -> Arc<Checkpoint> {
    let kept = |tensor: &TensorInfo| !tensor.name.starts_with("blk.") || tensor.name.starts_with("blk.0.");
    rewritten("gguf/llama-s1/model-legacy.gguf", Some(1), |tensor, _| kept(tensor))
}

/// A sequence of a model whose layers keep every position.
#[derive(Clone)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub computed: usize,
    spans: Vec<Span>,
}

impl Sequence {
    /// Number `number` of a runner with room for so many tokens of each.
    pub fn new(runner: &Runner, number: usize, prompt: usize) -> Self {
        let pages = runner.kv().context.div_ceil(PAGE);
        let first = 1 + number * pages;
        let span = Span { first: 0, pages: (first..first + pages).map(|page| page as u32).collect() };
        let vocabulary = runner.model().config.vocabulary;
        let token = |i: usize| ((i * 37 + number * 101 + i * i * 3 + 11) % vocabulary) as u32;
        let spans = vec![span; runner.kv().pages.len()];
        Self { tokens: (0..prompt).map(token).collect(), computed: 0, spans }
    }

    fn part(&self, n: usize) -> Part<'_> {
        let (tokens, computed) = (&self.tokens[..], self.computed);
        Part { tokens, computed, n, spans: &self.spans, all_rows: false }
    }
}

/// The inputs of a step that takes so many further tokens of each sequence; rows that end what is known are to be sampled, in
/// ways that differ.
pub fn inputs(runner: &Runner, parts: &[(&Sequence, usize)]) -> Inputs {
    let strides = vec![runner.kv().context.div_ceil(PAGE); runner.kv().pages.len()];
    let list: Vec<Part<'_>> = parts.iter().map(|(sequence, n)| sequence.part(*n)).collect();
    let mut inputs = Inputs::default();
    let wanted = batch::fill(&mut inputs, &list, &strides);
    let sampled = parts.iter().zip(wanted).filter(|(_, wanted)| *wanted > 0);
    inputs.sampling = sampled.map(|((sequence, _), _)| Some(sampling(&sequence.tokens))).collect();
    inputs
}

fn sampling(tokens: &[u32]) -> Sampling {
    let at = tokens.len();
    let seen = tokens.last().filter(|_| at % 2 == 1);
    let changes = seen.map(|&token| Change { token, bias: 0.25, seen: true, count: 2 });
    Sampling {
        temperature: [0.0, 1.0, 0.7][at % 3],
        top_k: [0, 20][at / 3 % 2],
        top_p: [1.0, 0.9][at / 6 % 2],
        repetition_penalty: 1.1,
        seed: 7,
        position: at as u64,
        changes: changes.into_iter().collect(),
        ..Sampling::greedy()
    }
}

/// All results of a step, by name, as bits.
pub type Results = Vec<(String, Vec<u32>)>;

/// Runs a step.
pub fn run(runner: &mut Runner, inputs: &Inputs) -> Results {
    runner.run(inputs).expect("it runs");
    let names = runner.outputs();
    let read = |name: String| {
        let bits = runner.output(&name).expect("a result").iter().map(|x| x.to_bits()).collect();
        (name, bits)
    };
    names.into_iter().map(read).collect()
}

/// The tokens that a step's program chose.
pub fn chosen(results: &Results) -> Vec<u32> {
    let (_, numbers) = results.iter().find(|(name, _)| name == "sampled").expect("it chooses tokens");
    let token = |&bits: &u32| match Chosen::of(f32::from_bits(bits)) {
        Some(Chosen::Token(token)) => token,
        other => panic!("{other:?}"),
    };
    numbers.iter().map(token).collect()
}

/// The same model twice: every step eagerly, and replayed where there is a graph.
pub struct Pair {
    pub eager: Runner,
    pub replayed: Runner,
    /// Steps that added one token to each of so many sequences, by the bucket of that number.
    decoded: [u64; 4],
}

impl Pair {
    pub fn new(gpu: &Gpu, checkpoint: &Arc<Checkpoint>, numerics: Numerics, room: [usize; 2]) -> Self {
        let [eager, replayed] = [true, false].map(|eager| load(gpu.open(eager), checkpoint, numerics, room));
        Self { eager, replayed, decoded: [0; 4] }
    }

    /// Runs a step on both. Sequences whose known tokens are then all computed get the next one.
    ///
    /// # Errors
    /// Where the two differ.
    pub fn step(&mut self, parts: &mut [(&mut Sequence, usize)]) -> Result<(), String> {
        let list: Vec<(&Sequence, usize)> = parts.iter().map(|(sequence, n)| (&**sequence, *n)).collect();
        let inputs = inputs(&self.eager, &list);
        let (want, got) = (run(&mut self.eager, &inputs), run(&mut self.replayed, &inputs));
        if inputs.tokens.len() == parts.len() {
            self.decoded[parts.len().next_power_of_two().ilog2() as usize] += 1;
        }
        for ((name, want), (_, got)) in want.iter().zip(&got) {
            if let Some(at) = want.iter().zip(got).position(|(a, b)| a != b) {
                let [want, got] = [want[at], got[at]].map(f32::from_bits);
                let positions = &inputs.positions;
                return Err(format!(
                    "{name}: value {at}: {got:e} replayed, {want:e} eagerly, at positions {positions:?}"
                ));
            }
        }
        assert!(want.len() == got.len() && want.len() >= 3, "{} and {} results", want.len(), got.len());
        let mut tokens = chosen(&want).into_iter();
        for (sequence, n) in parts {
            sequence.computed += *n;
            if sequence.computed == sequence.tokens.len() {
                sequence.tokens.push(tokens.next().expect("one for each"));
            }
        }
        Ok(())
    }

    /// Computes what is known of a sequence, in steps of up to 256 tokens.
    pub fn prefill(&mut self, sequence: &mut Sequence) -> Result<(), String> {
        let known = sequence.tokens.len();
        while sequence.computed < known {
            let n = (known - sequence.computed).min(256);
            self.step(&mut [(sequence, n)])?;
        }
        Ok(())
    }

    /// The same; on the stand-in, which would take minutes for a long prompt, only its first page and its last one, and the
    /// first one is in the tables in place of all between. Attention then reads as many keys, at as many places of the tables.
    pub fn prefill_ends(&mut self, gpu: &Gpu, sequence: &mut Sequence) -> Result<(), String> {
        let last = sequence.tokens.len().saturating_sub(1) / PAGE;
        if !gpu.is_real() && last > 1 {
            let mut first = sequence.clone();
            first.tokens.truncate(PAGE);
            self.prefill(&mut first)?;
            for span in &mut sequence.spans {
                let first = span.pages[0];
                span.pages.iter_mut().take(last).for_each(|page| *page = first);
            }
            sequence.computed = last * PAGE;
        }
        self.prefill(sequence)
    }

    /// That every step that added one token to each sequence was a replay on the one side, and none on the other.
    pub fn check_replays(&mut self) {
        for (size, &steps) in self.decoded.iter().enumerate().filter(|(_, steps)| **steps > 0) {
            let n = 1 << size;
            let path = format!("graph.t{n}s{n}r{n}");
            for (runner, why) in [(&mut self.eager, Some("it was asked for")), (&mut self.replayed, None)] {
                let graphs = graphs(runner);
                let found = graphs.iter().find(|graph| graph.path == path);
                let found = found.unwrap_or_else(|| panic!("{path}: none of {graphs:?}"));
                assert_eq!((found.declined.as_deref(), found.count), (why, steps), "{path}");
            }
        }
    }
}
