//! Rows of (settings, logits, tokens that can come out), and the lazy implementation against a plain one.

use std::collections::BTreeSet;

use ingle_graph::math;
use ingle_graph::sample::{self, Chosen};
use serde_json::json;

use super::*;

/// `settings` over the defaults, with seed 0 unless they give one: no test may hang on a drawn seed.
fn params(mut settings: serde_json::Value) -> Params {
    settings.as_object_mut().unwrap().entry("seed").or_insert(json!(0));
    let settings: Settings = serde_json::from_value(settings).unwrap();
    Params::resolve(&settings, &Settings::default(), 1 << 20).unwrap()
}

/// The model's distribution untouched, except for what `settings` says.
fn neutral(mut settings: serde_json::Value) -> Params {
    for (field, value) in [("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0)] {
        settings.as_object_mut().unwrap().entry(field).or_insert(json!(value));
    }
    params(settings)
}

/// The token at `position`, with nothing in the history to penalize.
fn at(sampler: &mut Sampler, logits: &[f32], position: usize) -> u32 {
    sampler.sample(logits, &vec![u32::MAX; position], None).unwrap().id
}

const N: f32 = f32::NEG_INFINITY;
const I: f32 = f32::INFINITY;
const NAN: f32 = f32::NAN;

/// (settings, logits, every token that comes out in 400 draws).
#[test]
fn kept_tokens() {
    for (settings, logits, want) in [
        // Temperature first: at 0.5 token 0 alone has 86 %; at 1 it would take tokens 0 and 1 to reach 70 %.
        (json!({"top_p": 0.7, "temperature": 0.5}), &[2.0, 1.0, 0.0, -1.0][..], &[0][..]),
        (json!({"top_p": 0.7}), &[2.0, 1.0, 0.0, -1.0], &[0, 1]),
        // 1, 0.61, 0.37, 0.22 of the likeliest.
        (json!({"min_p": 0.3, "temperature": 2.0}), &[2.0, 1.0, 0.0, -1.0], &[0, 1, 2]),
        (json!({"min_p": 0.3}), &[2.0, 1.0, 0.0, -1.0], &[0, 1]),
        (json!({"min_p": 1.0}), &[1.0, 2.0, 2.0, 0.0], &[1, 2]),
        (json!({"top_k": 2}), &[0.0, 0.0, 0.0, 0.0], &[0, 1]),
        (json!({"top_k": 1}), &[0.0, 1.0, 0.0], &[1]),
        (json!({"top_k": 1_000_000_000}), &[0.0, 0.1], &[0, 1]),
        (json!({"top_k": 0}), &[0.0, 0.1], &[0, 1]),
        (json!({"top_p": 0.0}), &[0.0, 0.1], &[1]),
        (json!({"top_p": 1e-9}), &[0.0, 0.1], &[1]),
        (json!({"top_p": 0.9999999}), &[0.0, 0.1], &[0, 1]),
        (json!({"temperature": 0.0, "top_p": 0.0}), &[0.0, 3.0, 3.0], &[1]),
        (json!({"temperature": 1e-12}), &[0.0, 3.0, 3.0, 2.9999998], &[1, 2]),
        (json!({"temperature": 1e-12}), &[3e38, -3e38, 3e38], &[0, 2]),
        (json!({"temperature": 100.0}), &[0.0, 3.0], &[0, 1]),
        (json!({}), &[NAN, 1.0, N, 1.0, NAN], &[1, 3]),
        (json!({}), &[N, I, 1.0, I], &[1, 3]),
        (json!({}), &[-0.0, 0.0], &[0, 1]),
        (json!({"temperature": 0.0}), &[NAN, -0.0, 0.0], &[1]),
        (json!({"logit_bias": [[0, -100.0], [2, 100.0]]}), &[5.0, 1.0, 0.0], &[2]),
        // XTC: tokens 0 and 1 have at least 30 %, so 0 goes; with one such token, or without chance, nobody goes.
        (json!({"xtc_probability": 1.0, "xtc_threshold": 0.3}), &[1.0, 1.0, 0.5, -1.0], &[1, 2, 3]),
        (json!({"xtc_probability": 1.0, "xtc_threshold": 0.5}), &[2.0, 1.0, 0.5, -1.0], &[0, 1, 2, 3]),
        (json!({"xtc_probability": 0.0, "xtc_threshold": 0.1}), &[1.0, 1.0, 0.5, -1.0], &[0, 1, 2, 3]),
        (json!({"xtc_probability": 1.0, "xtc_threshold": 0.3, "top_p": 0.6}), &[1.0, 1.0, 0.5, -1.0], &[1]),
        // Four equal tokens and a likely one: the expected surprise is nearer to the four.
        (json!({"typical_p": 0.3}), &[0.0, 0.0, 0.0, 0.0, 0.7], &[0, 1]),
        (json!({"typical_p": 0.0}), &[0.0, 0.0, 0.0, 0.0, 0.7], &[0]),
        // One bit of surprise allowed at first, and hardly moved: only token 0 has less.
        (json!({"mirostat": 2, "mirostat_tau": 0.5, "mirostat_eta": 1e-6}), &[2.0, 1.0, 0.0, -1.0], &[0]),
        (
            json!({"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 1e-6}),
            &[2.0, 1.0, 0.0, -1.0],
            &[0, 1, 2, 3],
        ),
    ] {
        let mut sampler = Sampler::new(neutral(settings.clone()), 0, 0);
        let got: BTreeSet<u32> = (0..400).map(|position| at(&mut sampler, logits, position)).collect();
        assert_eq!(got.into_iter().collect::<Vec<_>>(), want, "{settings} {logits:?}");
    }
}

#[test]
fn shares_are_the_softmax() {
    let logits = [1.0, 0.0, 2.0, -1.0];
    let mut sampler = Sampler::new(neutral(json!({"seed": 11})), 0, 0);
    let mut counts = [0; 4];
    for position in 0..20_000 {
        counts[at(&mut sampler, &logits, position) as usize] += 1;
    }
    let sum: f32 = logits.iter().map(|x| x.exp()).sum();
    for (count, logit) in counts.iter().zip(logits) {
        let (got, want) = (*count as f32 / 20_000.0, logit.exp() / sum);
        assert!((got - want).abs() < 0.01, "{got} {want}");
    }
}

#[test]
fn mirostat_follows_its_target() {
    let mut sampler =
        Sampler::new(neutral(json!({"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.1})), 0, 0);
    let logits: Vec<f32> = (0..1000).map(|i| -(i as f32).ln_1p() * 1.1).collect();
    let mut surprise = 0.0;
    let limit = |sampler: &Sampler| sampler.surprise_limit;
    for position in 0..3000 {
        let before = limit(&sampler);
        at(&mut sampler, &logits, position);
        // What the limit moved by, turned back into the surprise observed.
        surprise += f64::from((before - limit(&sampler)) / 0.1 + 2.0) / 3000.0;
    }
    assert!((surprise - 2.0).abs() < 0.1, "{surprise}");
}

#[test]
fn a_token_depends_on_seed_choice_and_position_alone() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
    let run = |seed: u64, choice: u32, positions: &[usize]| {
        let mut sampler = Sampler::new(neutral(json!({ "seed": seed })), choice, 0);
        positions.iter().map(|&position| at(&mut sampler, &logits, position)).collect::<Vec<_>>()
    };
    let positions: Vec<usize> = (0..40).collect();
    let base = run(5, 0, &positions);
    let mut backwards = run(5, 0, &positions.iter().rev().copied().collect::<Vec<_>>());
    backwards.reverse();
    assert_eq!(base, backwards);
    assert_ne!(base, run(6, 0, &positions));
    assert_ne!(base, run(5, 1, &positions));
}

#[test]
fn nothing_to_choose_is_an_error_with_the_numbers() {
    for settings in [json!({"temperature": 0.0}), json!({}), json!({"mirostat": 2})] {
        let error = Sampler::new(neutral(settings), 0, 0).sample(&[NAN, N, NAN], &[1, 2], None).unwrap_err();
        assert_eq!(error, SampleError { position: 2, logits: 3, nan: 2 });
    }
}

/// NaN among the logits is counted as the model gave them, and changes no choice.
#[test]
fn nan_among_the_logits_is_counted() {
    for settings in [json!({"temperature": 0.0}), json!({"seed": 3}), json!({"logit_bias": [[2, 1.0]]})] {
        let sample = |logits: &[f32]| Sampler::new(params(settings.clone()), 0, 0).sample(logits, &[], None);
        let (sound, damaged) = (sample(&[1.0, N, 2.0, N]).unwrap(), sample(&[1.0, NAN, 2.0, NAN]).unwrap());
        assert_eq!((sound.id, sound.nan, damaged.nan), (damaged.id, 0, 2), "{settings}");
    }
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = [1.0, NAN, 3.0, N, 3.0];
    let mut sampler = Sampler::new(params(json!({"temperature": 0.0, "logit_bias": [[0, 9.0]]})), 0, 0);
    let sample = sampler.sample(&logits, &[], Some(20)).unwrap();
    assert_eq!(sample.id, 0);
    let lse = (1_f64.exp() + 2.0 * 3_f64.exp()).ln();
    let close = |got: f32, want: f64| assert!((f64::from(got) - want).abs() < 1e-6, "{got} {want}");
    close(sample.logprob.unwrap(), 1.0 - lse);
    assert_eq!(sample.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [2, 4, 0, 3, 1]);
    close(sample.top[0].1, 3.0 - lse);
    close(sample.top[2].1, 1.0 - lse);
    assert_eq!((sample.top[3].1, sample.top[4].1), (LOGPROB_FLOOR, LOGPROB_FLOOR));
    for (asked, want) in [(0, 0), (2, 2), (20, 5), (21, 5)] {
        assert_eq!(sampler.sample(&logits, &[], Some(asked)).unwrap().top.len(), want);
    }
    let many = vec![0.0; 1000];
    let top = sampler.sample(&many, &[], Some(50)).unwrap().top;
    assert_eq!(
        top.iter().map(|&(id, _)| id).collect::<Vec<_>>(),
        (0..MAX_LOGPROBS as u32).collect::<Vec<_>>()
    );
    close(top[0].1, -(1000_f64.ln()));
}

/// The documented order, spelled out over a full sort with nothing saved.
fn plain(logits: &[f32], params: &Params, draw: Draw) -> u32 {
    let mut tokens: Vec<(f32, u32)> = logits.iter().copied().zip(0..).filter(|(x, _)| !x.is_nan()).collect();
    tokens.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    let largest = tokens[0].0;
    let weight =
        |x: f32| match x == largest {
            true => 1 << 43,
            false => (f64::from(math::exp((x - largest) / params.temperature)) * 2_f64.powi(43))
                .round_ties_even() as u64,
        };
    let mut tokens: Vec<(u32, u64)> = tokens.into_iter().map(|(x, id)| (id, weight(x))).collect();
    tokens.retain(|t| t.1 as f64 >= f64::from(params.min_p) * 2_f64.powi(43));
    if params.top_k > 0 {
        tokens.truncate(params.top_k);
    }
    let sum = |tokens: &[(u32, u64)]| tokens.iter().map(|t| t.1).sum::<u64>();
    if params.typical_p < 1.0 {
        tokens.retain(|t| t.1 > 0);
        let total = sum(&tokens) as f64;
        let surprise = |w: u64| -math::ln((w as f64 / total) as f32);
        let expected: f64 = tokens.iter().map(|t| t.1 as f64 / total * f64::from(surprise(t.1))).sum();
        let off = |t: &(u32, u64)| (surprise(t.1) - expected as f32).abs();
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by(|&a, &b| off(&tokens[a]).total_cmp(&off(&tokens[b])).then(a.cmp(&b)));
        let mut kept = BTreeSet::new();
        let mut reached = 0;
        for rank in order {
            kept.insert(rank);
            reached += tokens[rank].1;
            if reached as f64 >= f64::from(params.typical_p) * total {
                break;
            }
        }
        tokens = kept.into_iter().map(|rank| tokens[rank]).collect();
    }
    if params.top_p < 1.0 {
        let goal = f64::from(params.top_p) * sum(&tokens) as f64;
        let mut reached = 0;
        let last = tokens.iter().position(|t| {
            reached += t.1;
            reached as f64 >= goal
        });
        tokens.truncate(last.map_or(tokens.len(), |last| last + 1));
    }
    if let Some(xtc) = params.xtc {
        let least = f64::from(xtc.threshold) * sum(&tokens) as f64;
        let tops = tokens.iter().take_while(|t| t.1 as f64 >= least).count();
        if tops >= 2 && f64::from(draw.coin) / 2_f64.powi(32) < f64::from(xtc.probability) {
            tokens.drain(..tops - 1);
        }
    }
    let mut point = ((u128::from(draw.token) * u128::from(sum(&tokens))) >> 64) as u64;
    for (id, weight) in tokens {
        if point < weight {
            return id;
        }
        point -= weight;
    }
    unreachable!("the point lies within the sum")
}

#[test]
fn lazy_equals_plain() {
    let random = |case: u64, at: u64| Draw::new(99, case as u32, at).token;
    let mut cuts = BTreeSet::new();
    for case in 0..600 {
        let pick = |at: u64, options: &[f64]| options[(random(case, at) % options.len() as u64) as usize];
        let size = pick(0, &[1.0, 2.0, 63.0, 64.0, 65.0, 500.0, 3000.0]) as usize;
        // Coarse steps make ties; a few NaN and infinities.
        let step = pick(1, &[0.5, 0.001, 1e-6]);
        let logits: Vec<f32> = (0..size as u64)
            .map(|i| match random(case, 100 + i) {
                r if r % 97 == 0 && i > 0 => NAN,
                r if r % 89 == 0 && i > 0 => N,
                r => {
                    (((r >> 40) as f64 / 2_f64.powi(24) * pick(2, &[4.0, 40.0]) / step).round() * step) as f32
                }
            })
            .collect();
        let settings = json!({
            "temperature": pick(3, &[0.01, 0.7, 1.0, 5.0]),
            "min_p": pick(4, &[0.0, 0.0, 0.05, 0.9, 1.0]),
            "top_k": pick(5, &[0.0, 0.0, 1.0, 40.0, 1000.0]) as i64,
            "typical_p": pick(6, &[1.0, 1.0, 0.9, 0.2]),
            "top_p": pick(7, &[1.0, 0.95, 0.5, 0.0]),
            "xtc_probability": pick(8, &[0.0, 0.5, 1.0]),
            "xtc_threshold": pick(9, &[0.01, 0.1, 0.3]),
            "seed": case,
        });
        let params = params(settings.clone());
        for position in 0..8 {
            let draw = Draw::new(case, 0, position);
            let row = Row { logits: &logits, peaks: None };
            let got = choose::choose(row, rank::max(&logits).0, &params, draw, &mut 0.0);
            assert_eq!(got, Some(plain(&logits, &params, draw)), "case {case}: {settings}, {size} logits");
            cuts.insert(got);
        }
    }
    assert!(cuts.len() > 200, "the cases choose too few different tokens to tell anything: {}", cuts.len());
}

/// The largest of each span, as the model's graph says it.
fn peaks(logits: &[f32]) -> Vec<f32> {
    let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { NAN } else { a.max(b) };
    logits.chunks(LOGITS_SPAN).map(|span| span.iter().copied().fold(N, larger) + 0.0).collect()
}

#[test]
fn peaks_choose_the_same_token_from_fewer_logits() {
    let settings = [
        json!({"temperature": 0.0}),
        json!({}),
        json!({"temperature": 0.3, "min_p": 0.05}),
        json!({"temperature": 2.0, "top_k": 40, "top_p": 0.9}),
        json!({"typical_p": 0.5}),
        json!({"xtc_probability": 0.5, "xtc_threshold": 0.01}),
        json!({"mirostat": 2, "mirostat_tau": 3.0}),
        json!({"repetition_penalty": 1.5}),
        json!({"logit_bias": [[3, -50.0], [2600, 9.0]]}),
    ];
    // Four spans, the last of them short; peaked, flat, with a NaN, with ties across spans, of zeros of both signs.
    let count = 3 * LOGITS_SPAN + 37;
    let noise =
        |i: usize| ((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as f32 / (1u64 << 24) as f32;
    let rows: [Vec<f32>; 5] = [
        (0..count).map(|i| 30.0 * noise(i) * noise(i + 7)).collect(),
        (0..count).map(|i| 0.01 * noise(i)).collect(),
        (0..count).map(|i| if i == 1500 { NAN } else { 20.0 * noise(i) }).collect(),
        (0..count).map(|i| if i % 1100 == 1000 { 9.0 } else { N }).collect(),
        (0..count).map(|i| if i < 2000 { -0.0 } else { 0.0 }).collect(),
    ];
    for settings in settings {
        for (n, logits) in rows.iter().enumerate() {
            let peaks = peaks(logits);
            let [mut plain, mut peaked] = [0; 2].map(|_| Sampler::new(neutral(settings.clone()), 0, 0));
            for position in 0..20 {
                let tokens = vec![7; position];
                let want = plain.sample(logits, &tokens, None);
                let got = peaked.sample_peaked(logits, Some(&peaks), &tokens, None);
                assert_eq!(got, want, "{settings}, row {n}, position {position}");
            }
        }
    }
    // They are believed: a span that says it has nothing is not looked at.
    let mut logits = vec![0.0; 2 * LOGITS_SPAN];
    (logits[5], logits[LOGITS_SPAN + 5]) = (2.0, 1.0);
    let mut greedy = Sampler::new(neutral(json!({"temperature": 0.0})), 0, 0);
    assert_eq!(greedy.sample_peaked(&logits, Some(&[N, 1.0]), &[], None).unwrap().id, LOGITS_SPAN as u32 + 5);
}

/// What a device is told makes it choose the token that is chosen here, or it is told nothing, and why is said.
#[test]
fn a_device_is_told_what_is_done_here() {
    let random = |case: u64, at: u64| Draw::new(5, case as u32, at).token;
    let mut told = 0;
    for case in 0..1500 {
        let pick = |at: u64, options: &[f64]| options[(random(case, at) % options.len() as u64) as usize];
        let size = pick(0, &[1.0, 2.0, 65.0, 500.0, 3000.0]) as usize;
        let step = pick(1, &[0.5, 0.001]);
        let logits: Vec<f32> = (0..size as u64)
            .map(|i| match random(case, 100 + i) {
                r if r % 89 == 0 && i > 0 => N,
                r => (((r >> 40) as f64 / 2_f64.powi(24) * 20.0 / step).round() * step) as f32 - 10.0,
            })
            .collect();
        let tokens: Vec<u32> =
            (0..random(case, 50) % 40).map(|i| (random(case, 60 + i) % size as u64) as u32).collect();
        let bias: Vec<(u32, f32)> = (0..random(case, 51) % 3)
            .map(|i| ((random(case, 52 + i) % size as u64) as u32, pick(54 + i, &[-100.0, -1.0, 2.5]) as f32))
            .collect();
        let settings = json!({
            "temperature": pick(3, &[0.0, 0.01, 0.7, 1.0, 5.0]),
            "min_p": pick(4, &[0.0, 0.0, 0.05, 0.9, 1.0]),
            "top_k": pick(5, &[0.0, 0.0, 1.0, 40.0, 1000.0]) as i64,
            "top_p": pick(7, &[1.0, 0.95, 0.5, 0.0]),
            "repetition_penalty": pick(8, &[1.0, 1.0, 1.3, 0.5]),
            "frequency_penalty": pick(9, &[0.0, 0.0, 0.7]),
            "presence_penalty": pick(10, &[0.0, 0.0, -1.5]),
            "penalty_window": pick(11, &[-1.0, 0.0, 5.0]) as i64,
            "logit_bias": bias,
            "seed": case,
        });
        let mut sampler = Sampler::new(params(settings.clone()), (case % 3) as u32, tokens.len() / 2);
        let want = sampler.sample(&logits, &tokens, None).unwrap().id;
        match sampler.on_device(&tokens, size, None) {
            Err(why) => assert_eq!(why, "a token has two biases", "case {case}"),
            Ok(sampling) => {
                let got = sample::choose(&logits, Some(&sampling));
                assert_eq!(got, Chosen::Token(want), "case {case}: {settings}, {size} logits");
                told += 1;
            }
        }
    }
    assert!(told > 1300, "{told}");
}

#[test]
fn what_a_device_does_not_do_is_named() {
    let why = |settings: serde_json::Value, logprobs| {
        let sampler = Sampler::new(neutral(settings), 0, 0);
        sampler.on_device(&(0..2000).collect::<Vec<u32>>(), 3000, logprobs).unwrap_err()
    };
    for (settings, logprobs, want) in [
        (json!({}), Some(0), "log-probabilities are wanted"),
        (json!({"dry_multiplier": 1.0}), None, "DRY"),
        (json!({"typical_p": 0.9}), None, "typical-p"),
        (json!({"xtc_probability": 0.5}), None, "XTC"),
        (json!({"mirostat": 2}), None, "Mirostat"),
        (json!({"logit_bias": [[3, 1.0], [3, 1.0]]}), None, "a token has two biases"),
        (json!({"repetition_penalty": 1.1}), None, "more logits change than there is room for"),
    ] {
        assert_eq!(why(settings.clone(), logprobs), want, "{settings}");
    }
    let sampler = Sampler::new(neutral(json!({"temperature": 0.0, "typical_p": 0.9, "mirostat": 2})), 0, 0);
    assert!(
        sampler.on_device(&[1, 2], 10, None).is_ok(),
        "the likeliest token is that whatever else is said"
    );
}
