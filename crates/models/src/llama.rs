//! Llama (arXiv 2302.13971; grouped heads from 2307.09288): pre-norm attention and a SiLU-gated feed-forward layer.

use ingle_graph::Activation;

use crate::blocks::{Attention, Blocks};

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    pre_norm(m, false);
}

/// The Llama layout, which Qwen shares but for its heads.
pub fn pre_norm(m: &mut Blocks<'_>, qk_norm: bool) {
    let rope = m.rope();
    let mut x = m.embed(1.0);
    for l in 0..m.config.layers {
        m.layer(l, x);
        let h = m.norm("attn_norm", x);
        let window = m.config.window.filter(|_| m.config.slides[l]);
        let a = m.attention(h, Attention { rope, qk_norm, window });
        x = m.wanted(x);
        x = m.add("attn_residual", x, a);
        let h = m.norm("ffn_norm", x);
        let f = m.gated_ffn(h, Activation::Silu);
        x = m.add("ffn_residual", x, f);
    }
    m.head(x);
}
