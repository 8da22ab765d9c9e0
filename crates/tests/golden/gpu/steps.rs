//! Steps that must not change others: what lies in padding, another model, turns before, shapes before.

use ingle_engine::request::Request;
use ingle_engine::runner::kv_plan;
use ingle_engine::step::{Engine, EngineOptions};
use ingle_tensor::DType;
use ingle_tests::Random;

use super::*;
use crate::golden::window;

/// Steps of three sequences: a prompt of each, and tokens one at a time, of one, of two and of three together, over the
/// border of a page.
fn script(runner: &Runner) -> Vec<Inputs> {
    let mut sequences = [0, 1, 2].map(|number| Sequence::new(runner, number, 64));
    let mut steps: Vec<Vec<(usize, usize)>> = vec![vec![(0, 30)], vec![(1, 7), (2, 29)]];
    steps.extend([vec![(0, 1)], vec![(0, 1)], vec![(1, 1), (0, 1)], vec![(0, 1), (1, 1)]]);
    steps.extend((0..3).map(|_| vec![(2, 1), (0, 1), (1, 1)]));
    let step = |parts: Vec<(usize, usize)>| {
        // Rows that end what is known are wanted.
        let known = |&(number, n): &(usize, usize)| {
            let mut sequence = sequences[number].clone();
            sequence.tokens.truncate(sequence.computed + n);
            (sequence, n)
        };
        let known: Vec<(Sequence, usize)> = parts.iter().map(known).collect();
        parts.iter().for_each(|&(number, n)| sequences[number].computed += n);
        inputs(runner, &known.iter().map(|(sequence, n)| (sequence, *n)).collect::<Vec<_>>())
    };
    steps.into_iter().map(step).collect()
}

/// Two models loaded at once take steps by turns: each has the bits that it has alone, eagerly and replayed.
#[test]
fn two_models_by_turns_have_the_bits_they_have_alone() {
    let Some(gpu) = Gpu::new("two models by turns") else { return };
    let models = ["gguf/llama-s1/model-legacy.gguf", "models/gemma3_text"].map(checkpoint);
    let load = |checkpoint: &Arc<Checkpoint>, eager| {
        let runner = load(gpu.open(eager), checkpoint, Numerics::Fast, [3, 64]);
        let steps = script(&runner);
        (runner, steps)
    };
    let alone = |checkpoint| {
        let (mut runner, steps) = load(checkpoint, true);
        steps.iter().map(|inputs| run(&mut runner, inputs)).collect::<Vec<Results>>()
    };
    let want = [alone(&models[0]), alone(&models[1])];
    let [(mut a, of_a), (mut b, of_b)] = [load(&models[0], false), load(&models[1], false)];
    for at in 0..of_a.len() {
        assert!(run(&mut a, &of_a[at]) == want[0][at], "step {at} of the first");
        assert!(run(&mut b, &of_b[at]) == want[1][at], "step {at} of the second");
    }
    for runner in [&mut a, &mut b] {
        let graphs = graphs(runner);
        let replays: u64 = graphs.iter().filter(|g| g.declined.is_none()).map(|g| g.count).sum();
        assert_eq!(replays, 7, "{graphs:?}");
    }
}

/// Scale, or value, of the first token's row of embeddings becomes NaN.
fn with_a_nan_token(path: &str) -> Arc<Checkpoint> {
    assert!(checkpoint(path).get("output.weight").is_some(), "{path}: its logits would be NaN, too");
    rewritten(path, None, |tensor, bytes| {
        if tensor.name == "token_embd.weight" {
            let cols = tensor.shape[tensor.shape.len() - 1];
            let each = match tensor.dtype {
                DType::F16 => 2,
                DType::Q8_0 => 34,
                other => panic!("{other}"),
            };
            let row = tensor.dtype.row_bytes(cols).expect("whole blocks");
            bytes[..row].chunks_exact_mut(each).for_each(|x| x[..2].copy_from_slice(&[0x00, 0x7E]));
        }
        true
    })
}

/// Three sequences in a bucket of four whose last row is full of NaN, as is all that it left on the device: they have the bits
/// that each has alone, where there was no such row.
#[test]
fn nan_in_padding_changes_nothing() {
    let Some(gpu) = Gpu::new("NaN in padding") else { return };
    for path in ["gguf/llama-s1/model-f16.gguf", "gguf/llama-s1/model-q8_0.gguf"] {
        let checkpoint = with_a_nan_token(path);
        let load = |eager| load(gpu.open(eager), &checkpoint, Numerics::Fast, [4, 64]);
        let sequences = |runner: &Runner| {
            [(0, 5), (1, 33), (2, 8)].map(|(number, prompt)| {
                let mut sequence = Sequence::new(runner, number, prompt);
                sequence.tokens.iter_mut().for_each(|token| *token = (*token).max(1));
                sequence
            })
        };
        let prompts = |runner: &mut Runner, sequences: &mut [Sequence; 3]| {
            for sequence in sequences {
                let n = sequence.tokens.len();
                let of = inputs(runner, &[(&*sequence, n)]);
                run(runner, &of);
                sequence.computed = n;
                sequence.tokens.push(7);
            }
        };
        let mut clean = load(true);
        let mut alone = sequences(&clean);
        prompts(&mut clean, &mut alone);
        let want = alone.map(|sequence| {
            let of = inputs(&clean, &[(&sequence, 1)]);
            run(&mut clean, &of)
        });
        for eager in [true, false] {
            let mut runner = load(eager);
            let mut three = sequences(&runner);
            prompts(&mut runner, &mut three);
            let [a, b, c] = &three;
            let mut nan = Sequence::new(&runner, 3, 1);
            nan.tokens[0] = 0;
            let four = inputs(&runner, &[(a, 1), (b, 1), (c, 1), (&nan, 1)]);
            // Once for each blob of a step's data.
            for _ in 0..3 {
                let results = run(&mut runner, &four);
                let (_, logits) = &results[0];
                let last = &logits[logits.len() / 4 * 3..];
                assert!(last.iter().all(|&x| f32::from_bits(x).is_nan()), "{path}: the row is NaN");
            }
            let of = inputs(&runner, &[(a, 1), (b, 1), (c, 1)]);
            let got = run(&mut runner, &of);
            for (row, want) in want.iter().enumerate() {
                for ((name, got), (_, want)) in got.iter().zip(want) {
                    let got = &got[row * want.len()..(row + 1) * want.len()];
                    assert!(got == want, "{path}: {name} of row {row}, eager {eager}");
                }
            }
        }
    }
}

/// A conversation that goes on from the prefix cache has the bits of one that is prefilled whole, on the GPU, with replays.
#[test]
fn a_turn_appended_equals_the_conversation_prefilled_cold() {
    let Some(gpu) = Gpu::new("turns of a conversation") else { return };
    let path = "models/gemma3_text";
    let engine = |prefix_cache: bool, chunk: usize| -> Engine {
        let options = EngineOptions { chunk, prefix_cache, ..EngineOptions::default() };
        let model = window::model(path, false);
        let kv = kv_plan(&model.graph, window::CONTEXT, 2, chunk);
        window::engine_on(path, gpu.open(false), model, kv, options)
    };
    let (mut warm, mut cold) = (engine(true, 24), engine(false, 512));
    let mut tokens = window::prompt(1, 38);
    for turn in 0..3 {
        let request = Request::greedy(tokens.clone(), 8);
        let cached = warm.stats().cached as usize;
        let got = window::reply(&mut warm, &request);
        assert!(window::reply(&mut cold, &request) == got, "turn {turn}");
        // All full pages of the turn before, whose last token was not computed.
        let known = if turn == 0 { 0 } else { (tokens.len() - 21 - 1) / PAGE * PAGE };
        assert_eq!(warm.stats().cached as usize - cached, known, "turn {turn}");
        tokens.extend(got.iter().map(|(token, _)| *token));
        tokens.extend(window::prompt(turn + 7, 21));
    }
    assert_eq!(cold.stats().cached, 0);
    for engine in [&mut warm, &mut cold] {
        let graphs = graphs(engine.runner());
        let replayed = graphs.iter().find(|graph| graph.path == "graph.t1s1r1");
        assert!(replayed.is_some_and(|graph| graph.declined.is_none() && graph.count >= 21), "{graphs:?}");
    }
}

/// Once each bucket has been prepared, steps of any shapes allocate nothing.
#[test]
fn memory_stays_as_it_is_over_500_shapes() {
    let Some(gpu) = Gpu::new("memory over 500 shapes") else { return };
    let (backend, context) = gpu.open_in(false);
    let most = if gpu.is_real() { 200 } else { 5 };
    let mut runner = load(backend, &one_layer(), Numerics::Exact, [4, 256]);
    let mut random = Random::new(3);
    let sequences = [0, 1, 2, 3].map(|number| Sequence::new(&runner, number, 256));
    let mut shape = |runner: &Runner| {
        let count = 1 + random.below(4);
        let parts: Vec<(Sequence, usize)> = sequences[..count]
            .iter()
            .map(|sequence| {
                let (mut sequence, n) = (sequence.clone(), 1 + random.below(most / count));
                // Some from the start, some further on, some whose last row is not wanted.
                sequence.computed = random.below(2) * random.below(256 - n);
                sequence.tokens.truncate(sequence.computed + n + random.below(4) / 3);
                (sequence, n)
            })
            .collect();
        inputs(runner, &parts.iter().map(|(sequence, n)| (sequence, *n)).collect::<Vec<_>>())
    };
    let shapes: Vec<Inputs> = (0..500).map(|_| shape(&runner)).collect();
    let bucket = |inputs: &Inputs| {
        let (t, s, r) = (inputs.tokens.len(), inputs.sequence_count(), inputs.wanted.len());
        ingle_graph::Bucket::holding(t, s, r)
    };
    let mut buckets: Vec<_> = shapes.iter().map(bucket).collect();
    buckets.sort_by_key(|bucket| (bucket.t, bucket.s, bucket.r));
    buckets.dedup();
    for &bucket in &buckets {
        runner.prepare(bucket).expect("prepares");
    }
    let (tally, free) = (context.ledger().tally(), context.memory_bytes().expect("told"));
    assert!(tally.live_bytes > 0 && buckets.len() > 10, "{} buckets", buckets.len());
    for inputs in &shapes {
        runner.run(inputs).expect("it runs");
        runner.output("peaks").expect("a result");
    }
    assert_eq!(context.ledger().tally(), tally);
    if gpu.stand_in().is_some() {
        assert_eq!(context.memory_bytes().expect("told"), free);
    }
}
