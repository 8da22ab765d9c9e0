//! Which type each matrix of a model file gets, for the commands that write one.

use ingle_tensor::DType;

/// The version of the block formats, as llama.cpp numbers it (`general.quantization_version`).
pub const QUANTIZATION_VERSION: u32 = 2;

/// Which types the matrices have. Norms, routers and rotary factors are always f32.
#[derive(Debug)]
pub struct Mix {
    /// Its name on the command line.
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
    plain("q5_0", DType::Q5_0, 8),
    plain("q5_1", DType::Q5_1, 9),
    plain("q4_k", DType::Q4K, 14),
    plain("q5_k", DType::Q5K, 16),
    plain("q6_k", DType::Q6K, 18),
    plain("iq4_nl", DType::IQ4NL, 25),
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

impl Role {
    /// What the tensor of this GGUF name is for, in a model of `layers` layers whose embedding table may be its output
    /// matrix.
    pub fn of(name: &str, layers: usize, is_tied: bool) -> Self {
        match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, "attn_v.weight" | "ffn_down.weight" | "ffn_down_exps.weight")) => {
                layer.parse().map_or(Role::Other, |layer| Role::Sensitive { layer, layers })
            }
            _ if name == "output.weight" || name == "token_embd.weight" && is_tied => Role::Output,
            _ => Role::Other,
        }
    }
}

impl Mix {
    /// The mix of this name, in either case.
    pub fn named(name: &str) -> Option<&'static Self> {
        MIXES.iter().find(|mix| mix.name.eq_ignore_ascii_case(name))
    }

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

/// All names, for messages.
pub fn names() -> String {
    MIXES.iter().map(|mix| mix.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn roles_by_name() {
        let sensitive = |layer| Role::Sensitive { layer, layers: 4 };
        for (name, is_tied, want) in [
            ("output.weight", false, Role::Output),
            ("token_embd.weight", true, Role::Output),
            ("token_embd.weight", false, Role::Other),
            ("blk.0.attn_v.weight", false, sensitive(0)),
            ("blk.3.ffn_down.weight", true, sensitive(3)),
            ("blk.3.ffn_down_exps.weight", true, sensitive(3)),
            ("blk.3.attn_output.weight", true, Role::Other),
            ("blk.x.attn_v.weight", true, Role::Other),
            ("v.blk.0.attn_v.weight", true, Role::Other),
        ] {
            assert_eq!(Role::of(name, 4, is_tied), want, "{name}");
        }
    }
}
