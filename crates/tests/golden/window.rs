//! Layers with a window keep a ring of pages. Replies equal those of the scalar reference that keeps every position,
//! however they are computed, and a witness sees that no page is read that is not a row's own past.

use std::collections::HashMap;
use std::sync::Arc;

use ingle_engine::batch::{self, Part};
use ingle_engine::kv::Span;
use ingle_engine::request::{Request, RequestId, TokenEvent};
use ingle_engine::runner::{Runner, kv_plan, kv_plan_of_all};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::reference::Interpreter;
use ingle_graph::{Backend, Inputs, KvPlan, PAGE, PlanOptions};
use ingle_models::Model;

use super::checkpoint;
use super::witness::Witness;
use crate::cpu;

/// Three layers with a window of 8 and one without; three layers with a window of 8; two layers of each kind.
const MODELS: [&str; 3] = ["models/gemma3_text", "models/mistral", "models/qwen2_swa"];
const WINDOW: usize = 8;
/// Longest sequence: twelve pages, of which a window needs two.
pub const CONTEXT: usize = 384;

/// The model; with `all`, its layers keep every position.
pub fn model(path: &str, all: bool) -> Arc<Model> {
    let mut model = Model::open(&checkpoint(path)).expect("a fixture");
    let groups = &mut model.graph.kv_groups;
    assert!(groups.iter().any(|group| group.window == Some(WINDOW)), "{path}: {groups:?}");
    if all {
        groups.iter_mut().for_each(|group| group.window = None);
    }
    Arc::new(model)
}

/// Pools of so many pages for groups with a window and for those without.
fn pools(model: &Model, window: usize, all: usize) -> KvPlan {
    let pages = model.graph.kv_groups.iter().map(|group| group.window.map_or(all, |_| window));
    KvPlan { pages: pages.collect(), context: CONTEXT }
}

pub fn engine_on(
    path: &str,
    backend: Box<dyn Backend>,
    model: Arc<Model>,
    kv: KvPlan,
    options: EngineOptions,
) -> Engine {
    let checkpoint = checkpoint(path);
    let key = checkpoint.fingerprint();
    let runner = Runner::new(backend, model, checkpoint, PlanOptions::default(), kv).expect("loads");
    Engine::new(runner, key, options)
}

/// The scalar reference that keeps everything and remembers nothing.
pub fn reference(path: &str) -> Engine {
    let model = model(path, true);
    let kv = kv_plan_of_all(&model.graph, CONTEXT, 1);
    let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
    engine_on(path, Box::new(Interpreter::new()), model, kv, options)
}

/// Rings on the host, watched; with pools of so many pages (window, all positions), or those of two sequences.
fn ring(path: &str, threads: usize, pages: Option<(usize, usize)>, options: EngineOptions) -> Engine {
    let model = model(path, false);
    let kv = match pages {
        Some((window, all)) => pools(&model, window, all),
        None => kv_plan(&model.graph, CONTEXT, 2, options.chunk),
    };
    engine_on(path, Witness::new(cpu(threads, None)), model, kv, options)
}

pub fn prompt(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + seed * 11 + i * i * seed) % 500).collect()
}

fn bits(tokens: &[TokenEvent]) -> Vec<(u32, u32)> {
    tokens.iter().map(|t| (t.id, t.logprob.expect("asked for").to_bits())).collect()
}

/// Token ids of a reply and the bits of their log probabilities.
pub fn reply(engine: &mut Engine, request: &Request) -> Vec<(u32, u32)> {
    let id = engine.submit(Request { logprobs: Some(1), ..request.clone() }).expect("fits");
    let replies = engine.run_to_end().expect("runs");
    assert_eq!(engine.pages_held(), 0, "pages leaked");
    bits(&replies[&id])
}

/// Five times around a ring of two pages, in chunks of every kind.
#[test]
fn a_ring_equals_everything() {
    for path in MODELS {
        let request = Request::greedy(prompt(3, 150), 200);
        let want = reply(&mut reference(path), &request);
        assert_eq!(want.len(), 200);
        for (threads, chunk) in [(1, 1), (2, 7), (1, 33), (2, 100), (2, 512)] {
            let options = EngineOptions { chunk, ..EngineOptions::default() };
            assert!(
                reply(&mut ring(path, threads, None, options), &request) == want,
                "{path}: chunk {chunk}"
            );
        }
        let options = EngineOptions { chunk: 20, ..EngineOptions::default() };
        let model = model(path, false);
        let kv = kv_plan(&model.graph, CONTEXT, 1, options.chunk);
        assert_eq!(kv, pools(&model, 1 + 2 * 2, 1 + 12), "{path}");
        let backend = Witness::new(Box::new(Interpreter::new()));
        let mut interpreter = engine_on(path, backend, model, kv, options);
        assert!(reply(&mut interpreter, &request) == want, "{path}: the reference on a ring");
    }
}

/// However long a sequence is, its layers with a window hold what they see.
#[test]
fn a_window_holds_two_pages() {
    for path in MODELS {
        let mut engine = ring(path, 1, None, EngineOptions { chunk: 16, ..EngineOptions::default() });
        let of_all = model(path, false).graph.kv_groups.len() - 1;
        engine.submit(Request::greedy(prompt(1, 100), 200)).expect("fits");
        while engine.busy() {
            engine.step().expect("runs");
            if engine.busy() {
                let computed = engine.stats().computed as usize;
                let seen = computed.div_ceil(PAGE) - (computed + 1).saturating_sub(WINDOW) / PAGE;
                assert!(seen <= 2);
                assert_eq!(
                    engine.pages_held(),
                    of_all * computed.div_ceil(PAGE) + seen,
                    "{path}: {computed} tokens"
                );
            }
        }
        assert_eq!(engine.pages_held(), 0);
    }
}

#[test]
fn a_turn_appended_equals_the_conversation_cold() {
    for path in MODELS {
        let mut warm = ring(path, 2, None, EngineOptions { chunk: 24, ..EngineOptions::default() });
        let mut cold = reference(path);
        let mut tokens = prompt(1, 70);
        for turn in 0..4 {
            let request = Request::greedy(tokens.clone(), 40);
            let cached = warm.stats().cached as usize;
            let got = reply(&mut warm, &request);
            assert!(reply(&mut cold, &request) == got, "{path}: turn {turn}");
            // All full pages of the turn before, whose last token was not computed.
            let known = if turn == 0 { 0 } else { (tokens.len() - 9 - 1) / PAGE * PAGE };
            assert_eq!(warm.stats().cached as usize - cached, known, "{path}: turn {turn}");
            tokens.extend(got.iter().map(|t| t.0));
            tokens.extend(prompt(turn + 7, 9));
        }
    }
}

/// A prefix is used as far as its last window is still there, and no further.
#[test]
fn a_prefix_without_its_window_is_computed_again() {
    for path in MODELS {
        let first = prompt(5, 200);
        // Branches off in the sixth page, so that five pages are the same.
        let branch = [&first[..170], &prompt(9, 30)].concat();
        let requests =
            [first.clone(), first, prompt(8, 120), branch].map(|prompt| Request::greedy(prompt, 3));
        let mut cold = reference(path);
        let want: Vec<_> = requests.iter().map(|request| reply(&mut cold, request)).collect();
        // Pages of the window's pool; tokens found by each request. Four pages are soon needed for others.
        for (pages, found) in [(1 + 15, [0, 192, 0, 160]), (1 + 4, [0, 192, 0, 0])] {
            let options = EngineOptions { chunk: 32, ..EngineOptions::default() };
            let mut engine = ring(path, 1, Some((pages, 40)), options);
            for (i, request) in requests.iter().enumerate() {
                let cached = engine.stats().cached;
                assert!(reply(&mut engine, request) == want[i], "{path}: request {i}, {pages} pages");
                assert_eq!(engine.stats().cached - cached, found[i], "{path}: request {i}, {pages} pages");
            }
        }
    }
}

/// Requests of mixed lengths together equal each one alone, also when either pool is far too small for all of them.
#[test]
fn alone_or_together() {
    for path in MODELS {
        let requests: Vec<Request> = (0..6)
            .map(|i| Request {
                priority: (i % 3) as i32,
                logprobs: Some(1),
                ..Request::greedy(prompt(i as u32 % 4, [1, 31, 33, 64, 150, 220][i]), 40 + i)
            })
            .collect();
        let mut one = reference(path);
        let alone: Vec<_> = requests.iter().map(|request| reply(&mut one, request)).collect();
        for (pages, is_scarce) in [((40, 80), false), ((1 + 4, 80), true), ((1 + 4, 1 + 12), true)] {
            for prefix_cache in [true, false] {
                let options =
                    EngineOptions { step_tokens: 64, chunk: 24, prefix_cache, ..EngineOptions::default() };
                let mut together = ring(path, 2, Some(pages), options);
                let ids: Vec<RequestId> =
                    requests.iter().map(|r| together.submit(r.clone()).expect("fits")).collect();
                let replies: HashMap<RequestId, Vec<TokenEvent>> = together.run_to_end().expect("runs");
                let what = format!("{path}, {pages:?} pages, cache {prefix_cache}: {:?}", together.stats());
                for (i, id) in ids.iter().enumerate() {
                    assert!(bits(&replies[id]) == alone[i], "request {i}, {what}");
                }
                assert!(together.stats().widest > 1, "nothing ran together: {what}");
                assert_eq!(together.stats().preempted > 0, is_scarce, "{what}");
                assert_eq!(together.pages_held(), 0, "pages leaked: {what}");
            }
        }
    }
}

/// Chunks shorten to what a small pool holds; one that cannot hold a single window is an error with the numbers.
#[test]
fn a_small_pool_shortens_chunks() {
    for path in MODELS {
        let (request, mut one) = (Request::greedy(prompt(2, 120), 20), reference(path));
        let mut small = ring(path, 1, Some((1 + 3, 20)), EngineOptions::default());
        assert!(reply(&mut small, &request) == reply(&mut one, &request), "{path}");
        let steps = 120_u64.div_ceil(58) + 19;
        assert_eq!(small.stats().steps, steps, "{path}: three pages hold 7 tokens and 58 new ones");
        let mut tiny = ring(path, 1, Some((1 + 1, 20)), EngineOptions::default());
        let error = tiny.submit(request).unwrap_err().to_string();
        assert!(error.contains("a window of 8 tokens takes 2 pages") && error.contains("has 1"), "{error}");
        let short = Request::greedy(prompt(2, 20), 5);
        assert!(reply(&mut tiny, &short) == reply(&mut one, &short), "{path}: 25 tokens are on one page");
    }
}

/// A ring that is one page too small is refused, and a page that is not the row's own past is seen.
#[test]
fn planted_faults_are_caught() {
    let (path, tokens) = (MODELS[0], prompt(4, 200));
    let model = model(path, false);
    let kv = kv_plan_of_all(&model.graph, CONTEXT, 1);
    let backend = Witness::new(cpu(1, None));
    let mut runner =
        Runner::new(backend, model, checkpoint(path), PlanOptions::default(), kv).expect("loads");
    let mut inputs = Inputs::default();
    let mut run = |computed: usize, n: usize, window: &[u32], ring: usize| {
        // Pages 1 to 12 keep all; the window's are given.
        let first = (computed + 1).saturating_sub(WINDOW) / PAGE;
        let spans = [
            Span { first, pages: window.iter().copied().collect() },
            Span { first: 0, pages: (1..13).collect() },
        ];
        let part = Part { tokens: &tokens, computed, n, spans: &spans, all_rows: true };
        batch::fill(&mut inputs, &[part], &[ring, 12]);
        runner.run(&inputs).map_err(|e| e.to_string())
    };
    let error = run(0, 80, &[1, 2, 3], 2).unwrap_err();
    assert!(error.contains("positions 0 to 79 are on 3 pages, a table holds 2"), "{error}");
    run(0, 80, &[1, 2, 3], 3).expect("three pages hold 80 tokens");
    run(80, 30, &[3, 1], 3).expect("the first page is let go and taken again");
    let error = run(110, 1, &[2], 3).unwrap_err();
    assert!(error.contains("stale"), "the second page was let go: {error}");
    let error = run(110, 1, &[99], 3).unwrap_err();
    assert!(error.contains("page 99 of 13") || error.contains("cell"), "{error}");
    run(110, 1, &[1], 3).expect("the page that is held");
}
