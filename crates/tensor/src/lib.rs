//! What a tensor is and where its bytes are: dtypes, quantization formats, GGUF, safetensors, checkpoints.
//!
//! The room every other one stands on. It turns a path into named byte ranges and says how the bytes of a
//! range become numbers; it knows no model, no device and no arithmetic beyond decoding and encoding a row.
//!
//! - [`dtype`]: the element types, one table row each.
//! - [`quant`]: the block formats, one file each.
//! - [`gguf`], [`safetensors`]: the two file formats, read with every length checked before it is used.
//! - [`json`]: the small files beside safetensors, read key by key with a type.
//! - [`checkpoint`]: both behind one face, name → dtype, shape, byte range.

pub mod bytes;
pub mod checkpoint;
pub mod dtype;
mod error;
pub mod gguf;
pub mod json;
pub mod quant;
pub mod safetensors;

pub use bytes::Bytes;
pub use checkpoint::{Checkpoint, Gap, Source, TensorInfo};
pub use dtype::DType;
pub use error::{Error, Result};
