//! Ops, values and weights: the vocabulary of a graph.
//!
//! Every value is a matrix `[rows, cols]`; heads are a factor of `cols`. Row counts are symbolic ([`Rows`]): positions,
//! page tables and lengths are inputs of a step, so no shape depends on how long a sequence is.

use ingle_tensor::{Checkpoint, DType, TensorInfo, quant};

use crate::{Error, Result};

/// Symbolic row count of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rows {
    /// One row for each token of the step.
    T,
    /// One row for each wanted output position.
    R,
}

/// Columns that may share one scale of quantized activations: the block lengths of the integer formats.
pub const UNITS: [usize; 4] = [32, 64, 128, 256];

/// What one element of a value is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Elem {
    /// 32-bit float.
    F32,
    /// Activations quantized in units of this many columns (NUMERICS.md section 2), laid out as
    /// [`crate::quantize::Layout`] says.
    Int8 {
        /// Columns per unit: one of [`UNITS`].
        unit: usize,
    },
    /// The same with two int8 digits per element.
    Int16 {
        /// Columns per unit: one of [`UNITS`].
        unit: usize,
    },
}

impl Elem {
    /// Unit and digits of a quantized element.
    pub fn digits(self) -> Option<(usize, usize)> {
        match self {
            Elem::F32 => None,
            Elem::Int8 { unit } => Some((unit, 1)),
            Elem::Int16 { unit } => Some((unit, 2)),
        }
    }

    /// `f32`, `int8`, `int16`: the words of [`Activations`](crate::Activations).
    pub fn name(self) -> &'static str {
        match self {
            Elem::F32 => "f32",
            Elem::Int8 { .. } => "int8",
            Elem::Int16 { .. } => "int16",
        }
    }
}

/// Type of a value: `[rows, cols]` of `elem`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ValueType {
    /// Symbolic row count.
    pub rows: Rows,
    /// Columns.
    pub cols: usize,
    /// Element.
    pub elem: Elem,
}

impl ValueType {
    /// An f32 matrix.
    pub fn f32(rows: Rows, cols: usize) -> Self {
        Self { rows, cols, elem: Elem::F32 }
    }

    /// Bytes of `rows` rows.
    pub fn bytes(&self, rows: usize) -> usize {
        match self.elem.digits() {
            None => rows * self.cols * 4,
            Some((unit, digits)) => crate::quantize::Layout::new(rows, self.cols, unit, digits).bytes(),
        }
    }
}

/// Index of a value in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// Index of a weight in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// Index of a rope table in its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RopeId(pub u32);

/// How a backend reads a weight.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WeightUse {
    /// Rows are looked up one at a time (embedding).
    Rows,
    /// Left operand of a matrix product.
    Matrix,
    /// A short vector of f32 (norm weights, biases), `rows` = 1.
    Vector,
}

/// A weight a graph refers to, bound to a tensor of the checkpoint.
#[derive(Clone, PartialEq, Debug)]
pub struct Weight {
    /// Tensor name in the checkpoint.
    pub name: String,
    /// Type of the stored tensor.
    pub dtype: DType,
    /// Rows (output features; 1 for a vector).
    pub rows: usize,
    /// Columns (input features).
    pub cols: usize,
    /// How it is read. A tensor read in two ways (tied embeddings) is two weights with the same name.
    pub used: WeightUse,
    /// Added to every element of a vector after it is widened to f32 (1.0 where a family stores its norm weights as
    /// offsets from one), else 0.
    pub offset: f32,
}

impl Weight {
    /// Bytes of the stored tensor.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols / self.dtype.block_len() * self.dtype.block_bytes()
    }

    /// Columns of activations that share a scale in the `int` arithmetic for this weight, or `None` when its
    /// arithmetic is a float one.
    pub fn unit(&self) -> Option<usize> {
        self.dtype.is_quantized().then(|| self.dtype.block_len())
    }

    /// The stored tensor and its bytes, checked.
    ///
    /// # Errors
    /// A tensor that is missing; [`Error::Weight`]: one that is not what the graph was built for, or a scale that has no
    /// finite meaning.
    pub fn stored<'a>(&self, checkpoint: &'a Checkpoint) -> Result<(&'a TensorInfo, &'a [u8])> {
        let tensor = checkpoint.require(&self.name)?;
        if tensor.dtype != self.dtype || tensor.bytes != self.bytes() as u64 {
            let what = format!(
                "{} of shape {:?} in the file, but the graph was built for {} [{}, {}]",
                tensor.dtype, tensor.shape, self.dtype, self.rows, self.cols
            );
            return Err(Error::Weight { name: self.name.clone(), what });
        }
        let data = checkpoint.data(tensor);
        self.check(data)?;
        Ok((tensor, data))
    }

    /// A vector's elements, with the offset, from its stored bytes.
    pub fn vector(&self, data: &[u8]) -> Vec<f32> {
        let mut x = vec![0.0; self.cols];
        quant::decode_row(self.dtype, data, &mut x);
        if self.offset != 0.0 {
            x.iter_mut().for_each(|x| *x += self.offset);
        }
        x
    }

    /// Checks the stored tensor for what only its bytes can tell.
    ///
    /// # Errors
    /// [`Error::Weight`]: a scale that has no finite meaning.
    pub fn check(&self, bytes: &[u8]) -> Result<()> {
        quant::check_scales(self.dtype, bytes)
            .map_err(|error| Error::Weight { name: self.name.clone(), what: error.to_string() })
    }
}

/// Pairing of a rotary embedding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RopeStyle {
    /// Element i is paired with element i + rotated/2 (Hugging Face layout).
    Half,
    /// Element 2i is paired with element 2i + 1 (original Llama layout, kept by GGUF).
    Interleaved,
}

/// A rotary embedding: angle = fl(f32(position) * inv_freq\[i\]), cos and sin of that angle in f64 rounded to f32, times
/// `scale` (NUMERICS.md section 3).
#[derive(Clone, PartialEq, Debug)]
pub struct RopeSpec {
    /// Pairing.
    pub style: RopeStyle,
    /// One frequency per pair, rounded to f32.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN's attention factor), else 1.
    pub scale: f32,
}

/// Function of a gated unit or an activation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    GeluTanh,
    /// 0.5 x (1 + erf(x / sqrt 2))
    GeluErf,
}

/// One matrix of a [`Op::Linear`] node.
#[derive(Clone, PartialEq, Debug)]
pub struct LinearPart {
    /// Weight `[cols_out, cols_in]`.
    pub weight: WeightId,
    /// Factor of the whole tensor, applied once to the final sum.
    pub scale: Option<f32>,
    /// Bias `[cols_out]`.
    pub bias: Option<WeightId>,
    /// Which input of the node this part reads.
    pub input: usize,
}

/// Shape and rules of one attention.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionSpec {
    /// Layer whose KV pages are read.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// A row at position p sees keys in (p - window, p].
    pub window: Option<usize>,
    /// Scores become cap * tanh(score / cap).
    pub softcap: Option<f32>,
}

/// A gated unit: fl(act(gate) * up).
#[derive(Clone, PartialEq, Debug)]
pub struct Gated {
    /// Function of the gate.
    pub act: Activation,
    /// How the outputs are written.
    pub emit: Emit,
}

/// An operation. Inputs and outputs are listed on the [`Node`]; shapes below are `[rows, cols]`.
#[derive(Clone, PartialEq, Debug)]
pub enum Op {
    /// () -> `[T, cols]`: row tokens\[t\] of the table, times `scale`.
    Embed {
        /// Table `[vocabulary, cols]`.
        table: WeightId,
        /// Factor.
        scale: f32,
    },
    /// x `[n, cols]` -> `[n, cols]`: each group of `group` columns is divided by its root mean square and multiplied by
    /// `weight` (of `group` elements). With `quantize`, further outputs hold the result quantized for those units.
    RmsNorm {
        /// Weight vector of `group` elements.
        weight: WeightId,
        /// Added to the mean square.
        eps: f32,
        /// Columns normalized together: all of them, or one head.
        group: usize,
        /// How the outputs are written.
        emit: Emit,
    },
    /// x `[n, cols]` -> the same values quantized (NUMERICS.md section 2), one output per unit in `emit`.
    Quantize {
        /// Units and digits.
        emit: Emit,
    },
    /// Products `y_i = (scale_i *) W_i x (+ b_i)`, one output per part; with `residual`, the last input is added to the
    /// only output, which then has no scale; with `gated`, the parts are gate and up of a gated unit, whose outputs are
    /// this op's.
    Linear {
        /// Matrices that read the same rows.
        parts: Vec<LinearPart>,
        /// The last input is added to the product: fl(residual + y).
        residual: bool,
        /// The gated unit that reads the two products.
        gated: Option<Gated>,
    },
    /// a, b `[n, cols]` -> fl(a + b).
    Add,
    /// x -> fl(x * factor).
    Scale(f32),
    /// x -> cap * tanh(x / cap), as fl(cap * tanh(fl(x / cap))).
    Softcap(f32),
    /// x `[n, cols]` -> `[n, ceil(cols / span)]`: the largest of each `span` neighbouring columns, the last of which may be
    /// fewer; NaN where one of them is, and a zero is +0.
    Peaks {
        /// Columns, at least 1.
        span: usize,
    },
    /// logits `[R, cols]` and their peaks -> `[R, 1]`: each row's token ([`crate::sample`]), as a number; below 0 where the
    /// host must choose.
    Sample {
        /// Columns of which each peak is the largest.
        span: usize,
    },
    /// gate, up `[n, cols]` -> fl(act(gate) * up).
    Glu(Gated),
    /// x `[T, heads * head_dim]` -> the same, rotated by positions\[t\].
    Rope {
        /// Table.
        rope: RopeId,
        /// Elements of a head.
        head_dim: usize,
    },
    /// k, v `[T, kv_heads * head_dim]` -> (): written to the layer's KV pages at cells\[t\].
    KvStore {
        /// Layer.
        layer: usize,
    },
    /// q, k, v -> q rotated; k rotated and v are written to the layer's KV pages.
    RopeStore {
        /// Table.
        rope: RopeId,
        /// Elements of a head.
        head_dim: usize,
        /// Layer.
        layer: usize,
    },
    /// q `[T, heads * head_dim]` -> `[T, heads * head_dim]`: softmax attention over the layer's pages.
    Attention {
        /// Shape and rules.
        spec: AttentionSpec,
        /// How the outputs are written.
        emit: Emit,
    },
    /// x `[T, cols]` -> `[R, cols]`: rows wanted\[r\].
    TakeRows,
    /// x of device `from` -> x on the node's own device. x is one of the program's outputs.
    Copy {
        /// Device that holds the input.
        from: usize,
    },
    /// () -> x: what another part of a program computed ([`crate::split`]), as the step's inputs bring it.
    Carried {
        /// Index into [`crate::Inputs::carried`].
        index: usize,
    },
}

/// Outputs of an op whose result may be wanted as f32, quantized, or both: first the f32 value if `f32`, then one
/// quantized value for each element type products want.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Emit {
    /// The f32 result is an output.
    pub f32: bool,
    /// Element types of the quantized outputs, ascending by unit and digits.
    pub quantized: Vec<Elem>,
}

impl Emit {
    /// Only the f32 result.
    pub fn plain() -> Self {
        Self { f32: true, quantized: Vec::new() }
    }

    /// Element types in output order.
    pub fn elems(&self) -> Vec<Elem> {
        self.f32.then_some(Elem::F32).into_iter().chain(self.quantized.iter().copied()).collect()
    }
}

impl Op {
    /// Short name for dumps and timings.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Quantize { .. } => "quantize",
            Op::Linear { .. } => "linear",
            Op::Add => "add",
            Op::Scale(_) => "scale",
            Op::Softcap(_) => "softcap",
            Op::Peaks { .. } => "peaks",
            Op::Sample { .. } => "sample",
            Op::Glu(_) => "glu",
            Op::Rope { .. } => "rope",
            Op::KvStore { .. } => "kv_store",
            Op::RopeStore { .. } => "rope_store",
            Op::Attention { .. } => "attention",
            Op::TakeRows => "take_rows",
            Op::Copy { .. } => "copy",
            Op::Carried { .. } => "carried",
        }
    }

    /// The op's emission, for the ops whose result may be quantized on the way out.
    pub fn emit_mut(&mut self) -> Option<&mut Emit> {
        match self {
            Op::RmsNorm { emit, .. }
            | Op::Glu(Gated { emit, .. })
            | Op::Linear { gated: Some(Gated { emit, .. }), .. }
            | Op::Attention { emit, .. }
            | Op::Quantize { emit } => Some(emit),
            _ => None,
        }
    }

    /// The op has an effect beyond its outputs, so it is never removed.
    pub fn has_effect(&self) -> bool {
        matches!(self, Op::KvStore { .. } | Op::RopeStore { .. })
    }

    /// An output may share memory with input `i` when nothing else reads that input.
    pub fn in_place(&self, i: usize) -> bool {
        match self {
            Op::Add | Op::Scale(_) | Op::Softcap(_) | Op::Rope { .. } => i == 0,
            Op::RopeStore { .. } => i == 0,
            _ => false,
        }
    }
}

/// One operation of a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// Name for people: `blk.3.attn_norm`.
    pub name: String,
    /// Operation.
    pub op: Op,
    /// Inputs.
    pub inputs: Vec<ValueId>,
    /// Outputs.
    pub outputs: Vec<ValueId>,
    /// Layer this node belongs to; `None` before the first and after the last.
    pub layer: Option<usize>,
    /// Device that runs it, an index into the placement's devices.
    pub device: usize,
}
