//! The language models are written in and devices run.
//!
//! A model declares a [`Graph`] once, through a [`Builder`], with symbolic row counts. [`passes::compile`] turns the
//! graph into a [`Program`] for one [`PlanKey`]; a [`Backend`] runs programs. [`mod@reference`] is the scalar interpreter
//! that defines every op's bits; every other backend is compared with it.

pub mod amx3;
pub mod backend;
pub mod builder;
pub mod dump;
pub mod math;
pub mod mma;
pub mod op;
pub mod options;
pub mod passes;
pub mod program;
pub mod quantize;
pub mod reference;
pub mod sample;
pub mod split;
pub mod verify;

pub use backend::{Backend, Inputs, KvInputs, KvPlan, Prepared, Profile, StepTime};
pub use builder::{Builder, Graph};
pub use op::{Activation, AttentionSpec, LinearPart, Node, Op, RopeSpec, Rows, ValueId, ValueType, WeightId};
pub use options::{Activations, Bucket, FloatArithmetic, KvType, Numerics, PlanKey, PlanOptions};
pub use program::{KvGroup, KvLayer, Program, Segment, Slot, Step};
pub use sample::Sampling;

/// The version of the numeric contract (NUMERICS.md). It enters every prefix-cache key: results of different versions
/// are never mixed.
pub const CONTRACT_VERSION: u32 = 3;

/// Keys per attention chunk, by absolute position (NUMERICS.md section 3).
pub const ATTENTION_CHUNK: usize = 256;

/// Positions per KV page; divides [`ATTENTION_CHUNK`].
pub const PAGE: usize = 32;

/// Neighbouring logits of which a model's result `peaks` holds the largest, so that who chooses a token need not look at
/// all of them.
pub const LOGITS_SPAN: usize = 1024;

/// What can go wrong while a graph is built, compiled, loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The graph breaks a rule of the language; names the pass after which it was found.
    #[error("graph check failed after {pass}: node {node}: {what}")]
    Verify {
        /// Pass after which the check ran.
        pass: &'static str,
        /// Name of the offending node.
        node: String,
        /// The rule that was broken, with the numbers.
        what: String,
    },
    /// A weight cannot serve the op that asks for it.
    #[error("weight {name}: {what}")]
    Weight {
        /// Tensor name in the file.
        name: String,
        /// What is wrong, with the numbers.
        what: String,
    },
    /// The step's inputs do not fit the program.
    #[error("step inputs: {0}")]
    Inputs(String),
    /// The device lacks something the program needs.
    #[error("device {device}: {what}")]
    Device {
        /// Device name.
        device: String,
        /// What is missing and what to do.
        what: String,
    },
    /// The model file failed while weights were read from it.
    #[error(transparent)]
    Tensor(#[from] ingle_tensor::Error),
}

/// Result of the graph crate.
pub type Result<T> = std::result::Result<T, Error>;
