//! Rotary embedding, with its table of cosines and sines.

use std::io;

use ingle_graph::RopeSpec;
use ingle_graph::math::Lanes;
use ingle_graph::op::RopeStyle;
use ingle_graph::reference::rope_entry;

use crate::memory::Aligned;
use crate::simd::{Kernel, Vector};

/// Cosines and sines of one rotary embedding: address space for every position of the context, filled up to the
/// highest position seen.
pub struct RopeTable {
    spec: RopeSpec,
    /// `[context][2][pairs]` f32: cosines, then sines, of a position.
    memory: Aligned,
    context: usize,
    filled: usize,
}

impl RopeTable {
    /// Room for positions below `context`.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(spec: &RopeSpec, context: usize) -> io::Result<Self> {
        let bytes = context.checked_mul(8 * spec.inv_freq.len()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { spec: spec.clone(), memory: Aligned::sparse(bytes)?, context, filled: 0 })
    }

    /// Fills positions below `end`, which is at most the context.
    pub fn fill(&mut self, end: usize) {
        for position in self.filled..end.min(self.context) {
            let row = self.row(position).cast_mut();
            let pairs = self.spec.inv_freq.len();
            for (i, &inv_freq) in self.spec.inv_freq.iter().enumerate() {
                let (c, s) = rope_entry(&self.spec, position as u32, inv_freq);
                // SAFETY: inside the row of this position; `&mut self` says that nobody reads.
                unsafe {
                    row.add(i).write(c);
                    row.add(pairs + i).write(s);
                }
            }
        }
        self.filled = self.filled.max(end.min(self.context));
    }

    /// Cosines, then sines, of a filled position.
    fn row(&self, position: usize) -> *const f32 {
        assert!(position < self.context);
        // SAFETY: inside the memory by the assertion.
        unsafe { self.memory.as_mut_ptr().cast::<f32>().add(position * 2 * self.spec.inv_freq.len()) }
    }
}

/// Rotates `heads` neighbouring heads of one row.
pub struct Rope<'a> {
    /// Filled up to the position.
    pub table: &'a RopeTable,
    /// Position of the row.
    pub position: usize,
    /// `heads * head_dim` f32.
    pub x: *const f32,
    /// `heads * head_dim` f32; may be `x`.
    pub y: *mut f32,
    /// Heads.
    pub heads: usize,
    /// Elements of a head, at least two for every pair of the table.
    pub head_dim: usize,
}

impl Kernel for Rope<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let pairs = self.table.spec.inv_freq.len();
        let c = self.table.row(self.position);
        let whole = pairs / V::LANES * V::LANES;
        // SAFETY: a row of the table is 2 * pairs, a head holds at least as many.
        unsafe {
            let s = c.add(pairs);
            for head in 0..self.heads {
                let (x, y) = (self.x.add(head * self.head_dim), self.y.add(head * self.head_dim));
                match self.table.spec.style {
                    RopeStyle::Half => {
                        for i in (0..whole).step_by(V::LANES) {
                            half::<V>(c.add(i), s.add(i), x.add(i), y.add(i), pairs);
                        }
                        for i in whole..pairs {
                            half::<f32>(c.add(i), s.add(i), x.add(i), y.add(i), pairs);
                        }
                    }
                    RopeStyle::Interleaved => {
                        for i in (0..whole).step_by(V::LANES) {
                            interleaved::<V>(c.add(i), s.add(i), x.add(2 * i), y.add(2 * i));
                        }
                        for i in whole..pairs {
                            interleaved::<f32>(c.add(i), s.add(i), x.add(2 * i), y.add(2 * i));
                        }
                    }
                }
                if x != y.cast_const() {
                    x.add(2 * pairs).copy_to(y.add(2 * pairs), self.head_dim - 2 * pairs);
                }
            }
        }
    }
}

/// (x c - y s, y c + x s), each product with s fused.
#[inline(always)]
fn rotate<L: Lanes>(c: L, s: L, x: L, y: L) -> (L, L) {
    (y.neg().fma(s, x.mul(c)), x.fma(s, y.mul(c)))
}

#[inline(always)]
unsafe fn half<V: Vector>(c: *const f32, s: *const f32, x: *const f32, y: *mut f32, distance: usize) {
    // SAFETY: the caller's.
    unsafe {
        let (first, second) = rotate(V::load(c), V::load(s), V::load(x), V::load(x.add(distance)));
        first.store(y);
        second.store(y.add(distance));
    }
}

#[inline(always)]
unsafe fn interleaved<V: Vector>(c: *const f32, s: *const f32, x: *const f32, y: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let (even, odd) = V::load_pairs(x);
        let (even, odd) = rotate(V::load(c), V::load(s), even, odd);
        V::store_pairs(even, odd, y);
    }
}
