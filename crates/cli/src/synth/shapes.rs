//! What is synthesized: the shapes of published models, and the types of their weights.
//!
//! Settings are those of the models' own config.json on the Hugging Face hub: HuggingFaceTB/SmolLM2-135M-Instruct,
//! meta-llama/Llama-3.1-8B-Instruct, Qwen/Qwen3-0.6B, Qwen/Qwen3-32B and Qwen/Qwen3-30B-A3B.

use std::str::FromStr;

use super::vocabulary::Words;
use crate::mix::Mix;

/// Shape and settings of a model. Counts are elements unless said otherwise.
#[derive(Clone, Debug)]
pub struct Shape {
    /// First part of the preset's name.
    pub name: &'static str,
    /// The model whose shape it is.
    pub model: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer; with experts, of the dense layer that the settings name and no tensor has.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Rotary base.
    pub rope_theta: f32,
    /// Rotary frequencies are divided as for Llama 3.1, by the tensor `rope_freqs.weight`.
    pub llama3_rope: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// The embedding table is the output matrix.
    pub is_tied: bool,
    /// Query and key heads are normalized.
    pub qk_norm: bool,
    /// The feed-forward layers are mixtures.
    pub experts: Option<Experts>,
    /// Size of the vocabulary in tokens.
    pub vocabulary: usize,
    /// Special tokens and how text is cut.
    pub words: &'static Words,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that run for a token.
    pub used: usize,
    /// Width of an expert.
    pub ffn: usize,
}

/// The shapes that have names.
pub const SHAPES: &[Shape] = &[
    Shape {
        name: "smollm2-135m",
        model: "SmolLM2 135M",
        architecture: "llama",
        layers: 30,
        hidden: 576,
        ffn: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        context: 8192,
        rope_theta: 100_000.0,
        llama3_rope: false,
        eps: 1e-5,
        is_tied: true,
        qk_norm: false,
        experts: None,
        vocabulary: 49_152,
        words: &Words::SMOLLM2,
    },
    Shape {
        name: "llama8b",
        model: "Llama 3.1 8B",
        architecture: "llama",
        layers: 32,
        hidden: 4096,
        ffn: 14_336,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        context: 131_072,
        rope_theta: 500_000.0,
        llama3_rope: true,
        eps: 1e-5,
        is_tied: false,
        qk_norm: false,
        experts: None,
        vocabulary: 128_256,
        words: &Words::LLAMA3,
    },
    Shape {
        name: "qwen3_0_6b",
        model: "Qwen3 0.6B",
        layers: 28,
        hidden: 1024,
        ffn: 3072,
        heads: 16,
        is_tied: true,
        ..QWEN3
    },
    Shape { name: "qwen3_32b", model: "Qwen3 32B", ..QWEN3 },
    Shape {
        name: "qwen3_30b_a3b",
        model: "Qwen3 30B A3B",
        architecture: "qwen3moe",
        layers: 48,
        hidden: 2048,
        ffn: 6144,
        heads: 32,
        kv_heads: 4,
        experts: Some(Experts { count: 128, used: 8, ffn: 768 }),
        ..QWEN3
    },
];

/// Qwen3 32B, and what the others of its family share with it.
const QWEN3: Shape = Shape {
    name: "",
    model: "",
    architecture: "qwen3",
    layers: 64,
    hidden: 5120,
    ffn: 25_600,
    heads: 64,
    kv_heads: 8,
    head_dim: 128,
    context: 40_960,
    rope_theta: 1_000_000.0,
    llama3_rope: false,
    eps: 1e-6,
    is_tied: false,
    qk_norm: true,
    experts: None,
    vocabulary: 151_936,
    words: &Words::QWEN3,
};

/// A shape with a mix, by name: `llama8b-q4_k_m`.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// The model's shape.
    pub shape: &'static Shape,
    /// The types of its weights.
    pub mix: &'static Mix,
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let shape = SHAPES.iter().find(|shape| name.starts_with(shape.name));
        let mix = |shape: &Shape| Mix::named(name[shape.name.len()..].strip_prefix('-')?);
        let found = shape.and_then(|shape| Some(Preset { shape, mix: mix(shape)? }));
        found.ok_or_else(|| format!("a preset is {}", names()))
    }
}

/// What a preset's name can be, in words.
pub fn names() -> String {
    let shapes: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
    format!("one of {}, with -TYPE: {}", shapes.join(", "), crate::mix::names())
}

impl Shape {
    /// Why this build cannot run such a model, if it cannot.
    pub fn declined(&self) -> Option<String> {
        let is_known = ingle_models::FAMILIES.iter().any(|f| f.gguf.contains(&self.architecture));
        let why = match self.experts {
            Some(_) => "mixture-of-experts models do not run yet",
            None => "this architecture does not run yet",
        };
        (!is_known).then(|| format!("{} is to inspect and check only: {why}", self.name))
    }
}

/// Which presets this build can run, in words.
pub fn which_run() -> String {
    let runs: Vec<&str> = SHAPES.iter().filter(|s| s.declined().is_none()).map(|s| s.name).collect();
    let declined = SHAPES.iter().filter_map(Shape::declined);
    [format!("This build runs {}", runs.join(", "))]
        .into_iter()
        .chain(declined)
        .collect::<Vec<_>>()
        .join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::MIXES;

    #[test]
    fn presets_by_name() {
        for shape in SHAPES {
            for mix in MIXES {
                let preset: Preset = format!("{}-{}", shape.name, mix.name).parse().unwrap();
                assert_eq!((preset.shape.name, preset.mix.name), (shape.name, mix.name));
            }
        }
        for name in ["", "llama8b", "llama8b-", "llama8b-q9", "llama8bq4_0", "gpt-f16", "llama8b-q4_0 "] {
            let said = name.parse::<Preset>().expect_err(name);
            assert!(said.contains("qwen3_30b_a3b, with -TYPE: q4_k_m, q8_0"), "{said}");
        }
    }

    #[test]
    fn what_does_not_run_is_said() {
        let said = which_run();
        assert!(
            said.starts_with("This build runs smollm2-135m, llama8b, qwen3_0_6b, qwen3_32b; qwen3_30b_a3b"),
            "{said}"
        );
        assert!(said.ends_with("inspect and check only: mixture-of-experts models do not run yet"), "{said}");
    }
}
