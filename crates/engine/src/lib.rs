//! Requests to tokens: scheduling, paged KV, sampling, text.
//!
//! [`step`] is the heart: plan who computes how many tokens, run one program for all of them, sample, commit. The engine
//! names no device and knows no wire format.

use std::path::PathBuf;

pub mod batch;
pub mod handle;
pub mod kv;
pub mod parity;
pub mod request;
pub mod runner;
pub mod sampler;
pub mod scheduler;
pub mod step;
pub mod text;
pub mod verify;

/// What can go wrong between a request and its reply.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The prompt leaves no room for a reply.
    #[error(
        "the prompt has {prompt} tokens, but the context is {context}: shorten the prompt or raise the context (-c)"
    )]
    Context {
        /// Tokens of the prompt.
        prompt: usize,
        /// Longest sequence in tokens.
        context: usize,
    },
    /// Nothing to continue.
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    /// A token the model does not have.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// No sequence can go on.
    #[error(
        "no sequence fits the KV pools of {pages:?} pages: raise the context or send fewer requests together"
    )]
    Stuck {
        /// Pages of each group's pool.
        pages: Vec<usize>,
    },
    /// A pool that cannot hold one sequence's window.
    #[error(
        "a window of {window} tokens takes {needed} pages of keys and values, but its pool has {capacity}: give the pool \
         more pages"
    )]
    Pool {
        /// The window, in tokens.
        window: usize,
        /// Pages the request needs at once.
        needed: usize,
        /// Pages the pool can hand out.
        capacity: usize,
    },
    /// A result the program does not have.
    #[error("no result {name:?}: nothing has run, or the program was compiled without it")]
    Output {
        /// Name asked for.
        name: String,
    },
    /// The device left something else than a token.
    #[error("the device left {number} where a token was to be")]
    Sampled {
        /// What it left.
        number: f32,
    },
    /// A reference file that cannot be used.
    #[error("reference {}: {what}", path.display())]
    Reference {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The graph or the device failed.
    #[error(transparent)]
    Graph(#[from] ingle_graph::Error),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] ingle_models::Error),
    /// The model file failed.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
}

/// Result of the engine crate.
pub type Result<T> = std::result::Result<T, Error>;
