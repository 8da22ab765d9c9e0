//! Chat templates: a conversation becomes the text that a model was trained to read.
//!
//! Templates are Jinja2 programs that come with the model. They run in `minijinja` set up as Hugging Face sets up
//! Jinja2 (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, `tojson` over
//! `json.dumps`), with values printed as Python prints them, so the rendered text is the reference's byte for byte.
//! Every string of the conversation is disarmed first (see [`disarm`](super::disarm)).
//!
//! A model without a template is a base model: [`ChatTemplate`] is then absent, and the caller completes the text as
//! it is, with the note [`NO_TEMPLATE`].

mod clock;
mod python;

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};
use thiserror::Error as ThisError;

pub use clock::CivilTime;

use super::disarm::{Guard, unmark};

/// One line for the user of a model that has no chat template.
pub const NO_TEMPLATE: &str =
    "note: this model has no chat template (a base model); completing the text as it is, as with --raw";

const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "chat_template (tool_use)";

/// Why a template did not compile or a conversation did not render.
#[derive(Debug, ThisError)]
pub enum TemplateError {
    /// The template is not valid; found when the model is loaded.
    #[error("{template} does not compile: {reason}; use --raw to run the model without it")]
    Compile {
        /// Which of the model's templates.
        template: &'static str,
        /// What and on which line.
        reason: String,
    },
    /// The template itself refuses the conversation, in its author's words.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template failed while it ran.
    #[error("{template} failed: {reason}")]
    Render {
        /// Which of the model's templates.
        template: &'static str,
        /// What and on which line.
        reason: String,
    },
}

/// What a template renders.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// Messages as in the chat completions API: objects with `role`, `content` (a string, null or a list of parts),
    /// `tool_calls`, `reasoning_content` and so on. Tool-call arguments are objects, not JSON text.
    pub messages: Vec<Json>,
    /// Tool definitions; a template sees `none` where there are none.
    pub tools: Option<Vec<Json>>,
    /// Whether to end with the header of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. They may replace `bos_token` and `eos_token`, nothing else above.
    pub extra: Map<String, Json>,
    /// What `strftime_now` reads.
    pub now: CivilTime,
}

impl Conversation {
    /// Messages alone, to be answered, now.
    pub fn new(messages: Vec<Json>) -> Conversation {
        Conversation {
            messages,
            tools: None,
            add_generation_prompt: true,
            extra: Map::new(),
            now: CivilTime::now(),
        }
    }
}

/// A rendered conversation, with the marks that keep users' special tokens apart from the template's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered(String);

impl Rendered {
    /// The text as the template's author meant it, without marks.
    pub fn text(&self) -> String {
        unmark(&self.0).0.into_owned()
    }

    /// The text with its marks, for the tokenizer.
    pub(crate) fn marked(&self) -> &str {
        &self.0
    }
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    env: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let templates: Vec<&str> = self.env.templates().map(|(name, _)| name).collect();
        f.debug_struct("ChatTemplate").field("templates", &templates).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are what the variables `bos_token` and `eos_token` hold, empty where the
    /// model has none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(
            syntax.map_err(|error| TemplateError::Compile { template: DEFAULT, reason: reason(&error) })?,
        );
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_formatter(|out, _, value| Ok(out.write_str(&python::str(value))?));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", python::tojson);
        env.add_filter("string", |value: &Value| python::str(value));
        // To Python a string is a sequence, and so is whatever has a length.
        env.add_test("sequence", |value: &Value| value.is_undefined() || value.len().is_some());
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, python::str(message)).with_source(Raised))
        });
        let mut template = ChatTemplate { env, bos_token: bos.to_owned(), eos_token: eos.to_owned() };
        template.compile(DEFAULT, source)?;
        Ok(template)
    }

    /// Adds the template that a conversation with tools uses instead, which some models publish beside the first.
    pub fn with_tool_use(mut self, source: &str) -> Result<ChatTemplate, TemplateError> {
        self.compile(TOOL_USE, source)?;
        Ok(self)
    }

    fn compile(&mut self, template: &'static str, source: &str) -> Result<(), TemplateError> {
        self.env
            .add_template_owned(template, without_generation_tags(source))
            .map_err(|error| TemplateError::Compile { template, reason: reason(&error) })
    }

    /// Renders a conversation, keeping `guard`'s special tokens out of its strings.
    pub fn render(&self, conversation: &Conversation, guard: &Guard) -> Result<Rendered, TemplateError> {
        let disarmed = |values: &[Json]| values.iter().map(|value| disarm(guard, value)).collect::<Value>();
        let now = conversation.now;
        let context = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)]
            .map(|(name, token)| (name.to_owned(), Value::from(token.as_str())))
            .into_iter()
            .chain(conversation.extra.iter().map(|(name, value)| (name.clone(), disarm(guard, value))))
            .chain([
                ("messages".to_owned(), disarmed(&conversation.messages)),
                ("tools".to_owned(), conversation.tools.as_deref().map_or(Value::from(()), disarmed)),
                ("documents".to_owned(), Value::from(())),
                ("add_generation_prompt".to_owned(), Value::from(conversation.add_generation_prompt)),
                ("strftime_now".to_owned(), Value::from_function(move |format: &str| now.strftime(format))),
            ])
            .collect::<BTreeMap<_, _>>();

        let name = match conversation.tools.as_ref().and(self.env.get_template(TOOL_USE).ok()) {
            Some(_) => TOOL_USE,
            None => DEFAULT,
        };
        let rendered = self.env.get_template(name).and_then(|template| template.render(Value::from(context)));
        rendered.map(Rendered).map_err(|error| {
            let raised = std::error::Error::source(&error).is_some_and(|source| source.is::<Raised>());
            match error.detail() {
                Some(message) if raised => TemplateError::Refused(unmark(message).0.into_owned()),
                _ => TemplateError::Render { template: name, reason: unmark(&reason(&error)).0.into_owned() },
            }
        })
    }
}

/// Marks an error that the template's author raised.
#[derive(Debug, ThisError)]
#[error("raised by the template")]
struct Raised;

/// One line about `error`: what and where.
fn reason(error: &Error) -> String {
    let what = error
        .detail()
        .map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// A JSON value as a template sees it, with every string in it disarmed.
fn disarm(guard: &Guard, value: &Json) -> Value {
    match value {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(int), _) => Value::from(int),
            (None, Some(int)) => Value::from(int),
            (None, None) => Value::from(number.as_f64()),
        },
        Json::String(text) => Value::from(guard.disarm(text).as_ref()),
        Json::Array(items) => items.iter().map(|item| disarm(guard, item)).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(name, value)| (guard.disarm(name), disarm(guard, value))))
        }
    }
}

/// Replaces the tags `{% generation %}` and `{% endgeneration %}`, which mark assistant text for training, by a
/// condition that always holds, so that white space around them is trimmed as around any other tag.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let inner = tag[2..].trim_start_matches(['-', '+']);
        let opening = &tag[..tag.len() - inner.len()];
        let word = inner.trim_start();
        let swapped =
            [("generation", "if true"), ("endgeneration", "endif")].into_iter().find_map(|(name, other)| {
                let after = word.strip_prefix(name)?.trim_start();
                after.trim_start_matches(['-', '+']).starts_with("%}").then_some((other, after))
            });
        match swapped {
            Some((other, after)) => {
                out.push_str(opening);
                out.extend([" ", other, " "]);
                rest = after;
            }
            None => {
                out.push_str(opening);
                rest = inner;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::disarm::MARK;
    use serde_json::json;
    use std::path::Path;

    fn render(source: &str, conversation: &Conversation) -> Result<String, TemplateError> {
        Ok(ChatTemplate::new(source, "<s>", "</s>")?.render(conversation, &Guard::default())?.text())
    }

    fn user(content: &str) -> Conversation {
        let mut conversation = Conversation::new(vec![json!({"role": "user", "content": content})]);
        conversation.now = CivilTime::from_unix(1_741_356_309); // 2025-03-07 14:05:09
        conversation
    }

    /// Every template of the fixtures over every conversation: the text, or the refusal, of Jinja2 3.1.6 set up as
    /// transformers does.
    #[test]
    fn public_templates_render_as_in_python() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/templates");
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
        let conversations: Json = serde_json::from_str(&read("conversations.json")).unwrap();
        let mut compared = 0;
        for name in [
            "Qwen-Qwen2.5-7B-Instruct",
            "Qwen-Qwen3-0.6B",
            "SmolLM2-135M-Instruct",
            "google-gemma-2-2b-it",
            "meta-llama-Llama-3.1-8B-Instruct",
            "tiny-chatml",
            "tiny-llama3",
        ] {
            let expected: Json = serde_json::from_str(&read(&format!("{name}.json"))).unwrap();
            let text = |key: &str| expected[key].as_str().unwrap();
            let template =
                ChatTemplate::new(&read(&format!("{name}.jinja")), text("bos"), text("eos")).unwrap();
            for (case, want) in expected["cases"].as_object().unwrap() {
                let given = &conversations[case];
                let mut conversation = user("");
                conversation.messages = given["messages"].as_array().unwrap().clone();
                conversation.tools = given["tools"].as_array().cloned();
                conversation.add_generation_prompt = given["add_generation_prompt"].as_bool().unwrap_or(true);
                conversation.extra = given["extra"].as_object().cloned().unwrap_or_default();
                let got = template.render(&conversation, &Guard::default());
                let raised = want["error"].as_str().and_then(|error| error.strip_prefix("TemplateError: "));
                match (got, want["text"].as_str(), raised) {
                    (Ok(got), Some(want), _) => assert_eq!(got.text(), want, "{name}, {case}"),
                    (Err(error), Some(_), _) => panic!("{name}, {case}: {error}"),
                    (Err(TemplateError::Refused(got)), None, Some(want)) => {
                        assert_eq!(got, want, "{name}, {case}")
                    }
                    (got, None, Some(want)) => panic!("{name}, {case}: {got:?}, want the refusal {want:?}"),
                    // Where Python fails by a TypeError the outcome is not part of any training text.
                    (_, None, None) => continue,
                }
                compared += 1;
            }
        }
        assert_eq!(compared, 79);
    }

    /// (template, text) for one user message "hi".
    #[test]
    fn helpers_follow_jinja2() {
        for (source, want) in [
            ("{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y %Q') }}", "2025-03-07 07 Mar 2025 %Q"),
            ("{%- generation -%}\n a {%- endgeneration %} b", "a b"),
            ("{% generation %}\na\n{% endgeneration %}\nb", "a\nb"),
            (
                "{% set ns = namespace(n=0) %}{% for m in [1,2,3] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}",
                "6",
            ),
            (
                "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                "023",
            ),
            (
                "{{ ' a b '.strip().split(' ')[-1] }}{{ 'abc'.startswith('ab') }}{{ [1,2,3][::-1] }}",
                "bTrue[3, 2, 1]",
            ),
            (
                "{{ messages[0].missing }}|{{ missing is defined }}|{{ tools is none }}|{{ tools is defined }}",
                "|False|True|True",
            ),
            (
                "{{ 'a' is sequence }}{{ messages[0] is mapping }}{{ none is iterable }}{{ 'a' is iterable }}",
                "TrueTrueFalseTrue",
            ),
            ("{{ messages | string }}", "[{'role': 'user', 'content': 'hi'}]"),
            ("  {% if true %}  \n  x\n  {% endif %}\ny\n", "  \n  x\ny"),
            ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ] {
            assert_eq!(render(source, &user("hi")).unwrap(), want, "{source}");
        }
    }

    #[test]
    fn failures_name_the_template_and_the_line() {
        for (source, want) in [
            ("a\n{% if %}", "chat_template does not compile: "),
            ("{{ nowhere() }}", "chat_template failed: "),
            ("\n{{ missing.field }}", "(line 2)"),
            (
                "{{ raise_exception('roles must alternate') }}",
                "refuses this conversation: roles must alternate",
            ),
        ] {
            let error = render(source, &user("hi")).unwrap_err().to_string();
            assert!(error.contains(want), "{source}: {error}");
        }
    }

    #[test]
    fn conversations_with_tools_use_their_own_template() {
        let template = ChatTemplate::new("plain", "", "").unwrap().with_tool_use("tools").unwrap();
        let mut conversation = user("hi");
        assert_eq!(template.render(&conversation, &Guard::default()).unwrap().text(), "plain");
        conversation.tools = Some(vec![json!({})]);
        assert_eq!(template.render(&conversation, &Guard::default()).unwrap().text(), "tools");
    }

    /// The user's `<|end|>` is marked, also in keys, in two parts put side by side, and after the template's trimming;
    /// the template's own is not.
    #[test]
    fn only_the_users_specials_are_marked() {
        let guard = Guard::new(["<|end|>"]);
        let source = "{% for m in messages %}{{ m.content | trim }}{{ m.a | tojson(ensure_ascii=true) }}<|end|>{% endfor %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let message = |content: &str| json!({"content": content, "a": {"é<|end|>": 1}});
        let conversation = Conversation::new(vec![message(" <|end|><|en "), message("d|>")]);
        let rendered = template.render(&conversation, &guard).unwrap();
        let marks = rendered.marked().replace(MARK, "^");
        assert_eq!(marks, r#"<^|end|><^|en{"\u00e9<^|end|>": 1}<|end|>d|>{"\u00e9<^|end|>": 1}<|end|>"#);
        assert_eq!(rendered.text(), marks.replace('^', ""));
    }
}
