//! Keys and values in pages: layout, and the write of one position.
//!
//! A page holds [`PAGE`] positions of all heads of a layer. Values lie as they are read, `[head][position][dim]`. Keys
//! lie transposed, `[head][dim][position]`, so that the lanes of a score are keys, and their dims in the order in which
//! the sum tree of `f32x32` wants its 32 accumulators ([`PageLayout::order`]): a score then reads memory straight
//! through and holds six partial sums instead of 32.

use std::io;
use std::ops::Range;

use ingle_graph::program::KvLayer;
use ingle_graph::reference::kv_q8_0;
use ingle_graph::{KvType, PAGE};

use crate::memory::{ALIGN, Aligned};
use crate::simd::{Kernel, MAX_LANES, Vector, prefetch_write};

/// Accumulators of `f32x32`.
pub const ACCUMULATORS: usize = 32;

/// Elements of a head that share a scale in `q8_0`.
const UNIT: usize = 32;

/// Where keys and values of one layer are inside a page.
#[derive(Clone, Debug)]
pub struct PageLayout {
    /// Element type.
    pub kind: KvType,
    /// Key and value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements between the values of two positions: the head, padded to a whole vector with zeros.
    pub padded_dim: usize,
    /// Dim of each row of keys.
    pub order: Vec<u32>,
    /// Row of keys of each dim: the inverse of `order`.
    pub rows: Vec<u32>,
    /// Rows of each accumulator, in the order of `order`.
    pub leaves: [usize; ACCUMULATORS],
    /// Bytes of the keys of one head.
    pub key_bytes: usize,
    /// Bytes of the values of one head.
    pub value_bytes: usize,
}

/// The order in which a tree over 32 accumulators, upper half onto lower half, needs them depth first: bits reversed.
const fn leaf(step: usize) -> usize {
    (step as u32).reverse_bits() as usize >> (u32::BITS - ACCUMULATORS.ilog2())
}

impl PageLayout {
    /// Layout of one layer.
    pub fn new(layer: &KvLayer, kind: KvType) -> Self {
        let KvLayer { heads, head_dim, .. } = *layer;
        let padded_dim = head_dim.next_multiple_of(MAX_LANES);
        let units = head_dim.div_ceil(UNIT);
        let bytes = |dims: usize| {
            let bytes = match kind {
                KvType::F16 | KvType::BF16 => 2 * PAGE * dims,
                KvType::F32 => 4 * PAGE * dims,
                KvType::Q8_0 => PAGE * dims + 2 * PAGE * units,
            };
            bytes.next_multiple_of(ALIGN)
        };
        let leaves = (0..ACCUMULATORS).map(leaf);
        let order: Vec<u32> =
            leaves.flat_map(|i| (i..head_dim).step_by(ACCUMULATORS)).map(|d| d as u32).collect();
        let mut rows = vec![0; head_dim];
        order.iter().zip(0..).for_each(|(&dim, row)| rows[dim as usize] = row);
        Self {
            kind,
            heads,
            head_dim,
            padded_dim,
            order,
            rows,
            leaves: std::array::from_fn(|step| (leaf(step)..head_dim).step_by(ACCUMULATORS).len()),
            key_bytes: bytes(head_dim),
            value_bytes: bytes(padded_dim),
        }
    }

    /// Widens the keys of one head in a page to f32: `[head_dim][PAGE]`, rows in the order of `order`.
    ///
    /// # Safety
    /// `block` is the keys of a head in a page of this layout; `out` has room for all of them.
    #[inline(always)]
    pub unsafe fn widen_keys<V: Vector>(&self, block: *const u8, out: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            match self.kind {
                KvType::F16 => self.widen_keys_of::<V, F16>(block, out),
                KvType::BF16 => self.widen_keys_of::<V, BF16>(block, out),
                KvType::F32 => self.widen_keys_of::<V, F32>(block, out),
                KvType::Q8_0 => self.widen_keys_of::<V, Q8_0>(block, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn widen_keys_of<V: Vector, E: Element>(&self, block: *const u8, out: *mut f32) {
        for (row, &dim) in self.order.iter().enumerate() {
            for at in (0..PAGE).step_by(V::LANES) {
                // SAFETY: the caller's.
                unsafe {
                    E::keys::<V>(block, self, row, dim as usize / UNIT, at).store(out.add(row * PAGE + at));
                }
            }
        }
    }

    /// Widens values of one head in a page to f32: those of positions `keys` and dims `dims`, whole vectors of them.
    /// The value at position `at` goes to `at * stride`.
    ///
    /// # Safety
    /// `block` is the values of a head in a page of this layout, positions and dims are inside; `out` has room for
    /// [`PAGE`] times `stride`.
    #[inline(always)]
    pub unsafe fn widen_values<V: Vector>(
        &self,
        block: *const u8,
        keys: Range<usize>,
        dims: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match self.kind {
                KvType::F16 => self.widen_values_of::<V, F16>(block, keys, dims, out, stride),
                KvType::BF16 => self.widen_values_of::<V, BF16>(block, keys, dims, out, stride),
                KvType::F32 => self.widen_values_of::<V, F32>(block, keys, dims, out, stride),
                KvType::Q8_0 => self.widen_values_of::<V, Q8_0>(block, keys, dims, out, stride),
            }
        }
    }

    #[inline(always)]
    unsafe fn widen_values_of<V: Vector, E: Element>(
        &self,
        block: *const u8,
        keys: Range<usize>,
        dims: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        for at in keys {
            for dim in dims.clone().step_by(V::LANES) {
                // SAFETY: the caller's.
                unsafe {
                    E::value::<V>(block, self, at, dim).store(out.add(at * stride + dim - dims.start));
                }
            }
        }
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.heads * (self.key_bytes + self.value_bytes)
    }

    /// Byte offset of the keys of a head in a page.
    pub fn key_offset(&self, head: usize) -> usize {
        head * self.key_bytes
    }

    /// Byte offset of the values of a head in a page.
    pub fn value_offset(&self, head: usize) -> usize {
        self.heads * self.key_bytes + head * self.value_bytes
    }
}

/// Keys and values: for each group of layers a pool `[page][layer of the group]`. What a sequence touches lies together,
/// so that a short one takes little memory even where the system gives it in huge pages.
pub struct Pool {
    /// Memory, and bytes of a page of all layers of the group.
    groups: Vec<(Aligned, usize)>,
    layers: Vec<Place>,
}

/// Where the keys and values of a layer lie.
struct Place {
    layout: PageLayout,
    group: usize,
    /// Byte offset in a page of all layers of the group.
    offset: usize,
}

/// One layer's part of a [`Pool`].
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    /// Layout of a page.
    pub layout: &'a PageLayout,
    /// Group whose cells and page tables count.
    pub group: usize,
    start: *mut u8,
    stride: usize,
}

impl Pool {
    /// Room for `pages[g]` pages of each layer of group `g`.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(layers: &[KvLayer], kind: KvType, pages: &[usize]) -> io::Result<Self> {
        let mut strides = vec![0; pages.len()];
        let place = |layer: &KvLayer| {
            let layout = PageLayout::new(layer, kind);
            let offset = strides[layer.group];
            strides[layer.group] += layout.page_bytes();
            Place { layout, group: layer.group, offset }
        };
        let layers = layers.iter().map(place).collect();
        let group = |(&pages, stride): (&usize, usize)| {
            let bytes = pages.checked_mul(stride).ok_or(io::ErrorKind::OutOfMemory)?;
            let memory = Aligned::new(bytes)?;
            if cfg!(debug_assertions) {
                // SAFETY: all of it, and nobody else knows of it yet. As any float type these bytes are NaN, so that a
                // read of what was never written shows.
                unsafe { memory.as_mut_ptr().write_bytes(0xFF, bytes) };
            }
            Ok((memory, stride))
        };
        let groups = pages.iter().zip(strides).map(group).collect::<io::Result<_>>()?;
        Ok(Self { groups, layers })
    }

    /// The pages of one layer.
    pub fn layer(&self, layer: usize) -> Pages<'_> {
        let Place { layout, group, offset } = &self.layers[layer];
        let (memory, stride) = &self.groups[*group];
        // SAFETY: inside the first page, or at the end of an empty pool.
        let start = unsafe { memory.as_mut_ptr().add((*offset).min(memory.len())) };
        Pages { layout, group: *group, start, stride: *stride }
    }
}

impl Pages<'_> {
    /// First byte of the layer's part of a page.
    ///
    /// # Safety
    /// The page is in the pool.
    pub unsafe fn page(&self, page: usize) -> *mut u8 {
        // SAFETY: the caller's.
        unsafe { self.start.add(page * self.stride) }
    }
}

/// How elements of a KV type are read.
///
/// # Safety
/// Of every method: `block` is the keys or values of one head in a page of this type and layout, and indices are inside.
pub trait Element: Copy {
    /// Dim-row `row` (whose dim is in unit `unit`) of keys `at..at + LANES`.
    unsafe fn keys<V: Vector>(block: *const u8, layout: &PageLayout, row: usize, unit: usize, at: usize)
    -> V;
    /// Dims `dim..dim + LANES` of the value at position `at`.
    unsafe fn value<V: Vector>(block: *const u8, layout: &PageLayout, at: usize, dim: usize) -> V;
}

/// An element type whose elements stand alone.
pub trait Plain: Copy {
    /// Bytes of one element.
    const BYTES: usize;
    /// `LANES` elements.
    ///
    /// # Safety
    /// `from` is readable for them; it needs no alignment.
    unsafe fn load<V: Vector>(from: *const u8) -> V;
}

/// Marks f16 elements.
#[derive(Clone, Copy)]
pub struct F16;
/// Marks bfloat16 elements.
#[derive(Clone, Copy)]
pub struct BF16;
/// Marks f32 elements.
#[derive(Clone, Copy)]
pub struct F32;
/// Marks int8 elements with a scale per [`UNIT`].
#[derive(Clone, Copy)]
pub struct Q8_0;

macro_rules! plain {
    ($ty:ident, $bytes:literal, $load:expr) => {
        impl Plain for $ty {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const u8) -> V {
                // SAFETY: the caller's.
                unsafe { $load(from) }
            }
        }
    };
}
plain!(F16, 2, V::load_f16);
plain!(BF16, 2, V::load_bf16);
plain!(F32, 4, load_f32);

impl<E: Plain> Element for E {
    #[inline(always)]
    unsafe fn keys<V: Vector>(block: *const u8, _: &PageLayout, row: usize, _: usize, at: usize) -> V {
        // SAFETY: the caller's.
        unsafe { E::load(block.add(E::BYTES * (row * PAGE + at))) }
    }
    #[inline(always)]
    unsafe fn value<V: Vector>(block: *const u8, layout: &PageLayout, at: usize, dim: usize) -> V {
        // SAFETY: the caller's.
        unsafe { E::load(block.add(E::BYTES * (at * layout.padded_dim + dim))) }
    }
}

#[inline(always)]
unsafe fn load_f32<V: Vector>(from: *const u8) -> V {
    // SAFETY: the caller's; loads need no alignment.
    unsafe { V::load(from.cast()) }
}

impl Element for Q8_0 {
    #[inline(always)]
    unsafe fn keys<V: Vector>(
        block: *const u8,
        layout: &PageLayout,
        row: usize,
        unit: usize,
        at: usize,
    ) -> V {
        // SAFETY: the caller's; scales `[unit][position]` follow the codes.
        unsafe {
            let scales = block.add(layout.head_dim * PAGE);
            V::load_f16(scales.add(2 * (unit * PAGE + at))).mul(V::load_i8(block.add(row * PAGE + at)))
        }
    }
    #[inline(always)]
    unsafe fn value<V: Vector>(block: *const u8, layout: &PageLayout, at: usize, dim: usize) -> V {
        // SAFETY: the caller's; scales `[position][unit]` follow the codes.
        unsafe {
            let units = layout.head_dim.div_ceil(UNIT);
            let scales = block.add(PAGE * layout.padded_dim);
            let scale = f32::load_f16(scales.add(2 * (at * units + dim / UNIT)));
            V::splat(scale).mul(V::load_i8(block.add(at * layout.padded_dim + dim)))
        }
    }
}

impl PageLayout {
    /// Asks for the memory to which key and value of one position of a head will be written: a line for each row of keys.
    pub fn prefetch(&self, page: *const u8, head: usize, at: usize) {
        let (keys, values) =
            (page.wrapping_add(self.key_offset(head)), page.wrapping_add(self.value_offset(head)));
        let column = at * self.key_bytes / (PAGE * self.head_dim).max(1);
        for row in (column..self.key_bytes).step_by((self.key_bytes / self.head_dim.max(1)).max(1)) {
            prefetch_write(keys.wrapping_add(row));
        }
        let bytes = self.value_bytes / PAGE;
        for line in (0..bytes).step_by(LINE) {
            prefetch_write(values.wrapping_add(at * bytes + line));
        }
    }
}

/// Bytes that memory moves at once.
const LINE: usize = 64;

/// Writes key and value of one position of one head.
pub struct Store<'a> {
    /// Layout of the page.
    pub layout: &'a PageLayout,
    /// First byte of the page.
    pub page: *mut u8,
    /// Head.
    pub head: usize,
    /// Position in the page.
    pub at: usize,
    /// `head_dim` f32, overwritten.
    pub key: *mut f32,
    /// `head_dim` f32.
    pub value: *const f32,
    /// Counts elements too large for the type, which become its largest finite value.
    pub saturated: &'a mut u64,
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<V: Vector>(self) {
        let Self { layout, page, head, at, key, value, saturated } = self;
        // SAFETY: the fields' own promise; offsets of one head and position inside the page.
        unsafe {
            let keys = page.add(layout.key_offset(head));
            let values = page.add(layout.value_offset(head));
            match layout.kind {
                KvType::F32 => {
                    scatter::<4>(layout, key.cast(), keys, at);
                    let to = values.cast::<f32>().add(at * layout.padded_dim);
                    value.copy_to_nonoverlapping(to, layout.head_dim);
                }
                KvType::F16 | KvType::BF16 => {
                    // Two bytes are written where four were read: in place.
                    *saturated += narrow::<V>(layout, key, key.cast());
                    scatter::<2>(layout, key.cast(), keys, at);
                    *saturated += narrow::<V>(layout, value, values.add(2 * at * layout.padded_dim));
                }
                KvType::Q8_0 => store_q8_0(layout, key, value, keys, values, at),
            }
        }
    }
}

/// Copies `head_dim` elements of `N` bytes into column `at` of the key rows.
#[inline(always)]
unsafe fn scatter<const N: usize>(layout: &PageLayout, from: *const [u8; N], keys: *mut u8, at: usize) {
    let column = keys.cast::<[u8; N]>();
    for (row, &dim) in layout.order.iter().enumerate() {
        // SAFETY: `order` holds head_dim dims below head_dim.
        unsafe { column.add(row * PAGE + at).write(from.add(dim as usize).read()) };
    }
}

/// Rounds `head_dim` elements to f16 or bfloat16 and returns how many were too large. `to` may be `from`.
#[inline(always)]
unsafe fn narrow<V: Vector>(layout: &PageLayout, from: *const f32, to: *mut u8) -> u64 {
    let whole = layout.head_dim / V::LANES * V::LANES;
    let mut saturated = 0;
    // SAFETY: head_dim elements on both sides.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            saturated += narrow_lanes::<V>(layout.kind, from.add(i), to.add(2 * i));
        }
        for i in whole..layout.head_dim {
            saturated += narrow_lanes::<f32>(layout.kind, from.add(i), to.add(2 * i));
        }
    }
    saturated as u64
}

#[inline(always)]
unsafe fn narrow_lanes<V: Vector>(kind: KvType, from: *const f32, to: *mut u8) -> usize {
    // Largest finite value; and half a step above it, from where rounding would give infinity.
    let (largest, infinite) = match kind {
        KvType::BF16 => (f32::from_bits(0x7F7F_0000), f32::from_bits(0x7F7F_8000)),
        _ => (65504.0, 65520.0),
    };
    // SAFETY: the caller's.
    unsafe {
        let x = V::load(from);
        let clamped = V::select(V::splat(largest).lt(x.abs()), V::splat(largest).copysign(x), x);
        match kind {
            KvType::BF16 => clamped.store_bf16(to),
            _ => clamped.store_f16(to),
        }
        V::count(V::splat(infinite).le(x.abs()))
    }
}

/// `q8_0` codes and scales of one key, which is overwritten, and one value.
unsafe fn store_q8_0(
    layout: &PageLayout,
    key: *mut f32,
    value: *const f32,
    keys: *mut u8,
    values: *mut u8,
    at: usize,
) {
    let units = layout.head_dim.div_ceil(UNIT);
    // SAFETY: key and value hold head_dim elements; codes and scales are inside the head's blocks.
    unsafe {
        let key_scales = keys.add(layout.head_dim * PAGE);
        let value_scales = values.add(PAGE * layout.padded_dim);
        for unit in 0..units {
            let first = unit * UNIT;
            let n = UNIT.min(layout.head_dim - first);
            let (d, q) = kv_q8_0(std::slice::from_raw_parts(key.add(first), n));
            key_scales.add(2 * (unit * PAGE + at)).cast::<[u8; 2]>().write(d.to_le_bytes());
            // One byte is written where four were read: units still to come are not touched.
            q.as_ptr().copy_to_nonoverlapping(key.cast::<i8>().add(first), n);
            let (d, q) = kv_q8_0(std::slice::from_raw_parts(value.add(first), n));
            value_scales.add(2 * (at * units + unit)).cast::<[u8; 2]>().write(d.to_le_bytes());
            q.as_ptr().copy_to_nonoverlapping(values.cast::<i8>().add(at * layout.padded_dim + first), n);
        }
        scatter::<1>(layout, key.cast(), keys, at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_keys_are_every_dim_in_tree_order() {
        for head_dim in [1, 31, 40, 64, 256] {
            let layout = PageLayout::new(&KvLayer { heads: 3, head_dim, group: 0 }, KvType::F16);
            let mut dims = layout.order.clone();
            dims.sort_unstable();
            assert!(dims.iter().enumerate().all(|(i, &d)| i == d as usize) && dims.len() == head_dim);
        }
        let order = PageLayout::new(&KvLayer { heads: 1, head_dim: 64, group: 0 }, KvType::F16).order;
        assert_eq!(order[..10], [0, 32, 16, 48, 8, 40, 24, 56, 4, 36]);
    }

    #[test]
    fn blocks_do_not_overlap() {
        for kind in [KvType::F16, KvType::BF16, KvType::F32, KvType::Q8_0] {
            let layout = PageLayout::new(&KvLayer { heads: 2, head_dim: 40, group: 0 }, kind);
            let offsets =
                [layout.key_offset(0), layout.key_offset(1), layout.value_offset(0), layout.value_offset(1)];
            let ends = [&offsets[1..], &[layout.page_bytes()]].concat();
            for (i, (from, to)) in offsets.iter().zip(ends).enumerate() {
                let dims = if i < 2 { 40 } else { 48 };
                assert!(from % ALIGN == 0 && to - from >= PAGE * kind.bytes(dims), "{kind} block {i}");
            }
        }
    }

    /// A group's pages hold its own layers and no others.
    #[test]
    fn groups_have_pools_of_their_own() {
        let layer = |head_dim, group| KvLayer { heads: 2, head_dim, group };
        let layers = [layer(64, 0), layer(32, 1), layer(64, 1)];
        let pool = Pool::new(&layers, KvType::F16, &[3, 5]).unwrap();
        let bytes: Vec<usize> =
            layers.iter().map(|layer| PageLayout::new(layer, KvType::F16).page_bytes()).collect();
        assert_eq!(pool.groups[0].0.len(), 3 * bytes[0]);
        assert_eq!(pool.groups[1].0.len(), 5 * (bytes[1] + bytes[2]));
        for (l, layer) in layers.iter().enumerate() {
            let pages = pool.layer(l);
            assert_eq!(pages.group, layer.group);
            let (memory, stride) = &pool.groups[layer.group];
            // SAFETY: pages of the pool.
            let (first, second) = unsafe { (pages.page(0), pages.page(1)) };
            assert_eq!(first as usize - memory.as_mut_ptr() as usize, if l == 2 { bytes[1] } else { 0 });
            assert_eq!(second as usize - first as usize, *stride);
        }
    }
}
