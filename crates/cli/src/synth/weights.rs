//! Weights that were never trained: finite, of standard deviation 0.02, and quick to make.
//!
//! Of each element type a pool of 2^18 normally distributed values is encoded once; a row is pieces of the pool, each
//! from a place that is drawn anew. So a row costs what copying it costs, whatever the type, and has the values that
//! the type's encoder gives. What is drawn depends on (seed, tensor, row) and on nothing else: not on threads, nor on
//! how rows are put together for writing.

use std::collections::BTreeMap;

use ingle_tensor::{DType, quant};

use super::Tensor;
use crate::slabs;

/// Standard deviation of the matrices' values, as most models begin their training.
pub const DEVIATION: f32 = 0.02;

/// Values in a pool, and in the pieces that are taken from it. Blocks of every type tile both.
const POOL: usize = 1 << 18;
const PIECE: usize = 256;

/// What a tensor is filled with.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// Values around 0.
    Matrix,
    /// Values around 1.
    Norm,
    /// These f32 values.
    Exact(Vec<f32>),
}

/// Random numbers by (seed, stream, index): splitmix64 from a mixed start.
struct Draws(u64);

impl Draws {
    fn new(seed: u64, stream: u64, index: u64) -> Self {
        Self([stream, index].into_iter().fold(mix(seed), |state, word| mix(state ^ mix(word))))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// The sum of twelve 16-bit numbers, less its mean: deviation 1, within -6..=6, and the same on every machine.
    fn normal(&mut self) -> f32 {
        let sixteenths = |word: u64| (0..4).map(|i| (word >> (16 * i)) as u16).map(i32::from).sum::<i32>();
        let sum: i32 = (0..3).map(|_| sixteenths(self.next())).sum();
        (sum as f32 - 6.0 * 65535.0) / 65536.0
    }
}

/// The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The pools of all types that some tensors need.
pub struct Pools {
    seed: u64,
    /// By type, and whether the values are around 1.
    pools: BTreeMap<(DType, bool), Vec<u8>>,
}

impl Pools {
    /// Encodes the pools.
    pub fn new(seed: u64, tensors: &[Tensor]) -> Self {
        let mut pools = BTreeMap::new();
        for tensor in tensors {
            let is_norm = match tensor.fill {
                Fill::Matrix => false,
                Fill::Norm => true,
                Fill::Exact(_) => continue,
            };
            pools.entry((tensor.dtype, is_norm)).or_insert_with(|| {
                let mut draws = Draws::new(seed, u64::MAX, u64::from(is_norm));
                let mean = if is_norm { 1.0 } else { 0.0 };
                let values: Vec<f32> = (0..POOL).map(|_| mean + DEVIATION * draws.normal()).collect();
                let mut bytes = vec![0; POOL / tensor.dtype.block_len() * tensor.dtype.block_bytes()];
                let is_written = quant::encode_row(tensor.dtype, &values, &mut bytes);
                debug_assert!(is_written, "mixes have no integer types");
                bytes
            });
        }
        Self { seed, pools }
    }

    /// Row `row` of tensor number `at`.
    fn row(&self, at: usize, tensor: &Tensor, row: usize, out: &mut [u8]) {
        let is_norm = match &tensor.fill {
            Fill::Matrix => false,
            Fill::Norm => true,
            Fill::Exact(values) => {
                return out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes());
            }
        };
        let Some(pool) = self.pools.get(&(tensor.dtype, is_norm)) else { return };
        let bytes = |values: usize| values / tensor.dtype.block_len() * tensor.dtype.block_bytes();
        let places = (POOL - PIECE) / tensor.dtype.block_len() + 1;
        let mut draws = Draws::new(self.seed, at as u64, row as u64);
        for piece in out.chunks_mut(bytes(PIECE)) {
            let start = draws.below(places) * tensor.dtype.block_bytes();
            piece.copy_from_slice(&pool[start..start + piece.len()]);
        }
    }

    /// Makes every tensor in order and hands its bytes to `sink`, piece by piece, while the next are made.
    ///
    /// # Errors
    /// The first of the sink's.
    pub fn stream<E: Send>(
        &self,
        tensors: &[Tensor],
        threads: usize,
        mut sink: impl FnMut(&str, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let sizes = tensors.iter().map(|tensor| (tensor.rows(), tensor.row_bytes()));
        slabs::stream(
            sizes,
            threads,
            |at, first, out| {
                let tensor = &tensors[at];
                let rows = out.chunks_exact_mut(tensor.row_bytes()).enumerate();
                rows.for_each(|(i, out)| self.row(at, tensor, first + i, out));
                Ok(())
            },
            |at, bytes| sink(&tensors[at].name, bytes),
        )
    }
}
