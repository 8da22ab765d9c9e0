//! Chat templates: a conversation becomes the text that a model was trained to read.
//!
//! Templates are Jinja2 programs that come with the model. They run in `minijinja` set up as Hugging Face sets up
//! Jinja2 (`trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, `tojson` over
//! `json.dumps`), with values printed as Python prints them, so the rendered text is the reference's byte for byte.
//! Every string of the conversation is disarmed first (see [`disarm`](super::disarm)), and contents that the template was
//! not written for are put in a form that it takes (see `content`).
//!
//! A model without a template is a base model: [`ChatTemplate`] is then absent, and the caller completes the text as
//! it is, and says so.

mod clock;
mod content;
mod generator;
mod limits;
mod python;
mod rewrite;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};
use thiserror::Error as ThisError;

pub use clock::CivilTime;

use super::disarm::{Guard, unmark};
use content::Takes;
use limits::Broken;

const DEFAULT: &str = "chat_template";
const TOOL_USE: &str = "chat_template (tool_use)";

/// Why a template did not compile or a conversation did not render.
#[derive(Debug, Clone, ThisError)]
pub enum TemplateError {
    /// The template is not valid; found when the model is loaded.
    #[error("{template} does not compile: {reason}; use --raw to run the model without it")]
    Compile {
        /// Which of the model's templates.
        template: &'static str,
        /// What and on which line.
        reason: String,
    },
    /// The system refuses the thread that the template is to be compiled or run on; the template may be in order.
    #[error(
        "the system refuses {template} a thread with {} MiB of stack ({reason}): raise its limits of memory and threads \
         (ulimit -v and -u), or use --raw to run the model without it", stack_bytes.div_ceil(1 << 20)
    )]
    Thread {
        /// Which of the model's templates.
        template: &'static str,
        /// What the thread was to have.
        stack_bytes: usize,
        /// The system's word.
        reason: String,
    },
    /// The template itself refuses the conversation, in its author's words.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// A part of a message's content that is not text.
    #[error(
        "message {message} has a content part of the type {kind:?}; only parts of the type \"text\" can be read"
    )]
    Part {
        /// Which message, from 0.
        message: usize,
        /// The part's type.
        kind: String,
    },
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
    /// Messages as in the chat completions API: objects with `role`, `content` (a string, null or a list of text parts),
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
    /// Of the default template and of the one for tools: which contents it takes.
    takes: [OnceLock<Takes>; 2],
    /// It did not end once, and the thread that runs it may still run: it gets no other.
    endless: AtomicBool,
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
        env.set_formatter(|out, _, value| Ok(out.write_str(&python::str(value)?)?));
        env.set_unknown_method_callback(limits::method);
        env.add_filter("tojson", python::tojson);
        env.add_filter("join", python::join);
        generator::add_filters(&mut env);
        rewrite::add_functions(&mut env);
        env.add_filter("string", |value: &Value| python::str(value));
        // To Python a string is a sequence, and so is whatever has a length.
        env.add_test("sequence", |value: &Value| value.is_undefined() || value.len().is_some());
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, python::str(message)?).with_source(Raised))
        });
        let (bos_token, eos_token) = (bos.to_owned(), eos.to_owned());
        let mut template =
            ChatTemplate { env, bos_token, eos_token, takes: Default::default(), endless: false.into() };
        template.compile(DEFAULT, source)?;
        Ok(template)
    }

    /// Adds the template that a conversation with tools uses instead, which some models publish beside the first.
    pub fn with_tool_use(mut self, source: &str) -> Result<ChatTemplate, TemplateError> {
        self.compile(TOOL_USE, source)?;
        Ok(self)
    }

    fn compile(&mut self, template: &'static str, source: &str) -> Result<(), TemplateError> {
        let (mut env, source) = (self.env.clone(), source.to_owned());
        // The engine's compiler panics on a few sources (`{% import 'a' as b ~ c %}`).
        let bad = |reason| TemplateError::Compile { template, reason };
        let stack = limits::compile_stack(&source).map_err(bad)?;
        let compiled = limits::within(stack, move || {
            env.add_template_owned(template, rewrite::rewritten(&source)).map(|()| env)
        });
        let compiled = compiled.map_err(|broken| match broken {
            Broken::Thread { stack_bytes, reason } => TemplateError::Thread { template, stack_bytes, reason },
            broken => bad(broken.to_string()),
        })?;
        self.env = compiled.map_err(|error| bad(reason(&error)))?;
        Ok(())
    }

    /// Renders a conversation, keeping `guard`'s special tokens out of its strings.
    ///
    /// # Errors
    /// What the template refuses, in its author's words; a content part that is not text; a template that fails, which
    /// includes that it does not end, or makes more of the conversation than a template may.
    pub fn render(&self, conversation: &Conversation, guard: &Guard) -> Result<Rendered, TemplateError> {
        let (name, takes) = match conversation.tools.as_ref().and(self.env.get_template(TOOL_USE).ok()) {
            Some(_) => (TOOL_USE, &self.takes[1]),
            None => (DEFAULT, &self.takes[0]),
        };
        let messages = content::fitted(&conversation.messages, || {
            takes.get_or_init(|| {
                Takes::find_out(|messages| self.run(name, messages, conversation, &Guard::default()).ok())
            })
        })?;
        let rendered = self.run(name, &messages, conversation, guard);
        rendered.map(Rendered).map_err(|error| {
            let raised = std::error::Error::source(&error).is_some_and(|source| source.is::<Raised>());
            let broken = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
            if let Some(Broken::Thread { stack_bytes, reason }) = broken {
                let (stack_bytes, reason) = (*stack_bytes, reason.clone());
                return TemplateError::Thread { template: name, stack_bytes, reason };
            }
            match error.detail() {
                Some(message) if raised => TemplateError::Refused(unmark(message).0.into_owned()),
                _ => TemplateError::Render { template: name, reason: unmark(&reason(&error)).0.into_owned() },
            }
        })
    }

    /// What the template called `name` makes of `messages` and of all else in `conversation`.
    fn run(
        &self,
        name: &'static str,
        messages: &[Json],
        conversation: &Conversation,
        guard: &Guard,
    ) -> Result<String, Error> {
        let disarmed = |values: &[Json]| values.iter().map(|value| disarm(guard, value)).collect::<Value>();
        let now = conversation.now;
        let context = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)]
            .map(|(name, token)| (name.to_owned(), Value::from(token.as_str())))
            .into_iter()
            .chain(conversation.extra.iter().map(|(name, value)| (name.clone(), disarm(guard, value))))
            .chain([
                ("messages".to_owned(), disarmed(messages)),
                ("tools".to_owned(), conversation.tools.as_deref().map_or(Value::from(()), disarmed)),
                ("documents".to_owned(), Value::from(())),
                ("add_generation_prompt".to_owned(), Value::from(conversation.add_generation_prompt)),
                ("strftime_now".to_owned(), Value::from_function(move |format: &str| now.strftime(format))),
            ])
            .collect::<BTreeMap<_, _>>();
        let budget = limits::budget(conversation);
        let mut env = self.env.clone();
        env.set_fuel(Some(budget));
        let failed = |what: String| Error::new(ErrorKind::InvalidOperation, what);
        let stack = limits::run_stack(budget);
        if self.endless.load(Relaxed) {
            return Err(failed(format!("{}: it is not run again", Broken::Late)));
        }
        limits::within(stack, move || env.get_template(name)?.render(Value::from(context))).map_err(
            |broken| {
                self.endless.fetch_or(broken == Broken::Late, Relaxed);
                failed(broken.to_string()).with_source(broken)
            },
        )?
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

#[cfg(test)]
mod tests;
