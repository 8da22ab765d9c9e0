//! Weights on the device: how each matrix lies there, exactly how many bytes it takes, and how it is brought there.
//!
//! A matrix is up to three planes, each `[row][...]`, so that a range of rows can be made and copied alone. The first plane
//! of an integer form holds chunks of 16 bytes, units in groups of eight with chunk c of all units of a group before
//! chunk c + 1: eight lanes that own a unit each then read 128 bytes in a row. Rows of the other planes are padded to whole
//! chunks. `kernels/matrix.cuh` reads it. Floats lie in blocks of 128 columns, in which elements l, l + 32, l + 64 and l + 96
//! are neighbours: those of one accumulator (`kernels/float.cuh`).

use ingle_graph::op::Weight;
use ingle_tensor::DType;
use ingle_tensor::quant::{self, Minimum, UnitView};

use crate::driver::{Buffer, Context, Pinned, Span, Stream};
use crate::{Error, Result};

/// Planes of a matrix begin at multiples of this.
const ALIGN: usize = 256;

/// Bytes of a chunk, and units of a group.
const CHUNK: usize = 16;
const GROUP: usize = 8;

/// Columns of a block of floats, and accumulators of the contract: columns that are as far apart lie side by side.
pub(crate) const FLOAT_BLOCK: usize = 128;
const ACCUMULATORS: usize = 32;

/// How the elements of a matrix lie on the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// Floats, in another order; rows are padded with zeros to whole blocks.
    F32,
    /// As F32.
    F16,
    /// As F32.
    BF16,
    /// Codes; d.
    Q4_0,
    /// Codes; d and m.
    Q4_1,
    /// Low bits of codes; fifth bits; d.
    Q5_0,
    /// Low bits of codes; fifth bits, d and m.
    Q5_1,
    /// Bytes; d. Q8_1 too.
    Q8_0,
    /// Codes; d.
    IQ4NL,
    /// Codes; the byte of the scale.
    MXFP4,
    /// The block as it is: header, codes.
    Q4K,
    /// The block as it is: header, fifth bits, low bits of codes.
    Q5K,
    /// Low bits, high bits, sub-scales as they are; d.
    Q6K,
    /// Codes; the eight bytes before them.
    IQ4XS,
    /// The format's integer view: i16 weights with their sub-scales, an i16 for every 16 columns where there are minima;
    /// scale and minimum as f32.
    Wide {
        /// Columns of a unit.
        unit: usize,
        /// Columns that share a scale of activations.
        scale_unit: usize,
        /// There are minima.
        minima: bool,
    },
}

/// What a unit takes: chunks of the first plane, and bytes of the second and the third.
#[derive(Clone, Copy)]
struct UnitSize {
    columns: usize,
    chunks: usize,
    second: usize,
    third: usize,
}

impl Form {
    /// The form of a matrix of this type; a quantized one that is not multiplied as integers is widened.
    pub fn of(dtype: DType, integers: bool) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
            _ if !integers => Self::F32,
            DType::Q4_0 => Self::Q4_0,
            DType::Q4_1 => Self::Q4_1,
            DType::Q5_0 => Self::Q5_0,
            DType::Q5_1 => Self::Q5_1,
            DType::Q8_0 | DType::Q8_1 => Self::Q8_0,
            DType::IQ4NL => Self::IQ4NL,
            DType::MXFP4 => Self::MXFP4,
            DType::Q4K => Self::Q4K,
            DType::Q5K => Self::Q5K,
            DType::Q6K => Self::Q6K,
            DType::IQ4XS => Self::IQ4XS,
            _ => match quant::format(dtype) {
                Some(format) => Self::Wide {
                    unit: format.unit,
                    scale_unit: dtype.block_len(),
                    minima: format.minimum != Minimum::None,
                },
                None => Self::F32,
            },
        }
    }

    fn size(self) -> Option<UnitSize> {
        let (columns, chunks, second, third) = match self {
            Self::F32 | Self::F16 | Self::BF16 => return None,
            Self::Q4_0 | Self::IQ4NL => (32, 1, 2, 0),
            Self::Q4_1 => (32, 1, 4, 0),
            Self::Q5_0 => (32, 1, 4, 2),
            Self::Q5_1 => (32, 1, 8, 0),
            Self::Q8_0 => (32, 2, 2, 0),
            Self::MXFP4 => (32, 1, 1, 0),
            Self::Q4K => (256, 9, 0, 0),
            Self::Q5K => (256, 11, 0, 0),
            Self::Q6K => (256, 13, 2, 0),
            Self::IQ4XS => (256, 8, 8, 0),
            // Minima are those of units of 256 columns: two chunks.
            Self::Wide { unit, minima, .. } => (unit, unit / 8 + if minima { 2 } else { 0 }, 8, 0),
        };
        Some(UnitSize { columns, chunks, second, third })
    }

    /// Bytes of a unit in each plane; none for floats.
    pub fn unit_bytes(self) -> [usize; 3] {
        self.size().map_or([0; 3], |size| [size.chunks * CHUNK, size.second, size.third])
    }

    /// Whether units have a minimum.
    pub fn has_minima(self) -> bool {
        match self {
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => true,
            Self::Wide { minima, .. } => minima,
            _ => false,
        }
    }

    /// Columns of a unit of the integer product; `None` for floats.
    pub fn unit(self) -> Option<usize> {
        self.size().map(|size| size.columns)
    }
}

/// How a matrix lies on the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MatrixLayout {
    /// Type of the stored tensor.
    pub dtype: DType,
    /// Form on the device.
    pub form: Form,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl MatrixLayout {
    /// Of a matrix of this type; `integers` as for [`Form::of`].
    ///
    /// # Errors
    /// Columns that are not whole blocks of its type; no rows or columns, or more than kernels count.
    pub fn new(dtype: DType, rows: usize, cols: usize, integers: bool) -> Result<Self> {
        let sizes = 1..=i32::MAX as usize;
        let whole = cols.is_multiple_of(dtype.block_len());
        if !whole || !sizes.contains(&rows) || !sizes.contains(&cols) {
            return Err(Error::Refused(format!("a matrix [{rows}, {cols}] of {dtype}")));
        }
        Ok(Self { dtype, form: Form::of(dtype, integers), rows, cols })
    }

    /// Columns that share a scale of the activations it is multiplied with; `None` where they are f32.
    pub fn unit(&self) -> Option<usize> {
        match self.form {
            Form::Wide { scale_unit, .. } => Some(scale_unit),
            form => form.unit(),
        }
    }

    /// Bytes of a row of the tensor.
    pub fn stored_bytes(&self) -> usize {
        self.cols / self.dtype.block_len() * self.dtype.block_bytes()
    }

    /// Bytes of a row in each plane.
    pub fn row_bytes(&self) -> [usize; 3] {
        match self.form.size() {
            Some(size) => {
                let units = self.cols / size.columns;
                let small = |bytes: usize| (units * bytes).next_multiple_of(CHUNK);
                [units * size.chunks * CHUNK, small(size.second), small(size.third)]
            }
            None => {
                let element = if self.form == Form::F32 { 4 } else { 2 };
                [self.cols.next_multiple_of(FLOAT_BLOCK) * element, 0, 0]
            }
        }
    }

    /// Where each plane begins.
    pub fn planes(&self) -> [usize; 3] {
        let mut at = 0;
        self.row_bytes().map(|bytes| {
            let here = at;
            at += (self.rows * bytes).next_multiple_of(ALIGN);
            here
        })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.row_bytes().iter().map(|bytes| (self.rows * bytes).next_multiple_of(ALIGN)).sum()
    }

    /// Makes rows: `data` are whole rows of the tensor, `planes` room for just as many rows of each plane.
    ///
    /// # Panics
    /// Slices of other sizes.
    pub fn pack(&self, data: &[u8], planes: [&mut [u8]; 3]) {
        let sizes = self.row_bytes();
        let stored = self.stored_bytes();
        let rows = data.len() / stored;
        assert_eq!(data.len(), rows * stored);
        for (plane, size) in planes.iter().zip(sizes) {
            assert_eq!(plane.len(), rows * size);
        }
        let [first, second, third] = planes;
        for (row, data) in data.chunks_exact(stored).enumerate() {
            let part = |size: usize| row * size..(row + 1) * size;
            let first = &mut first[part(sizes[0])];
            match (self.form, self.form.size()) {
                (Form::F16 | Form::BF16, _) => pack_floats(first.as_chunks_mut().0, data.as_chunks::<2>().0),
                (form, Some(size)) => {
                    let (second, third) = (&mut second[part(sizes[1])], &mut third[part(sizes[2])]);
                    pack_row(self.dtype, form, size, data, first, second, third);
                }
                _ => {
                    let mut values = vec![0.0f32; self.cols];
                    quant::decode_row(self.dtype, data, &mut values);
                    let bytes: Vec<[u8; 4]> = values.iter().map(|x| x.to_le_bytes()).collect();
                    pack_floats(first.as_chunks_mut().0, &bytes);
                }
            }
        }
    }
}

/// One row of floats of so many bytes.
fn pack_floats<const BYTES: usize>(to: &mut [[u8; BYTES]], row: &[[u8; BYTES]]) {
    const EACH: usize = FLOAT_BLOCK / ACCUMULATORS;
    for (to, block) in to.chunks_exact_mut(FLOAT_BLOCK).zip(row.chunks(FLOAT_BLOCK)) {
        if block.len() < FLOAT_BLOCK {
            to.fill([0; BYTES]);
        }
        for (j, elements) in block.chunks(ACCUMULATORS).enumerate() {
            to[j..].iter_mut().step_by(EACH).zip(elements).for_each(|(to, x)| *to = *x);
        }
    }
}

/// One row of an integer form.
fn pack_row(
    dtype: DType,
    form: Form,
    size: UnitSize,
    data: &[u8],
    first: &mut [u8],
    second: &mut [u8],
    third: &mut [u8],
) {
    let units = first.len() / (size.chunks * CHUNK);
    // Units of a block: one, but for NVFP4.
    let split = dtype.block_len() / size.columns;
    let mut view = UnitView::default();
    for u in 0..units {
        let block = &data[u / split * dtype.block_bytes()..][..dtype.block_bytes()];
        let (group, in_group) = (u / GROUP, u % GROUP);
        let pitch = (units - group * GROUP).min(GROUP) * CHUNK;
        let group = &mut first[group * GROUP * size.chunks * CHUNK..];
        let mut put = |c: usize, bytes: &[u8]| {
            for (i, chunk) in bytes.chunks_exact(CHUNK).enumerate() {
                group[(c + i) * pitch + in_group * CHUNK..][..CHUNK].copy_from_slice(chunk);
            }
        };
        let second = &mut second[u * size.second..(u + 1) * size.second];
        let third = &mut third[u * size.third..(u + 1) * size.third];
        match form {
            Form::Q4_0 | Form::IQ4NL => {
                put(0, &block[2..]);
                second.copy_from_slice(&block[..2]);
            }
            Form::Q4_1 => {
                put(0, &block[4..]);
                second.copy_from_slice(&block[..4]);
            }
            Form::Q5_0 => {
                put(0, &block[6..]);
                second.copy_from_slice(&fifth_bits(&block[2..6]));
                third.copy_from_slice(&block[..2]);
            }
            Form::Q5_1 => {
                put(0, &block[8..]);
                second[..4].copy_from_slice(&fifth_bits(&block[4..8]));
                second[4..].copy_from_slice(&block[..4]);
            }
            Form::Q8_0 => {
                // Q8_1 has its sum between scale and bytes.
                put(0, &block[dtype.block_bytes() - 32..]);
                second.copy_from_slice(&block[..2]);
            }
            Form::MXFP4 => {
                put(0, &block[1..]);
                second.copy_from_slice(&block[..1]);
            }
            Form::Q4K | Form::Q5K => put(0, block),
            Form::Q6K => {
                put(0, &block[..208]);
                second.copy_from_slice(&block[208..]);
            }
            Form::IQ4XS => {
                put(0, &block[8..]);
                second.copy_from_slice(&block[..8]);
            }
            Form::Wide { unit, minima, .. } => {
                let Some(format) = quant::format(dtype) else { return };
                (format.unit_view)(block, u % split, &mut view);
                let mut bytes = [0; 2 * 256 + 2 * 16];
                let (weights, rest) = bytes.split_at_mut(2 * unit);
                let words = |to: &mut [u8], from: &mut dyn Iterator<Item = i16>| {
                    to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, w)| *to = w.to_le_bytes());
                };
                words(weights, &mut view.w.iter().copied());
                words(rest, &mut view.m.iter().copied().step_by(16));
                put(0, &bytes[..2 * unit + if minima { 2 * CHUNK } else { 0 }]);
                second[..4].copy_from_slice(&view.d.to_le_bytes());
                second[4..].copy_from_slice(&view.min.to_le_bytes());
            }
            Form::F32 | Form::F16 | Form::BF16 => {}
        }
    }
}

/// Bit k of the file's word, k = 4 i + b, becomes bit 8 b + i: so a shift and a mask give the bits of bytes of word i.
fn fifth_bits(high: &[u8]) -> [u8; 4] {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    (0..32).fold(0, |to, k| to | (high >> k & 1) << (8 * (k % 4) + k / 4)).to_le_bytes()
}

/// Most bytes of host memory that are made before they are copied, twice: one is filled while the other is copied.
const STAGING: usize = 32 << 20;

/// Rows of a matrix that are worth a thread of their own, in bytes: to start one takes as long as to make some of them.
const SHARE: usize = 64 << 10;

/// Pinned memory of the host that matrices pass through.
pub struct Staging {
    turns: [Pinned; 2],
    bytes: usize,
    threads: usize,
}

impl Staging {
    /// For matrices of up to `largest` bytes and as many threads as there are processors. Of memory it takes what those need,
    /// since to pin and clear it takes longer than to load a small model, and from 32 MiB on a matrix passes in pieces.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(context: &Context, largest: usize) -> Result<Self> {
        let bytes = largest.min(STAGING);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self { turns: [Pinned::new(context, bytes)?, Pinned::new(context, bytes)?], bytes, threads })
    }
}

/// A matrix on the device.
pub struct Matrix {
    layout: MatrixLayout,
    buffer: Buffer,
    limits: Limits,
}

/// What of a device decides how a product is launched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory of a block at most.
    pub shared_bytes: usize,
    /// Compute capability.
    pub capability: (u32, u32),
}

impl Limits {
    /// Of the device of a context.
    pub fn new(context: &Context) -> Self {
        let device = context.device();
        Self {
            multiprocessors: device.multiprocessors as u32,
            shared_bytes: device.shared_bytes_max,
            capability: device.capability,
        }
    }
}

impl Matrix {
    /// Brings a matrix to the device, to the beginning of `memory`, which has [`MatrixLayout::bytes`]: `data` are the tensor's
    /// bytes; `integers` says whether a quantized one is multiplied as integers, else it is widened. Copies of the last rows
    /// are under way when it returns, from memory that `staging` keeps.
    ///
    /// # Errors
    /// A shape that kernels cannot take; bytes, or memory, of another size; a call that failed.
    pub fn load(
        context: &Context,
        stream: &Stream,
        staging: &mut Staging,
        memory: Buffer,
        weight: &Weight,
        integers: bool,
        data: &[u8],
    ) -> Result<Self> {
        let layout = MatrixLayout::new(weight.dtype, weight.rows, weight.cols, integers)?;
        if data.len() != weight.bytes() {
            let what = format!("{}: {} bytes, {layout:?} has {}", weight.name, data.len(), weight.bytes());
            return Err(Error::Refused(what));
        }
        let (row, starts) = (layout.row_bytes(), layout.planes());
        let per_row = row.iter().sum::<usize>();
        let per_piece = staging.bytes / per_row;
        if per_piece == 0 {
            let most = staging.bytes;
            let what =
                format!("{}: a row of {per_row} bytes, at most {most} are copied at once", weight.name);
            return Err(Error::Refused(what));
        }
        let buffer = memory.piece(0, layout.bytes())?;
        let stride = data.len() / weight.rows;
        for (i, data) in data.chunks(per_piece * stride).enumerate() {
            staging.turns.swap(0, 1);
            let pinned = &mut staging.turns[0];
            let sizes = pack_all(&layout, data, pinned.bytes()?, staging.threads);
            let mut from = 0;
            for plane in (0..3).filter(|&plane| sizes[plane] > 0) {
                let at = starts[plane] + i * per_piece * row[plane];
                stream.upload(buffer.span(at, sizes[plane])?, pinned, from)?;
                from += sizes[plane];
            }
        }
        Ok(Self { layout, buffer, limits: Limits::new(context) })
    }

    /// How it lies there.
    pub fn layout(&self) -> MatrixLayout {
        self.layout
    }

    /// Where.
    pub fn span(&self) -> Span<'_> {
        self.buffer.all()
    }

    /// What its device has.
    pub fn limits(&self) -> Limits {
        self.limits
    }
}

/// Makes rows, plane after plane, at the beginning of `out`; returns the bytes of each plane.
fn pack_all(layout: &MatrixLayout, data: &[u8], out: &mut [u8], threads: usize) -> [usize; 3] {
    let (row, stride) = (layout.row_bytes(), layout.stored_bytes());
    let rows = data.len() / stride;
    let sizes = row.map(|bytes| rows * bytes);
    let (first, rest) = out.split_at_mut(sizes[0]);
    let (second, rest) = rest.split_at_mut(sizes[1]);
    let mut left = [first, second, &mut rest[..sizes[2]]];
    let share = rows.div_ceil(threads.max(1)).max(SHARE.div_ceil(row.iter().sum()));
    std::thread::scope(|scope| {
        for data in data.chunks(share * stride) {
            let mut planes: [&mut [u8]; 3] = Default::default();
            for ((plane, left), bytes) in planes.iter_mut().zip(&mut left).zip(row) {
                let (now, later) = std::mem::take(left).split_at_mut(data.len() / stride * bytes);
                (*plane, *left) = (now, later);
            }
            scope.spawn(move || layout.pack(data, planes));
        }
    });
    sizes
}
