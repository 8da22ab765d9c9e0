//! Whole models give the reference's bits on every path: every family, every kind of format, both activation widths,
//! every KV type.

use ingle_engine::batch::{self, Part};
use ingle_engine::runner::Runner;
use ingle_graph::reference::Interpreter;
use ingle_graph::{Activations, Bucket, FloatArithmetic, Inputs, KvType, PlanOptions};

use super::{MODELS, runner, spans};
use crate::{devices, not_run};

/// Logits of two sequences: prompts of 33 and 7 tokens in one step, then four steps of both together.
fn logits(runner: &mut Runner) -> Vec<u32> {
    let token = |s: u32, i: u32| (i * 29 + s * 101 + 5) % 500;
    let tokens: Vec<Vec<u32>> = (0..2).map(|s| (0..64).map(|i| token(s, i)).collect()).collect();
    let spans = [spans(runner, &[1, 4, 6]), spans(runner, &[2, 3, 5])];
    let mut computed = [0, 0];
    let mut inputs = Inputs::default();
    let mut bits = Vec::new();
    for n in [[33, 7], [1, 1], [1, 26], [1, 1], [3, 1]] {
        let parts: Vec<Part<'_>> = (0..2)
            .map(|s| Part {
                tokens: &tokens[s],
                computed: computed[s],
                n: n[s],
                spans: &spans[s],
                all_rows: true,
            })
            .collect();
        batch::fill(&mut inputs, &parts, &vec![3; spans[0].len()]);
        runner.run(&inputs).expect("runs");
        bits.extend(runner.output("logits").expect("logits").iter().map(|x| x.to_bits()));
        computed = [computed[0] + n[0], computed[1] + n[1]];
    }
    bits
}

#[test]
fn every_path_gives_the_reference_bits() {
    let (mut count, mut absent) = (0, Vec::new());
    for path in MODELS {
        let arms = [
            PlanOptions::default(),
            PlanOptions { activations: Activations::Int16, kv: KvType::BF16, ..PlanOptions::default() },
            PlanOptions { activations: Activations::F32, kv: KvType::F32, ..PlanOptions::default() },
            PlanOptions { kv: KvType::Q8_0, ..PlanOptions::default() },
            PlanOptions { float: FloatArithmetic::Amx3, ..PlanOptions::default() },
        ];
        for options in arms {
            let want = logits(&mut runner(path, Box::new(Interpreter::new()), options.clone(), 2));
            for device in devices().into_iter().filter(|device| device.runs(options.float)) {
                let Some(backend) = device.open() else {
                    absent.push(device.to_string());
                    continue;
                };
                count += 1;
                let got = logits(&mut runner(path, backend, options.clone(), 2));
                let first = got.iter().zip(&want).position(|(a, b)| a != b);
                assert!(
                    first.is_none() && got.len() == want.len(),
                    "{path} on {device}: logit {first:?}, {options:?}"
                );
            }
        }
    }
    absent.sort();
    absent.dedup();
    println!("{count} whole-model comparisons");
    not_run(&absent);
    assert!(count > 0);
}

/// No path runs another arithmetic than the one a program names.
#[test]
fn a_path_without_tiles_refuses_amx3() {
    let options = PlanOptions { float: FloatArithmetic::Amx3, ..PlanOptions::default() };
    for device in devices().into_iter().filter(|device| !device.runs(options.float)) {
        let Some(backend) = device.open() else { continue };
        let mut runner = runner(MODELS[0], backend, options.clone(), 1);
        let error = runner.prepare(Bucket::holding(1, 1, 1)).expect_err("no tiles").to_string();
        assert!(error.contains("amx3"), "{device}: {error}");
    }
}
