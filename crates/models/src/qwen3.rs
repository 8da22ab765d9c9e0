//! Qwen3 (arXiv 2505.09388): Llama whose query and key heads are normalized before rotation.

use crate::blocks::Blocks;
use crate::llama;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let x = m.embed(1.0);
    llama::pre_norm(m, x, true);
}
