//! Whole models: closeness to the original (`verify`), the same bits on every path, and replies that do not depend on
//! how they were computed.

mod contract;
mod cuda;
mod engine;
mod families;
mod faults;
mod gpu;
mod keys;
mod placement;
mod plans;
mod sampling;
mod verify;
mod window;
mod witness;

use std::path::PathBuf;
use std::sync::Arc;

use ingle_engine::kv::Span;
use ingle_engine::runner::{Runner, kv_plan_of_all};
use ingle_graph::{Backend, PlanOptions};
use ingle_models::Model;
use ingle_tensor::Checkpoint;

/// Path of a fixture: where this was built, or in the repository that is the current folder.
pub fn fixture(path: &str) -> PathBuf {
    let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    if built.exists() { built.join(path) } else { PathBuf::from("crates/tests/fixtures").join(path) }
}

/// A fixture's checkpoint.
pub fn checkpoint(path: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&fixture(path)).unwrap_or_else(|e| panic!("{path}: {e}")))
}

/// A fixture loaded on `backend` with room for every position of `sequences` sequences of 256 tokens.
pub fn runner(path: &str, backend: Box<dyn Backend>, options: PlanOptions, sequences: usize) -> Runner {
    let checkpoint = checkpoint(path);
    let model = Arc::new(Model::open(&checkpoint).unwrap_or_else(|e| panic!("{path}: {e}")));
    let kv = kv_plan_of_all(&model.graph, 256, sequences);
    Runner::new(backend, model, checkpoint, options, kv).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The same pages, from the first position on, in every KV group of the runner's model.
pub fn spans(runner: &Runner, pages: &[u32]) -> Vec<Span> {
    let span = Span { first: 0, pages: pages.iter().copied().collect() };
    vec![span; runner.kv().pages.len()]
}

/// Models that between them have every family, source and kind of format.
pub const MODELS: &[&str] = &[
    "models/llama",
    "models/llama_tied_bias",
    "models/mistral",
    "models/qwen2",
    "models/qwen2_swa",
    "models/gemma",
    "models/gemma2",
    "models/gemma3_text",
    "gguf/llama-s1/model-legacy.gguf",
    "gguf/llama_yarn-s1/model-q8_0.gguf",
    "gguf/qwen3-s1-wide/model-q4_k_m.gguf",
    "gguf/gemma-s1/model-q8_0.gguf",
    "gguf/gemma2-s1/model-q8_0.gguf",
    "gguf/gemma3_text-s1/model-q8_0.gguf",
];
