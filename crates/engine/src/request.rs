//! What is asked of the engine, and what it answers, in tokens.

use crate::sampler::Params;

/// Name of a request, unique in its engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One reply asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens to continue; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens of the reply.
    pub max_tokens: usize,
    /// Tokens that end the reply; they are reported but are not part of its text.
    pub end_tokens: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Params,
    /// Number of this reply among those of one prompt; replies of different numbers draw different random numbers.
    pub choice: u32,
    /// Log probabilities to report with each token: that of the token and this many of the likeliest.
    pub logprobs: Option<usize>,
    /// Larger goes first.
    pub priority: i32,
    /// Requests with different salts never share cached prefixes.
    pub salt: u64,
}

impl Request {
    /// A greedy request of at most `max_tokens` tokens that nothing ends earlier.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            end_tokens: Vec::new(),
            sampling: Params::greedy(),
            choice: 0,
            logprobs: None,
            priority: 0,
            salt: 0,
        }
    }
}

/// Why a reply ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model said an end token, or the text reached a stop string.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// Somebody cancelled it.
    Cancelled,
}

impl FinishReason {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// One token of a reply.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenEvent {
    /// The token.
    pub id: u32,
    /// Its log probability under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens and their log probabilities, if asked for.
    pub top: Vec<(u32, f32)>,
    /// How many of the logits it was chosen from were NaN. They are never chosen; a sound model has none.
    pub nan: usize,
}

/// What happened to a request in a step.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A token was generated.
    Token(RequestId, TokenEvent),
    /// The reply ended.
    Finished(RequestId, FinishReason),
    /// No token could be chosen for this request; the others go on.
    Failed(RequestId, String),
}
