//! Text to tokens and back: tokenizers, chat templates, streaming detokenization.
//!
//! A conversation is rendered by [`template`], its special tokens kept apart from the user's words by [`disarm`], and
//! turned into ids by [`tokenizer`]; generated ids become text again in [`detokenize`], one push at a time.

pub mod detokenize;
pub mod disarm;
pub mod template;
pub mod tokenizer;

pub use detokenize::{Detokenizer, StopMatcher};
pub use disarm::Guard;
pub use template::{ChatTemplate, CivilTime, Conversation, Rendered, TemplateError};
pub use tokenizer::{Specials, Tokenizer, TokenizerError};
