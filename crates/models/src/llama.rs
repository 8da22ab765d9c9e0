//! Llama (arXiv 2302.13971; grouped heads from 2307.09288): pre-norm attention and a SiLU-gated feed-forward layer.

use ingle_graph::ValueId;

use crate::blocks::{Attention, Blocks};

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let x = m.embed(1.0);
    pre_norm(m, x, false);
}

/// The Llama layout over embeddings `x`, which Mistral, Qwen and the first Gemma share.
pub fn pre_norm(m: &mut Blocks<'_>, mut x: ValueId, qk_norm: bool) {
    let rope = m.rope();
    for l in 0..m.config.layers {
        m.layer(l, x);
        let h = m.norm("attn_norm", x);
        let a = m.attention(h, Attention { rope, qk_norm, window: m.window() });
        x = m.wanted(x);
        x = m.add("attn_residual", x, a);
        let h = m.norm("ffn_norm", x);
        let f = m.gated_ffn(h);
        x = m.add("ffn_residual", x, f);
    }
    m.head(x);
}
