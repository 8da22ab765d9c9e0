//! Tokens that programs choose: replies are those of the host's sampler, whatever is asked for in one batch; what is left to
//! the host is counted, and nobody copies logits that nobody looks at.

use std::sync::Arc;

use ingle_cuda::stand_in::StandIn;
use ingle_engine::request::{Request, RequestId, TokenEvent};
use ingle_engine::runner::{Runner, kv_plan};
use ingle_engine::sampler::{Params, Settings};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_graph::backend::PathCount;
use ingle_graph::reference::Interpreter;
use ingle_graph::{Backend, Bucket, PlanKey, PlanOptions, passes};
use ingle_models::Model;
use serde_json::{Value, json};

use super::{checkpoint, cuda};
use crate::cpu;

const MODEL: &str = "gguf/llama-s1/model-legacy.gguf";

fn engine(backend: Box<dyn Backend>, sample: bool) -> Engine {
    let checkpoint = checkpoint(MODEL);
    let model = Arc::new(Model::open(&checkpoint).expect("a fixture"));
    let options = EngineOptions { step_tokens: 40, chunk: 24, ..EngineOptions::default() };
    let kv = kv_plan(&model.graph, 256, 16, options.chunk);
    let plan = PlanOptions { sample, ..PlanOptions::default() };
    let key = checkpoint.fingerprint();
    let runner = Runner::new(backend, model, checkpoint, plan, kv).expect("loads");
    Engine::new(runner, key, options)
}

fn request(seed: u32, length: u32, tokens: usize, settings: Value) -> Request {
    let prompt = (0..length).map(|i| (i * 37 + seed * 11 + i * i * seed) % 500).collect();
    let settings: Settings = serde_json::from_value(settings).expect("settings");
    let sampling = Params::resolve(&settings, &Settings::default(), 512).expect("valid");
    Request { sampling, ..Request::greedy(prompt, tokens) }
}

/// Requests that programs serve, and those whose tokens are left to the host, with the reason.
fn requests(tokens: usize) -> (Vec<Request>, Vec<(Request, &'static str)>) {
    let served = [
        json!({"temperature": 0.0}),
        json!({"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "seed": 1}),
        json!({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2}),
        json!({"seed": 3}),
        json!({"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": [[7, 4.0], [400, -100.0]]}),
        json!({"temperature": 2.0, "frequency_penalty": 0.7, "presence_penalty": 0.2, "penalty_window": 9, "seed": 4}),
    ];
    let left = [
        (json!({"dry_multiplier": 0.8, "temperature": 0.0}), "DRY"),
        (json!({"mirostat": 2, "seed": 5}), "Mirostat"),
        (json!({"seed": 6}), "log-probabilities are wanted"),
    ];
    let served = served.into_iter().zip(1..).map(|(settings, i)| request(i, 5 * i, tokens, settings));
    let left = left.into_iter().zip(20..).map(|((settings, why), i)| {
        let logprobs = why.starts_with("log").then_some(3);
        (Request { logprobs, ..request(i, i, tokens, settings) }, why)
    });
    (served.collect(), left.collect())
}

fn replies(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<TokenEvent>> {
    let ids: Vec<RequestId> =
        requests.iter().map(|request| engine.submit(request.clone()).expect("fits")).collect();
    let mut replies = engine.run_to_end().expect("runs");
    ids.iter().map(|id| replies.remove(id).expect("a reply")).collect()
}

/// Tokens that programs chose, and those left to the host by reason.
fn choices(engine: &mut Engine) -> Vec<(Option<String>, u64)> {
    let paths = engine.paths().into_iter().filter(|path| path.path == "token");
    let mut all: Vec<_> = paths.map(|PathCount { declined, count, .. }| (declined, count)).collect();
    all.sort();
    all
}

#[test]
fn replies_are_those_of_the_hosts_sampler() {
    let tokens = 12;
    let (served, left) = requests(tokens);
    let all: Vec<Request> =
        served.iter().cloned().chain(left.iter().map(|(request, _)| request.clone())).collect();
    let want = replies(&mut engine(cpu(1, None), false), &all);
    let mut expected = vec![(None, (served.len() * tokens) as u64)];
    expected.extend(left.iter().map(|(_, why)| (Some(why.to_string()), tokens as u64)));
    expected.sort();
    let device = StandIn::new("tokens that programs choose");
    let mut backends: Vec<Box<dyn Backend>> = vec![Box::new(Interpreter::new())];
    for eager in [true, false] {
        backends.extend(device.iter().map(|device| Box::new(cuda::open(device, eager)) as Box<dyn Backend>));
    }
    for (n, backend) in backends.into_iter().enumerate() {
        let mut engine = engine(backend, true);
        assert_eq!(replies(&mut engine, &all), want, "backend {n}");
        assert_eq!(choices(&mut engine), expected, "backend {n}");
        let graphs: u64 = engine
            .paths()
            .iter()
            .filter(|path| path.path.starts_with("graph.") && path.declined.is_none())
            .map(|path| path.count)
            .sum();
        assert_eq!(graphs > 0, n == 2, "backend {n}: replays");
    }
}

/// Where programs chose all tokens of a step, these are all that is copied back.
#[test]
fn logits_that_nobody_looks_at_stay_where_they_are() {
    let Some(device) = StandIn::new("logits that stay on the device") else { return };
    let mut engine = engine(Box::new(cuda::open(&device, false)), true);
    let copied = |engine: &mut Engine, requests: &[Request]| -> Vec<String> {
        // Programs are prepared, and proved, the first time.
        replies(engine, requests);
        device.calls();
        replies(engine, requests);
        device.calls().into_iter().filter(|call| call.starts_with("download")).collect()
    };
    let (served, left) = requests(5);
    let few = copied(&mut engine, &served[..2]);
    assert!(
        few.len() > 4 && few.iter().all(|call| ["download 4", "download 8"].contains(&call.as_str())),
        "{few:?}"
    );
    let all = copied(&mut engine, &[left[0].0.clone()]);
    assert!(all.contains(&"download 2048".to_string()), "{all:?}");
}

/// A backend that chooses no tokens says so when a program that does is prepared.
#[test]
fn a_backend_that_chooses_no_tokens_says_so() {
    let checkpoint = checkpoint(MODEL);
    let model = Model::open(&checkpoint).expect("a fixture");
    let options = PlanOptions { sample: true, ..PlanOptions::default() };
    let kv = kv_plan(&model.graph, 64, 1, 64);
    let mut backend = cpu(1, None);
    backend.load(&model.graph, checkpoint, &options, kv).expect("loads");
    let program = passes::compile(&model.graph, &PlanKey { bucket: Bucket::holding(1, 1, 1), options });
    let refused = backend.prepare(Arc::new(program.expect("compiles"))).expect_err("a refusal").to_string();
    assert!(refused.contains("sample"), "{refused}");
}
