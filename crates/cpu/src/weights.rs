//! A graph's weights as kernels read them: packed, mapped, or widened.

use std::ops::Range;
use std::sync::Arc;

use ingle_graph::op::{Weight, WeightUse};
use ingle_graph::{Activations, Error, Graph, Result, WeightId};
use ingle_tensor::{Checkpoint, DType, TensorInfo, quant};

use crate::dot::{PackError, Packed};
use crate::kernels::float::Float;
use crate::memory::{Aligned, Slab};
use crate::threads::Team;

/// One weight.
enum Stored {
    /// A quantized matrix for integer products. Its pages of the file are no longer needed.
    Packed(Packed),
    /// Rows as the file has them: matrices of 16- and 32-bit floats, tables of which rows are looked up, quantized
    /// matrices whose rows are decoded before each use, and those of formats without a packed form.
    Mapped(TensorInfo),
    /// A matrix of a plain type that no kernel reads, as f32. Its pages of the file are no longer needed.
    Widened(Aligned),
    /// A vector, widened to f32, offset added.
    Vector(Vec<f32>),
}

/// Whether a matrix of this type is converted to f32 when it is loaded.
fn is_widened(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

/// Whether products with this weight are of integers, so that it is packed if its format has a packed form.
fn is_packed(weight: &Weight, activations: Activations) -> bool {
    weight.used == WeightUse::Matrix && weight.unit().is_some() && activations != Activations::F32
}

/// Bytes of memory that loading takes for this weight; 0 when it is read from the mapped file.
pub fn planned_bytes(weight: &Weight, activations: Activations) -> usize {
    match weight.used {
        WeightUse::Vector => weight.cols * size_of::<f32>(),
        WeightUse::Matrix if is_widened(weight.dtype) => weight.rows * weight.cols * size_of::<f32>(),
        WeightUse::Matrix if activations != Activations::F32 => {
            Packed::planned_bytes(weight.dtype, weight.rows, weight.cols).unwrap_or(0)
        }
        WeightUse::Matrix | WeightUse::Rows => 0,
    }
}

/// A matrix as f32, row by row.
fn widen(weight: &Weight, data: &[u8]) -> std::io::Result<Aligned> {
    let memory = Aligned::new(weight.rows * weight.cols * size_of::<f32>())?;
    // SAFETY: the memory's own bytes, aligned and zeroed; nobody else has them yet.
    let values = unsafe {
        std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<f32>(), weight.rows * weight.cols)
    };
    quant::decode_row(weight.dtype, data, values);
    Ok(memory)
}

/// The weights of one graph, by [`WeightId`].
pub struct Weights {
    checkpoint: Arc<Checkpoint>,
    declared: Vec<Weight>,
    stored: Vec<Stored>,
}

impl Weights {
    /// Packs and widens what the graph's products need; `activations` says whether quantized matrices are multiplied as
    /// integers.
    ///
    /// # Errors
    /// A tensor that is missing, or not what the graph says; no memory.
    pub fn load(
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        activations: Activations,
        team: &Team,
    ) -> Result<Self> {
        let mut stored = Vec::with_capacity(graph.weights.len());
        // Most matrices of a small model are smaller than a huge page: they share them.
        let packed = graph.weights.iter().filter(|weight| is_packed(weight, activations));
        let packed: usize = packed.map(|weight| planned_bytes(weight, activations)).sum();
        let mut slab = Slab::new(packed).map_err(|error| Error::Device {
            device: "cpu".into(),
            what: format!("no memory for {packed} bytes of weights: {error}"),
        })?;
        for weight in &graph.weights {
            let (tensor, data) = weight.stored(&checkpoint)?;
            let bad = |what: String| Error::Weight { name: weight.name.clone(), what };
            stored.push(match weight.used {
                WeightUse::Vector => Stored::Vector(weight.vector(data)),
                WeightUse::Matrix if is_packed(weight, activations) => {
                    match Packed::new_in(&mut slab, weight.dtype, weight.rows, weight.cols, data, team) {
                        Ok(packed) => {
                            checkpoint.release(tensor);
                            Stored::Packed(packed)
                        }
                        // Read through the format's integer view.
                        Err(PackError::Type(_)) => Stored::Mapped(tensor.clone()),
                        Err(error) => return Err(bad(error.to_string())),
                    }
                }
                WeightUse::Matrix if is_widened(weight.dtype) => {
                    let widened = widen(weight, data)
                        .map_err(|error| bad(format!("no memory for it as f32: {error}")))?;
                    checkpoint.release(tensor);
                    Stored::Widened(widened)
                }
                WeightUse::Matrix | WeightUse::Rows => Stored::Mapped(tensor.clone()),
            });
        }
        Ok(Self { checkpoint, declared: graph.weights.clone(), stored })
    }

    /// Whether a program was compiled from the graph these weights were loaded for.
    pub fn serve(&self, weights: &[Weight]) -> bool {
        self.declared == weights
    }

    /// What the graph says of a weight.
    pub fn declared(&self, id: WeightId) -> &Weight {
        &self.declared[id.0 as usize]
    }

    /// The packed matrix, if this weight is one.
    pub fn packed(&self, id: WeightId) -> Option<&Packed> {
        match &self.stored[id.0 as usize] {
            Stored::Packed(packed) => Some(packed),
            _ => None,
        }
    }

    /// The vector; empty if this weight is not one.
    pub fn vector(&self, id: WeightId) -> &[f32] {
        match &self.stored[id.0 as usize] {
            Stored::Vector(x) => x,
            _ => &[],
        }
    }

    /// Rows of a matrix that kernels read as floats.
    pub fn floats(&self, id: WeightId, rows: Range<usize>) -> Option<(Float, &[u8])> {
        let weight = self.declared(id);
        let (float, bytes, size) = match (&self.stored[id.0 as usize], weight.dtype) {
            (Stored::Widened(values), _) => (Float::F32, &values[..], 4),
            (Stored::Mapped(tensor), DType::F32) => (Float::F32, self.checkpoint.data(tensor), 4),
            (Stored::Mapped(tensor), DType::F16) => (Float::F16, self.checkpoint.data(tensor), 2),
            (Stored::Mapped(tensor), DType::BF16) => (Float::BF16, self.checkpoint.data(tensor), 2),
            _ => return None,
        };
        Some((float, &bytes[rows.start * weight.cols * size..rows.end * weight.cols * size]))
    }

    /// The bytes of the file; empty if this weight is no longer read from it.
    pub fn bytes(&self, id: WeightId) -> &[u8] {
        match &self.stored[id.0 as usize] {
            Stored::Mapped(tensor) => self.checkpoint.data(tensor),
            _ => &[],
        }
    }
}
