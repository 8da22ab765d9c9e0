//! Tokenizer, chat template and sampling defaults: loaded, and one conversation through all of them.

use ingle_engine::handle::{Error, Language};
use ingle_engine::text::tokenizer::TokenizerError;
use ingle_engine::text::{Conversation, TemplateError, Tokenizer};
use ingle_tensor::gguf::{Metadata, Value};
use ingle_tensor::{Checkpoint, Source};
use serde_json::json;

use super::{CONVERT, Findings};

const ELSE_RAW: &str = "use --raw, or another copy of the model";

/// Checks what a model's files say about text; `rows` is the size of the model's vocabulary, where that is known.
pub(super) fn check(checkpoint: &Checkpoint, rows: Option<usize>, findings: &mut Findings) {
    let (tokenizer, bad_ids) = match checkpoint.source() {
        Source::Gguf(metadata) => (Tokenizer::from_gguf(metadata), bad_ids(metadata, findings)),
        Source::SafeTensors { dir, .. } => (Tokenizer::from_dir(dir), 0),
    };
    let tokenizer = match tokenizer {
        Ok(tokenizer) => tokenizer,
        // Told with all others of its kind.
        Err(TokenizerError::TokenId { .. }) if bad_ids > 0 => return,
        Err(TokenizerError::Key(error)) if findings.has_problem(&error.to_string()) => return,
        Err(error) => {
            let advice = match error {
                TokenizerError::Unsupported { .. } | TokenizerError::Missing { .. } => "",
                _ => CONVERT,
            };
            return findings.problem("tokenizer", error, advice);
        }
    };
    if let Source::Gguf(metadata) = checkpoint.source()
        && metadata.str_opt("tokenizer.ggml.model").is_ok_and(|model| model == Some("gpt2"))
        && metadata.get("tokenizer.ggml.pre").is_none()
    {
        let what = "tokenizer.ggml.pre, which says how text is cut into words, is missing: it is cut as for \"default\"";
        findings.note("tokenizer", what);
    }
    let tokens = tokenizer.vocab_len();
    if let Some(rows) = rows.filter(|&rows| tokens > rows) {
        let what = format!("it has {tokens} tokens, but the model has rows for {rows}");
        findings.problem("tokenizer", what, "use the tokenizer that belongs to this model");
    } else if let Some(rows) = rows.filter(|&rows| tokens < rows) {
        findings.note("tokenizer", format!("it has {tokens} tokens, and the model rows for {rows}"));
    }
    let language = match Language::open(checkpoint) {
        Ok(language) => language,
        Err(error) => return findings.problem("sampling defaults", error, CONVERT),
    };
    if language.tokenizer().eog().is_empty() {
        findings.note("tokenizer", "no token ends a reply");
    }
    match language.template() {
        Ok(Some(_)) => {}
        Ok(None) => return findings.note("chat template", language.without_template()),
        Err(error) => return faulty_template(&error, findings),
    }
    let conversation = Conversation::new(vec![
        json!({ "role": "user", "content": "Name a river." }),
        json!({ "role": "assistant", "content": "The Elbe." }),
        json!({ "role": "user", "content": "And another?" }),
    ]);
    match language.chat(&conversation) {
        Ok(ids) if ids.is_empty() => {
            findings.problem("chat template", "a conversation becomes no tokens at all", CONVERT);
        }
        Ok(_) => {}
        Err(Error::Template(error)) => faulty_template(&error, findings),
        Err(error) => findings.problem("chat template", error, ELSE_RAW),
    }
}

/// Tells of a template that does not work, unless it is this machine that keeps it from being tried.
fn faulty_template(error: &TemplateError, findings: &mut Findings) {
    match error {
        TemplateError::Thread { .. } => {
            findings.note("chat template", format!("it was not checked: {error}"))
        }
        // Says itself what to do.
        TemplateError::Compile { .. } => findings.problem("chat template", error, ""),
        _ => findings.problem("chat template", error, ELSE_RAW),
    }
}

/// Special tokens whose id is none, or one that no token has; how many there are.
fn bad_ids(metadata: &Metadata, findings: &mut Findings) -> usize {
    let Some(Value::Array(tokens)) = metadata.get("tokenizer.ggml.tokens") else { return 0 };
    let is_id = |key: &&str| key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id");
    let bad = metadata.keys().filter(is_id).filter_map(|key| match metadata.u32_opt(key) {
        Ok(Some(id)) if id as usize >= tokens.len() => {
            Some(format!("{key} is {id}, but the vocabulary has {} tokens", tokens.len()))
        }
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    });
    let bad: Vec<_> = bad.collect();
    for what in &bad {
        findings.problem("tokenizer", what, CONVERT);
    }
    bad.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_thread_is_no_fault_of_the_template() {
        let (mut findings, reason) = (Findings::default(), "no memory".into());
        faulty_template(
            &TemplateError::Thread { template: "chat_template", stack_bytes: 3 << 20, reason },
            &mut findings,
        );
        assert!(findings.problems.is_empty());
        let note = &findings.notes[0].what;
        assert!(
            note.starts_with("it was not checked: the system refuses chat_template a thread with 3 MiB"),
            "{note}"
        );
    }
}
