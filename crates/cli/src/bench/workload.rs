//! What a benchmark times, and the bytes and operations that the same work needs, from the programs that run.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use ingle_engine::request::{Event, Request};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::op::Elem;
use ingle_graph::{Bucket, Graph, KvType, Op, PAGE, Program, Rows, WeightId};

use crate::error::{Error, Result};

/// One step; a sequence for which no token can be chosen ends the benchmark.
fn step(engine: &mut Engine) -> Result<Vec<Event>> {
    let events = engine.step()?;
    let failed = events.iter().find_map(|event| match event {
        Event::Failed(_, what) => Some(what),
        _ => None,
    });
    match failed {
        Some(what) => Err(Error::Refused(format!("{what}: `ingle check` finds weights that are not finite"))),
        None => Ok(events),
    }
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Prompts are read, cold but for a depth that is there already.
    Prefill,
    /// Tokens are generated one by one.
    Decode,
}

impl Kind {
    /// `prefill`, `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Prefill => "prefill",
            Kind::Decode => "decode",
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Test {
    /// What is timed.
    pub kind: Kind,
    /// Tokens read, or generated, by each sequence.
    pub tokens: usize,
    /// Tokens in the context of each sequence when the clock starts.
    pub depth: usize,
    /// Sequences together.
    pub batch: usize,
}

/// One repetition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Time.
    pub seconds: f64,
    /// Tokens of all sequences together.
    pub tokens: usize,
}

/// What a repetition needs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Bytes of weights read.
    pub weight_bytes: f64,
    /// Bytes of keys and values read.
    pub kv_bytes: f64,
    /// Bytes of weights, keys and values that its last step reads.
    pub step_bytes: f64,
    /// Multiplications and additions with weights in integers.
    pub int_operations: f64,
    /// The same in floats.
    pub float_operations: f64,
}

impl Test {
    /// `pp512`, `tg128`, `pp512@d2048`, `tg128@d2048`.
    pub fn name(&self) -> String {
        let what = match self.kind {
            Kind::Prefill => "pp",
            Kind::Decode => "tg",
        };
        match self.depth {
            0 => format!("{what}{}", self.tokens),
            depth => format!("{what}{}@d{depth}", self.tokens),
        }
    }

    /// Tokens of the prompt. In decode its last token is computed before the clock starts.
    fn prompt(&self) -> usize {
        match self.kind {
            Kind::Prefill => self.depth + self.tokens,
            Kind::Decode => self.depth + 1,
        }
    }

    /// Tokens of a prefill's prompt that are cached when the clock starts: whole pages of its depth.
    fn cached(&self) -> usize {
        self.depth / PAGE * PAGE
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        match self.kind {
            Kind::Prefill => self.prompt() + 1,
            Kind::Decode => self.prompt() + self.tokens + 1,
        }
    }

    /// What keeps the prompts of a prefill apart from those of all other tests and repetitions, which may begin with the
    /// same tokens: no prompt is found in the prefix cache but the depth that this test has put there. Never 0.
    fn salt(&self, repetition: u64) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self, repetition).hash(&mut hasher);
        hasher.finish() | 1
    }

    /// What is wrong with this test on a model whose context is shorter, and what to do.
    pub fn too_long(&self, made_for: usize) -> String {
        let (of, flags) = match self.kind {
            Kind::Prefill if self.depth == 0 => {
                (format!("a prompt of {} and 1 generated", self.tokens), "-p")
            }
            Kind::Prefill => {
                (format!("{} deep, a prompt of {} and 1 generated", self.depth, self.tokens), "-d or -p")
            }
            Kind::Decode => {
                (format!("{} deep, a prompt of 1, {} generated", self.depth, self.tokens + 1), "-d or -n")
            }
        };
        format!(
            "{} takes a context of {} tokens ({of}), but this model was made for {made_for}: give a smaller {flags}",
            self.name(),
            self.context()
        )
    }

    /// Runs once. What is there when the clock starts, the depth, is computed before; all else of a prefill is cold in every
    /// repetition.
    pub fn run(&self, engine: &mut Engine, repetition: u64) -> Result<Sample> {
        self.run_watched(engine, repetition, &mut |_, _| ())
    }

    /// As [`Test::run`]; `after_step` is called after every step that is timed, with its seconds.
    pub fn run_watched(
        &self,
        engine: &mut Engine,
        repetition: u64,
        after_step: &mut dyn FnMut(&mut Engine, f64),
    ) -> Result<Sample> {
        match self.kind {
            Kind::Prefill => {
                let salt = self.salt(repetition);
                if self.cached() > 0 {
                    self.submit(engine, self.cached(), 1, salt)?;
                    while engine.busy() {
                        step(engine)?;
                    }
                }
                let start = Instant::now();
                self.submit(engine, self.prompt(), 1, salt)?;
                while engine.busy() {
                    let begun = Instant::now();
                    step(engine)?;
                    after_step(engine, begun.elapsed().as_secs_f64());
                }
                let tokens = (self.prompt() - self.cached()) * self.batch;
                Ok(Sample { seconds: start.elapsed().as_secs_f64(), tokens })
            }
            Kind::Decode => {
                // The contexts, into the prefix cache: so all sequences begin to decode in the same step.
                self.submit(engine, self.prompt(), 1, 0)?;
                while engine.busy() {
                    step(engine)?;
                }
                self.submit(engine, self.prompt(), self.tokens + 1, 0)?;
                let mut begun = HashSet::new();
                while begun.len() < self.batch {
                    let events = step(engine)?;
                    begun.extend(events.iter().filter_map(|event| match event {
                        Event::Token(id, _) => Some(*id),
                        _ => None,
                    }));
                }
                let (start, mut tokens) = (Instant::now(), 0);
                while engine.busy() {
                    let begun = Instant::now();
                    let events = step(engine)?;
                    after_step(engine, begun.elapsed().as_secs_f64());
                    tokens += events.iter().filter(|event| matches!(event, Event::Token(..))).count();
                }
                Ok(Sample { seconds: start.elapsed().as_secs_f64(), tokens })
            }
        }
    }

    /// One request for each sequence, with a prompt of `length`; any tokens do, as speed does not depend on them.
    fn submit(&self, engine: &mut Engine, length: usize, max_tokens: usize, salt: u64) -> Result<()> {
        let vocabulary = engine.runner().model().config.vocabulary;
        for sequence in 0..self.batch {
            let token = |i: usize| ((i * 7919 + sequence * 104_729 + 13) % vocabulary) as u32;
            let prompt = (0..length).map(token).collect();
            engine.submit(Request { salt, ..Request::greedy(prompt, max_tokens) })?;
        }
        Ok(())
    }

    /// Bytes and operations of one repetition.
    pub fn work(&self, engine: &mut Engine) -> Result<Work> {
        let step_tokens = EngineOptions::default().step_tokens;
        let runner = engine.runner();
        let kv = runner.options().kv;
        match self.kind {
            Kind::Prefill => {
                let (cached, prompt) = (self.cached(), self.prompt());
                let all = (prompt - cached) * self.batch;
                let steps = all.div_ceil(step_tokens);
                let program = runner.prepare(Bucket::holding(all.min(step_tokens), 1, 1))?;
                let graph = &runner.model().graph;
                // A chunk reads the keys before it once.
                let chunks =
                    (cached..prompt).step_by(step_tokens).map(|from| (from + step_tokens).min(prompt));
                let (int_operations, float_operations) = operations(&program, all, self.batch);
                Ok(Work {
                    weight_bytes: (steps as u64 * program.weight_bytes()) as f64,
                    kv_bytes: self.batch as f64
                        * chunks.map(|length| kv_bytes(graph, kv, length)).sum::<f64>(),
                    step_bytes: program.weight_bytes() as f64 + kv_bytes(graph, kv, prompt),
                    int_operations,
                    float_operations,
                })
            }
            Kind::Decode => {
                let program = runner.prepare(Bucket::holding(self.batch, self.batch, self.batch))?;
                let graph = &runner.model().graph;
                let lengths = (0..self.tokens).map(|i| self.prompt() + 1 + i);
                let last = kv_bytes(graph, kv, self.prompt() + self.tokens);
                let tokens = self.tokens * self.batch;
                let (int_operations, float_operations) = operations(&program, tokens, tokens);
                Ok(Work {
                    weight_bytes: (self.tokens as u64 * program.weight_bytes()) as f64,
                    kv_bytes: self.batch as f64
                        * lengths.map(|length| kv_bytes(graph, kv, length)).sum::<f64>(),
                    step_bytes: program.weight_bytes() as f64 + self.batch as f64 * last,
                    int_operations,
                    float_operations,
                })
            }
        }
    }
}

/// Bytes of keys and values that one row at the end of `length` tokens reads.
fn kv_bytes(graph: &Graph, kv: KvType, length: usize) -> f64 {
    let attention = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::Attention { spec, .. } => Some(spec),
        _ => None,
    });
    let bytes = attention.map(|spec| {
        let seen = spec.window.map_or(length, |window| window.min(length));
        2 * seen * spec.kv_heads * kv.bytes(spec.head_dim)
    });
    bytes.sum::<usize>() as f64
}

/// Multiplications and additions with the weights of a program, in integers and in floats, for so many tokens, of which
/// `wanted` have logits.
fn operations(program: &Program, tokens: usize, wanted: usize) -> (f64, f64) {
    let (mut int, mut float) = (0.0, 0.0);
    for step in program.steps() {
        let rows = match step.outputs.first().map(|slot| slot.ty().rows) {
            Some(Rows::R) => wanted,
            _ => tokens,
        };
        for (WeightId(weight), elem) in step.products() {
            let weight = &program.weights[weight as usize];
            let operations = 2.0 * weight.rows as f64 * weight.cols as f64 * rows as f64;
            *(if elem == Elem::F32 { &mut float } else { &mut int }) += operations;
        }
    }
    (int, float)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ingle_graph::PlanOptions;
    use ingle_tensor::Checkpoint;

    use super::*;
    use crate::flags::{Device, DeviceFlags};
    use crate::session;

    /// Whatever ran before: tests of other lengths begin with the same tokens.
    #[test]
    fn a_prefill_finds_its_depth_cached_and_nothing_else() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/gguf/llama-s1/model-legacy.gguf");
        let checkpoint = Arc::new(Checkpoint::open(path.as_ref()).unwrap());
        let options = PlanOptions::default();
        let flags = DeviceFlags { device: Device::Cpu, threads: Some(1), gpu_memory: None };
        let (runner, _) = session::load(&checkpoint, &flags, options, Some(256), 2).unwrap();
        let mut engine = Engine::new(runner, checkpoint.fingerprint(), EngineOptions::default());
        for (tokens, depth, batch, cached, timed) in
            [(40, 0, 1, 0, 40), (70, 0, 1, 0, 70), (70, 0, 2, 0, 140), (40, 33, 2, 64, 82), (8, 64, 1, 64, 8)]
        {
            let test = Test { kind: Kind::Prefill, tokens, depth, batch };
            for repetition in 0..3 {
                let before = engine.stats().cached;
                let sample = test.run(&mut engine, repetition).unwrap();
                let found = engine.stats().cached - before;
                assert_eq!((sample.tokens, found), (timed, cached), "{} of {batch}", test.name());
            }
        }
    }

    #[test]
    fn names_and_lengths() {
        let test = |kind, depth| Test { kind, tokens: 128, depth, batch: 1 };
        for (test, name, context) in [
            (test(Kind::Prefill, 0), "pp128", 129),
            (test(Kind::Prefill, 2048), "pp128@d2048", 2177),
            (test(Kind::Decode, 0), "tg128", 130),
            (test(Kind::Decode, 2048), "tg128@d2048", 2178),
        ] {
            assert_eq!((test.name().as_str(), test.context()), (name, context));
        }
    }
}
