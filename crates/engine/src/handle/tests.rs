//! Text in, text out on a tiny model, run by the scalar interpreter.

use std::sync::Arc;

use ingle_graph::PlanOptions;
use ingle_graph::reference::Interpreter;
use ingle_models::Model;
use ingle_tensor::Checkpoint;
use serde_json::json;

use super::*;
use crate::runner::{Runner, kv_plan};
use crate::step::EngineOptions;
use crate::text::Conversation;

fn handle(context: usize, prefix_cache: bool) -> Handle {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/llama-s1/model-legacy.gguf");
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    let language = Language::open(&checkpoint).unwrap();
    let model = Arc::new(Model::open(&checkpoint).unwrap());
    let (backend, options) = (Box::new(Interpreter::new()), PlanOptions::default());
    let kv = kv_plan(&model.graph, context, 2, EngineOptions::default().chunk);
    let runner = Runner::new(backend, model, checkpoint.clone(), options, kv).unwrap();
    let engine = Engine::new(runner, 1, EngineOptions { prefix_cache, ..EngineOptions::default() });
    Handle::new(engine, language).unwrap()
}

fn request(handle: &Handle, text: &str, max_tokens: usize) -> TextRequest {
    let sampling = Settings { seed: Some(11), ..Settings::default() };
    let prompt = handle.language().completion(text).unwrap();
    TextRequest { prompt, max_tokens, sampling, continues: true, ..TextRequest::default() }
}

/// The reply, and the pieces its text came in.
fn generate(handle: &mut Handle, request: TextRequest) -> (Reply, Vec<String>) {
    let mut pieces = Vec::new();
    let reply = handle.generate(request, &mut |event| {
        if let Some(Event::Text(text)) = event {
            pieces.push(text.clone());
        }
        ControlFlow::Continue(())
    });
    let reply = reply.unwrap();
    assert_eq!(pieces.concat(), reply.text);
    assert!(!handle.busy() && handle.engine().pages_held() == 0);
    (reply, pieces)
}

#[test]
fn the_stream_is_the_text_of_the_tokens() {
    let mut handle = handle(128, true);
    let request = TextRequest { logprobs: Some(2), ..request(&handle, "Hello", 40) };
    let (reply, pieces) = generate(&mut handle, request);
    assert!(pieces.len() > 10);
    let bytes: Vec<u8> = reply
        .generated_ids
        .iter()
        .filter(|&&id| !handle.language().tokenizer().is_special(id))
        .flat_map(|&id| handle.language().tokenizer().token_bytes(id).to_vec())
        .collect();
    assert_eq!(reply.text, String::from_utf8_lossy(&bytes));
    let ids: Vec<u32> = reply.steps.iter().map(|step| step.id).collect();
    assert_eq!((&ids, reply.seed, reply.cached_tokens), (&reply.generated_ids, Some(11), 0));
    assert_eq!(reply.prefill_tokens(), reply.prompt_ids.len());
    assert_eq!(reply.decode_tokens(), reply.generated_ids.len() - 1);
}

#[test]
fn token_counts_are_exact() {
    let mut handle = handle(64, true);
    for max_tokens in [0, 1, 2] {
        let request = request(&handle, "Hello", max_tokens);
        let (reply, _) = generate(&mut handle, request);
        assert_eq!((reply.generated_ids.len(), reply.finish_reason), (max_tokens, FinishReason::Length));
    }
}

/// A stop string anywhere in the text ends it right there, whatever the tokens are.
#[test]
fn stop_strings_cut_the_text() {
    let mut handle = handle(128, true);
    let ask = request(&handle, "Hello", 24);
    let (whole, _) = generate(&mut handle, ask.clone());
    let chars: Vec<char> = whole.text.chars().collect();
    for from in 0..chars.len() - 3 {
        let stop: String = chars[from..from + 3].iter().collect();
        let (reply, _) =
            generate(&mut handle, TextRequest { stop: vec!["?!?!".into(), stop.clone()], ..ask.clone() });
        assert_eq!(reply.text, whole.text[..whole.text.find(&stop).unwrap()], "{stop:?}");
        assert_eq!(reply.finish_reason, FinishReason::Stop);
        assert!(whole.generated_ids.starts_with(&reply.generated_ids));
    }
    let (unstopped, _) = generate(&mut handle, TextRequest { stop: vec!["?!?!".into()], ..ask.clone() });
    assert_eq!(unstopped.text, whole.text, "what was held back comes at the end");
    let error = handle.submit(TextRequest { stop: vec![String::new()], ..ask }).unwrap_err();
    assert!(error.to_string().contains("a stop string is empty"), "{error}");
}

#[test]
fn a_break_cancels_and_frees() {
    let mut handle = handle(128, true);
    let ask = request(&handle, "Hello", 60);
    let (whole, _) = generate(&mut handle, ask.clone());
    let (mut told, mut text) = (0, String::new());
    let reply = handle.generate(ask, &mut |event| {
        told += usize::from(matches!(event, Some(Event::Token(_))));
        if let Some(Event::Text(piece)) = event {
            text.push_str(piece);
        }
        if told == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let reply = reply.unwrap();
    assert_eq!(
        (reply.finish_reason, &reply.generated_ids[..]),
        (FinishReason::Cancelled, &whole.generated_ids[..5])
    );
    assert_eq!(reply.text, text, "all text of the reply was told");
    assert!(!handle.busy() && !handle.engine().busy() && handle.engine().pages_held() == 0);
}

#[test]
fn overflow_and_bad_settings_are_errors_with_numbers() {
    let mut handle = handle(32, true);
    let long = request(&handle, &"word ".repeat(60), 4);
    let error = handle.submit(long).unwrap_err().to_string();
    assert!(error.contains("but the context is 32"), "{error}");
    let mut odd = request(&handle, "Hello", 4);
    odd.sampling.top_p = Some(7.0);
    let error = handle.submit(odd).unwrap_err().to_string();
    assert!(error.contains("top_p is 7"), "{error}");
    assert!(!handle.busy());
}

/// A conversation goes on from the pages of its turns before, and its reply is that of a cold start.
#[test]
fn a_turn_appended_is_cached_and_equal() {
    let (mut warm, mut cold) = (handle(256, true), handle(256, false));
    let mut messages = Vec::new();
    for (turn, text) in ["Tell me of the sea.", "And of ships?", "More."].iter().enumerate() {
        messages.push(json!({ "role": "user", "content": text }));
        let ask = |handle: &Handle| {
            let prompt = handle.language().chat(&Conversation::new(messages.clone())).unwrap();
            TextRequest { continues: false, prompt, ..request(handle, "", 12) }
        };
        let (a, b) = (ask(&warm), ask(&cold));
        let ((reply, _), (anew, _)) = (generate(&mut warm, a), generate(&mut cold, b));
        assert_eq!((&reply.generated_ids, &reply.text), (&anew.generated_ids, &anew.text));
        assert_eq!((reply.cached_tokens > 0, anew.cached_tokens), (turn > 0, 0), "turn {turn}");
        messages.push(json!({ "role": "assistant", "content": reply.text }));
    }
}

/// Two requests in one batch get the replies they get alone, by the events of `step`.
#[test]
fn requests_share_steps_and_not_text() {
    let mut handle = handle(128, true);
    let asks = [request(&handle, "Hello", 20), request(&handle, "Once upon a time", 30)];
    let alone: Vec<Reply> = asks.iter().map(|ask| generate(&mut handle, ask.clone()).0).collect();
    let ids: Vec<RequestId> = asks.map(|ask| handle.submit(ask).unwrap()).into();
    let mut texts: HashMap<RequestId, String> = HashMap::new();
    let mut replies: HashMap<RequestId, Reply> = HashMap::new();
    while handle.busy() {
        for (id, event) in handle.step().unwrap() {
            match event {
                Event::Text(text) => texts.entry(id).or_default().push_str(&text),
                Event::Done(reply) => assert!(replies.insert(id, *reply).is_none()),
                Event::Token(_) => {}
                Event::Failed(what) => panic!("{what}"),
            }
        }
    }
    assert_eq!(handle.engine().stats().widest, 2);
    for (id, alone) in ids.iter().zip(alone) {
        assert_eq!((&replies[id].text, &replies[id].generated_ids), (&alone.text, &alone.generated_ids));
        assert_eq!(texts[id], alone.text);
    }
}

/// While one request runs to its end, the events of another are kept for whoever steps next.
#[test]
fn generate_keeps_the_events_of_others() {
    let mut handle = handle(128, true);
    let ask = request(&handle, "Hello", 10);
    let other = handle.submit(ask.clone()).unwrap();
    let reply = handle.generate(request(&handle, "Once", 20), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(reply.finish_reason, FinishReason::Length);
    let mut text = String::new();
    while handle.busy() {
        for (id, event) in handle.step().unwrap() {
            assert_eq!(id, other);
            if let Event::Text(piece) = event {
                text.push_str(&piece);
            }
        }
    }
    assert_eq!(text, generate(&mut handle, ask).0.text);
}
