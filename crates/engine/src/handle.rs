//! Text in, text out: the engine with a tokenizer before it and a detokenizer behind it. What a command line or a server
//! holds. It prints nothing and keeps no global state.
//!
//! Many requests: [`Handle::submit`] each, then [`Handle::step`] until [`Handle::busy`] says no. One request:
//! [`Handle::generate`]. A conversation needs nothing special: its prompt is rendered anew each turn, and the engine's
//! prefix cache finds the pages that the turns before left.

mod language;

use std::collections::HashMap;
use std::mem::take;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use language::Language;

use crate::request::{self, FinishReason, Request, RequestId, TokenEvent};
use crate::sampler::{ParamError, Params, Settings};
use crate::step::Engine;
use crate::text::tokenizer::TokenizerError;
use crate::text::{Detokenizer, StopMatcher, TemplateError};

/// What can go wrong between text and text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine refused the request or failed.
    #[error(transparent)]
    Engine(#[from] crate::Error),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A sampling setting outside its range.
    #[error(transparent)]
    Setting(#[from] ParamError),
    /// The model file.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
    /// A conversation for a model that knows only text.
    #[error(
        "this model has no chat template (a base model): it can continue a text, but not answer a conversation"
    )]
    NoTemplate,
    /// A stop string that would end every reply at once.
    #[error("a stop string is empty: give at least one character, or none at all")]
    EmptyStop,
    /// More tokens in the vocabulary than rows of logits.
    #[error(
        "the tokenizer has {tokens} tokens, but the model has {rows} rows of logits: their files do not belong together"
    )]
    Vocabulary {
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Size of the model's vocabulary.
        rows: usize,
    },
    /// No token could be chosen.
    #[error("{0}")]
    Sample(String),
    /// A small file beside the model.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl Error {
    fn file(path: &Path, what: impl ToString) -> Self {
        Error::File { path: path.to_path_buf(), what: what.to_string() }
    }
}

/// Result of text-level work.
pub type Result<T> = std::result::Result<T, Error>;

/// One reply asked for, as text.
#[derive(Debug, Clone, Default)]
pub struct TextRequest {
    /// Tokens to continue: [`Language::chat`] or [`Language::completion`].
    pub prompt: Vec<u32>,
    /// The reply goes on from the prompt's own text: a space at its start is part of it.
    pub continues: bool,
    /// Most tokens of the reply; 0 gives an empty reply.
    pub max_tokens: usize,
    /// Texts that end the reply and are not part of it.
    pub stop: Vec<String>,
    /// What the caller says about sampling; the model's own settings fill the gaps.
    pub sampling: Settings,
    /// Number of this reply among those of one prompt.
    pub choice: u32,
    /// Log probabilities to report with each token: its own and those of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// Larger goes first.
    pub priority: i32,
    /// Requests with different salts never share cached prefixes.
    pub salt: u64,
}

/// What happened to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A token was generated. Its text comes in an [`Event::Text`] of its own, perhaps later.
    Token(TokenEvent),
    /// Text that is certain now: whole characters, no part of a stop string. Never empty.
    Text(String),
    /// The reply is complete.
    Done(Box<Reply>),
    /// No token could be chosen.
    Failed(String),
}

/// A complete reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Tokens of the prompt.
    pub prompt_ids: Vec<u32>,
    /// Tokens generated, with the end token and those of a stop string, if one of them ended the reply.
    pub generated_ids: Vec<u32>,
    /// The text, without end token and stop string: all [`Event::Text`] of the reply, joined.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Each token with its log probabilities, if they were asked for.
    pub steps: Vec<TokenEvent>,
    /// Seed of the random numbers, given or drawn; none where the likeliest token is always taken.
    pub seed: Option<u64>,
    /// Tokens of the prompt that were found in the prefix cache. Exact for a request that ran alone.
    pub cached_tokens: usize,
    /// The first token that was chosen although some logits were NaN: its position and how many they were.
    pub nan: Option<(usize, usize)>,
    /// Times.
    pub timings: Timings,
}

/// Where the time of a reply went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// From submission to the first token; zero if there is none.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Reply {
    /// Tokens computed before the first token of the reply; 0 if there is none.
    pub fn prefill_tokens(&self) -> usize {
        if self.generated_ids.is_empty() { 0 } else { self.prompt_ids.len() - self.cached_tokens }
    }

    /// Tokens generated during [`Timings::decode`]: all but the first, which ends the prefill.
    pub fn decode_tokens(&self) -> usize {
        self.generated_ids.len().saturating_sub(1)
    }
}

/// A request on its way to a reply.
struct Open {
    prompt: Vec<u32>,
    end_tokens: Vec<u32>,
    generated: Vec<u32>,
    steps: Option<Vec<TokenEvent>>,
    text: String,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    seed: Option<u64>,
    /// The engine's count of cached tokens when the request was submitted, and what it grew by until the first token.
    cached: (u64, usize),
    /// As in [`Reply`].
    nan: Option<(usize, usize)>,
    submitted: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// A model that reads and writes text.
pub struct Handle {
    engine: Engine,
    language: Language,
    open: HashMap<RequestId, Open>,
    /// Events that nobody has been told yet.
    backlog: Vec<(RequestId, Event)>,
}

impl Handle {
    /// Joins an engine and the language of the model it runs.
    ///
    /// # Errors
    /// [`Error::Vocabulary`] when the tokenizer has tokens that the model has not.
    pub fn new(mut engine: Engine, language: Language) -> Result<Self> {
        let (tokens, rows) = (language.tokenizer().vocab_len(), engine.runner().model().config.vocabulary);
        if tokens > rows {
            return Err(Error::Vocabulary { tokens, rows });
        }
        Ok(Self { engine, language, open: HashMap::new(), backlog: Vec::new() })
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Tokenizer, template and defaults.
    pub fn language(&self) -> &Language {
        &self.language
    }

    /// Whether a request is unfinished or an event untold.
    pub fn busy(&self) -> bool {
        !self.open.is_empty() || !self.backlog.is_empty()
    }

    /// Takes a request.
    ///
    /// # Errors
    /// A prompt that leaves no room in the context, with the numbers; a setting outside its range; an empty stop string.
    pub fn submit(&mut self, request: TextRequest) -> Result<RequestId> {
        let vocabulary = self.engine.runner().model().config.vocabulary;
        let sampling = Params::resolve(&request.sampling, self.language.defaults(), vocabulary)?;
        if request.stop.iter().any(String::is_empty) {
            return Err(Error::EmptyStop);
        }
        let end_tokens = self.language.tokenizer().eog().to_vec();
        let detokenizer = Detokenizer::new(self.language.tokenizer());
        let open = Open {
            prompt: request.prompt.clone(),
            end_tokens: end_tokens.clone(),
            generated: Vec::new(),
            steps: request.logprobs.map(|_| Vec::new()),
            text: String::new(),
            detokenizer: if request.continues { detokenizer.continuing() } else { detokenizer },
            stop: StopMatcher::new(request.stop),
            seed: (!sampling.is_greedy()).then(|| sampling.seed()),
            cached: (self.engine.stats().cached, 0),
            nan: None,
            submitted: Instant::now(),
            first: None,
            last: None,
        };
        let id = self.engine.submit(Request {
            prompt: request.prompt,
            max_tokens: request.max_tokens,
            end_tokens,
            sampling,
            choice: request.choice,
            logprobs: request.logprobs,
            priority: request.priority,
            salt: request.salt,
        })?;
        if request.max_tokens == 0 {
            // Checked like any other, but there is nothing to compute.
            self.engine.cancel(id);
            self.backlog.push((id, Event::Done(Box::new(open.close(FinishReason::Length)))));
        } else {
            self.open.insert(id, open);
        }
        Ok(id)
    }

    /// Runs one step of the engine and says what came of it.
    ///
    /// # Errors
    /// A device failure; the requests stay, and the step can be run again.
    pub fn step(&mut self) -> Result<Vec<(RequestId, Event)>> {
        let mut events = take(&mut self.backlog);
        if self.open.is_empty() {
            return Ok(events);
        }
        for event in self.engine.step()? {
            match event {
                request::Event::Token(id, token) => self.token(id, token, &mut events),
                request::Event::Finished(id, reason) => self.finish(id, reason, &mut events),
                request::Event::Failed(id, what) => {
                    self.open.remove(&id);
                    events.push((id, Event::Failed(what)));
                }
            }
        }
        Ok(events)
    }

    /// Ends a request early and returns what there is of its reply; `None` if it has ended already.
    pub fn cancel(&mut self, id: RequestId) -> Option<Reply> {
        self.engine.cancel(id);
        self.open.remove(&id).map(|open| open.close(FinishReason::Cancelled))
    }

    /// Runs one request to its end. `on_event` is told each token and each piece of text, and `None` after a step in which
    /// there was nothing to tell. A break cancels the request once the events of that step are told, and the reply is what
    /// there was.
    ///
    /// # Errors
    /// As [`Handle::submit`] and [`Handle::step`]; no token could be chosen.
    pub fn generate(
        &mut self,
        request: TextRequest,
        on_event: &mut dyn FnMut(Option<&Event>) -> ControlFlow<()>,
    ) -> Result<Reply> {
        let id = self.submit(request)?;
        loop {
            let events = match self.step() {
                Ok(events) => events,
                Err(error) => {
                    self.cancel(id);
                    return Err(error);
                }
            };
            let (mine, others): (Vec<_>, Vec<_>) = events.into_iter().partition(|(of, _)| *of == id);
            self.backlog.extend(others);
            let mut is_wanted = !mine.is_empty() || on_event(None).is_continue();
            for (_, event) in mine {
                match event {
                    Event::Done(reply) => return Ok(*reply),
                    Event::Failed(what) => return Err(Error::Sample(what)),
                    event => is_wanted &= on_event(Some(&event)).is_continue(),
                }
            }
            if !is_wanted && let Some(reply) = self.cancel(id) {
                return Ok(reply);
            }
        }
    }

    /// A generated token becomes text, unless it is held back; a stop string ends the reply.
    fn token(&mut self, id: RequestId, token: TokenEvent, events: &mut Vec<(RequestId, Event)>) {
        let cached = self.engine.stats().cached;
        let Some(open) = self.open.get_mut(&id) else { return };
        let now = Instant::now();
        if open.first.is_none() {
            open.first = Some(now);
            open.cached.1 = ((cached - open.cached.0) as usize).min(open.prompt.len());
        }
        open.last = Some(now);
        if token.nan > 0 {
            open.nan.get_or_insert((open.prompt.len() + open.generated.len(), token.nan));
        }
        open.generated.push(token.id);
        let is_end = open.end_tokens.contains(&token.id);
        if let Some(steps) = &mut open.steps {
            steps.push(token.clone());
        }
        let token_id = token.id;
        events.push((id, Event::Token(token)));
        if is_end {
            return;
        }
        let piece = open.detokenizer.push(self.language.tokenizer(), token_id);
        let (text, stopped) = open.stop.push(&piece);
        open.tell(id, text, events);
        if stopped {
            self.engine.cancel(id);
            self.finish(id, FinishReason::Stop, events);
        }
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason, events: &mut Vec<(RequestId, Event)>) {
        if let Some(mut open) = self.open.remove(&id) {
            let text = open.rest();
            open.tell(id, text, events);
            events.push((id, Event::Done(Box::new(open.close(reason)))));
        }
    }
}

impl Open {
    /// Text that became certain.
    fn tell(&mut self, id: RequestId, text: String, events: &mut Vec<(RequestId, Event)>) {
        if !text.is_empty() {
            self.text.push_str(&text);
            events.push((id, Event::Text(text)));
        }
    }

    /// What was held back, now that nothing follows.
    fn rest(&mut self) -> String {
        let (mut text, stopped) = self.stop.push(&self.detokenizer.finish());
        if !stopped {
            text.push_str(&self.stop.finish());
        }
        text
    }

    fn close(self, finish_reason: FinishReason) -> Reply {
        Reply {
            prompt_ids: self.prompt,
            generated_ids: self.generated,
            text: self.text,
            finish_reason,
            steps: self.steps.unwrap_or_default(),
            seed: self.seed,
            cached_tokens: self.cached.1,
            nan: self.nan,
            timings: Timings {
                prefill: self.first.map_or(Duration::ZERO, |first| first - self.submitted),
                decode: self.first.zip(self.last).map_or(Duration::ZERO, |(first, last)| last - first),
            },
        }
    }
}

#[cfg(test)]
mod tests;
