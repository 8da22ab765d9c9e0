//! A tokenizer from a model folder: `tokenizer.json` or `tokenizer.model`, and the small files beside it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ingle_tensor::json::{Document, FromJson, Mismatch, Object};
use serde_json::Value as Json;

use super::gguf::added_tokens;
use super::library::{Library, Loaded};
use super::{Model, Parts, Tokenizer, TokenizerError, sentencepiece};

impl Tokenizer {
    /// The tokenizer of a model folder: `tokenizer.json`, or where there is none SentencePiece's `tokenizer.model`.
    /// `tokenizer_config.json`, `generation_config.json` and `config.json` name the begin and end tokens where they are
    /// there.
    ///
    /// # Errors
    /// A file that is missing, damaged, or uses a decoder that is not supported; a key of the wrong type.
    pub fn from_dir(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let (json, model) = (folder.join("tokenizer.json"), folder.join("tokenizer.model"));
        let config = Document::read_or_empty(&folder.join("tokenizer_config.json"))?;
        let config = config.object();
        let adds = (config.get::<bool>("add_bos_token")?, config.get::<bool>("add_eos_token")?);
        let is_sentence_piece = !json.exists() && model.exists();
        let path = if is_sentence_piece { model } else { json };
        let bytes = fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => TokenizerError::Missing { folder: folder.to_owned() },
            _ => TokenizerError::File { path: path.clone(), source },
        })?;
        let mut parts =
            if is_sentence_piece { sentence_piece(&bytes, &path, adds)? } else { library(&bytes, &path)? };

        let named = |field: &str| {
            let token = config.get::<Spelled<'_>>(field)?;
            let id = token.and_then(|Spelled(text)| parts.added.iter().find(|token| token.text == text));
            Ok::<_, TokenizerError>(id.map(|token| token.id))
        };
        let files = [folder.join("generation_config.json"), settings_in(folder)];
        let [generation, settings] = files.map(|path| Document::read_or_empty(&path));
        let (generation, settings) = (generation?, settings?);
        let (generation, settings) = (generation.object(), settings.object());
        let inner = settings.object("text_config")?;
        let ids = |field: &str| {
            let mut all = Vec::new();
            for object in [Some(&generation), Some(&settings), inner.as_ref()].into_iter().flatten() {
                all.extend(ids_in(object, field)?);
            }
            all.retain(|&id| (id as usize) < parts.vocabulary.len());
            Ok::<_, TokenizerError>(all)
        };
        let (begins, ends) = (ids("bos_token_id")?, ids("eos_token_id")?);
        let bos = named("bos_token")?.or(begins.first().copied()).or(parts.bos);
        let eos = named("eos_token")?.or(ends.first().copied()).or(parts.eos);
        (parts.bos, parts.eos, parts.ends) = (bos, eos, ends);
        Ok(Tokenizer::from_parts(parts))
    }
}

/// The folder's config.json, or config.legacy.json where that is absent: the one that its model is read from.
fn settings_in(folder: &Path) -> PathBuf {
    let (config, legacy) = (folder.join("config.json"), folder.join("config.legacy.json"));
    if !config.exists() && legacy.exists() { legacy } else { config }
}

/// What a `tokenizer.json` says; it names no begin and end tokens.
fn library(bytes: &[u8], path: &Path) -> Result<Parts, TokenizerError> {
    let Loaded { library, plain, vocabulary, added, prefix, suffix, strips_space } =
        Library::load(bytes, path)?;
    let model = plain.unwrap_or_else(|| Model::Library(Box::new(library)));
    let (bos, eos, ends) = (None, None, Vec::new());
    Ok(Parts { model, vocabulary, added, prefix, suffix, bos, eos, ends, strips_space })
}

/// What a `tokenizer.model` says. `adds` is whether a prompt begins with the begin token and ends with the end token,
/// where `tokenizer_config.json` says so; else it begins with one.
fn sentence_piece(
    bytes: &[u8],
    path: &Path,
    adds: (Option<bool>, Option<bool>),
) -> Result<Parts, TokenizerError> {
    let sentencepiece::Loaded { model, vocabulary, bos, eos, strips_space } =
        sentencepiece::load(bytes, path)?;
    Ok(Parts {
        added: added_tokens(&vocabulary, |_| false),
        prefix: bos.filter(|_| adds.0 != Some(false)).into_iter().collect(),
        suffix: eos.filter(|_| adds.1 == Some(true)).into_iter().collect(),
        bos,
        eos,
        ends: Vec::new(),
        model: Model::SentencePieces(model),
        vocabulary,
        strips_space,
    })
}

/// A special token's text: alone, or in an object with the flags of an added token.
struct Spelled<'a>(&'a str);

impl<'a> FromJson<'a> for Spelled<'a> {
    fn wanted() -> String {
        "a text, or an object with a text as \"content\"".into()
    }

    fn from_json(value: &'a Json) -> Result<Self, Mismatch> {
        let text = value.as_str().or_else(|| value.get("content")?.as_str());
        text.map(Self).ok_or_else(|| Mismatch::of::<Self>(value))
    }
}

/// One id or a list of them.
struct Ids(Vec<u32>);

impl FromJson<'_> for Ids {
    fn wanted() -> String {
        "a token id or a list of them".into()
    }

    fn from_json(value: &Json) -> Result<Self, Mismatch> {
        match value {
            Json::Array(_) => Vec::from_json(value).map(Self),
            Json::Number(_) => u32::from_json(value).map(|id| Self(vec![id])),
            _ => Err(Mismatch::of::<Self>(value)),
        }
    }
}

/// The ids at `key`; none where it is absent or null.
fn ids_in(object: &Object<'_>, key: &str) -> Result<Vec<u32>, TokenizerError> {
    Ok(object.get::<Ids>(key)?.map_or_else(Vec::new, |Ids(ids)| ids))
}
