//! Mistral (arXiv 2310.06825): Llama whose layers all slide, where the file names a window.

use crate::blocks::Blocks;
use crate::llama;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    llama::build(m);
}
