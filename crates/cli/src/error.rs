//! Everything that can end a command, and the exit code it ends with.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::sys::Signal;

/// Why a command failed: one line that says what, where, and what to do.
#[derive(Debug, Error)]
pub enum Error {
    /// The command line contradicts itself or leaves something out: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// This version cannot do what was asked.
    #[error("{0}")]
    Refused(String),
    /// A comparison was outside its limit; the report has said which.
    #[error("{failed} of {made} comparisons are outside their limits")]
    Differs {
        /// Comparisons outside their limits.
        failed: usize,
        /// Comparisons made.
        made: usize,
    },
    /// A model file is wrong; the report has said how.
    #[error("{problems} problem{} found", if *.problems == 1 { " was" } else { "s were" })]
    Unsound {
        /// Problems reported.
        problems: usize,
    },
    /// Lines of a chat's script failed; each has said why.
    #[error("{failed} line{} of the script failed", if *.failed == 1 { "" } else { "s" })]
    Script {
        /// How many.
        failed: usize,
    },
    /// A signal ended the command, which has cleaned up.
    #[error("{signal}; {left}")]
    Interrupted {
        /// Which.
        signal: Signal,
        /// What is left of the work.
        left: &'static str,
    },
    /// A file of the user's.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file with the wrong content.
    #[error("{}: {what}", .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Standard input or output.
    #[error("standard input or output: {0}")]
    Stream(#[from] io::Error),
    /// The line editor.
    #[error("the line editor: {0}")]
    Editor(#[from] rustyline::error::ReadlineError),
    /// No such model, or it could not be fetched.
    #[error(transparent)]
    Source(#[from] crate::source::Error),
    /// Text in or out.
    #[error(transparent)]
    Text(#[from] ingle_engine::handle::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] ingle_engine::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] ingle_models::Error),
    /// The graph or the device.
    #[error(transparent)]
    Graph(#[from] ingle_graph::Error),
    /// The model file.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
}

/// Result of a command.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wraps an error of the file system.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Error::Io { action, path: path.to_path_buf(), source }
    }

    /// 2 for bad usage, 128 and its number for a signal, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Interrupted { signal, .. }
            | Error::Source(crate::source::Error::Interrupted { signal, .. }) => signal.exit_code(),
            _ => 1,
        }
    }

    /// The message on one line, whatever its parts hold.
    pub fn line(&self) -> String {
        crate::term::plain(&self.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
    }
}
