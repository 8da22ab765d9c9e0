//! One file per model family, built from shared blocks.
//!
//! A family file says what its paper says and nothing else: no device, no dtype, no cache, no batch. What differs from
//! Llama is a few arguments. [`FAMILIES`] is the registry; [`Model::open`] turns a checkpoint into a graph.

pub mod blocks;
pub mod config;
pub mod gemma;
pub mod gemma2;
pub mod gemma3;
pub mod llama;
pub mod mistral;
pub mod names;
pub mod qwen2;
pub mod qwen3;
pub mod rope;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ingle_graph::{Activation, Graph};
use ingle_tensor::json::Object;
use ingle_tensor::{Checkpoint, Source};

pub use blocks::Blocks;
pub use config::Config;

/// What can go wrong while a model is recognized and declared.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No family of the registry answers to this name.
    #[error("architecture {name:?} is not supported{why}; known: {known}")]
    UnknownFamily {
        /// `general.architecture` or `model_type`.
        name: String,
        /// More on it, where more is known.
        why: &'static str,
        /// Supported names of the same key.
        known: String,
    },
    /// A mixture of experts of a family whose dense models run.
    #[error("setting {key}: {experts} experts: this version runs dense models only")]
    Experts {
        /// Key in the file.
        key: String,
        /// How many.
        experts: usize,
    },
    /// A setting is missing or impossible.
    #[error("setting {key}: {what}")]
    Setting {
        /// Key in the file.
        key: String,
        /// What is wrong, with the value.
        what: String,
    },
    /// Another error, with the file it was found in.
    #[error("{}: {reason}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Box<Error>,
    },
    /// The checkpoint failed.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
    /// The graph failed.
    #[error(transparent)]
    Graph(#[from] ingle_graph::Error),
}

impl Error {
    /// Whether nothing is wrong with the files, and this version does not run such a model.
    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::UnknownFamily { .. } | Self::Experts { .. } => true,
            Self::InFile { reason, .. } => reason.is_unsupported(),
            _ => false,
        }
    }

    /// The same error with the file it was found in, where it is about one of its settings.
    fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Tensor(error) => Self::Tensor(error.in_file(path)),
            Self::Setting { .. } | Self::Experts { .. } => {
                Self::InFile { path: path.into(), reason: Box::new(self) }
            }
            Self::InFile { .. } | Self::UnknownFamily { .. } | Self::Graph(_) => self,
        }
    }
}

/// Result of the models crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Which layers of a family have a sliding window, where the file does not list them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sliding {
    /// None by config.json; all if a GGUF file names a window.
    Unless,
    /// All, if there is a window.
    All,
    /// Those from `max_window_layers` on, if `use_sliding_window` says so. GGUF files have no word for it.
    From,
    /// All but every so manieth.
    AllBut(usize),
}

/// A row of the registry: a family's names, and what its files leave unsaid.
#[derive(Debug)]
pub struct Family {
    /// Name for people.
    pub name: &'static str,
    /// `general.architecture` of GGUF files. Where two families share one, the first row reads the file.
    pub gguf: &'static [&'static str],
    /// `model_type` of config.json.
    pub model_types: &'static [&'static str],
    /// Declares the model.
    pub build: fn(&mut Blocks<'_>),
    /// Whether GGUF files of this family keep the interleaved rotary layout.
    pub gguf_interleaved_rope: bool,
    /// Whether a norm follows attention and another the feed-forward layer.
    pub sandwich: bool,
    /// Whether Hugging Face files store norm weights as offsets from one.
    pub norm_offset: bool,
    /// Function of the feed-forward gate where the file names none.
    pub activation: Activation,
    /// Which layers slide.
    pub sliding: Sliding,
    /// Rotary base where the file names none.
    pub rope_theta: f64,
    /// The same for sliding layers, in families where they have a base of their own.
    pub rope_theta_local: Option<f64>,
    /// Cap of attention scores where the file has no such key.
    pub attention_softcap: Option<f64>,
    /// Cap of the logits where the file has no such key.
    pub final_softcap: Option<f64>,
    /// Layers of the family's size whose queries are scaled by hidden / heads: GGUF files do not say so.
    pub scaled_by_width: Option<usize>,
}

/// What most families have in common: the Llama layout.
const LLAMA: Family = Family {
    name: "llama",
    gguf: &["llama"],
    model_types: &["llama"],
    build: llama::build,
    gguf_interleaved_rope: true,
    sandwich: false,
    norm_offset: false,
    activation: Activation::Silu,
    sliding: Sliding::Unless,
    rope_theta: 10_000.0,
    rope_theta_local: None,
    attention_softcap: None,
    final_softcap: None,
    scaled_by_width: None,
};

/// What Gemmas have in common.
const GEMMA: Family = Family {
    name: "gemma",
    gguf: &["gemma"],
    model_types: &["gemma"],
    build: gemma::build,
    gguf_interleaved_rope: false,
    norm_offset: true,
    activation: Activation::GeluTanh,
    ..LLAMA
};

/// Every family: adding one is a file and a row.
pub const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        name: "mistral",
        model_types: &["mistral"],
        build: mistral::build,
        sliding: Sliding::All,
        ..LLAMA
    },
    Family {
        name: "qwen2",
        gguf: &["qwen2"],
        model_types: &["qwen2"],
        build: qwen2::build,
        gguf_interleaved_rope: false,
        sliding: Sliding::From,
        ..LLAMA
    },
    Family {
        name: "qwen3",
        gguf: &["qwen3"],
        model_types: &["qwen3"],
        build: qwen3::build,
        gguf_interleaved_rope: false,
        sliding: Sliding::From,
        ..LLAMA
    },
    GEMMA,
    Family {
        name: "gemma2",
        gguf: &["gemma2"],
        model_types: &["gemma2"],
        build: gemma2::build,
        sandwich: true,
        sliding: Sliding::AllBut(2),
        attention_softcap: Some(50.0),
        final_softcap: Some(30.0),
        scaled_by_width: Some(46),
        ..GEMMA
    },
    Family {
        name: "gemma3",
        gguf: &["gemma3"],
        model_types: &["gemma3_text"],
        build: gemma3::build,
        sandwich: true,
        sliding: Sliding::AllBut(6),
        rope_theta: 1_000_000.0,
        rope_theta_local: Some(10_000.0),
        scaled_by_width: Some(62),
        ..GEMMA
    },
];

/// Whether a reference made from architecture `arch` (`gemma3_text`, `llama_yarn`) can be of a model of `family`: the
/// longest family name that begins it decides, and Mistral's GGUF files say that they are llama.
pub fn answers_to(family: &str, arch: &str) -> bool {
    let named = FAMILIES.iter().filter(|f| arch.starts_with(f.name)).max_by_key(|f| f.name.len());
    named.is_some_and(|named| {
        let shares = |f: &Family| f.name == family && f.gguf.iter().any(|g| named.gguf.contains(g));
        FAMILIES.iter().any(shares)
    })
}

/// A model: its settings and its graph.
#[derive(Clone, Debug)]
pub struct Model {
    /// Settings read from the checkpoint.
    pub config: Config,
    /// The declared graph, before any pass.
    pub graph: Graph,
}

/// What can be said of a checkpoint that may not be whole.
#[derive(Debug)]
pub struct Survey {
    /// Settings read from the checkpoint.
    pub config: Config,
    /// Tensors that are missing, of another shape, or of a type that their use does not allow; a broken setting.
    pub faults: Vec<Error>,
    /// Names of the tensors that the model reads.
    pub tensors: BTreeSet<String>,
}

impl Model {
    /// Recognizes the checkpoint's family, reads its settings and declares its graph.
    ///
    /// # Errors
    /// A GGUF file that is no model, an unknown architecture, a missing setting, or the first tensor that is missing or
    /// of another shape.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        Self::declare(checkpoint).map_err(|error| error.in_file(settings_of(checkpoint)))
    }

    fn declare(checkpoint: &Checkpoint) -> Result<Self> {
        let (family, config) = Self::recognize(checkpoint)?;
        let mut blocks = Blocks::new(checkpoint, &config);
        (family.build)(&mut blocks);
        let graph = blocks.finish()?;
        Ok(Self { config, graph })
    }

    /// Everything about the checkpoint that [`Model::open`] would refuse, and the names of the tensors that a model of its
    /// settings reads.
    ///
    /// # Errors
    /// A file that is no model, an unknown architecture, a missing setting: nothing can be said of tensors then. Of a
    /// folder's files it is said which, while a GGUF file is the one that was asked about.
    pub fn survey(checkpoint: &Checkpoint) -> Result<Survey> {
        let (family, config) = Self::recognize(checkpoint).map_err(|error| match checkpoint.source() {
            Source::Gguf(_) => error,
            Source::SafeTensors { config_path, .. } => error.in_file(config_path),
        })?;
        let mut blocks = Blocks::new(checkpoint, &config);
        (family.build)(&mut blocks);
        let (graph, faults) = blocks.survey();
        let tensors = graph.weights.into_iter().map(|weight| weight.name).collect();
        Ok(Survey { config, faults, tensors })
    }

    /// The family and the settings of a checkpoint.
    fn recognize(checkpoint: &Checkpoint) -> Result<(&'static Family, Config)> {
        checkpoint.require_model()?;
        let family = Self::family(checkpoint)?;
        Ok((family, Config::of(checkpoint, family)?))
    }

    fn family(checkpoint: &Checkpoint) -> Result<&'static Family> {
        let (name, gguf, why) = match checkpoint.source() {
            Source::Gguf(m) => (m.str("general.architecture")?, true, ""),
            Source::SafeTensors { config, config_path, .. } => {
                let config = Object::of(config_path, config)?;
                let why = match config.contains("text_config") {
                    true => ", being the multimodal form: only text models run",
                    false => "",
                };
                (config.require("model_type")?, false, why)
            }
        };
        let names = |f: &Family| if gguf { f.gguf } else { f.model_types };
        FAMILIES.iter().find(|f| names(f).contains(&name)).ok_or_else(|| {
            // A family may go by the name of another: files of mistral say llama.
            let all =
                FAMILIES.iter().enumerate().flat_map(|(i, f)| names(f).iter().map(move |name| (i, f, name)));
            let known = all.map(|(i, f, name)| match FAMILIES[..i].iter().any(|f| names(f).contains(name)) {
                true => format!("{} (as {name})", f.name),
                false => (*name).to_string(),
            });
            let known = known.collect::<Vec<_>>().join(", ");
            Error::UnknownFamily { name: name.to_string(), why, known }
        })
    }
}

/// The file that holds a checkpoint's settings.
fn settings_of(checkpoint: &Checkpoint) -> &Path {
    match checkpoint.source() {
        Source::Gguf(_) => checkpoint.path(),
        Source::SafeTensors { config_path, .. } => config_path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_references() {
        for (family, arch, answers) in [
            ("llama", "llama", true),
            ("llama", "llama_yarn", true),
            ("llama", "mistral", true),
            ("mistral", "mistral", true),
            ("qwen2", "qwen2_swa", true),
            ("gemma3", "gemma3_text", true),
            ("gemma", "gemma3_text", false),
            ("gemma2", "gemma", false),
            ("qwen3", "gemma3_text", false),
            ("llama", "unheard", false),
        ] {
            assert_eq!(answers_to(family, arch), answers, "{family}, {arch}");
        }
    }
}
