//! A reply depends on its prompt alone: not on threads, chunks, the prefix cache, its neighbours, or preemption.

use ingle_engine::request::{Event, Request, RequestId};
use ingle_engine::runner::{Runner, kv_plan};
use ingle_engine::sampler::{Params, Settings};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::{KvPlan, Numerics, PlanOptions};
use ingle_models::Model;
use std::sync::Arc;

use super::checkpoint;
use crate::cpu;
use ingle_cpu::Isa;

const MODEL: &str = "gguf/llama-s1/model-legacy.gguf";

/// The default mode, as this machine runs it.
fn options_here() -> PlanOptions {
    PlanOptions { float: Isa::detect().float(Numerics::Fast), ..PlanOptions::default() }
}

/// An engine with pools of so many pages, or with room for 16 sequences.
fn engine_with(threads: usize, pages: Option<usize>, options: EngineOptions) -> Engine {
    let checkpoint = checkpoint(MODEL);
    let model = Arc::new(Model::open(&checkpoint).expect("a fixture"));
    let key = checkpoint.fingerprint();
    let kv = match pages {
        Some(pages) => KvPlan::uniform(&model.graph, pages, 256),
        None => kv_plan(&model.graph, 256, 16, options.chunk),
    };
    let runner = Runner::new(cpu(threads, None), model, checkpoint, options_here(), kv).expect("loads");
    Engine::new(runner, key, options)
}

fn engine(threads: usize, options: EngineOptions) -> Engine {
    engine_with(threads, None, options)
}

fn prompt(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + seed * 11 + i * i * seed) % 500).collect()
}

/// Token ids of a reply, and the bits of their log probabilities.
fn reply(engine: &mut Engine, request: Request) -> Vec<(u32, u32)> {
    let id = engine.submit(Request { logprobs: Some(2), ..request }).expect("fits");
    let mut replies = engine.run_to_end().expect("runs");
    bits(&replies.remove(&id).expect("a reply"))
}

fn bits(tokens: &[ingle_engine::request::TokenEvent]) -> Vec<(u32, u32)> {
    tokens.iter().map(|t| (t.id, t.logprob.expect("asked for").to_bits())).collect()
}

fn sampled(seed: u64) -> Params {
    let settings = Settings { temperature: Some(0.9), seed: Some(seed), ..Settings::default() };
    Params::resolve(&settings, &Settings::default(), 512).expect("valid")
}

#[test]
fn threads_and_chunks_change_nothing() {
    for sampling in [Params::greedy(), sampled(5)] {
        let request = Request { sampling, ..Request::greedy(prompt(3, 90), 20) };
        let want = reply(&mut engine(1, EngineOptions::default()), request.clone());
        assert_eq!(want.len(), 20);
        for (threads, chunk) in [(2, 512), (1, 1), (2, 7), (2, 32), (1, 33), (2, 89)] {
            let options = EngineOptions { chunk, ..EngineOptions::default() };
            assert_eq!(
                reply(&mut engine(threads, options), request.clone()),
                want,
                "{threads} threads, chunk {chunk}"
            );
        }
    }
}

#[test]
fn a_turn_appended_equals_the_conversation_prefilled_cold() {
    let mut warm = engine(2, EngineOptions::default());
    let mut tokens = prompt(1, 70);
    for turn in 0..4 {
        let request = Request::greedy(tokens.clone(), 15);
        let cached = warm.stats().cached;
        let got = reply(&mut warm, request.clone());
        assert!(turn == 0 || warm.stats().cached >= cached + 64, "turn {turn} found nothing in the cache");
        let off = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
        for options in [EngineOptions::default(), off] {
            let mut cold = engine(2, options);
            assert_eq!(reply(&mut cold, request.clone()), got, "turn {turn}");
            assert_eq!(cold.stats().cached, 0);
        }
        tokens.extend(got.iter().map(|t| t.0));
        tokens.extend(prompt(turn + 7, 9));
    }
    assert_eq!(warm.pages_held(), 0);
}

/// Tokens found in the prefix cache take no share of a step: as many prompts begin together as have room for the rest.
#[test]
fn cached_prompts_begin_together() {
    let options = EngineOptions { step_tokens: 100, chunk: 100, ..EngineOptions::default() };
    let mut engine = engine(2, options);
    let requests: Vec<Request> = (0..8).map(|i| Request::greedy(prompt(i, 97), 4)).collect();
    let alone: Vec<_> = requests.iter().map(|request| reply(&mut engine, request.clone())).collect();
    let ids: Vec<RequestId> = requests
        .iter()
        .map(|r| engine.submit(Request { logprobs: Some(2), ..r.clone() }).expect("fits"))
        .collect();
    let first = engine.step().expect("runs");
    assert_eq!(first.len(), 8, "{first:?}");
    assert_eq!(engine.stats().cached, 8 * 96);
    let mut replies = engine.run_to_end().expect("runs");
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(bits(&replies.remove(id).expect("a reply")), alone[i][1..], "request {i}");
    }
}

#[test]
fn salts_do_not_share() {
    let mut engine = engine(1, EngineOptions::default());
    let request = Request::greedy(prompt(1, 70), 3);
    reply(&mut engine, request.clone());
    reply(&mut engine, Request { salt: 1, ..request.clone() });
    assert_eq!(engine.stats().cached, 0);
    reply(&mut engine, Request { salt: 1, ..request });
    assert_eq!(engine.stats().cached, 64);
}

/// Replies of requests of mixed lengths and samplings, all together, equal each one alone; also when the pool is far
/// too small for all of them and some are preempted.
#[test]
fn alone_or_together() {
    let requests: Vec<Request> = (0..8)
        .map(|i| Request {
            sampling: if i % 2 == 0 { Params::greedy() } else { sampled(i) },
            priority: (i % 3) as i32,
            logprobs: Some(2),
            ..Request::greedy(prompt(i as u32, [1, 5, 31, 32, 33, 64, 90, 120][i as usize]), 40 + i as usize)
        })
        .collect();
    let alone: Vec<_> =
        requests.iter().map(|r| reply(&mut engine(1, EngineOptions::default()), r.clone())).collect();
    for (pages, prefix_cache) in [(130, true), (130, false), (12, true), (12, false)] {
        let options = EngineOptions { step_tokens: 64, chunk: 24, prefix_cache, ..EngineOptions::default() };
        let mut together = engine_with(2, Some(pages), options);
        let ids: Vec<RequestId> =
            requests.iter().map(|r| together.submit(r.clone()).expect("fits")).collect();
        let replies = together.run_to_end().expect("runs");
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(bits(&replies[id]), alone[i], "request {i}, {pages} pages, cache {prefix_cache}");
        }
        let stats = together.stats();
        assert_eq!(stats.preempted > 0, pages == 12, "{stats:?}");
        assert!(stats.widest > 1, "nothing ran together: {stats:?}");
        assert_eq!(together.pages_held(), 0, "pages leaked");
    }
}

#[test]
fn a_cancelled_request_frees_its_pages_and_disturbs_nobody() {
    let request = Request { logprobs: Some(2), ..Request::greedy(prompt(2, 50), 30) };
    let want = reply(&mut engine(1, EngineOptions::default()), request.clone());
    let mut engine = engine(2, EngineOptions::default());
    let kept = engine.submit(request).expect("fits");
    let gone = engine.submit(Request::greedy(prompt(9, 100), 100)).expect("fits");
    let mut tokens = Vec::new();
    for step in 0.. {
        if step == 5 {
            let held = engine.pages_held();
            assert!(matches!(engine.cancel(gone), Some(Event::Finished(id, _)) if id == gone));
            assert!(engine.pages_held() < held);
            assert!(engine.cancel(gone).is_none());
        }
        for event in engine.step().expect("runs") {
            match event {
                Event::Token(id, token) if id == kept => tokens.push(token),
                _ => {}
            }
        }
        if !engine.busy() {
            break;
        }
    }
    assert_eq!(bits(&tokens), want);
}

#[test]
fn requests_that_cannot_be_served_are_refused_with_the_numbers() {
    let mut engine = engine(1, EngineOptions::default());
    let refused = |engine: &mut Engine, prompt: Vec<u32>| {
        engine.submit(Request::greedy(prompt, 1)).unwrap_err().to_string()
    };
    let message = refused(&mut engine, prompt(1, 256));
    assert!(message.contains("256"), "{message}");
    assert!(refused(&mut engine, vec![]).contains("no tokens"));
    assert!(refused(&mut engine, vec![1, 512]).contains("512"));
    let id = engine.submit(Request::greedy(prompt(1, 250), 100)).expect("fits");
    let replies = engine.run_to_end().expect("runs");
    assert_eq!(replies[&id].len(), 6, "a reply ends where the context does");
}
