//! Gemma 2 (arXiv 2408.00118): norms before and after each layer's halves, every other layer slides, attention scores
//! and logits are capped.

use ingle_graph::op::RopeId;

use crate::blocks::{Attention, Blocks};
use crate::gemma;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let rope = m.rope();
    sandwich(m, rope, rope, false);
}

/// The layout Gemma 3 shares: layers that slide rotate by `local`, the others by `global`.
pub fn sandwich(m: &mut Blocks<'_>, global: RopeId, local: RopeId, qk_norm: bool) {
    let mut x = gemma::embed(m);
    for l in 0..m.config.layers {
        m.layer(l, x);
        let rope = if m.config.slides[l] { local } else { global };
        let h = m.norm("attn_norm", x);
        let a = m.attention(h, Attention { rope, qk_norm, window: m.window() });
        let a = m.norm("post_attention_norm", a);
        x = m.wanted(x);
        x = m.add("attn_residual", x, a);
        let h = m.norm("ffn_norm", x);
        let f = m.gated_ffn(h);
        let f = m.norm("post_ffw_norm", f);
        x = m.add("ffn_residual", x, f);
    }
    m.head(x);
}
