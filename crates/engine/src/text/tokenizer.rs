//! Tokenizers: text to token ids, and the bytes of each token.
//!
//! From a GGUF file's metadata they are built here: byte-level BPE, SentencePiece BPE and WordPiece, small and quick to
//! load; so is the SentencePiece BPE of a `tokenizer.model`, and a `tokenizer.json` of a plain kind. Any other
//! `tokenizer.json` is run by the `tokenizers` crate. Unigram vocabularies are refused by name.

mod added;
mod bpe;
mod classes;
mod folder;
mod gguf;
mod library;
mod merge;
mod plain;
mod sentencepiece;
mod split;
mod spm;
mod vocabulary;
mod wordpiece;

use std::ops::Range;
use std::path::PathBuf;

use thiserror::Error;

use super::disarm::{Guard, unmark};
use super::template::Rendered;
use added::{AddedToken, AddedTokens};
use bpe::BytePairs;
use library::Library;
use merge::Scratch;
use spm::SentencePieces;
use vocabulary::{Kind, Vocabulary};
use wordpiece::WordPieces;

/// Why a tokenizer did not load or a text did not encode.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// A key of a GGUF file or of a model folder's small files that is missing or of the wrong type.
    #[error(transparent)]
    Key(#[from] ingle_tensor::Error),
    /// A kind of tokenizer that is not implemented.
    #[error("{what} {name:?} is not supported; supported: {known}")]
    Unsupported {
        /// Which setting.
        what: &'static str,
        /// Its value.
        name: String,
        /// The values that are supported.
        known: String,
    },
    /// A model folder without a tokenizer.
    #[error(
        "{} has neither tokenizer.json nor tokenizer.model: copy it from the original model's folder",
        folder.display()
    )]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// A merge of a byte-level vocabulary.
    #[error("tokenizer.ggml.merges, entry {rank} ({merge:?}): {what}")]
    Merge {
        /// Its place in the list.
        rank: usize,
        /// The entry.
        merge: String,
        /// What is wrong with it.
        what: String,
    },
    /// A list with one entry per token that is shorter or longer.
    #[error("{key} has {found} entries, but there are {tokens} tokens")]
    Length {
        /// The metadata key.
        key: &'static str,
        /// Its entries.
        found: usize,
        /// How many tokens there are.
        tokens: usize,
    },
    /// A token id outside the vocabulary.
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens")]
    TokenId {
        /// Which setting names it.
        key: String,
        /// The id.
        id: u32,
        /// How many tokens there are.
        tokens: usize,
    },
    /// A file of a model folder that cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file of a model folder that is not what it should be.
    #[error("{}: {what}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A text that the model's own tokenizer program gave up on.
    #[error("tokenizing failed: {0}")]
    Encode(String),
    /// A text of 4 GiB or more.
    #[error("the text has {bytes} bytes; at most {limit} can be tokenized at once")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}

/// What the spelling of a special token in a text means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// The token.
    Parse,
    /// Text like any other: for words that a user typed.
    AsText,
}

/// What turns text between added tokens into ids.
#[derive(Debug)]
enum Model {
    BytePairs(BytePairs),
    SentencePieces(SentencePieces),
    WordPieces(WordPieces),
    Library(Box<Library>),
}

/// A model's vocabulary and the rules for cutting text into it.
#[derive(Debug)]
pub struct Tokenizer {
    model: Model,
    vocabulary: Vocabulary,
    added: AddedTokens,
    guard: Guard,
    /// Ids put before a text.
    prefix: Vec<u32>,
    /// Ids put after a text.
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Ascending.
    eog: Vec<u32>,
    strips_space: bool,
}

/// Spellings of tokens that end a reply whatever the file's settings say, if they are added tokens.
const ENDS: [&str; 18] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
];

/// What a loader finds, before it is a [`Tokenizer`].
struct Parts {
    model: Model,
    vocabulary: Vocabulary,
    added: Vec<AddedToken>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Further tokens that end a reply.
    ends: Vec<u32>,
    strips_space: bool,
}

impl Tokenizer {
    fn from_parts(parts: Parts) -> Tokenizer {
        let added = AddedTokens::new(parts.added);
        let named = |name: &str| added.iter().find(|token| token.text == name).map(|token| token.id);
        let mut eog: Vec<u32> = parts.eos.into_iter().chain(parts.ends).collect();
        // Where a model ends a reply by `<|return|>` or `<|call|>`, `<|end|>` only ends one of its parts.
        let parted = named("<|return|>").is_some() && named("<|call|>").is_some();
        eog.extend(ENDS.into_iter().filter(|&name| name != "<|end|>" || !parted).filter_map(named));
        eog.sort_unstable();
        eog.dedup();
        Tokenizer {
            guard: Guard::new(
                added
                    .iter()
                    .filter(|token| token.special)
                    .flat_map(|token| [token.text.clone(), library::written(&token.text)]),
            ),
            model: parts.model,
            vocabulary: parts.vocabulary,
            added,
            prefix: parts.prefix,
            suffix: parts.suffix,
            bos: parts.bos,
            eos: parts.eos,
            eog,
            strips_space: parts.strips_space,
        }
    }

    /// The ids of `text` alone, with nothing put before or after it.
    ///
    /// # Errors
    /// A text of 4 GiB or more; a `tokenizer.json` whose own rules fail on it.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        self.encode_armed(text, |_| specials == Specials::Parse)
    }

    /// The ids of a prompt that is completed as it is: begin and end tokens as the file asks for them.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        let ids = self.encode(text, specials)?;
        Ok([&self.prefix[..], &ids, &self.suffix].concat())
    }

    /// The ids of a rendered conversation: special tokens are parsed where the template wrote them and are text where a
    /// user did. The begin token is there once, whether the template writes it or the file asks for it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, rendered: &Rendered) -> Result<Vec<u32>, TokenizerError> {
        let (text, disarmed) = unmark(rendered.marked());
        let ids = self.encode_armed(&text, |place| {
            let first = disarmed.partition_point(|&at| at < place.start);
            disarmed.get(first).is_none_or(|&at| at >= place.end)
        })?;
        Ok(if ids.starts_with(&self.prefix) { ids } else { [&self.prefix[..], &ids].concat() })
    }

    /// Whether a prompt starts with two begin tokens, which no model was trained on: the caller may want to warn.
    pub fn has_doubled_bos(&self, ids: &[u32]) -> bool {
        self.bos.is_some_and(|bos| ids.starts_with(&[bos, bos]))
    }

    fn encode_armed(
        &self,
        text: &str,
        armed: impl Fn(Range<usize>) -> bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let limit = u32::MAX as usize / 2;
        if text.len() > limit {
            return Err(TokenizerError::TooLong { bytes: text.len(), limit });
        }
        let vocabulary = &self.vocabulary;
        match &self.model {
            Model::Library(library) => library.encode(text, armed),
            Model::BytePairs(model) => Ok(self.encode_between(text, armed, |part, _, scratch, ids| {
                model.encode(vocabulary, part, scratch, ids);
            })),
            Model::SentencePieces(model) => {
                Ok(self.encode_between(text, armed, |part, is_start, scratch, ids| {
                    model.encode(vocabulary, part, is_start, scratch, ids);
                }))
            }
            Model::WordPieces(model) => Ok(self.encode_between(text, armed, |part, _, scratch, ids| {
                model.encode(vocabulary, part, scratch, ids);
            })),
        }
    }

    /// Splits `text` at its added tokens and encodes what lies between. `encode` is told whether the whole text starts
    /// with its part, which is empty where an added token that is no control token comes first.
    fn encode_between(
        &self,
        text: &str,
        armed: impl Fn(Range<usize>) -> bool,
        encode: impl Fn(&str, bool, &mut Scratch, &mut Vec<u32>),
    ) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut scratch = Scratch::default();
        for (index, piece) in self.added.split(text, |place, _| armed(place)).into_iter().enumerate() {
            match piece.token {
                None => encode(&text[piece.range], index == 0, &mut scratch, &mut ids),
                Some(id) => {
                    if index == 0 && self.vocabulary.kind(id) == Kind::Added {
                        encode("", true, &mut scratch, &mut ids);
                    }
                    ids.push(id);
                }
            }
        }
        ids
    }

    /// How many ids there are: from 0 to one less than this.
    pub fn vocab_len(&self) -> usize {
        self.vocabulary.len()
    }

    /// The bytes a token stands for; a special token's are its spelling. None for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// Whether a token is a control token and no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.kind(id) == Kind::Special
    }

    /// The begin token, if the file names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end token, if the file names one; [`Tokenizer::eog`] has all that end a reply.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The spelling of a token for a template's `bos_token` and `eos_token`; empty for none.
    pub fn spelling(&self, id: Option<u32>) -> String {
        id.map_or_else(String::new, |id| String::from_utf8_lossy(self.token_bytes(id)).into_owned())
    }

    /// The tokens that end a reply, ascending: those that the files name, and well-known ones by their spelling.
    pub fn eog(&self) -> &[u32] {
        &self.eog
    }

    /// Keeps this vocabulary's special tokens out of users' text.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Whether the space at the start of a decoded text was put there in encoding.
    pub fn strips_space(&self) -> bool {
        self.strips_space
    }

    /// The tokens whose text holds any of `parts`, ascending; for the sampler's sequence breakers.
    pub fn tokens_containing(&self, parts: &[&str]) -> Vec<u32> {
        let holds = |id: &u32| {
            let bytes = self.token_bytes(*id);
            parts
                .iter()
                .any(|part| !part.is_empty() && bytes.windows(part.len()).any(|at| at == part.as_bytes()))
        };
        (0..self.vocab_len() as u32).filter(holds).collect()
    }
}

/// The byte of a token spelled `<0x41>`.
fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
pub(super) mod testing {
    //! Small vocabularies for tests.

    use super::spm::SpacePrefix;
    use super::*;

    /// A vocabulary of just these tokens, as bytes, and their ids; `<s>` is special.
    pub(in crate::text) fn of_tokens(tokens: &[&[u8]], strips_space: bool) -> (Tokenizer, Vec<u32>) {
        let mut vocabulary = Vocabulary::with_capacity(tokens.len());
        for token in tokens {
            let kind = if *token == b"<s>" { Kind::Special } else { Kind::Text };
            vocabulary.push(kind, |out| out.extend_from_slice(token));
        }
        let tokenizer = Tokenizer::from_parts(Parts {
            model: Model::SentencePieces(SentencePieces::scored(&vocabulary, &[], None, SpacePrefix::Never)),
            vocabulary,
            added: Vec::new(),
            prefix: Vec::new(),
            suffix: Vec::new(),
            bos: None,
            eos: None,
            ends: Vec::new(),
            strips_space,
        });
        (tokenizer, (0..tokens.len() as u32).collect())
    }
}

#[cfg(test)]
mod tests;
