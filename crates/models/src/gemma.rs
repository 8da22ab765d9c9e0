//! Gemma (arXiv 2403.08295): Llama with a GELU gate, norm weights stored as offsets from one, and scaled embeddings.

use ingle_graph::ValueId;

use crate::blocks::Blocks;
use crate::llama;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let x = embed(m);
    llama::pre_norm(m, x, false);
}

/// Embeddings times the root of their width, in f32. (A model that computes in bf16 rounds the root to bf16 as well;
/// this one computes in f32.)
pub fn embed(m: &mut Blocks<'_>) -> ValueId {
    m.embed((m.config.hidden as f32).sqrt())
}
