//! The one error type of this crate: what was found, where, the limit, and what to do.

use std::path::{Path, PathBuf};

use crate::DType;

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file, a key or a tensor could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "open", "map", "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// What a model is written to refused.
    #[error("cannot write: {0}")]
    Write(std::io::Error),
    /// A file came to be there while another of its name was written.
    #[error("{} came to be there while it was written, and stays as it is", path.display())]
    Taken {
        /// The name.
        path: PathBuf,
    },
    /// Another error, with the file it was found in.
    #[error("{}: {reason}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Box<Error>,
    },
    /// Another error, with the tensor it was found in.
    #[error("tensor {}: {reason}", shown(name))]
    InTensor {
        /// The tensor's name in the file.
        name: String,
        /// What is wrong with it.
        reason: Box<Error>,
    },
    /// The first bytes are of no known model format.
    #[error("not a GGUF or safetensors file (it begins with {found}); {hint}")]
    NotAModel {
        /// The first bytes, printable.
        found: String,
        /// What to do.
        hint: &'static str,
    },
    /// A GGUF version that is not read.
    #[error("GGUF version {found} is not supported; versions 2 and 3 are: convert the model again")]
    Version {
        /// The version field.
        found: u32,
    },
    /// A GGUF written for a big-endian machine.
    #[error(
        "big-endian GGUF (version field {found:#010x}) is not supported; convert the model for little-endian"
    )]
    BigEndian {
        /// The version field as read, little-endian.
        found: u32,
    },
    /// A length or count that reaches past the end of the file.
    #[error(
        "{what} at byte {offset} needs {needed} bytes, but {remaining} remain in the file: it is cut short or damaged"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where, in bytes from the start of the file.
        offset: u64,
        /// Bytes that it would take, saturated.
        needed: u64,
        /// Bytes that are there.
        remaining: u64,
    },
    /// A header that contradicts itself or its format.
    #[error("{0}")]
    Header(String),
    /// Files that belong together and are not: parts, shards, a config. The message says what to do.
    #[error("{0}")]
    Apart(String),
    /// A metadata key with an unusable value.
    #[error("metadata key {}: {problem}", shown(key))]
    Key {
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A required metadata key is absent.
    #[error("metadata key {} is missing; this model needs it", shown(key))]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata key holds another type than its meaning asks for.
    #[error("metadata key {} is {found}, wanted {wanted}", shown(key))]
    KeyType {
        /// The key.
        key: String,
        /// The type in the file, with the value where it does not fit.
        found: String,
        /// The type asked for.
        wanted: &'static str,
    },
    /// A key of a JSON file holds another type than its meaning asks for.
    #[error("setting {}: want {wanted}, found {found}", plain(key))]
    Setting {
        /// The key, with those that lead to it.
        key: String,
        /// The type asked for, in words.
        wanted: String,
        /// What is there.
        found: String,
    },
    /// A required tensor is absent.
    #[error("tensor {} is missing; the file has {count} tensors", shown(name))]
    MissingTensor {
        /// The name asked for.
        name: String,
        /// How many tensors there are.
        count: usize,
    },
    /// An element type that this version does not read.
    #[error("element type {found} is not supported; known types are {}", DType::names())]
    UnknownType {
        /// The type as the file gives it, with its public name if it has one.
        found: String,
    },
    /// A scale that says "not a number".
    #[error(
        "block {block} has the scale code {code:#04x}, which means \"not a number\" in {dtype}: the file is damaged, or its quantization failed"
    )]
    ScaleCode {
        /// The element type.
        dtype: DType,
        /// Which block of the tensor.
        block: usize,
        /// The code.
        code: u8,
    },
    /// A row that blocks cannot tile.
    #[error("rows of {cols} values cannot be stored as {dtype}, whose blocks hold {}", dtype.block_len())]
    RowLength {
        /// The element type.
        dtype: DType,
        /// Values in a row.
        cols: usize,
    },
    /// A shape whose size overflows.
    #[error("shape {shape:?} of {dtype} does not fit in 63 bits of bytes")]
    TooLarge {
        /// The element type.
        dtype: DType,
        /// The shape, outermost first.
        shape: Vec<usize>,
    },
}

impl Error {
    /// The same error with the file it was found in.
    pub fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Io { .. } | Self::Taken { .. } | Self::InFile { .. } => self,
            reason => Self::InFile { path: path.into(), reason: Box::new(reason) },
        }
    }

    /// The same error with the tensor it was found in.
    pub fn in_tensor(self, name: &str) -> Self {
        Self::InTensor { name: name.into(), reason: Box::new(self) }
    }

    /// The same error, or this reason where the file that could not be opened is not there.
    pub(crate) fn or_missing(self, reason: impl FnOnce() -> String) -> Self {
        match self {
            Self::Io { path, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Self::Apart(reason()).in_file(&path)
            }
            other => other,
        }
    }

    /// Whether the message itself says what to do, or needs nobody to.
    pub fn says_what_to_do(&self) -> bool {
        match self {
            Self::InFile { reason, .. } | Self::InTensor { reason, .. } => reason.says_what_to_do(),
            Self::Io { .. } | Self::NotAModel { .. } | Self::Version { .. } | Self::BigEndian { .. } => true,
            Self::Apart(_) | Self::UnknownType { .. } => true,
            _ => false,
        }
    }

    /// A key whose value is not what a reader needs, and why.
    pub fn key(key: &str, problem: impl Into<String>) -> Self {
        Self::Key { key: key.into(), problem: problem.into() }
    }
}

/// A name from a file, quoted, escaped and cut: files may hold control characters and megabyte-long names.
fn shown(name: &str) -> String {
    const LIMIT: usize = 120;
    match name.char_indices().nth(LIMIT) {
        None => format!("{name:?}"),
        Some((end, _)) => format!("{:?}... ({} bytes)", &name[..end], name.len()),
    }
}

/// A key from a file: as it is where it is short and printable, else as [`shown`].
fn plain(key: &str) -> String {
    let is_plain = key.len() <= 120 && key.chars().all(|c| c.is_ascii_graphic());
    if is_plain { key.to_string() } else { shown(key) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_cut() {
        assert_eq!(shown("a\u{1b}[31m"), r#""a\u{1b}[31m""#);
        let long = "é".repeat(1000);
        assert_eq!(shown(&long), format!("{:?}... (2000 bytes)", "é".repeat(120)));
    }

    #[test]
    fn a_file_is_named_once() {
        let error = Error::Version { found: 1 }.in_file(Path::new("a.gguf")).in_file(Path::new("b.gguf"));
        assert!(error.to_string().starts_with("a.gguf: GGUF version 1"), "{error}");
    }
}
