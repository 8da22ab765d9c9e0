//! Tensor names of the two worlds. Families speak GGUF names; this file translates.

/// Whose names a checkpoint uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
}

/// Names of one checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Names {
    /// Whose names.
    pub style: Style,
    /// The family has a norm after attention and one after the feed-forward layer (Gemma): Hugging Face then calls the
    /// norm before the feed-forward layer by another name.
    pub sandwich: bool,
}

impl Names {
    /// A tensor outside the layers, by its GGUF name.
    pub fn global(&self, gguf: &str) -> String {
        match (self.style, gguf) {
            (Style::Gguf, name) => name.to_string(),
            (_, "token_embd.weight") => "model.embed_tokens.weight".into(),
            (_, "output_norm.weight") => "model.norm.weight".into(),
            (_, "output.weight") => "lm_head.weight".into(),
            (_, name) => name.to_string(),
        }
    }

    /// The layer that a tensor's name puts it in.
    pub fn layer_of(&self, name: &str) -> Option<usize> {
        let prefix = if self.style == Style::Gguf { "blk." } else { "model.layers." };
        name.strip_prefix(prefix)?.split_once('.')?.0.parse().ok()
    }

    /// A tensor of a layer: `part` is the GGUF name without its prefix and suffix (`attn_q`), `kind` is `weight` or
    /// `bias`.
    pub fn layer(&self, layer: usize, part: &str, kind: &str) -> String {
        if self.style == Style::Gguf {
            return format!("blk.{layer}.{part}.{kind}");
        }
        let part = match part {
            "attn_norm" => "input_layernorm",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "post_attention_norm" => "post_attention_layernorm",
            "ffn_norm" if self.sandwich => "pre_feedforward_layernorm",
            "ffn_norm" => "post_attention_layernorm",
            "post_ffw_norm" => "post_feedforward_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            other => other,
        };
        format!("model.layers.{layer}.{part}.{kind}")
    }
}
