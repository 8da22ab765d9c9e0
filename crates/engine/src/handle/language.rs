//! What a model's files say about text: tokenizer, chat template, sampling defaults.

use std::fs;
use std::path::Path;

use ingle_tensor::json::{Document, FromJson, Mismatch};
use ingle_tensor::{Checkpoint, Source};
use serde_json::{Map, Value as Json};

use super::{Error, Result};
use crate::sampler::{Params, Settings};
use crate::text::tokenizer::{Specials, TokenizerError};
use crate::text::{ChatTemplate, Conversation, TemplateError, Tokenizer};

/// How a model reads and writes.
#[derive(Debug)]
pub struct Language {
    tokenizer: Tokenizer,
    /// Compiled, or why it is not: who continues texts needs none.
    template: Option<std::result::Result<ChatTemplate, TemplateError>>,
    /// Names of templates that there are, none of which is the one for a conversation.
    others: Vec<String>,
    defaults: Settings,
}

impl Language {
    /// Reads the metadata of a GGUF file, or the small files of a safetensors folder: `tokenizer.json`,
    /// `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`.
    ///
    /// # Errors
    /// A tokenizer that is missing or of an unknown kind; a damaged file; a key of the wrong type, or a sampling setting
    /// outside its range, by its file and name.
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
                let defaults = in_range(Settings::from_gguf(metadata)?, checkpoint.path())?;
                Self::new(tokenizer, Templates { template, tool_use, names: Vec::new() }, defaults)
            }
            Source::SafeTensors { dir, .. } => {
                let tokenizer = Tokenizer::from_dir(dir)?;
                let path = dir.join("generation_config.json");
                let generation = Document::read_or_empty(&path)?;
                let defaults = in_range(Settings::from_generation_config(&generation.object())?, &path)?;
                Self::new(tokenizer, Templates::in_folder(dir)?, defaults)
            }
        }
    }

    fn new(tokenizer: Tokenizer, templates: Templates, defaults: Settings) -> Result<Self> {
        let (bos, eos) = (tokenizer.spelling(tokenizer.bos()), tokenizer.spelling(tokenizer.eos()));
        let templates = templates.that_render();
        let template = match (templates.template, templates.tool_use) {
            (Some(source), None) => Some(ChatTemplate::new(&source, &bos, &eos)),
            (Some(source), Some(tool_use)) => {
                Some(ChatTemplate::new(&source, &bos, &eos).and_then(|t| t.with_tool_use(&tool_use)))
            }
            (None, _) => None,
        };
        let others = if template.is_none() { templates.names } else { Vec::new() };
        Ok(Self { tokenizer, template, others, defaults })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; a base model has none.
    ///
    /// # Errors
    /// It does not compile, or there was no thread to compile it on.
    pub fn template(&self) -> std::result::Result<Option<&ChatTemplate>, TemplateError> {
        self.template.as_ref().map(|compiled| compiled.as_ref().map_err(Clone::clone)).transpose()
    }

    /// Why a model without [`Language::template`] has none.
    pub fn without_template(&self) -> String {
        match self.others.as_slice() {
            [] => "this model has no chat template (a base model)".into(),
            names => format!("none of this model's chat templates is called default ({})", names.join(", ")),
        }
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
    /// [`Error::NoTemplate`] for a base model; as [`Language::template`]; a template that refuses the conversation.
    pub fn chat(&self, conversation: &Conversation) -> Result<Vec<u32>> {
        let template = self.template()?.ok_or(Error::NoTemplate)?;
        let rendered = template.render(conversation, self.tokenizer.guard())?;
        Ok(self.tokenizer.encode_chat(&rendered)?)
    }
}

/// The model's own settings, from the file at `path`, if all are in their ranges.
fn in_range(settings: Settings, path: &Path) -> Result<Settings> {
    match Params::resolve(&Settings::default(), &settings, usize::MAX) {
        Ok(_) => Ok(settings),
        Err(error) => Err(Error::file(path, error)),
    }
}

/// Sources of a model's templates.
#[derive(Default)]
struct Templates {
    template: Option<String>,
    tool_use: Option<String>,
    /// Of all that have one.
    names: Vec<String>,
}

impl Templates {
    /// Without those that are empty: they would render nothing of any conversation, and stand for none.
    fn that_render(self) -> Self {
        let renders = |source: &String| !source.trim().is_empty();
        Self {
            template: self.template.filter(renders),
            tool_use: self.tool_use.filter(renders),
            names: self.names,
        }
    }

    /// `chat_template.jinja`, else the field `chat_template` of `chat_template.json` or `tokenizer_config.json`: a text,
    /// or a list of texts with names.
    fn in_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let source = fs::read_to_string(&path).map_err(|e| Error::file(&path, e))?;
            return Ok(Self { template: Some(source), ..Self::default() });
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let config = Document::read_or_empty(&dir.join(name))?;
            match config.object().get("chat_template")? {
                Some(Sources::One(source)) => {
                    return Ok(Self { template: Some(source.into()), ..Self::default() });
                }
                Some(Sources::Named(named)) => {
                    let find = |name: &str| named.iter().find(|t| t.0 == name).map(|t| t.1.into());
                    let names = named.iter().map(|t| t.0.to_string()).collect();
                    return Ok(Self { template: find("default"), tool_use: find("tool_use"), names });
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
        let empty = Templates { template: some(" \n"), tool_use: some("t"), names: Vec::new() }.that_render();
        assert_eq!((empty.template, empty.tool_use), (None, some("t")));
        let broken = write(&[("tokenizer_config.json", "{")]).unwrap_err();
        assert!(broken.contains("tokenizer_config.json"), "{broken}");
    }
}
