//! A tokenizer from a model folder: `tokenizer.json` or `tokenizer.model`, and the small files beside it.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

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
    /// A file that is missing, damaged, or uses a decoder that is not supported.
    pub fn from_dir(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let (json, model) = (folder.join("tokenizer.json"), folder.join("tokenizer.model"));
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let is_sentence_piece = !json.exists() && model.exists();
        let path = if is_sentence_piece { model } else { json };
        let bytes = fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => TokenizerError::Missing { folder: folder.to_owned() },
            _ => TokenizerError::File { path: path.clone(), source },
        })?;
        let mut parts =
            if is_sentence_piece { sentence_piece(&bytes, &path, &config)? } else { library(&bytes, &path)? };

        let named = |field: &str| {
            // A string, or an object with the flags of an added token.
            let token = &config[field];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            parts.added.iter().find(|token| token.text == text).map(|token| token.id)
        };
        let generation = read_json(&folder.join("generation_config.json"))?;
        let settings = read_json(&folder.join("config.json"))?;
        let ids = |field: &str| {
            let lists = [&generation[field], &settings[field], &settings["text_config"][field]];
            lists
                .into_iter()
                .flat_map(ids_in)
                .filter(|&id| (id as usize) < parts.vocabulary.len())
                .collect::<Vec<_>>()
        };
        let first = |field: &str| ids(field).first().copied();
        let bos = named("bos_token").or_else(|| first("bos_token_id")).or(parts.bos);
        let eos = named("eos_token").or_else(|| first("eos_token_id")).or(parts.eos);
        let ends = ids("eos_token_id");
        (parts.bos, parts.eos, parts.ends) = (bos, eos, ends);
        Ok(Tokenizer::from_parts(parts))
    }
}

/// What a `tokenizer.json` says; it names no begin and end tokens.
fn library(bytes: &[u8], path: &Path) -> Result<Parts, TokenizerError> {
    let Loaded { library, plain, vocabulary, added, prefix, suffix, strips_space } =
        Library::load(bytes, path)?;
    let model = plain.unwrap_or_else(|| Model::Library(Box::new(library)));
    let (bos, eos, ends) = (None, None, Vec::new());
    Ok(Parts { model, vocabulary, added, prefix, suffix, bos, eos, ends, strips_space })
}

/// What a `tokenizer.model` says. A prompt begins with the begin token unless `config` says otherwise.
fn sentence_piece(bytes: &[u8], path: &Path, config: &Json) -> Result<Parts, TokenizerError> {
    let sentencepiece::Loaded { model, vocabulary, bos, eos, strips_space } =
        sentencepiece::load(bytes, path)?;
    Ok(Parts {
        added: added_tokens(&vocabulary, |_| false),
        prefix: bos.filter(|_| config["add_bos_token"] != false).into_iter().collect(),
        suffix: eos.filter(|_| config["add_eos_token"] == true).into_iter().collect(),
        bos,
        eos,
        ends: Vec::new(),
        model: Model::SentencePieces(model),
        vocabulary,
        strips_space,
    })
}

/// One id or a list of them.
fn ids_in(value: &Json) -> Vec<u32> {
    let one = |value: &Json| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value.as_array() {
        Some(values) => values.iter().filter_map(one).collect(),
        None => one(value).into_iter().collect(),
    }
}

/// The JSON of a file; null where there is no file.
pub(in crate::text) fn read_json(path: &Path) -> Result<Json, TokenizerError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Json::Null),
        Err(source) => return Err(TokenizerError::File { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| TokenizerError::Json { path: path.to_owned(), what: error.to_string() })
}
