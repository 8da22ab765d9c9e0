//! `ingle run`: one answer.

use std::io::{Read, Write, stdin, stdout};
use std::ops::ControlFlow;

use ingle_engine::handle::{Event, Reply, TextRequest};
use ingle_engine::text::Conversation;
use ingle_graph::CONTRACT_VERSION;
use ingle_graph::backend::PathCount;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::files::TEXT_BYTES_MAX;
use crate::flags::Run;
use crate::session::{self, Session};
use crate::sys;
use crate::term::{self, bytes};

/// Answers one prompt: streamed, or as one JSON object.
pub fn run(flags: &Run) -> Result<()> {
    let sampling = flags.sampling.settings()?;
    session::require_device(&flags.device)?;
    if flags.logprobs > 0 && !flags.json {
        return Err(Error::Usage(
            "--logprobs is part of the JSON object: add --json, or leave it out".into(),
        ));
    }
    let prompt = read_prompt(flags)?;
    let mut session = session::open(flags.model.model.as_ref(), &flags.device, &flags.plan)?;
    let continues = flags.raw
        || session.handle.language().template().map_err(ingle_engine::handle::Error::from)?.is_none();
    let request = TextRequest {
        prompt: tokens(&session, &prompt, continues, flags)?,
        continues,
        max_tokens: flags.max_tokens,
        stop: flags.stop.clone(),
        sampling,
        logprobs: (flags.logprobs > 0).then_some(usize::from(flags.logprobs)),
        ..TextRequest::default()
    };
    let mut out = stdout().lock();
    let mut written = Ok(());
    let mut mid_line = false;
    let reply = session.handle.generate(request, &mut |event| {
        if let Some(Event::Text(text)) = event
            && !flags.json
            && written.is_ok()
        {
            written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            mid_line = !text.ends_with('\n');
        }
        if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    written?;
    if reply.is_err() && mid_line {
        writeln!(out)?;
    }
    let reply = reply.map_err(|error| session.advised(error))?;
    if flags.json {
        writeln!(out, "{}", json(&session, &reply, flags.logprobs > 0))?;
    } else if !reply.text.ends_with('\n') {
        writeln!(out)?;
    }
    session.warn_of_nan(&reply);
    if flags.stats {
        stats(&mut session, &reply);
    }
    Ok(())
}

/// The prompt: a word of the command line, or standard input.
fn read_prompt(flags: &Run) -> Result<String> {
    match flags.prompt.as_deref() {
        Some("-") => {}
        Some(prompt) => return Ok(prompt.to_string()),
        None if term::stdin_is_person() => {
            return Err(Error::Usage(
                "no PROMPT: give one, or - to read it from standard input; `ingle chat` holds a conversation"
                    .into(),
            ));
        }
        None => {}
    }
    let mut bytes = Vec::new();
    stdin().lock().take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(Error::Refused(format!(
            "standard input is longer than {}: give a shorter prompt",
            term::bytes(TEXT_BYTES_MAX)
        )));
    }
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Refused(format!("standard input is not UTF-8 from byte {at} on: give it as UTF-8 text"))
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    match text.is_empty() {
        true => Err(Error::Usage("no PROMPT: standard input is empty".into())),
        false => Ok(text),
    }
}

/// The prompt as the model reads it: under the chat template, unless there is none or `--raw` says so.
fn tokens(session: &Session, prompt: &str, continues: bool, flags: &Run) -> Result<Vec<u32>> {
    let language = session.handle.language();
    if !continues {
        let messages = flags.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let messages = messages.chain([json!({ "role": "user", "content": prompt })]).collect();
        return Ok(language.chat(&Conversation::new(messages))?);
    }
    if flags.system.is_some() {
        let why = language.without_template();
        return Err(Error::Refused(format!(
            "--system: {why}, so there is no place for a system message; write all of the text into the prompt"
        )));
    }
    if !flags.raw {
        let why = language.without_template();
        term::say(&format!("note: {why}; completing the text as it is, as with --raw"));
    }
    let ids = language.completion(prompt)?;
    if language.tokenizer().has_doubled_bos(&ids) {
        term::say(
            "note: the prompt starts with the begin token, and this model's file adds one: there are two now",
        );
    }
    Ok(ids)
}

/// The object that scripts read.
fn json(session: &Session, reply: &Reply, with_steps: bool) -> Value {
    let mut object = json!({
        "prompt_ids": reply.prompt_ids,
        "generated_ids": reply.generated_ids,
        "text": reply.text,
        "finish_reason": reply.finish_reason.name(),
        "model": session.name,
        "device": session.device,
        "numerics": session.numerics.to_string(),
        "seed": reply.seed,
        "contract": CONTRACT_VERSION,
        "timings": {
            "load_ms": session.load_ms,
            "prefill_ms": reply.timings.prefill.as_secs_f64() * 1e3,
            "decode_ms": reply.timings.decode.as_secs_f64() * 1e3,
            "prefill_tokens": reply.prefill_tokens(),
            "decode_tokens": reply.decode_tokens(),
        },
    });
    if let Some(layout) = &session.layout {
        object["layout"] = layout.json();
    }
    if with_steps {
        let steps =
            reply.steps.iter().map(|step| json!({ "id": step.id, "logprob": step.logprob, "top": step.top }));
        object["steps"] = steps.collect();
    }
    object
}

/// Where the time went, on standard error.
fn stats(session: &mut Session, reply: &Reply) {
    let paint = term::Paint::stderr();
    // What did not happen took no time and has no rate.
    let timed = |tokens: usize, seconds: f64| match tokens {
        0 => String::new(),
        _ => format!(" in {:.1} ms, {:.1} tok/s", seconds * 1e3, tokens as f64 / seconds),
    };
    let of_them = |tokens: usize| if tokens > 0 { format!(", {tokens} of them") } else { String::new() };
    let (prefill, decode) = (reply.timings.prefill.as_secs_f64(), reply.timings.decode.as_secs_f64());
    let Session { name, device, numerics, arithmetics, layout, load_ms, .. } = &*session;
    let mut lines = vec![
        ("model", name.clone()),
        ("device", device.clone()),
        ("numerics", format!("{numerics}: {arithmetics} (contract {CONTRACT_VERSION})")),
        ("load", format!("{load_ms:.1} ms")),
        (
            "prompt",
            match reply.prefill_tokens() {
                0 => format!("{} tokens, none of them read", reply.prompt_ids.len()),
                read => format!(
                    "{} tokens ({} from the cache){}",
                    reply.prompt_ids.len(),
                    reply.cached_tokens,
                    timed(read, prefill)
                ),
            },
        ),
        (
            "answer",
            format!(
                "{} tokens ({}){}{}",
                reply.generated_ids.len(),
                reply.finish_reason.name(),
                of_them(reply.decode_tokens()),
                timed(reply.decode_tokens(), decode)
            ),
        ),
    ];
    lines.extend(layout.iter().map(|layout| ("layers", layout.line())));
    lines.extend(reply.seed.map(|seed| ("seed", seed.to_string())));
    lines.push(("peak memory", sys::peak_memory_bytes().map_or("unknown".into(), bytes)));
    let (counts, paths): (Vec<_>, Vec<_>) =
        session.handle.engine().paths().into_iter().partition(|path| path.path == PathCount::SATURATED);
    let saturated: u64 = counts.iter().map(|count| count.count).sum();
    lines.push(("kv", format!("saturated keys/values: {saturated}")));
    lines.push((
        "paths",
        "op.instruction set of its kernel x times it ran; the arithmetic is under numerics".into(),
    ));
    lines.extend(paths.iter().map(|PathCount { path, declined, count }| {
        let declined = declined.as_ref().map_or(String::new(), |why| format!(", declined: {why}"));
        ("path", format!("{path} x {count}{declined}"))
    }));
    for (what, said) in &lines {
        term::say(&format!("{} {said}", paint.dim(&format!("{what:<12}"))));
    }
}
