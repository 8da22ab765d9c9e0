//! Gemma 3 (arXiv 2503.19786): norms before and after each layer's halves, normalized query and key heads, five
//! sliding-window layers to one global layer with a rotary base and scaling of its own.

use ingle_graph::Activation;

use crate::blocks::{Attention, Blocks};
use crate::rope::Scaling;

/// Declares the model.
pub fn build(m: &mut Blocks<'_>) {
    let global = m.rope();
    let local = m.rope_with(m.config.rope_theta_local, Scaling::None);
    let mut x = m.embed((m.config.hidden as f32).sqrt());
    for l in 0..m.config.layers {
        m.layer(l, x);
        let (rope, window) = if m.config.slides[l] { (local, m.config.window) } else { (global, None) };
        let h = m.norm("attn_norm", x);
        let a = m.attention(h, Attention { rope, qk_norm: true, window });
        let a = m.norm("post_attention_norm", a);
        x = m.wanted(x);
        x = m.add("attn_residual", x, a);
        let h = m.norm("ffn_norm", x);
        let f = m.gated_ffn(h, Activation::GeluTanh);
        let f = m.norm("post_ffw_norm", f);
        x = m.add("ffn_residual", x, f);
    }
    m.head(x);
}
