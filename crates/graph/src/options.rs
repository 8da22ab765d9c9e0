//! Every switch that changes a program. A [`PlanKey`] names a program: two runs with equal keys run the same program.

use std::fmt;
use std::str::FromStr;

use crate::Rows;

/// `--numerics`: which float arithmetics may be used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Numerics {
    /// The fastest named arithmetic of the device.
    #[default]
    Fast,
    /// `f32x32` everywhere: the same bits on every device.
    Exact,
}

/// Named float arithmetic of matmul and attention (NUMERICS.md section 1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum FloatArithmetic {
    /// 32 interleaved f32 accumulators, FMA in order, tree sum.
    #[default]
    F32x32,
    /// Attention as bf16 matrix tiles multiply it, its operands split into two terms; other float products as `F32x32`.
    Amx3,
    /// Attention as tensor cores multiply it, its operands rounded to 16 bits; other float products as `F32x32`.
    Mma,
}

/// How activations enter a product with quantized weights.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Activations {
    /// One int8 digit per element; two where one was measured to be too coarse: the inputs of query, key and value
    /// products whose weights have units of 256 columns (`docs/numerics.md`).
    #[default]
    Int8,
    /// Two int8 digits per element everywhere.
    Int16,
    /// Not quantized: weights are dequantized and `f32x32` is used.
    F32,
}

/// Element of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum KvType {
    /// 16-bit float, saturating.
    #[default]
    F16,
    /// bfloat16.
    BF16,
    /// 32-bit float.
    F32,
    /// int8 with one f16 scale per 32 elements of a head.
    Q8_0,
}

impl KvType {
    /// Bytes of `n` consecutive elements of one head.
    pub fn bytes(self, n: usize) -> usize {
        match self {
            KvType::F16 | KvType::BF16 => 2 * n,
            KvType::F32 => 4 * n,
            KvType::Q8_0 => n + n.div_ceil(32) * 2,
        }
    }
}

macro_rules! names {
    ($ty:ident, $what:literal, $($variant:ident => $name:literal),+) => {
        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($ty::$variant => $name),+ })
            }
        }
        impl FromStr for $ty {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                match s {
                    $($name => Ok($ty::$variant),)+
                    _ => Err(format!(concat!("unknown ", $what, " {:?}: choose one of {}"), s, [$($name),+].join(", "))),
                }
            }
        }
    };
}
names!(FloatArithmetic, "float arithmetic", F32x32 => "f32x32", Amx3 => "amx3", Mma => "mma");
names!(Numerics, "numerics mode", Fast => "fast", Exact => "exact");
names!(Activations, "activation type", Int8 => "int8", Int16 => "int16", F32 => "f32");
names!(KvType, "KV type", F16 => "f16", BF16 => "bf16", F32 => "f32", Q8_0 => "q8_0");

/// Layers that follow each other on one device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stretch {
    /// First layer; the last is the one before the next stretch.
    pub first: usize,
    /// Device, counted from 0.
    pub device: usize,
}

/// Which device runs which layers. What comes before the first layer runs with it; what comes after the last counts as one
/// layer more.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Placement {
    /// Stretches, ascending, the first from layer 0 on. A device may have several.
    pub stretches: Vec<Stretch>,
}

impl Default for Placement {
    fn default() -> Self {
        Self::of(&[(0, 0)])
    }
}

impl Placement {
    /// From first layer and device of each stretch.
    pub fn of(stretches: &[(usize, usize)]) -> Self {
        let stretch = |&(first, device): &(usize, usize)| Stretch { first, device };
        Self { stretches: stretches.iter().map(stretch).collect() }
    }

    /// The device of a layer.
    pub fn device(&self, layer: usize) -> usize {
        let stretch = self.stretches.iter().rev().find(|stretch| stretch.first <= layer);
        stretch.map_or(0, |stretch| stretch.device)
    }

    /// How many devices it names, if it names all up to the last.
    pub fn devices(&self) -> usize {
        self.stretches.iter().map(|stretch| stretch.device + 1).max().unwrap_or(1)
    }
}

/// Every switch that changes a graph on its way to a program. Parsed once; passes read nothing else.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PlanOptions {
    /// Mode asked for.
    pub numerics: Numerics,
    /// Float arithmetic chosen from mode and device.
    pub float: FloatArithmetic,
    /// Activation type of integer products.
    pub activations: Activations,
    /// KV element.
    pub kv: KvType,
    /// Query, key and value products become one node.
    pub fuse_qkv: bool,
    /// Gate and up products become one node.
    pub fuse_gate_up: bool,
    /// Ops that feed integer products quantize on the way out.
    pub fuse_quantize: bool,
    /// Rotation of q and k and the KV store become one node.
    pub fuse_rope_store: bool,
    /// The residual is added in the product's tail.
    pub fuse_residual: bool,
    /// The gated unit of gate and up, where they are one node, is computed in its tail.
    pub fuse_gated: bool,
    /// Hidden states become outputs (`hidden.N`), for `verify`.
    pub taps: bool,
    /// The program chooses tokens from its logits: a result `sampled`.
    pub sample: bool,
    /// Devices and their layers.
    pub placement: Placement,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            numerics: Numerics::default(),
            float: FloatArithmetic::default(),
            activations: Activations::default(),
            kv: KvType::default(),
            fuse_qkv: true,
            fuse_gate_up: true,
            fuse_quantize: true,
            fuse_rope_store: true,
            fuse_residual: true,
            fuse_gated: true,
            taps: false,
            sample: false,
            placement: Placement::default(),
        }
    }
}

impl PlanOptions {
    /// All fusions off: the unfused arm, which still goes through the fusion pass.
    pub fn unfused(self) -> Self {
        Self {
            fuse_qkv: false,
            fuse_gate_up: false,
            fuse_quantize: false,
            fuse_rope_store: false,
            fuse_residual: false,
            fuse_gated: false,
            ..self
        }
    }
}

/// Largest row counts a program serves: `t` tokens, `s` sequences, `r` wanted rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Bucket {
    /// Tokens.
    pub t: usize,
    /// Sequences.
    pub s: usize,
    /// Wanted rows.
    pub r: usize,
}

impl Bucket {
    /// The smallest bucket (powers of two) that holds these counts.
    pub fn holding(t: usize, s: usize, r: usize) -> Self {
        let up = |n: usize| n.max(1).next_power_of_two();
        Self { t: up(t), s: up(s), r: up(r) }
    }

    /// Rows of a kind that there is room for.
    pub fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::T => self.t,
            Rows::R => self.r,
        }
    }
}

/// Name of a program.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PlanKey {
    /// Row counts.
    pub bucket: Bucket,
    /// Switches.
    pub options: PlanOptions,
}
