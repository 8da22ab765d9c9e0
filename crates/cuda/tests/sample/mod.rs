//! Tokens that the device chooses, on the stand-in that runs its kernel on the host: the very tokens of the definition, for
//! rows of all shapes and settings of all kinds.

use ingle_cuda::kernels::sample;
use ingle_cuda::step::StepLayout;
use ingle_graph::sample::{CHANGES, Change, Chosen, Draw, choose};
use ingle_graph::{Bucket, Inputs, LOGITS_SPAN, Sampling, reference};

use crate::shim::{Host, Value, bytes, floats, launch};

/// Rows of one launch.
const ROWS: usize = 16;

/// A number below `n` that depends on where it is asked for.
fn random(case: u64, at: u64, n: u64) -> u64 {
    Draw::new(17, case as u32, at).token % n
}

fn one_of<T: Copy>(case: u64, at: u64, options: &[T]) -> T {
    options[random(case, at, options.len() as u64) as usize]
}

/// Logits of one kind: spread out as a model's, flat, in coarse steps that make ties, mostly negative infinity, all equal,
/// with infinities, with NaN.
fn logits(case: u64, size: usize) -> Vec<f32> {
    let kind =
        one_of(case, 1, &["model", "model", "flat", "steps", "sparse", "equal", "infinite", "nan", "huge"]);
    let scale = one_of(case, 2, &[0.1, 1.0, 4.0, 12.0]);
    let mut state = random(case, 3, u64::MAX) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    // A sum of uniform numbers is bell-shaped enough.
    let mut bell = || (next() + next() + next() + next() - 2.0) * 2.0 * scale;
    let mut x: Vec<f32> = (0..size).map(|_| bell()).collect();
    match kind {
        "model" => (0..3.min(size)).for_each(|i| x[(i * 7919 + 11) % size] += 3.0 * scale),
        "steps" => x.iter_mut().for_each(|x| *x = (*x * 2.0).round() / 2.0),
        "sparse" => {
            x.iter_mut().enumerate().filter(|(i, _)| i % 97 != 3).for_each(|(_, x)| *x = f32::NEG_INFINITY)
        }
        "equal" => x.fill(if scale > 1.0 { -0.0 } else { scale }),
        "infinite" => {
            x[size / 2] = f32::INFINITY;
            x[size - 1] = f32::INFINITY;
            x[0] = f32::NEG_INFINITY;
        }
        "nan" => x[size / 3] = f32::NAN,
        "huge" => x.iter_mut().for_each(|x| *x *= 1e38),
        _ => {}
    }
    if kind == "sparse" && scale < 1.0 {
        x.fill(f32::NEG_INFINITY);
    }
    x
}

fn sampling(case: u64, size: usize) -> Option<Sampling> {
    let tokens = |n: usize| {
        let n = n.min(size);
        let mut tokens: Vec<u32> =
            (0..n as u64).map(|i| random(case, 1000 + i, size as u64) as u32).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    };
    let change = |token: u32| Change {
        token,
        bias: one_of(case, 2000 + u64::from(token), &[0.0, 0.0, 3.0, -100.0]),
        seen: random(case, 2001 + u64::from(token), 3) > 0,
        count: one_of(case, 2002 + u64::from(token), &[0, 0, 1, 7]),
    };
    let changes = one_of(case, 4, &[0, 0, 0, 1, 20, CHANGES]);
    (random(case, 5, 20) > 0).then(|| Sampling {
        temperature: one_of(case, 6, &[0.0, 0.0, 0.01, 0.6, 0.7, 1.0, 1.0, 5.0, 100.0, 1e-12]),
        top_k: one_of(case, 7, &[0, 0, 0, 1, 2, 20, 40, 1000, 5000, u32::MAX]),
        top_p: one_of(case, 8, &[1.0, 1.0, 0.95, 0.9, 0.5, 0.0, 1e-9, 0.999_999_9]),
        min_p: one_of(case, 9, &[0.0, 0.0, 0.0, 0.05, 0.3, 1.0, 1e-30]),
        repetition_penalty: one_of(case, 10, &[1.0, 1.1, 2.0, 0.01, 0.9]),
        frequency_penalty: one_of(case, 11, &[0.0, 0.5, -2.0]),
        presence_penalty: one_of(case, 12, &[0.0, 1.5]),
        seed: random(case, 13, u64::MAX),
        choice: random(case, 14, 3) as u32,
        position: one_of(case, 15, &[0, 1, 777, 1 << 40]),
        changes: tokens(changes).into_iter().map(change).collect(),
    })
}

/// The tokens of one launch, beside those of the definition.
fn compare(host: &Host, rows: &[(Vec<f32>, Option<Sampling>)], what: &str) -> Vec<Chosen> {
    let (n, cols) = (rows.len(), rows[0].0.len());
    // Two rows of the bucket are padding.
    let bucket = Bucket { t: n + 2, s: n + 2, r: n + 2 };
    let tokens: Vec<u32> = (0..n as u32).collect();
    let inputs = Inputs {
        wanted: tokens.clone(),
        positions: tokens.clone(),
        sequences: tokens.clone(),
        tokens,
        sampling: rows.iter().map(|(_, sampling)| sampling.clone()).collect(),
        ..Inputs::default()
    };
    let layout = StepLayout::new(bucket, &[]).and_then(StepLayout::with_samplers).expect("it fits");
    let mut blob = vec![0xFF; layout.bytes()];
    let used = layout.fill(&inputs, None, &mut blob).expect("it fits");
    // What is behind the data that is used is not on the device.
    blob.truncate(used);
    let all: Vec<f32> = rows.iter().flat_map(|(logits, _)| logits).copied().collect();
    let peak = |x: &[f32]| x.iter().copied().fold(f32::NEG_INFINITY, reference::max) + 0.0;
    let peaks = rows.iter().flat_map(|(logits, _)| logits.chunks(LOGITS_SPAN).map(peak));
    let memory = [blob, bytes(&all), bytes(&peaks.collect::<Vec<_>>()), bytes(&vec![-7777.0; n + 2])];
    let [step, x, p, y] = [0, 1, 2, 3].map(Value::Memory);
    let shape = sample::shape(n as u32 + 2, cols, LOGITS_SPAN).expect("it is taken");
    let back = launch(host, sample::SAMPLE, shape, &memory, &[step, Value::U32(cols as u32), x, p, y]);
    assert_eq!(back[1], memory[1], "{what}: logits stay as they are");
    let got = floats(&back[3]);
    assert_eq!(got[n..], [-7777.0; 2], "{what}: padding");
    let chosen = |(row, (logits, sampling)): (usize, &(Vec<f32>, Option<Sampling>))| {
        let (got, want) = (Chosen::of(got[row]), choose(logits, sampling.as_ref()));
        let said = sampling
            .as_ref()
            .map(|s| Sampling { changes: s.changes.iter().take(3).copied().collect(), ..s.clone() });
        assert_eq!(got, Some(want), "{what}, row {row} of {cols} logits: {said:?}");
        want
    };
    rows.iter().enumerate().map(chosen).collect()
}

#[test]
fn tokens_are_those_of_the_definition() {
    let Some(host) = &Host::new("tokens that the device chooses", &[]) else { return };
    let mut chosen = Vec::new();
    let launches = if cfg!(debug_assertions) { 12 } else { 130 };
    for n in 0..launches {
        let size = one_of(n, 0, &[1, 2, 31, 63, 500, 1023, 1024, 1025, 3000, 5000, 9001, 20_000]);
        let case = |row: u64| 1000 * n + row;
        let rows: Vec<_> =
            (0..ROWS as u64).map(|row| (logits(case(row), size), sampling(case(row), size))).collect();
        chosen.extend(compare(host, &rows, &format!("launch {n}")));
    }
    // They tell something: many tokens, and every other outcome.
    let tokens: std::collections::BTreeSet<u32> =
        chosen.iter().filter_map(|c| if let Chosen::Token(id) = c { Some(*id) } else { None }).collect();
    assert!(tokens.len() > chosen.len() / 8, "{} different tokens of {}", tokens.len(), chosen.len());
    for other in [Chosen::Unasked, Chosen::NaN, Chosen::Nothing] {
        assert!(chosen.contains(&other), "{other:?} of {}", chosen.len());
    }
}

/// A vocabulary as large as models have, whose tokens do not fit where they are sorted: wide, flat, and all alike.
#[test]
fn many_tokens_are_cut_into_bins() {
    let Some(host) = &Host::new("tokens that the device chooses from many", &[]) else { return };
    let size = 128_256;
    for (what, scale, step) in
        [("wide", 4.0, 0.0), ("flat", 0.01, 0.0), ("alike", 0.0, 0.0), ("in steps", 2.0, 0.25)]
    {
        let value = |i: usize| {
            let x = ((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32 / (1u64 << 24) as f32;
            let x = (1.0 - x).max(1e-7).ln() * -scale;
            if step > 0.0 { (x / step).round() * step } else { x }
        };
        let logits: Vec<f32> = (0..size).map(value).collect();
        let plain = Sampling { temperature: 1.0, ..Sampling::greedy() };
        let rows: Vec<_> =
            [(0, 1.0), (0, 0.9), (0, 0.9), (5000, 1.0), (5000, 0.5), (100_000, 0.999), (128_256, 1.0)]
                .into_iter()
                .enumerate()
                .map(|(i, (top_k, top_p))| {
                    let sampling = Sampling { top_k, top_p, seed: i as u64, ..plain.clone() };
                    (logits.clone(), Some(sampling))
                })
                .collect();
        compare(host, &rows, what);
    }
}

#[test]
fn rows_that_the_kernel_does_not_take_are_refused() {
    assert!(sample::shape(1, 1 << 20, LOGITS_SPAN).is_ok());
    assert!(sample::shape(1, (1 << 20) + 1, LOGITS_SPAN).is_err());
    assert!(sample::shape(1, 100, 64).is_err());
}
