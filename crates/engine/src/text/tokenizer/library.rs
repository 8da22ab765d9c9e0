//! `tokenizer.json`, read by the `tokenizers` crate. One of a plain kind is then run by this room's own models (see
//! `plain`), which are quicker on long words; any other by the crate. Added tokens are matched here, because only the
//! caller knows which of them the template wrote.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ingle_tensor::json::Object;
use serde_json::{Map, Value as Json};
use tokenizers::normalizer::{NormalizedString, Range};
use tokenizers::{Model as _, Normalizer as _, PreTokenizedString, PreTokenizer as _, Token};

use super::added::{AddedToken, AddedTokens};
use super::bpe::from_byte_alphabet;
use super::spm::SPACE;
use super::vocabulary::{Kind, Vocabulary};
use super::{Model, TokenizerError, byte_token, plain};

/// A tokenizer of the crate, taken apart.
#[derive(Debug)]
pub(super) struct Library {
    inner: tokenizers::Tokenizer,
    /// Matched in the text as it is.
    raw: AddedTokens,
    /// Matched in the normalized text.
    normalized: AddedTokens,
    /// How those are written, see [`written`].
    spellings: HashMap<u32, String>,
}

/// What a `tokenizer.json` holds.
pub(super) struct Loaded {
    pub(super) library: Library,
    /// The same model, if it is of a plain kind.
    pub(super) plain: Option<Model>,
    pub(super) vocabulary: Vocabulary,
    pub(super) added: Vec<AddedToken>,
    /// Added around a text by the file's post-processor.
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    pub(super) strips_space: bool,
}

/// How tokens spell bytes, by the file's decoder.
#[derive(Clone, PartialEq)]
enum Spelling {
    ByteAlphabet,
    SentencePiece {
        strips_space: bool,
    },
    /// Pieces that go on with a word start with the prefix, the others with a space that is not written.
    WordPiece {
        prefix: String,
    },
}

impl Library {
    /// Loads the text of the file at `path`.
    pub(super) fn load(json: &[u8], path: &Path) -> Result<Loaded, TokenizerError> {
        let bad = |what: String| TokenizerError::Json { path: path.to_owned(), what };
        let file: Json = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        let object = Object::of(path, &file)?;
        for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            object.object(part)?;
        }
        // What is inside them has its types checked by the crate, before anything is made of them.
        let spelling = spelling(&file["decoder"])?;
        object.require::<&Map<String, Json>>("model")?;
        object.get::<Vec<&Map<String, Json>>>("added_tokens")?;
        check_frame(&file["post_processor"]).map_err(bad)?;
        guarded(|| Self::take_apart(json, &file, spelling)).and_then(|loaded| loaded).map_err(bad)
    }

    /// `file` is `json` as values.
    fn take_apart(json: &[u8], file: &Json, spelling: Spelling) -> Result<Loaded, String> {
        let bad = |error: tokenizers::Error| error.to_string();
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(bad)?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(bad)?;

        let mut added: Vec<(u32, tokenizers::AddedToken)> =
            inner.get_added_tokens_decoder().iter().map(|(id, token)| (*id, token.clone())).collect();
        added.sort_by_key(|&(id, _)| id);
        let mut vocabulary = vocabulary(&inner, &added, &spelling)?;
        let token = |id, token: &tokenizers::AddedToken, text: String| AddedToken {
            id,
            text,
            special: token.special,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            single_word: token.single_word,
        };
        let (mut raw, mut normalized, mut spellings) = (Vec::new(), Vec::new(), HashMap::new());
        for (id, given) in &added {
            if given.normalized {
                let mut text = NormalizedString::from(given.content.as_str());
                if let Some(normalizer) = inner.get_normalizer() {
                    normalizer.normalize(&mut text).map_err(bad)?;
                }
                spellings.insert(*id, written(&given.content));
                normalized.push(token(*id, given, text.get().to_owned()));
            } else {
                raw.push(token(*id, given, given.content.clone()));
            }
        }
        let (prefix, suffix) = frame(&inner).map_err(bad)?;
        if let Some(id) = prefix.iter().chain(&suffix).find(|&&id| id as usize >= vocabulary.len()) {
            return Err(format!(
                "post_processor puts token {id} around a text, but the vocabulary has {} tokens",
                vocabulary.len()
            ));
        }
        let plain = plain::model(file, &mut vocabulary);
        Ok(Loaded {
            plain,
            vocabulary,
            added: added.iter().map(|(id, given)| token(*id, given, given.content.clone())).collect(),
            prefix,
            suffix,
            strips_space: match spelling {
                Spelling::ByteAlphabet => false,
                Spelling::SentencePiece { strips_space } => strips_space,
                Spelling::WordPiece { .. } => true,
            },
            library: Library {
                inner,
                raw: AddedTokens::new(raw),
                spellings,
                normalized: AddedTokens::new(normalized),
            },
        })
    }

    /// The ids of `text`. A special token is matched only where `armed` holds for its place; if it is matched in the
    /// normalized text, also only where it was written as such: a template writes it so, and another spelling that
    /// becomes the token is a user's, which nobody looked out for.
    pub(super) fn encode(
        &self,
        text: &str,
        armed: impl Fn(std::ops::Range<usize>) -> bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        guarded(|| self.encode_unguarded(text, armed)).map_err(TokenizerError::Encode)?
    }

    fn encode_unguarded(
        &self,
        text: &str,
        armed: impl Fn(std::ops::Range<usize>) -> bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        let failed = |error: tokenizers::Error| TokenizerError::Encode(error.to_string());
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, part| Ok(split(&self.raw, &part, &|place, _| armed(place)))).map_err(failed)?;
        if let Some(normalizer) = self.inner.get_normalizer() {
            pieces.normalize(|part| normalizer.normalize(part)).map_err(failed)?;
        }
        if !self.normalized.is_empty() {
            pieces
                .split(|_, part| {
                    let first = part.offsets_original().0;
                    let as_written = |place: std::ops::Range<usize>, id| {
                        // A place in the normalized text, taken back to the text as given.
                        let Some(place) = part.convert_offsets(Range::Normalized(place)) else {
                            return false;
                        };
                        let place = first + place.start..first + place.end;
                        let spelling = text.get(place.clone()).map(written);
                        spelling.as_ref() == self.spellings.get(&id) && armed(place)
                    };
                    Ok(split(&self.normalized, &part, &as_written))
                })
                .map_err(failed)?;
        }
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        pieces.tokenize(|part| self.inner.get_model().tokenize(part.get())).map_err(failed)?;
        let encoding = pieces.into_encoding(None, 0, tokenizers::OffsetType::None).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// What `work` returns. The crate panics on some files that its own programs would not write; such a file is damaged,
/// and costs nobody else's work.
fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| "its settings contradict each other".to_owned())
}

/// A template of the post-processor that names a special token must define it: the crate looks it up without asking.
fn check_frame(processor: &Json) -> Result<(), String> {
    let nested = processor["processors"].as_array().into_iter().flatten();
    for processor in nested.chain([processor]) {
        let pieces = ["single", "pair"].into_iter().flat_map(|field| processor[field].as_array()).flatten();
        for id in pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str()) {
            if processor["special_tokens"].get(id).is_none() {
                return Err(format!(
                    "post_processor puts the token {id:?} around a text, but does not define it"
                ));
            }
        }
    }
    Ok(())
}

/// A part of the text, with its token where it is one.
type Part = (NormalizedString, Option<Vec<Token>>);

fn split(
    added: &AddedTokens,
    text: &NormalizedString,
    armed: &dyn Fn(std::ops::Range<usize>, u32) -> bool,
) -> Vec<Part> {
    let parts = added.split(text.get(), armed).into_iter();
    parts
        .filter_map(|piece| {
            let part = text.slice(Range::Normalized(piece.range))?;
            let token =
                piece.token.map(|id| vec![Token::new(id, part.get().to_owned(), (0, part.get().len()))]);
            Some((part, token))
        })
        .collect()
}

/// How a special token is written in a text where its spelling has SentencePiece's mark for a space, or a space at an
/// end, which a normalizer may add.
pub(super) fn written(spelling: &str) -> String {
    spelling.replace(SPACE, " ").trim().to_owned()
}

/// Reads the decoder for how tokens spell bytes.
fn spelling(decoder: &Json) -> Result<Spelling, TokenizerError> {
    let kind = decoder["type"].as_str().unwrap_or("none");
    let parts = decoder["decoders"].as_array().map(Vec::as_slice).unwrap_or_default();
    let has = |name: &str| parts.iter().any(|part| part["type"] == name);
    match kind {
        "ByteLevel" => Ok(Spelling::ByteAlphabet),
        // The clean-up of this decoder (no space before a full stop, and the like) is left out: it cannot be streamed.
        "WordPiece" => {
            Ok(Spelling::WordPiece { prefix: decoder["prefix"].as_str().unwrap_or("##").to_owned() })
        }
        "Metaspace" => Ok(Spelling::SentencePiece { strips_space: decoder["prepend_scheme"] != "never" }),
        "Sequence" if has("ByteLevel") => Ok(Spelling::ByteAlphabet),
        "Sequence" if has("ByteFallback") || has("Metaspace") => Ok(Spelling::SentencePiece {
            strips_space: parts
                .iter()
                .any(|part| part["type"] == "Strip" && part["start"].as_u64() > Some(0)),
        }),
        kind => Err(TokenizerError::Unsupported {
            what: "decoder of tokenizer.json",
            name: kind.to_owned(),
            known:
                "ByteLevel, WordPiece, Metaspace, and a Sequence with ByteLevel, ByteFallback or Metaspace"
                    .into(),
        }),
    }
}

fn vocabulary(
    inner: &tokenizers::Tokenizer,
    added: &[(u32, tokenizers::AddedToken)],
    spelling: &Spelling,
) -> Result<Vocabulary, String> {
    let vocab = inner.get_vocab(true);
    let tokens = vocab.values().max().map_or(0, |&largest| largest as usize + 1);
    // A hole of ids is a file's business; one this large is damage.
    if tokens > 4 * vocab.len() + 65_536 {
        return Err(format!("the largest id is {}, but there are {} tokens", tokens - 1, vocab.len()));
    }
    let mut texts = vec![""; tokens];
    for (text, &id) in &vocab {
        texts[id as usize] = text;
    }
    let mut kinds = vec![Kind::Text; tokens];
    for (id, token) in added {
        kinds[*id as usize] = if token.special { Kind::Special } else { Kind::Added };
    }
    let mut out = Vocabulary::with_capacity(tokens);
    for (&text, kind) in texts.iter().zip(kinds) {
        match (kind, spelling) {
            (Kind::Text, Spelling::ByteAlphabet) => out.push(kind, |bytes| from_byte_alphabet(text, bytes)),
            (Kind::Text, Spelling::WordPiece { prefix }) => match text.strip_prefix(prefix) {
                Some(rest) => out.push(kind, |bytes| bytes.extend(rest.bytes())),
                None => out.push(kind, |bytes| bytes.extend([" ", text].concat().bytes())),
            },
            (Kind::Text, Spelling::SentencePiece { .. }) => match byte_token(text) {
                Some(byte) => out.push(Kind::Byte, |bytes| bytes.push(byte)),
                None => out.push(kind, |bytes| bytes.extend(text.replace(SPACE, " ").bytes())),
            },
            _ => out.push(kind, |bytes| bytes.extend(text.bytes())),
        }
    }
    Ok(out)
}

/// What the post-processor puts before and after a text.
fn frame(inner: &tokenizers::Tokenizer) -> tokenizers::Result<(Vec<u32>, Vec<u32>)> {
    // The text's place is held by an id that no vocabulary has.
    const TEXT: u32 = u32::MAX;
    let text = tokenizers::Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
    let framed = inner.post_process(text, None, true)?;
    let ids = framed.get_ids();
    let at = ids.iter().position(|&id| id == TEXT).unwrap_or(ids.len());
    Ok((ids[..at].to_vec(), ids.get(at + 1..).unwrap_or_default().to_vec()))
}
