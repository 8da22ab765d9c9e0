//! Message contents that not every template takes: lists of parts, and null.
//!
//! Many templates were written for strings alone: they print a list as Python writes it, or the word `None`, or fail.
//! What a template does is found out by rendering small conversations, once, when the first such content comes. Where it
//! does not take them, text parts are joined by line breaks and null becomes the empty string, for all roles alike, so
//! that nothing a user wrote is lost. A part that is not text is an error for every template: no model here reads it.

use std::borrow::Cow;

use serde_json::{Value as Json, json};

use super::TemplateError;

/// Which contents a template takes as they are.
#[derive(Debug)]
pub(super) struct Takes {
    parts: bool,
    null: bool,
    /// Null beside tool calls, where it is common.
    null_with_calls: bool,
}

impl Takes {
    /// `render` gives a template's text for messages, if it does not fail.
    pub(super) fn find_out(render: impl Fn(&[Json]) -> Option<String>) -> Takes {
        let user = json!({"role": "user", "content": "question"});
        let prints_none = |answer: Json| {
            let text = render(&[user.clone(), answer, user.clone()]);
            text.is_none_or(|text| text.contains("None"))
        };
        let calls =
            json!([{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}]);
        let parts = json!([{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]);
        let text = render(&[json!({"role": "user", "content": parts})]).unwrap_or_default();
        Takes {
            parts: text.contains("first") && text.contains("second") && !text.contains("'type'"),
            null: !prints_none(json!({"role": "assistant", "content": null})),
            null_with_calls: !prints_none(json!({"role": "assistant", "content": null, "tool_calls": calls})),
        }
    }
}

/// The messages in a form that the template takes; `takes` is asked only if there is any doubt.
///
/// # Errors
/// A part that is not text.
pub(super) fn fitted<'m, 't>(
    messages: &'m [Json],
    takes: impl Fn() -> &'t Takes,
) -> Result<Cow<'m, [Json]>, TemplateError> {
    let mut fitted = Cow::Borrowed(messages);
    for (index, message) in messages.iter().enumerate() {
        let content = match message.get("content") {
            Some(Json::Array(parts)) => {
                let texts = parts.iter().map(|part| text_of(part, index)).collect::<Result<Vec<_>, _>>()?;
                if takes().parts {
                    continue;
                }
                texts.join("\n")
            }
            Some(Json::Null) => {
                let has_calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
                if if has_calls { takes().null_with_calls } else { takes().null } {
                    continue;
                }
                String::new()
            }
            _ => continue,
        };
        fitted.to_mut()[index]["content"] = Json::String(content);
    }
    Ok(fitted)
}

/// The text of a part of the message at `index`. A bare string is a part, too.
fn text_of(part: &Json, index: usize) -> Result<&str, TemplateError> {
    let text = match part["type"].as_str() {
        Some("text") => part["text"].as_str(),
        Some(_) => None,
        None => part.as_str(),
    };
    text.ok_or_else(|| TemplateError::Part {
        message: index,
        kind: part["type"].as_str().unwrap_or("without a type").to_owned(),
    })
}
