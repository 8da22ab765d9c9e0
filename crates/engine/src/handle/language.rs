//! What a model's files say about text: tokenizer, chat template, sampling defaults.

use std::fs;
use std::path::Path;

use ingle_tensor::json::{Document, FromJson, Mismatch};
use ingle_tensor::{Checkpoint, Source};
use serde_json::{Map, Value as Json};

use super::{Error, Result};
use crate::sampler::Settings;
use crate::text::tokenizer::{Specials, TokenizerError};
use crate::text::{ChatTemplate, Conversation, Tokenizer};

/// How a model reads and writes.
#[derive(Debug)]
pub struct Language {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    defaults: Settings,
}

impl Language {
    /// Reads the metadata of a GGUF file, or the small files of a safetensors folder: `tokenizer.json`,
    /// `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`.
    ///
    /// # Errors
    /// A tokenizer that is missing or of an unknown kind; a template that does not compile; a damaged file; a key of the
    /// wrong type, by its file and name.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        Self::read(checkpoint).map_err(|error| match error {
            Error::Tensor(error) | Error::Tokenizer(TokenizerError::Key(error)) => {
                Error::Tensor(error.in_file(checkpoint.path()))
            }
            other => other,
        })
    }

    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.source() {
            Source::Gguf(metadata) => {
                let tokenizer = Tokenizer::from_gguf(metadata)?;
                let text = |key| metadata.str_opt(key);
                let template = text("tokenizer.chat_template")?.map(String::from);
                let tool_use = text("tokenizer.chat_template.tool_use")?.map(String::from);
                let defaults = Settings::from_gguf(metadata)?;
                Self::new(tokenizer, Templates { template, tool_use }, defaults)
            }
            Source::SafeTensors { dir, .. } => {
                let tokenizer = Tokenizer::from_dir(dir)?;
                let generation = Document::read_or_empty(&dir.join("generation_config.json"))?;
                let defaults = Settings::from_generation_config(&generation.object())?;
                Self::new(tokenizer, Templates::in_folder(dir)?, defaults)
            }
        }
    }

    fn new(tokenizer: Tokenizer, templates: Templates, defaults: Settings) -> Result<Self> {
        let (bos, eos) = (tokenizer.spelling(tokenizer.bos()), tokenizer.spelling(tokenizer.eos()));
        let templates = templates.that_render();
        let template = match (templates.template, templates.tool_use) {
            (Some(source), None) => Some(ChatTemplate::new(&source, &bos, &eos)?),
            (Some(source), Some(tool_use)) => {
                Some(ChatTemplate::new(&source, &bos, &eos)?.with_tool_use(&tool_use)?)
            }
            (None, _) => None,
        };
        Ok(Self { tokenizer, template, defaults })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; a base model has none.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The model's own sampling settings.
    pub fn defaults(&self) -> &Settings {
        &self.defaults
    }

    /// Tokens of a text to be continued as it is; spellings of special tokens in it are those tokens.
    ///
    /// # Errors
    /// A text that cannot be tokenized.
    pub fn completion(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_prompt(text, Specials::Parse)?)
    }

    /// Tokens of a conversation under the model's template; spellings of special tokens in messages stay text.
    ///
    /// # Errors
    /// [`Error::NoTemplate`] for a base model; a template that refuses the conversation.
    pub fn chat(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or(Error::NoTemplate)?;
        let rendered = template.render(conversation, self.tokenizer.guard())?;
        Ok(self.tokenizer.encode_chat(&rendered)?)
    }
}

/// Sources of a model's templates.
#[derive(Default)]
struct Templates {
    template: Option<String>,
    tool_use: Option<String>,
}

impl Templates {
    /// Without those that are empty: they would render nothing of any conversation, and stand for none.
    fn that_render(self) -> Self {
        let renders = |source: &String| !source.trim().is_empty();
        Self { template: self.template.filter(renders), tool_use: self.tool_use.filter(renders) }
    }

    /// `chat_template.jinja`, else the field `chat_template` of `chat_template.json` or `tokenizer_config.json`: a text,
    /// or a list of texts with names.
    fn in_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let source = fs::read_to_string(&path).map_err(|e| Error::file(&path, e))?;
            return Ok(Self { template: Some(source), tool_use: None });
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let config = Document::read_or_empty(&dir.join(name))?;
            match config.object().get("chat_template")? {
                Some(Sources::One(source)) => {
                    return Ok(Self { template: Some(source.into()), tool_use: None });
                }
                Some(Sources::Named(named)) => {
                    let find = |name: &str| named.iter().find(|t| t.0 == name).map(|t| t.1.into());
                    return Ok(Self { template: find("default"), tool_use: find("tool_use") });
                }
                None => {}
            }
        }
        Ok(Self::default())
    }
}

/// The field `chat_template` of a JSON file.
enum Sources<'a> {
    One(&'a str),
    /// Name and text of each.
    Named(Vec<(&'a str, &'a str)>),
}

impl<'a> FromJson<'a> for Sources<'a> {
    fn wanted() -> String {
        "a text, or a list of objects with \"name\" and \"template\"".into()
    }

    fn from_json(value: &'a Json) -> std::result::Result<Self, Mismatch> {
        let entries = match value {
            Json::String(source) => return Ok(Self::One(source)),
            Json::Array(entries) => entries.iter().enumerate(),
            _ => return Err(Mismatch::of::<Self>(value)),
        };
        let named = entries.map(|(i, entry)| {
            let fields = <&Map<String, Json>>::from_json(entry).map_err(|m| m.within(&format!("[{i}]")))?;
            let text = |field: &str| {
                let value = fields.get(field).unwrap_or(&Json::Null);
                <&str>::from_json(value).map_err(|m| m.within(&format!("[{i}].{field}")))
            };
            Ok((text("name")?, text("template")?))
        });
        named.collect::<std::result::Result<_, _>>().map(Self::Named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ggml-org/llama.cpp#5628, mudler/vllm.cpp#2077, huggingface/transformers.js#1662.
    #[test]
    fn llama_cpp_5628_templates_are_found_where_folders_keep_them() {
        let write = |files: &[(&str, &str)]| {
            let dir = tempfile::tempdir().unwrap();
            files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
            let found = Templates::in_folder(dir.path()).map(|t| (t.template, t.tool_use));
            found.map_err(|e| e.to_string())
        };
        let some = |text: &str| Some(text.to_string());
        assert_eq!(write(&[]), Ok((None, None)));
        assert_eq!(write(&[("chat_template.jinja", "a")]), Ok((some("a"), None)));
        assert_eq!(write(&[("tokenizer_config.json", r#"{"chat_template": "b"}"#)]), Ok((some("b"), None)));
        assert_eq!(write(&[("tokenizer_config.json", r#"{"bos_token": "x"}"#)]), Ok((None, None)));
        assert_eq!(write(&[("chat_template.json", r#"{"chat_template": "c"}"#)]), Ok((some("c"), None)));
        let named = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        assert_eq!(write(&[("tokenizer_config.json", named)]), Ok((some("d"), some("t"))));
        let empty = Templates { template: some(" \n"), tool_use: some("t") }.that_render();
        assert_eq!((empty.template, empty.tool_use), (None, some("t")));
        let broken = write(&[("tokenizer_config.json", "{")]).unwrap_err();
        assert!(broken.contains("tokenizer_config.json"), "{broken}");
    }
}
