//! Replays have the bits of eager execution: over many tokens, from any position on, around the ring of a window. What runs
//! once is not captured.

use ingle_cuda::stand_in::Fault;
use ingle_engine::request::Request;
use ingle_engine::runner::kv_plan;
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::Bucket;

use super::*;
use crate::golden::window::{self, CONTEXT};
use crate::not_run;

/// Each family, in float and in quantized formats by turns.
const FAMILIES: [&str; 7] = [
    "models/llama",
    "gguf/mistral-s1/model-q8_0.gguf",
    "models/qwen2_swa",
    "gguf/qwen3-s1/model-legacy.gguf",
    "models/gemma",
    "gguf/gemma2-s1/model-q8_0.gguf",
    "models/gemma3_text",
];

/// One sequence for so many tokens after a prompt.
fn long(gpu: &Gpu, checkpoint: &Arc<Checkpoint>, numerics: Numerics, tokens: usize) {
    let mut pair = Pair::new(gpu, checkpoint, numerics, [1, 768]);
    let mut sequence = Sequence::new(&pair.eager, 0, 5);
    pair.prefill(&mut sequence).unwrap();
    for _ in 0..tokens {
        pair.step(&mut [(&mut sequence, 1)]).unwrap();
    }
    assert_eq!(sequence.computed, 5 + tokens);
    pair.check_replays();
}

#[test]
fn replays_equal_eager_execution_for_700_tokens() {
    let Some(gpu) = Gpu::new("700 tokens replayed and eagerly") else { return };
    long(&gpu, &one_layer(), Numerics::Exact, 700);
    if !gpu.is_real() {
        return not_run(&FAMILIES.map(|path| format!("cuda: 700 tokens of {path}")));
    }
    for path in FAMILIES {
        long(&gpu, &checkpoint(path), Numerics::Fast, 700);
    }
}

/// Every family over the borders of a page and of a chunk of attention, and of buckets: one sequence, two, three, two, one.
#[test]
fn replays_equal_eager_execution_across_borders() {
    let Some(gpu) = Gpu::new("replays across borders of pages and buckets") else { return };
    for path in FAMILIES {
        let mut pair = Pair::new(&gpu, &checkpoint(path), Numerics::Fast, [3, 320]);
        let [mut a, mut b, mut c] =
            [(0, 254), (1, 31), (2, 3)].map(|(number, prompt)| Sequence::new(&pair.eager, number, prompt));
        pair.prefill_ends(&gpu, &mut a).expect(path);
        for _ in 0..4 {
            pair.step(&mut [(&mut a, 1)]).expect(path);
        }
        assert!(a.computed > 256, "{}", a.computed);
        pair.prefill(&mut b).expect(path);
        for _ in 0..3 {
            pair.step(&mut [(&mut a, 1), (&mut b, 1)]).expect(path);
        }
        pair.prefill(&mut c).expect(path);
        for _ in 0..2 {
            pair.step(&mut [(&mut c, 1), (&mut a, 1), (&mut b, 1)]).expect(path);
        }
        pair.step(&mut [(&mut c, 1), (&mut b, 1)]).expect(path);
        pair.step(&mut [(&mut c, 1)]).expect(path);
        assert_eq!(pair.decoded, [5, 4, 2, 0], "{path}");
        pair.check_replays();
    }
}

/// A graph that was captured when its first sequence had 1, 255 or 4095 tokens serves the positions that follow.
#[test]
fn positions_are_not_frozen_where_the_first_replay_was() {
    let Some(gpu) = Gpu::new("replays after prompts of 1, 255 and 4095 tokens") else { return };
    let checkpoint = checkpoint("gguf/qwen3-s1/model-legacy.gguf");
    for prompt in [1, 255, 4095] {
        let mut pair = Pair::new(&gpu, &checkpoint, Numerics::Fast, [1, 4224]);
        let mut sequence = Sequence::new(&pair.eager, 0, prompt);
        pair.prefill_ends(&gpu, &mut sequence).unwrap();
        for _ in 0..3 {
            pair.step(&mut [(&mut sequence, 1)]).unwrap_or_else(|why| panic!("after {prompt} tokens: {why}"));
        }
        // A prompt of one token is such a step, too.
        let steps = 3 + u64::from(prompt == 1);
        assert_eq!((sequence.computed, pair.decoded), (prompt + 3, [steps, 0, 0, 0]));
        pair.check_replays();
    }
    if !gpu.is_real() {
        not_run(&["cuda: all of a prompt of 4095 tokens".into()]);
    }
}

/// The comparison sees a replay that has the step data of another time, and one that does nothing.
#[test]
fn faults_of_replays_are_seen() {
    let Some(gpu) = Gpu::new("faults of replays") else { return };
    let Some(device) = gpu.stand_in() else {
        return not_run(&["cuda: faults of replays, which only the stand-in can be given".into()]);
    };
    for fault in [Fault::FrozenData, Fault::EmptyReplay] {
        let mut pair = Pair::new(&gpu, &one_layer(), Numerics::Exact, [1, 64]);
        let mut sequence = Sequence::new(&pair.eager, 0, 5);
        pair.prefill(&mut sequence).unwrap();
        pair.step(&mut [(&mut sequence, 1)]).unwrap();
        device.plant(fault);
        let seen = (0..3).filter(|_| pair.step(&mut [(&mut sequence, 1)]).is_err()).count();
        device.plant(Fault::None);
        assert!(seen > 0, "{fault:?}");
    }
}

/// Layers with a window keep a ring of pages: a reply that is several times as long has the bits of the scalar reference that
/// keeps everything, eagerly and replayed.
#[test]
fn replays_go_around_a_ring() {
    let Some(gpu) = Gpu::new("replays around the ring of a window") else { return };
    for path in ["models/gemma3_text", "models/mistral"] {
        let request = Request::greedy(window::prompt(3, 40), if gpu.is_real() { 200 } else { 72 });
        let want = window::reply(&mut window::reference(path), &request);
        let options = EngineOptions { chunk: 16, ..EngineOptions::default() };
        for eager in [true, false] {
            let model = window::model(path, false);
            let kv = kv_plan(&model.graph, CONTEXT, 1, options.chunk);
            let mut engine = window::engine_on(path, gpu.open(eager), model, kv, options);
            assert!(window::reply(&mut engine, &request) == want, "{path}, eager {eager}");
            let ring = ring(&mut engine);
            assert!(ring * PAGE < want.len(), "{path}: a ring of {ring} pages is not left");
            let graphs = graphs(engine.runner());
            let replays: u64 = graphs.iter().filter(|g| g.declined.is_none()).map(|g| g.count).sum();
            assert_eq!(replays, if eager { 0 } else { want.len() as u64 - 1 }, "{path}: {graphs:?}");
        }
    }
}

/// Pages of the smallest ring of an engine's model that a sequence can hold at a time.
fn ring(engine: &mut Engine) -> usize {
    let runner = engine.runner();
    let groups = runner.model().graph.kv_groups.clone();
    let rings = groups.iter().filter(|group| group.window.is_some());
    rings.map(|group| group.ring(16, CONTEXT, PAGE)).min().expect("a window")
}

/// However often a prompt's program runs, nothing of it is captured, and the counters say so and why.
#[test]
fn a_prompt_that_runs_four_times_is_not_captured() {
    let Some(gpu) = Gpu::new("a prompt that runs four times") else { return };
    let (backend, context) = gpu.open_in(false);
    let mut runner = load(backend, &checkpoint("models/llama"), Numerics::Fast, [1, 64]);
    let sequence = Sequence::new(&runner, 0, 24);
    let inputs = inputs(&runner, &[(&sequence, 24)]);
    runner.prepare(Bucket::holding(24, 1, 1)).expect("prepares");
    let tally = context.ledger().tally();
    gpu.stand_in().map(StandIn::calls);
    let first = run(&mut runner, &inputs);
    for _ in 0..3 {
        assert!(run(&mut runner, &inputs) == first);
    }
    assert_eq!(context.ledger().tally(), tally, "a step allocates nothing");
    let calls = gpu.stand_in().map_or(Vec::new(), StandIn::calls);
    let of_graphs =
        |call: &&String| ["begin", "end", "instantiate", "replay"].iter().any(|of| call.starts_with(of));
    assert_eq!(calls.iter().find(of_graphs), None);
    let graphs = graphs(&mut runner);
    let [graph] = &graphs[..] else { panic!("one program: {graphs:?}") };
    let said = (graph.path.as_str(), graph.declined.as_deref(), graph.count);
    assert_eq!(said, ("graph.t32s1r1", Some("a prompt runs once"), 4));
}
