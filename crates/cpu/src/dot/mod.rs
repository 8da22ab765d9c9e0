//! Products with quantized matrices: packed weights and the `int` arithmetic (NUMERICS.md section 2).
//!
//! A quantized matrix is packed once at load. Sixteen output rows are interleaved to a *tile*, so that a vector's
//! lanes are output rows, activations are broadcast, and no sum ever crosses lanes. Codes keep their width in memory:
//! a packed matrix is as large as the file's, or up to 3% larger where sub-scales are widened to bytes. Units of a
//! row are stored grouped by the accumulator they belong to (unit index mod 8), so that a row needs one running sum
//! and one total instead of eight sums, whether one activation row is multiplied or many.
//!
//! - [`spec`]: what distinguishes the formats, and the packed layout; [`pack`]: from file blocks to tiles.
//! - [`panel`]: the activation side, a few rows rearranged to be read in one stream.
//! - [`kernel`]: the arithmetic, written once over an [`engine`]; [`avx2`], [`avx512`]: the engines besides the scalar; [`amx`]: many
//!   rows on matrix tiles.
//! - [`dispatch`]: which compiled kernel serves a call.
//!
//! Few rows stream the weights once, at the speed of memory. Many rows are cut into panels that stay in the L2 cache;
//! each tile is expanded to bytes once and multiplied with all of them while the next tile is on its way from memory.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dispatch;
mod engine;
mod kernel;
mod pack;
mod panel;
mod spec;
#[cfg(test)]
mod tests;

use std::ops::Range;

use ingle_graph::quantize::Layout;
use ingle_tensor::DType;

use crate::memory::{Lines, Part, Slab};
use crate::simd::Isa;
use crate::threads::Team;

pub use panel::Activations;
pub use spec::TILE;

use dispatch::GROUPS_MAX;
use kernel::Call;
use panel::UnitLayout;
use spec::Spec;

/// Where results go: element `(row, col)` is at `row * stride + col`.
#[derive(Clone, Copy, Debug)]
pub struct OutPtr {
    ptr: *mut f32,
    stride: usize,
}

/// Where residuals come from: element `(row, col)` is at `row * stride + col`.
#[derive(Clone, Copy, Debug)]
pub struct InPtr {
    ptr: *const f32,
    stride: usize,
}

// SAFETY: these are addresses; who dereferences them answers for it (see `Packed::product`).
unsafe impl Send for OutPtr {}
// SAFETY: as above.
unsafe impl Sync for OutPtr {}
// SAFETY: as above.
unsafe impl Send for InPtr {}
// SAFETY: as above.
unsafe impl Sync for InPtr {}

impl OutPtr {
    /// Rows of results from `ptr` on, `stride` elements apart. The first rows and columns may be outside the memory that
    /// is written, as long as those of the product are inside.
    pub fn new(ptr: *mut f32, stride: usize) -> Self {
        Self { ptr, stride }
    }

    /// Where the first element would be, and the elements between rows.
    pub(crate) fn parts(self) -> (*mut f32, usize) {
        (self.ptr, self.stride)
    }

    /// Where an element is.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, col: usize) -> *mut f32 {
        self.ptr.wrapping_add(row * self.stride + col)
    }
}

impl InPtr {
    /// Rows from `ptr` on, `stride` elements apart.
    pub fn new(ptr: *const f32, stride: usize) -> Self {
        Self { ptr, stride }
    }

    /// # Safety
    /// The element is inside the memory this points into.
    #[inline(always)]
    unsafe fn at(&self, row: usize, col: usize) -> *const f32 {
        // SAFETY: the caller's duty.
        unsafe { self.ptr.add(row * self.stride + col) }
    }
}

/// What follows a dot product: `y = fl(y + bias)`, then `y = fl(residual + y)`, each where given.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tail<'a> {
    /// One value per output, `[outputs]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, outputs]`; may be the output itself.
    pub residual: Option<InPtr>,
}

impl Tail<'_> {
    /// Adds bias and residual and writes one row of a tile: `lanes` columns from `first` on.
    ///
    /// # Safety
    /// `row` and the columns are inside the output, the bias and the residual.
    #[inline(always)]
    unsafe fn finish(&self, sums: &[f32; TILE], out: OutPtr, row: usize, first: usize, lanes: usize) {
        // SAFETY: the caller's duty. A whole tile is the rule, and its length then a constant.
        unsafe {
            match lanes {
                TILE => self.write(sums, out, row, first, TILE),
                lanes => self.write(sums, out, row, first, lanes),
            }
        }
    }

    /// # Safety
    /// As [`Tail::finish`].
    #[inline(always)]
    unsafe fn write(&self, sums: &[f32; TILE], out: OutPtr, row: usize, first: usize, lanes: usize) {
        let mut y = *sums;
        if let Some(bias) = self.bias {
            for (y, b) in y.iter_mut().zip(&bias[first..first + lanes]) {
                *y += b;
            }
        }
        // SAFETY: the caller's duty; the residual may be the output itself, so both are raw and read before written.
        unsafe {
            if let Some(residual) = self.residual {
                let residual = residual.at(row, first);
                for lane in 0..lanes {
                    y[lane] += *residual.add(lane);
                }
            }
            std::ptr::copy_nonoverlapping(y.as_ptr(), out.at(row, first), lanes);
        }
    }
}

/// A worker's private memory for products; grows to the largest one asked for.
#[derive(Default)]
pub struct Scratch {
    lines: Lines,
    /// What its first part holds, while activations that may be kept do not change.
    arranged: Option<Arranged>,
}

/// Which activations were arranged, and how.
#[derive(Clone, PartialEq, Debug)]
struct Arranged {
    bytes: *const u8,
    layout: Layout,
    rows: Range<usize>,
    dtype: DType,
    isa: Isa,
}

// SAFETY: the address is compared, never read.
unsafe impl Send for Arranged {}

impl Scratch {
    /// Makes room, so that no later product of at most this size allocates.
    pub fn reserve(&mut self, bytes: usize) {
        self.lines.reserve(bytes);
    }

    /// Activations that were promised to stay ([`Activations::kept`]) may change from here on.
    pub fn forget(&mut self) {
        self.arranged = None;
    }

    /// Whether `rows` of `x` have to be arranged for this format and path; from here on they are.
    fn arranges(&mut self, x: &Activations<'_>, rows: &Range<usize>, dtype: DType, isa: Isa) -> bool {
        let wanted = x.kept.then(|| Arranged {
            bytes: x.bytes.as_ptr(),
            layout: x.layout,
            rows: rows.clone(),
            dtype,
            isa,
        });
        let there = wanted.is_some() && self.arranged == wanted;
        self.arranged = wanted;
        !there
    }
}

/// Why a matrix could not be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The element type has no integer arithmetic.
    #[error("{0} weights have no packed form; use the float product")]
    Type(DType),
    /// The bytes are not a matrix of this shape.
    #[error("{bytes} bytes do not hold {rows} rows of {cols} values of {dtype}")]
    Size {
        /// Element type.
        dtype: DType,
        /// Rows.
        rows: usize,
        /// Values per row.
        cols: usize,
        /// Bytes found.
        bytes: usize,
    },
    /// The system has no memory for the packed matrix.
    #[error("no memory for a packed matrix: {0}")]
    Memory(#[from] std::io::Error),
}

/// A quantized matrix `[rows, cols]`, packed for the `int` arithmetic.
pub struct Packed {
    spec: &'static Spec,
    rows: usize,
    cols: usize,
    /// Bytes between tiles: the code section, the scale section, padding to 64.
    tile_stride: usize,
    data: Part,
}

/// Bytes between tiles of a matrix with so many columns.
fn tile_stride(spec: &Spec, cols: usize) -> usize {
    (cols / spec.unit() * (spec.code_bytes() + spec.scale_bytes())).next_multiple_of(64)
}

impl Packed {
    /// Packs the file bytes of `[rows, cols]` into memory of its own; tiles are shared out among the team.
    ///
    /// # Errors
    /// A type without packed form, or bytes that are not the shape's; no memory.
    pub fn new(dtype: DType, rows: usize, cols: usize, data: &[u8], team: &Team) -> Result<Self, PackError> {
        let mut slab = Slab::new(Self::planned_bytes(dtype, rows, cols).unwrap_or(0))?;
        Self::new_in(&mut slab, dtype, rows, cols, data, team)
    }

    /// As [`Packed::new`], with [`Packed::planned_bytes`] of `slab`.
    ///
    /// # Errors
    /// As [`Packed::new`]; the slab is used up.
    pub fn new_in(
        slab: &mut Slab,
        dtype: DType,
        rows: usize,
        cols: usize,
        data: &[u8],
        team: &Team,
    ) -> Result<Self, PackError> {
        let spec = spec::spec(dtype).ok_or(PackError::Type(dtype))?;
        let size = || PackError::Size { dtype, rows, cols, bytes: data.len() };
        let row_bytes = dtype.row_bytes(cols).map_err(|_| size())?;
        if row_bytes.checked_mul(rows) != Some(data.len()) {
            return Err(size());
        }
        let units = cols / spec.unit();
        let tile_stride = tile_stride(spec, cols);
        let tiles = rows.div_ceil(TILE);
        let packed = Self { spec, rows, cols, tile_stride, data: slab.take(tiles * tile_stride)? };
        if data.is_empty() {
            return Ok(packed);
        }
        let pack_tile = dispatch::tile_packer(dtype);
        let base = SharedBytes(packed.data.as_mut_ptr());
        team.run(&|worker, workers| {
            for tile in worker * tiles / workers..(worker + 1) * tiles / workers {
                let source = &data[tile * TILE * row_bytes..((tile + 1) * TILE).min(rows) * row_bytes];
                // SAFETY: tiles are disjoint, inside the buffer, and each is visited by one worker only.
                let tile = unsafe { base.slice(tile * tile_stride, tile_stride) };
                let (codes, scales) = tile.split_at_mut(units * spec.code_bytes());
                pack_tile(source, row_bytes, codes, scales);
            }
        });
        Ok(packed)
    }

    /// Bytes that a matrix of this type and shape takes when packed; `None` for a type without packed form.
    pub fn planned_bytes(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
        spec::spec(dtype).map(|spec| rows.div_ceil(TILE) * tile_stride(spec, cols))
    }

    /// Element type of the file.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: the length of one dot product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Tiles of 16 output rows; the last may be padded.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// Columns per activation scale: 32 or 256.
    pub fn unit(&self) -> usize {
        self.spec.unit()
    }

    /// Bytes in memory, which is what one pass over the weights reads.
    pub fn bytes(&self) -> usize {
        self.tiles() * self.tile_stride
    }

    /// Bytes of scratch that products of at most `rows` activation rows need, with any instruction set.
    pub fn scratch_bytes(&self, digits: usize, rows: usize) -> usize {
        let at_once = Isa::ALL.iter().map(|&isa| self.panel_rows(isa, digits)).max().unwrap_or(0);
        let vectors = self.block_bytes(digits, rows.min(at_once));
        #[cfg(target_arch = "x86_64")]
        let vectors = vectors.max(amx::scratch_bytes(self, digits, rows));
        vectors
    }

    /// Bytes of scratch for the panels of this many rows.
    fn block_bytes(&self, digits: usize, rows: usize) -> usize {
        // The last panel of a group may have one row more than there are rows.
        self.expanded_bytes() + self.panel_bytes(rows + GROUPS_MAX, digits)
    }

    /// Bytes of a panel of this many rows; of several panels with as many rows in all.
    fn panel_bytes(&self, height: usize, digits: usize) -> usize {
        self.units() * UnitLayout::new(self.spec, height, digits).bytes
    }

    /// Bytes of a tile with its codes expanded to bytes.
    fn expanded_bytes(&self) -> usize {
        TILE * self.cols
    }

    /// Rows whose arrangement is kept at once when `rows` are multiplied: what one call should have, where several calls
    /// share out a matrix.
    pub fn rows_at_once(&self, isa: Isa, digits: usize, rows: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx
            && let Some(plan) = amx::plan(self, digits, rows)
        {
            return amx::rows_at_once(self, &plan, rows);
        }
        self.panel_rows(isa, digits)
    }

    /// Rows whose panels are kept at once.
    fn panel_rows(&self, isa: Isa, digits: usize) -> usize {
        let height = dispatch::tallest(isa, digits);
        height * (PANELS_SHARE / self.panel_bytes(height, digits).max(1)).max(2)
    }

    fn units(&self) -> usize {
        self.cols / self.spec.unit()
    }

    /// Bytes of a tile in memory.
    fn tile_bytes(&self) -> usize {
        self.tile_stride
    }

    /// Codes of a tile: `[units][code_bytes]`.
    fn tile_codes(&self, tile: usize) -> *const u8 {
        self.data[tile * self.tile_stride..].as_ptr()
    }

    /// Scale records of a tile: `[units][scale_bytes]`.
    fn tile_scales(&self, tile: usize) -> *const u8 {
        self.data[tile * self.tile_stride + self.units() * self.spec.code_bytes()..].as_ptr()
    }

    /// Multiplies activation rows `x_rows` with the output rows of `tiles`:
    /// `out[r][16 * tile + lane] = tail(dot(weight row, x[r]))`. Output columns beyond [`Packed::rows`] are not
    /// written. The bits do not depend on how rows and tiles are split over calls, nor on `isa`.
    ///
    /// For many rows, weights are read again from the L2 cache for each block of rows; a call should have as many
    /// tiles as it can, since rearranging activations is paid once per block of rows and a share of L2.
    ///
    /// # Panics
    /// When the activations' columns, unit, or rows, or the tiles, are not those of the matrix, or the bias is short.
    ///
    /// # Safety
    /// `isa` is available. Rows `x_rows` and the columns of `tiles` of `out` (and of the residual) are inside live
    /// memory, and nobody else reads or writes these elements of `out` during the call.
    pub unsafe fn product(
        &self,
        isa: Isa,
        x: &Activations<'_>,
        x_rows: Range<usize>,
        tiles: Range<usize>,
        out: OutPtr,
        tail: Tail<'_>,
        scratch: &mut Scratch,
    ) {
        let layout = *x.layout();
        assert!(layout.cols == self.cols && layout.unit == self.unit(), "{layout:?} for {self:?}");
        assert!(x_rows.end <= layout.rows && tiles.end <= self.tiles(), "{x_rows:?}, {tiles:?} for {self:?}");
        assert!(tail.bias.is_none_or(|bias| bias.len() >= self.rows), "bias for {self:?}");
        debug_assert!(isa.available(), "{isa:?}");
        let digits = layout.digits;
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx
            && let Some(plan) = amx::plan(self, digits, x_rows.len())
        {
            // SAFETY: this function's contract, and the instruction set is the caller's choice.
            return unsafe { amx::product(self, &plan, x, x_rows, tiles, out, tail, scratch) };
        }
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx
            && let Some(few) = amx::few::product(self, x, x_rows.len())
        {
            // SAFETY: as above.
            return unsafe { few.run(x_rows, tiles, out, tail, scratch) };
        }
        let at_once = self.panel_rows(isa, digits);
        let bytes = scratch.lines.bytes(self.block_bytes(digits, x_rows.len().min(at_once)));
        let write_panel = dispatch::panel_writer(self.spec.dtype);
        let mut row = x_rows.start;
        while row < x_rows.end {
            // Panels of as many rows as fit, in groups of equal height: the tallest, then what remains.
            let block = row..x_rows.end.min(row + at_once);
            let arranges = scratch.arranges(x, &block, self.spec.dtype, isa.min(Isa::Avx512));
            let mut groups = [None; GROUPS_MAX];
            let mut used = 0;
            // SAFETY: `block_bytes` counts the expanded tile first.
            let mut at = unsafe { bytes.add(self.expanded_bytes()) };
            while row < block.end {
                let group = dispatch::next_group(isa, block.end - row, digits);
                groups[used] = Some((group, row, at.cast_const()));
                used += 1;
                for first in (0..group.rows).step_by(group.height) {
                    let rows = row + first..row + group.rows.min(first + group.height);
                    // SAFETY: the layout was checked above, and scratch has room for the panels of a block.
                    unsafe {
                        if arranges {
                            write_panel(x, rows, group.height, at);
                        }
                        at = at.add(self.panel_bytes(group.height, digits));
                    }
                }
                row += group.rows;
            }
            let step = if used == 1 { tiles.len() } else { WEIGHTS_SHARE / self.tile_stride.max(1) }.max(1);
            for first in tiles.clone().step_by(step) {
                let tiles = first..tiles.end.min(first + step);
                for (group, row, panels) in groups.into_iter().flatten() {
                    let kernel = dispatch::kernel(isa, self.spec.dtype, digits, group);
                    let (rows, tiles) = (row..row + group.rows, tiles.clone());
                    // SAFETY: shapes were checked and panels written above; the rest is this function's contract.
                    unsafe { kernel(&Call { packed: self, panels, rows, tiles, out, tail, bytes }) };
                }
            }
        }
    }

    /// Name of the path that products take: `int.avx512vnni`.
    pub fn engaged_name(isa: Isa) -> &'static str {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "int.avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "int.amx",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "int.avx2",
            _ => "int.scalar",
        }
    }
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed({}, [{}, {}])", self.spec.dtype, self.rows, self.cols)
    }
}

/// Bytes of panels that tiles are multiplied with one after the other; they stay in the L2 cache meanwhile.
const PANELS_SHARE: usize = 1 << 20;

/// Bytes of weights that are multiplied with all groups of panels before the next are read, where there are several.
const WEIGHTS_SHARE: usize = 256 << 10;

/// A buffer that workers write disjoint parts of.
#[derive(Clone, Copy)]
struct SharedBytes(*mut u8);

// SAFETY: `slice` makes its callers answer for disjointness.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// # Safety
    /// The range is inside the buffer, which outlives the result, and no other slice of it overlaps.
    unsafe fn slice<'a>(self, at: usize, len: usize) -> &'a mut [u8] {
        // SAFETY: the caller's duty.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}
