//! A tokenizer from a model folder: `tokenizer.json` and the small files beside it.

use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use super::library::{Library, Loaded};
use super::{Model, Parts, Tokenizer, TokenizerError};

impl Tokenizer {
    /// The tokenizer of a model folder. `tokenizer.json` must be there; `tokenizer_config.json`,
    /// `generation_config.json` and `config.json` name the begin and end tokens where they are there.
    ///
    /// # Errors
    /// A file that is missing, damaged, or uses a decoder that is not supported.
    pub fn from_dir(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() && folder.join("tokenizer.model").exists() {
            let name = "tokenizer.model without tokenizer.json".to_owned();
            return Err(TokenizerError::Unsupported { what: "tokenizer file", name });
        }
        let bytes = fs::read(&path).map_err(|source| TokenizerError::File { path: path.clone(), source })?;
        let Loaded { library, vocabulary, added, prefix, suffix, strips_space } =
            Library::load(&bytes, &path)?;

        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let named = |field: &str| {
            // A string, or an object with the flags of an added token.
            let token = &config[field];
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            added.iter().find(|token| token.text == text).map(|token| token.id)
        };
        let generation = read_json(&folder.join("generation_config.json"))?;
        let model = read_json(&folder.join("config.json"))?;
        let (bos, eos) = (named("bos_token"), named("eos_token"));
        let ids = |field: &str| {
            let lists = [&generation[field], &model[field], &model["text_config"][field]];
            lists
                .into_iter()
                .flat_map(ids_in)
                .filter(|&id| (id as usize) < vocabulary.len())
                .collect::<Vec<_>>()
        };
        Ok(Tokenizer::from_parts(Parts {
            bos: bos.or_else(|| ids("bos_token_id").first().copied()),
            eos: eos.or_else(|| ids("eos_token_id").first().copied()),
            ends: ids("eos_token_id"),
            model: Model::Library(Box::new(library)),
            vocabulary,
            added,
            prefix,
            suffix,
            strips_space,
        }))
    }
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
