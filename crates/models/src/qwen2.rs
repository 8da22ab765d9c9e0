//! Qwen2 (arXiv 2407.10671): Llama with biases on query, key and value, which the file brings; its upper layers may slide.

use crate::blocks::Blocks;
use crate::llama;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    llama::build(m);
}
