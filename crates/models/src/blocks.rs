//! What families have in common: the words their files are written in. Values are `[tokens, columns]`; `T` tokens enter,
//! and from the last layer's attention on only the `R` wanted rows are computed.

use ingle_graph::op::{AttentionSpec, RopeId, RopeSpec};
use ingle_graph::{Builder, Graph, LOGITS_SPAN, ValueId, WeightId};
use ingle_tensor::Checkpoint;

use crate::{Config, Error, Result};

/// What differs between families' attentions.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Rotary table.
    pub rope: RopeId,
    /// Query and key heads are normalized before rotation.
    pub qk_norm: bool,
    /// Sliding window in tokens.
    pub window: Option<usize>,
}

/// A builder that knows the model's settings and the current layer.
pub struct Blocks<'a> {
    /// Settings.
    pub config: &'a Config,
    builder: Builder<'a>,
    layer: usize,
    error: Option<Error>,
}

impl<'a> Blocks<'a> {
    /// An empty model.
    pub fn new(checkpoint: &'a Checkpoint, config: &'a Config) -> Self {
        Self { config, builder: Builder::new(checkpoint), layer: 0, error: None }
    }

    /// The declared graph.
    ///
    /// # Errors
    /// The first thing that was missing or did not fit.
    pub fn finish(self) -> Result<Graph> {
        match self.error {
            Some(e) => Err(e),
            None => Ok(self.builder.finish()?),
        }
    }

    /// The graph as far as it goes, and everything that was missing or did not fit.
    pub fn survey(self) -> (Graph, Vec<Error>) {
        let (graph, errors) = self.builder.survey();
        (graph, self.error.into_iter().chain(errors.into_iter().map(Error::from)).collect())
    }

    /// The model's rotary embedding.
    pub fn rope(&mut self) -> RopeId {
        self.rope_with(self.config.rope_theta, self.config.rope_scaling.clone())
    }

    /// A rotary embedding with another base or scaling.
    pub fn rope_with(&mut self, theta: f64, scaling: crate::rope::Scaling) -> RopeId {
        let (inv_freq, scale) = scaling.frequencies(theta, self.config.rope_dim).unwrap_or_else(|e| {
            self.error.get_or_insert(e);
            (Vec::new(), 1.0)
        });
        self.builder.rope_table(RopeSpec { style: self.config.rope_style, inv_freq, scale })
    }

    /// The tokens' embeddings, times `scale`.
    pub fn embed(&mut self, scale: f32) -> ValueId {
        let name = self.config.names.global("token_embd.weight");
        self.builder.embed(&name, self.config.vocabulary, self.config.hidden, scale)
    }

    /// Begins layer `layer`, whose input is `x`.
    pub fn layer(&mut self, layer: usize, x: ValueId) {
        self.layer = layer;
        self.builder.set_layer(Some(layer));
        self.builder.tap(&format!("hidden.{layer}"), x);
    }

    /// The layer's sliding window in tokens, if it slides.
    pub fn window(&self) -> Option<usize> {
        self.config.window.filter(|_| self.config.slides[self.layer])
    }

    /// Whether this layer is the last.
    fn last(&self) -> bool {
        self.layer + 1 == self.config.layers
    }

    /// The layer's norm of this name over `len` columns at a time.
    fn norm_of(&mut self, part: &str, x: ValueId, len: usize) -> ValueId {
        let name = self.config.names.layer(self.layer, part, "weight");
        let weight = self.builder.vector(&name, len, self.config.norm_offset);
        self.builder.rms_norm(part, x, weight, self.config.eps)
    }

    /// The layer's norm of this name over whole rows.
    pub fn norm(&mut self, part: &str, x: ValueId) -> ValueId {
        self.norm_of(part, x, self.config.hidden)
    }

    /// The layer's product of this name, with its bias if the file has one.
    pub fn linear(&mut self, part: &str, x: ValueId, rows: usize, cols: usize) -> ValueId {
        let weight = self.builder.matrix(&self.config.names.layer(self.layer, part, "weight"), rows, cols);
        let bias = self.config.names.layer(self.layer, part, "bias");
        let bias: Option<WeightId> = self.builder.has(&bias).then(|| self.builder.vector(&bias, rows, 0.0));
        self.builder.linear(part, x, weight, bias)
    }

    /// Self-attention of normalized `h`, projected back to the residual's width. In the last layer only wanted rows go
    /// on: see [`Blocks::wanted`].
    pub fn attention(&mut self, h: ValueId, how: Attention) -> ValueId {
        let Config { hidden, heads, kv_heads, head_dim, .. } = *self.config;
        let (q_cols, kv_cols) = (heads * head_dim, kv_heads * head_dim);
        let mut q = self.linear("attn_q", h, q_cols, hidden);
        let mut k = self.linear("attn_k", h, kv_cols, hidden);
        let v = self.linear("attn_v", h, kv_cols, hidden);
        if how.qk_norm {
            q = self.norm_of("attn_q_norm", q, head_dim);
            k = self.norm_of("attn_k_norm", k, head_dim);
        }
        let q = self.builder.rope("rope_q", q, how.rope, head_dim);
        let k = self.builder.rope("rope_k", k, how.rope, head_dim);
        let layer = self.builder.kv_layer(kv_heads, head_dim, how.window);
        self.builder.kv_store(layer, k, v);
        let spec = AttentionSpec {
            layer,
            heads,
            kv_heads,
            head_dim,
            scale: self.config.attention_scale,
            window: how.window,
            softcap: self.config.attention_softcap,
        };
        let o = self.builder.attention(q, spec);
        let o = self.wanted(o);
        self.linear("attn_output", o, hidden, q_cols)
    }

    /// `x` itself; in the last layer, its wanted rows.
    pub fn wanted(&mut self, x: ValueId) -> ValueId {
        if self.last() { self.builder.take_rows(x) } else { x }
    }

    /// Gated feed-forward layer.
    pub fn gated_ffn(&mut self, h: ValueId) -> ValueId {
        let Config { hidden, ffn, activation, .. } = *self.config;
        let gate = self.linear("ffn_gate", h, ffn, hidden);
        let up = self.linear("ffn_up", h, ffn, hidden);
        let h = self.builder.glu("ffn_act", activation, gate, up);
        self.linear("ffn_down", h, hidden, ffn)
    }

    /// a + b.
    pub fn add(&mut self, name: &str, a: ValueId, b: ValueId) -> ValueId {
        self.builder.add(name, a, b)
    }

    /// Final norm and output head (the embedding table where the file has no head of its own): the results `logits` and
    /// `peaks`, the largest of each [`LOGITS_SPAN`] of them.
    pub fn head(&mut self, x: ValueId) {
        let Config { hidden, vocabulary, names, .. } = *self.config;
        self.builder.set_layer(None);
        let weight =
            self.builder.vector(&names.global("output_norm.weight"), hidden, self.config.norm_offset);
        let h = self.builder.rms_norm("output_norm", x, weight, self.config.eps);
        self.builder.tap(&format!("hidden.{}", self.config.layers), h);
        let own = names.global("output.weight");
        let name = if self.builder.has(&own) { own } else { names.global("token_embd.weight") };
        let weight = self.builder.matrix(&name, vocabulary, hidden);
        let mut logits = self.builder.linear("output", h, weight, None);
        if let Some(cap) = self.config.final_softcap {
            logits = self.builder.softcap("final_softcap", logits, cap);
        }
        self.builder.output("logits", logits);
        let peaks = self.builder.peaks("peaks", logits, LOGITS_SPAN);
        self.builder.output("peaks", peaks);
    }
}
