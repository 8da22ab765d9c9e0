//! Everything that a model's files can reach, from the path to two tokens of a reply.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ingle_cpu::{Cpu, CpuOptions};
use ingle_engine::handle::Language;
use ingle_engine::request::{Event, Request};
use ingle_engine::runner::{Runner, kv_plan};
use ingle_engine::sampler::{Params, Settings};
use ingle_engine::step::{Engine, EngineOptions};
use ingle_engine::text::{ChatTemplate, CivilTime, Conversation, Detokenizer, Guard, Specials, Tokenizer};
use ingle_graph::PlanOptions;
use ingle_models::Model;
use ingle_tensor::gguf::Gguf;
use ingle_tensor::{Bytes, Checkpoint, Source};
use serde_json::json;

use super::seeds;

/// Longest context that is loaded, in tokens.
const CONTEXT: usize = 64;

/// What became of a file: an answer, or the first refusal in words.
pub type Outcome = Result<(), String>;

/// Opens the model at `path`, loads it, asks for two tokens of a reply, and says which step refused.
pub fn model(path: &Path) -> Outcome {
    let checkpoint = Arc::new(Checkpoint::open(path).map_err(|e| format!("open: {e}"))?);
    read(&checkpoint);
    let model = Arc::new(Model::open(&checkpoint).map_err(|e| format!("model: {e}"))?);
    let language = Language::open(&checkpoint).map_err(|e| format!("language: {e}"));
    let prompt = language.as_ref().map_or(Ok(Vec::new()), speak);
    // A text that does not tokenize does not keep a caller from sending ids.
    let ids = prompt.as_deref().unwrap_or_default();
    let settings = language.as_ref().map_or_else(|_| Settings::default(), |l| l.defaults().clone());
    answer(checkpoint, model, ids, &settings, &PlanOptions::default())?;
    language?;
    prompt.map(drop)
}

/// Reads all that a checkpoint holds, as `inspect` does.
fn read(checkpoint: &Checkpoint) {
    if let Source::Gguf(metadata) = checkpoint.source() {
        for (key, value) in metadata.iter() {
            assert!(!value.to_string().is_empty(), "{key}");
            let _ = (metadata.strings(key), metadata.u32s(key), metadata.f32s(key), metadata.f32(key));
        }
    }
    for tensor in checkpoint.tensors() {
        assert_eq!(checkpoint.data(tensor).len() as u64, tensor.bytes);
        let _ = (tensor.rows(), tensor.cols(), tensor.elements());
    }
    checkpoint.fingerprint();
}

/// Texts for every part of a tokenizer: words, spaces, a character of two bytes, spellings of special tokens.
const TEXTS: [&str; 4] = ["the hiss", "  \n\n a  ", "\u{e9}\u{1F600} 12345 <s><|x|> his", ""];

/// Both ways into the model's ids; the prompt is the conversation where there is a template.
fn speak(language: &Language) -> Result<Vec<u32>, String> {
    let tokenizer = language.tokenizer();
    tokenize(tokenizer)?;
    if language.template().map_err(|e| format!("language: {e}"))?.is_none() {
        return language.completion("the hiss").map_err(|e| format!("completion: {e}"));
    }
    let mut prompt = Vec::new();
    for conversation in conversations() {
        prompt = language.chat(&conversation).map_err(|e| format!("chat: {e}"))?;
    }
    Ok(prompt)
}

/// Encodes and decodes with a tokenizer.
pub fn tokenize(tokenizer: &Tokenizer) -> Result<(), String> {
    for text in TEXTS {
        for specials in [Specials::Parse, Specials::AsText] {
            let ids = tokenizer.encode_prompt(text, specials).map_err(|e| format!("encode: {e}"))?;
            let mut detokenizer = Detokenizer::new(tokenizer);
            let mut decoded: String = ids.iter().map(|&id| detokenizer.push(tokenizer, id)).collect();
            decoded += &detokenizer.finish();
            let _ = tokenizer.has_doubled_bos(&ids);
        }
    }
    for id in [0, 1, u32::MAX] {
        let _ = (tokenizer.token_bytes(id), tokenizer.is_special(id));
    }
    let _ = (tokenizer.eog(), tokenizer.tokens_containing(&["h"]));
    Ok(())
}

/// Compiles and renders a chat template.
pub fn template(source: &str) -> Outcome {
    let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|e| format!("compile: {e}"))?;
    for conversation in conversations() {
        template.render(&conversation, &Guard::new(["<s>"])).map_err(|e| format!("render: {e}"))?;
    }
    Ok(())
}

/// A short conversation, and one with tools.
fn conversations() -> [Conversation; 2] {
    let mut short = Conversation::new(vec![
        json!({"role": "system", "content": "this is it"}),
        json!({"role": "user", "content": "is <s> it the hiss?"}),
    ]);
    short.now = CivilTime::from_unix(1_741_356_309);
    let mut tools = short.clone();
    tools.messages.extend([
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [true, null]}}}]}),
        json!({"role": "tool", "content": [{"type": "text", "text": "7"}]}),
    ]);
    tools.tools = Some(vec![
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}),
    ]);
    tools.extra.insert("enable_thinking".into(), json!(false));
    [short, tools]
}

/// What a model said.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reply {
    /// The tokens of a greedy reply and of a drawn one, each with the likeliest tokens and the bits of their log
    /// probabilities.
    pub tokens: Vec<(u32, Vec<(u32, u32)>)>,
    /// Why a token could not be chosen.
    pub failed: Vec<String>,
    /// Keys and values that were too large for their type.
    pub saturated: u64,
}

/// Loads the model at `path` under these options and asks for its reply to a fixed prompt.
///
/// # Errors
/// In words, the first refusal.
pub fn reply(path: &Path, options: &PlanOptions) -> Result<Reply, String> {
    let checkpoint = Arc::new(Checkpoint::open(path).map_err(|e| format!("open: {e}"))?);
    let model = Arc::new(Model::open(&checkpoint).map_err(|e| format!("model: {e}"))?);
    answer(checkpoint, model, &[3, 1, 4, 1, 5, 9, 2, 6], &Settings::default(), options)
}

/// Loads the model and asks for two tokens of a greedy reply and of a drawn one.
fn answer(
    checkpoint: Arc<Checkpoint>,
    model: Arc<Model>,
    prompt: &[u32],
    settings: &Settings,
    options: &PlanOptions,
) -> Result<Reply, String> {
    let vocabulary = model.config.vocabulary;
    let engine = EngineOptions::default();
    let kv = kv_plan(&model.graph, model.config.context.min(CONTEXT), 2, engine.chunk);
    let backend = Cpu::new(&CpuOptions { threads: 1, isa: None }).map_err(|e| format!("device: {e}"))?;
    let key = checkpoint.fingerprint();
    let runner = Runner::new(Box::new(backend), model, checkpoint, options.clone(), kv)
        .map_err(|e| format!("load: {e}"))?;
    let mut engine = Engine::new(runner, key, engine);
    let mut prompt: Vec<u32> = prompt.iter().copied().take(CONTEXT / 4).collect();
    if prompt.is_empty() || prompt.iter().any(|&id| id as usize >= vocabulary) {
        prompt = vec![0];
    }
    let drawn = Settings { seed: Some(1), ..Settings::default() };
    let drawn = Params::resolve(&drawn, settings, vocabulary).map_err(|e| format!("sampling: {e}"))?;
    let mut reply = Reply::default();
    for sampling in [Params::greedy(), drawn] {
        let request = Request { sampling, logprobs: Some(20), ..Request::greedy(prompt.clone(), 2) };
        engine.submit(request).map_err(|e| format!("submit: {e}"))?;
        while engine.busy() {
            for event in engine.step().map_err(|e| format!("step: {e}"))? {
                match event {
                    Event::Token(_, token) => {
                        let top = token.top.iter().map(|&(id, logprob)| (id, logprob.to_bits()));
                        reply.tokens.push((token.id, top.collect()));
                    }
                    Event::Failed(_, what) => reply.failed.push(what),
                    Event::Finished(..) => {}
                }
            }
        }
    }
    let paths = engine.runner().backend().paths();
    reply.saturated = paths.iter().filter(|p| p.path == "kv.saturated").map(|p| p.count).sum();
    Ok(reply)
}

/// A folder that lives as long as this process's thread needs it, in memory where the system has such a place.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let name = format!("ingle-walk-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let place = Self(base.join(name));
        fs::create_dir_all(&place.0).expect("a temporary folder");
        place
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        // Another file under the name: what maps the old one must not see it change.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).expect("a temporary file");
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

thread_local! {
    static PLACE: Place = Place::new();
}

/// Walks a GGUF file of these bytes.
pub fn gguf(bytes: &[u8]) -> Outcome {
    PLACE.with(|place| model(&place.write("m.gguf", bytes)))
}

/// Walks the seeds' folder with `model.safetensors` of these bytes.
pub fn safetensors(bytes: &[u8]) -> Outcome {
    folder(&[("model.safetensors", bytes)])
}

/// Walks the seeds' folder with some files of other bytes. The index, if it is among them, is what is opened.
pub fn folder(changed: &[(&str, &[u8])]) -> Outcome {
    thread_local! {
        static SEEDS: Vec<seeds::File> = [seeds::folder(false), seeds::folder(true)].concat();
    }
    PLACE.with(|place| {
        SEEDS.with(|seeds| {
            for (name, bytes) in seeds {
                if changed.iter().all(|(other, _)| other != name) && !place.0.join(name).exists() {
                    place.write(name, bytes);
                }
            }
        });
        for (name, bytes) in changed {
            place.write(name, bytes);
        }
        let index = changed.iter().find(|(name, _)| name.ends_with(".index.json"));
        let outcome = model(&index.map_or_else(|| place.0.clone(), |(name, _)| place.0.join(name)));
        for (name, _) in changed {
            let _ = fs::remove_file(place.0.join(name));
        }
        outcome
    })
}

/// Walks a tokenizer: of a folder if this is a JSON object, else of a GGUF file.
pub fn tokenizer(bytes: &[u8]) -> Outcome {
    let tokenizer = if bytes.trim_ascii_start().starts_with(b"{") {
        PLACE.with(|place| {
            let alone = place.0.join("tokenizer");
            let _ = fs::create_dir(&alone);
            fs::write(alone.join("tokenizer.json"), bytes).expect("a temporary file");
            Tokenizer::from_dir(&alone)
        })
    } else {
        let gguf = Gguf::parse(&Bytes::from(bytes.to_vec())).map_err(|e| format!("open: {e}"))?;
        Tokenizer::from_gguf(&gguf.metadata)
    };
    tokenize(&tokenizer.map_err(|e| format!("tokenizer: {e}"))?)
}
