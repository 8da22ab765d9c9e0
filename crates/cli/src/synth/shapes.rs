//! What is synthesized: the shapes of published models, and the types of their weights.
//!
//! Settings are those of the models' own config.json on the Hugging Face hub: HuggingFaceTB/SmolLM2-135M-Instruct,
//! meta-llama/Llama-3.1-8B-Instruct, Qwen/Qwen3-0.6B, Qwen/Qwen3-32B and Qwen/Qwen3-30B-A3B.

use std::str::FromStr;

use ingle_tensor::DType;

use super::vocabulary::Words;

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

/// Which types the matrices have. Norms, routers and rotary factors are always f32.
#[derive(Debug)]
pub struct Mix {
    /// Last part of the preset's name.
    pub name: &'static str,
    /// The type of every matrix, but for what [`Mix::dtype`] says.
    base: DType,
    /// Some matrices get more bits, as in llama.cpp's Q4_K_M.
    is_mixed: bool,
    /// `general.file_type`, as llama.cpp numbers them.
    pub file_type: u32,
}

/// The mixes that have names: plain types, and Q4_K_M.
pub const MIXES: &[Mix] = &[
    Mix { name: "q4_k_m", base: DType::Q4K, is_mixed: true, file_type: 15 },
    plain("q8_0", DType::Q8_0, 7),
    plain("q4_0", DType::Q4_0, 2),
    plain("q4_1", DType::Q4_1, 3),
    plain("q5_k", DType::Q5K, 16),
    plain("q6_k", DType::Q6K, 18),
    plain("iq4_xs", DType::IQ4XS, 30),
    plain("f16", DType::F16, 1),
    plain("bf16", DType::BF16, 32),
    plain("f32", DType::F32, 0),
];

const fn plain(name: &'static str, base: DType, file_type: u32) -> Mix {
    Mix { name, base, is_mixed: false, file_type }
}

/// What a matrix is for, as far as a mix cares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The output matrix, or the embedding table that serves as one.
    Output,
    /// The values of attention or the way out of the feed-forward layer, in this layer of so many.
    Sensitive {
        /// Which layer.
        layer: usize,
        /// Layers in all.
        layers: usize,
    },
    /// Any other.
    Other,
}

impl Mix {
    /// The type of a matrix whose rows have `cols` values. Q4_K_M has Q6_K for the output matrix and for half of the
    /// sensitive ones. Rows that blocks do not tile get a near type of smaller blocks, as in llama.cpp.
    pub fn dtype(&self, role: Role, cols: usize) -> DType {
        let gets_more = match role {
            Role::Output => true,
            Role::Sensitive { layer, layers } => more_bits(layer, layers),
            Role::Other => false,
        };
        let wanted = if self.is_mixed && gets_more { DType::Q6K } else { self.base };
        let smaller = match wanted {
            DType::Q4K => DType::Q5_0,
            DType::Q5K => DType::Q5_1,
            DType::Q6K => DType::Q8_0,
            DType::IQ4XS => DType::IQ4NL,
            _ => DType::F16,
        };
        let tiles = |dtype: &DType| cols.is_multiple_of(dtype.block_len());
        [wanted, smaller].into_iter().find(tiles).unwrap_or(DType::F16)
    }
}

/// The first and the last eighth of the layers, and every third between.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

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
        let mix = |shape: &Shape| {
            let mix = name[shape.name.len()..].strip_prefix('-')?;
            MIXES.iter().find(|known| known.name == mix)
        };
        let found = shape.and_then(|shape| Some(Preset { shape, mix: mix(shape)? }));
        found.ok_or_else(|| format!("a preset is {}", names()))
    }
}

/// What a preset's name can be, in words.
pub fn names() -> String {
    let list = |names: Vec<&str>| names.join(", ");
    let shapes = list(SHAPES.iter().map(|shape| shape.name).collect());
    format!("one of {shapes}, with -TYPE: {}", list(MIXES.iter().map(|mix| mix.name).collect()))
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

    /// The layers of Qwen3 0.6B to which Q4_K_M gives more bits: 14 of 28.
    #[test]
    fn half_of_the_sensitive_matrices_get_more_bits() {
        let layers: Vec<usize> = (0..28).filter(|&layer| more_bits(layer, 28)).collect();
        assert_eq!(layers, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]);
        let mix = &MIXES[0];
        let role = |layer| Role::Sensitive { layer, layers: 28 };
        for (role, cols, want) in [
            (Role::Other, 1024, DType::Q4K),
            (role(3), 1024, DType::Q4K),
            (role(5), 1024, DType::Q6K),
            (Role::Output, 1024, DType::Q6K),
            (Role::Other, 576, DType::Q5_0),
            (role(0), 576, DType::Q8_0),
            (Role::Output, 576, DType::Q8_0),
            (Role::Other, 100, DType::F16),
        ] {
            assert_eq!(mix.dtype(role, cols), want, "{role:?} {cols}");
        }
    }

    #[test]
    fn plain_types_are_of_one_type() {
        for (name, cols, want) in [
            ("q8_0", 576, DType::Q8_0),
            ("q5_k", 576, DType::Q5_1),
            ("q6_k", 576, DType::Q8_0),
            ("iq4_xs", 576, DType::IQ4NL),
            ("iq4_xs", 1536, DType::IQ4XS),
            ("bf16", 7, DType::BF16),
        ] {
            let mix = MIXES.iter().find(|mix| mix.name == name).unwrap();
            for role in [Role::Output, Role::Other, Role::Sensitive { layer: 0, layers: 8 }] {
                assert_eq!(mix.dtype(role, cols), want, "{name} {role:?}");
            }
        }
    }
}
