//! GGUF, versions 2 and 3, little-endian: one file of typed metadata and tensors.
//!
//! Layout: magic `GGUF`, version u32, tensor count u64, key count u64; per key: name, value type, value; per
//! tensor: name, dimension count u32, dimensions u64 (innermost first), type u32, offset u64 into the data;
//! padding to the alignment (`general.alignment`, else 32); data. Strings are a u64 length and bytes.
//!
//! Reading trusts nothing: every length is checked against the bytes that remain before it is used, so a
//! hostile file costs time and memory in proportion to its own size. Strings and arrays stay in the file.

mod metadata;
mod split;
mod writer;

pub use metadata::{Array, Metadata, Value, ValueType};
pub(crate) use split::open_parts;
pub use writer::{FileStream, Outline, Stream, ToValue, Writer};

use crate::bytes::Bytes;
use crate::checkpoint::{TensorInfo, check_ranges, index_by_name};
use crate::{DType, Error, Result};

/// The first bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Alignment of tensor data where `general.alignment` is absent.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// The key that sets the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";

/// Dimensions a tensor may have, as in the format's own library.
const MAX_DIMS: u32 = 4;

/// What a GGUF file says of itself: everything but the tensor data.
#[derive(Debug, Clone)]
pub struct Gguf {
    /// The format version, 2 or 3.
    pub version: u32,
    /// Every tensor begins at a multiple of this many bytes from the start of the data.
    pub alignment: u64,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_start: u64,
    /// The typed keys.
    pub metadata: Metadata,
    /// The tensors in file order, with offsets from the start of the file and `file` 0.
    pub tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Reads and checks everything but the tensor data. The result shares `bytes`.
    pub fn parse(bytes: &Bytes) -> Result<Self> {
        let mut cursor = Cursor::new(bytes);
        let version = read_preamble(&mut cursor)?;
        let tensor_count = cursor.u64("tensor count")?;
        let key_count = cursor.u64("key count")?;
        // A key takes at least its name's length, its type and one byte; a tensor its name's length, the
        // dimension count, the type and the offset.
        let key_count = cursor.count(key_count, 13, "metadata keys")?;
        let metadata = Metadata::parse(bytes, &mut cursor, key_count)?;
        let alignment = read_alignment(&metadata)?;

        let tensor_count = cursor.count(tensor_count, 24, "tensors")?;
        let mut tensors = Vec::with_capacity(cursor.room::<TensorInfo>(tensor_count));
        for i in 0..tensor_count {
            tensors.push(read_tensor(&mut cursor, i, alignment)?);
        }
        let data_start = (cursor.at as u64).next_multiple_of(alignment);
        for tensor in &mut tensors {
            tensor.offset = tensor.offset.checked_add(data_start).ok_or_else(|| {
                Error::Header(format!("its offset {} overflows", tensor.offset)).in_tensor(&tensor.name)
            })?;
        }
        index_by_name(&tensors)?;
        check_ranges(&tensors, bytes.len() as u64)?;
        Ok(Self { version, alignment, data_start, metadata, tensors })
    }
}

/// Magic and version. Byte order is judged from the version field and nothing else: a guess from counts once
/// broke valid files elsewhere (ollama/ollama#4987).
fn read_preamble(cursor: &mut Cursor<'_>) -> Result<u32> {
    let magic = cursor.take(4, "the magic")?;
    if magic != MAGIC {
        let hint = "GGUF files begin with \"GGUF\"";
        return Err(Error::NotAModel { found: format!("{:?}", magic.escape_ascii().to_string()), hint });
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        _ if (1..=0xffff).contains(&version.swap_bytes()) => Err(Error::BigEndian { found: version }),
        _ => Err(Error::Version { found: version }),
    }
}

fn read_alignment(metadata: &Metadata) -> Result<u64> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    // The format fixes this key's type; reading another one would only hide a broken writer.
    let Value::U32(alignment) = value else {
        let found = value.describe();
        return Err(Error::KeyType { key: ALIGNMENT_KEY.into(), found, wanted: "u32" });
    };
    check_alignment(alignment)?;
    Ok(u64::from(alignment))
}

/// A power of two up to 1 MiB: what writers use is 32 to 4096.
fn check_alignment(alignment: u32) -> Result<()> {
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        let problem = format!("an alignment of {alignment} is not a power of two in 1..=1048576");
        return Err(Error::key(ALIGNMENT_KEY, problem));
    }
    Ok(())
}

/// One tensor's entry; its offset is still relative to the start of the data.
fn read_tensor(cursor: &mut Cursor<'_>, index: usize, alignment: u64) -> Result<TensorInfo> {
    let name = cursor.utf8(|| format!("name of tensor {index}"))?;
    let in_tensor = |error: Error| error.in_tensor(name);

    let dims = cursor.u32("the dimension count").map_err(in_tensor)?;
    if dims > MAX_DIMS {
        return Err(in_tensor(Error::Header(format!(
            "it has {dims} dimensions; at most {MAX_DIMS} are possible"
        ))));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        let dim = cursor.u64("a dimension").map_err(in_tensor)?;
        let fits = usize::try_from(dim).ok().filter(|dim| *dim > 0);
        shape.push(fits.ok_or_else(|| in_tensor(Error::Header(format!("it has a dimension of {dim}"))))?);
    }
    shape.reverse();
    let dtype =
        DType::from_ggml_type(cursor.u32("the element type").map_err(in_tensor)?).map_err(in_tensor)?;
    let offset = cursor.u64("the offset").map_err(in_tensor)?;
    if !offset.is_multiple_of(alignment) {
        let problem = format!("its offset {offset} is not a multiple of the alignment {alignment}");
        return Err(in_tensor(Error::Header(problem)));
    }
    let bytes = dtype.tensor_bytes(&shape).map_err(in_tensor)?;
    Ok(TensorInfo { name: name.into(), dtype, shape, file: 0, offset, bytes })
}

/// A reader of the header that checks before it takes.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn truncated(&self, what: impl Into<String>, needed: u64) -> Error {
        let (offset, remaining) = (self.at as u64, self.remaining() as u64);
        Error::Truncated { what: what.into(), offset, needed, remaining }
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8]> {
        if len > self.remaining() {
            return Err(self.truncated(what, len as u64));
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let taken = self.take(N, what)?;
        Ok(std::array::from_fn(|i| taken[i]))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Checks that `count` items of at least `least` bytes each can still follow.
    fn count(&self, count: u64, least: usize, what: &str) -> Result<usize> {
        let room = self.remaining() / least;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= room)
            .ok_or_else(|| self.truncated(format!("{count} {what}"), count.saturating_mul(least as u64)))
    }

    /// How many of `count` items to make room for at once: a number in a header is only a claim, and no claim gets more
    /// memory than the rest of the file has bytes.
    fn room<T>(&self, count: usize) -> usize {
        count.min(self.remaining() / size_of::<T>())
    }

    /// A length and that many bytes.
    fn string(&mut self, what: impl Fn() -> String) -> Result<&'a [u8]> {
        if self.remaining() < 8 {
            return Err(self.truncated(what(), 8));
        }
        let len = self.u64("")?;
        match usize::try_from(len) {
            Ok(len) if len <= self.remaining() => self.take(len, ""),
            _ => Err(self.truncated(what(), len)),
        }
    }

    /// A string that must be UTF-8: names of keys and tensors.
    fn utf8(&mut self, what: impl Fn() -> String) -> Result<&'a str> {
        let at = self.at;
        let bytes = self.string(&what)?;
        std::str::from_utf8(bytes).map_err(|_| Error::Header(format!("{} at byte {at} is not UTF-8", what())))
    }
}

#[cfg(test)]
mod tests;
