//! One file per model family, built from shared blocks.
//!
//! A family file says what its paper says and nothing else: no device, no dtype, no cache, no batch. What differs from
//! Llama is a few arguments. [`FAMILIES`] is the registry; [`Model::open`] turns a checkpoint into a graph.

pub mod blocks;
pub mod config;
pub mod gemma3;
pub mod llama;
pub mod names;
pub mod qwen2;
pub mod qwen3;
pub mod rope;

use ingle_graph::Graph;
use ingle_tensor::{Checkpoint, Source};

pub use blocks::Blocks;
pub use config::Config;

/// What can go wrong while a model is recognized and declared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No family of the registry answers to this name.
    #[error("architecture {name:?} is not supported; known: {known}")]
    UnknownFamily {
        /// `general.architecture` or `model_type`.
        name: String,
        /// Supported names.
        known: String,
    },
    /// A setting is missing or impossible.
    #[error("setting {key}: {what}")]
    Setting {
        /// Key in the file.
        key: String,
        /// What is wrong, with the value.
        what: String,
    },
    /// The checkpoint failed.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
    /// The graph failed.
    #[error(transparent)]
    Graph(#[from] ingle_graph::Error),
}

/// Result of the models crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A row of the registry.
#[derive(Debug)]
pub struct Family {
    /// Name for people.
    pub name: &'static str,
    /// `general.architecture` of GGUF files.
    pub gguf: &'static [&'static str],
    /// `model_type` of config.json.
    pub model_types: &'static [&'static str],
    /// Whether GGUF files of this family keep the interleaved rotary layout.
    pub gguf_interleaved_rope: bool,
    /// Declares the model.
    pub build: fn(&mut Blocks<'_>),
}

/// Every family: adding one is a file and a row.
pub const FAMILIES: &[Family] = &[
    Family {
        name: "llama",
        gguf: &["llama"],
        model_types: &["llama"],
        gguf_interleaved_rope: true,
        build: llama::build,
    },
    Family {
        name: "qwen2",
        gguf: &["qwen2"],
        model_types: &["qwen2"],
        gguf_interleaved_rope: false,
        build: qwen2::build,
    },
    Family {
        name: "qwen3",
        gguf: &["qwen3"],
        model_types: &["qwen3"],
        gguf_interleaved_rope: false,
        build: qwen3::build,
    },
    Family {
        name: "gemma3",
        gguf: &["gemma3"],
        model_types: &["gemma3_text"],
        gguf_interleaved_rope: false,
        build: gemma3::build,
    },
];

/// A model: its settings and its graph.
#[derive(Clone, Debug)]
pub struct Model {
    /// Settings read from the checkpoint.
    pub config: Config,
    /// The declared graph, before any pass.
    pub graph: Graph,
}

impl Model {
    /// Recognizes the checkpoint's family, reads its settings and declares its graph.
    ///
    /// # Errors
    /// A GGUF file that is no model, an unknown architecture, a missing setting, or the first tensor that is missing or of another shape.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.require_model()?;
        let (name, gguf) = match checkpoint.source() {
            Source::Gguf(m) => (m.str("general.architecture")?.to_string(), true),
            Source::SafeTensors { config, .. } => {
                let name = config.get("model_type").and_then(|v| v.as_str()).ok_or_else(|| {
                    Error::Setting { key: "model_type".into(), what: "config.json has no such string".into() }
                })?;
                (name.to_string(), false)
            }
        };
        let names = |f: &Family| if gguf { f.gguf } else { f.model_types };
        let family = FAMILIES.iter().find(|f| names(f).contains(&name.as_str())).ok_or_else(|| {
            let known: Vec<_> = FAMILIES.iter().map(|f| f.name).collect();
            Error::UnknownFamily { name: name.clone(), known: known.join(", ") }
        })?;
        let config = Config::read(checkpoint, family)?;
        let mut blocks = Blocks::new(checkpoint, &config);
        (family.build)(&mut blocks);
        let graph = blocks.finish()?;
        Ok(Self { config, graph })
    }
}
