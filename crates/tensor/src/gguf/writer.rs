//! Writing GGUF version 3: keys, then tensors, then their bytes, which need never be in memory together.
//!
//! An [`Outline`] says what the file will hold; from it the header and the size are known before the first byte
//! of a weight. A [`Stream`] then takes the bytes in the declared order, in pieces of any size, and refuses what was
//! not declared. A [`FileStream`] does so into a file that gets its name only when it is whole. [`Writer`] is for
//! small files: it holds the bytes and streams them at the end.

mod stream;
mod value;

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, Metadata, Value, ValueType, check_alignment};
use crate::{DType, Error, Result};

pub use stream::{FileStream, Stream};
pub use value::ToValue;
use value::put_string;

/// The version that is written.
const VERSION: u32 = 3;

/// What a file will hold: its keys, and its tensors by name, type and shape, in the order in which they are written.
#[derive(Clone, Debug, Default)]
pub struct Outline {
    keys: HashSet<String>,
    names: HashSet<String>,
    encoded_keys: Vec<u8>,
    tensors: Vec<Declared>,
    alignment: Option<u32>,
}

/// A tensor of an outline.
#[derive(Clone, Debug)]
struct Declared {
    name: String,
    /// The type's number in the file.
    number: u32,
    shape: Vec<usize>,
    bytes: u64,
}

impl Outline {
    /// An empty file of version 3 with the default alignment.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key. An error if it is there already, or is an alignment that no reader takes.
    pub fn set(&mut self, key: &str, value: &(impl ToValue + ?Sized)) -> Result<()> {
        let mut encoded = Vec::new();
        put_string(key.as_bytes(), &mut encoded);
        encoded.extend((value.kind() as u32).to_le_bytes());
        value.put(&mut encoded);
        if key == ALIGNMENT_KEY {
            let Some(bytes) = encoded.last_chunk().filter(|_| value.kind() == ValueType::U32) else {
                let found = value.kind().name().into();
                return Err(Error::KeyType { key: key.into(), found, wanted: "u32" });
            };
            let alignment = u32::from_le_bytes(*bytes);
            check_alignment(alignment)?;
            self.alignment = Some(alignment);
        }
        self.add_key(key, &encoded)
    }

    /// Adds every key of another file but those in `except`, byte for byte.
    pub fn copy(&mut self, metadata: &Metadata, except: &[&str]) -> Result<()> {
        for (key, encoded) in metadata.encoded().filter(|(key, _)| !except.contains(key)) {
            if let (ALIGNMENT_KEY, Some(Value::U32(alignment))) = (key, metadata.get(key)) {
                self.alignment = Some(alignment);
            }
            self.add_key(key, encoded)?;
        }
        Ok(())
    }

    fn add_key(&mut self, key: &str, encoded: &[u8]) -> Result<()> {
        if !self.keys.insert(key.into()) {
            return Err(Error::key(key, "it was set already"));
        }
        self.encoded_keys.extend(encoded);
        Ok(())
    }

    /// Adds a tensor; `shape` is outermost first. An error if the name is there already, or the shape has more
    /// than four dimensions or one of 0, or rows that the type cannot store, or bytes beyond 63 bits.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<()> {
        let problem = |problem: String| Error::Header(problem).in_tensor(name);
        let Some(number) = dtype.ggml_type() else {
            return Err(problem(format!("{dtype} has no number in GGUF")));
        };
        if shape.len() > MAX_DIMS as usize {
            return Err(problem(format!(
                "it has {} dimensions; at most {MAX_DIMS} are possible",
                shape.len()
            )));
        }
        if shape.contains(&0) {
            return Err(problem(format!("{shape:?} has a dimension of 0")));
        }
        let bytes = dtype.tensor_bytes(shape).map_err(|error| error.in_tensor(name))?;
        if !self.names.insert(name.into()) {
            return Err(problem("it was added already".into()));
        }
        self.tensors.push(Declared { name: name.into(), number, shape: shape.to_vec(), bytes });
        Ok(())
    }

    /// The size of the whole file in bytes.
    ///
    /// # Errors
    /// More than 64 bits of bytes.
    pub fn file_bytes(&self) -> Result<u64> {
        let (header, data) = self.encode()?;
        (header.len() as u64).checked_add(data).ok_or_else(too_large)
    }

    /// Writes the header to `out` and returns what takes the tensors' bytes.
    ///
    /// # Errors
    /// `out` refuses; more than 64 bits of bytes.
    pub fn begin<W: Write>(&self, out: W) -> Result<Stream<W>> {
        let (header, _) = self.encode()?;
        Stream::new(out, &header, self.tensors.iter().map(|t| (t.name.clone(), t.bytes)), self.alignment())
    }

    /// Begins a file that is called `path` once it is whole; until then it lies beside it under another name.
    ///
    /// # Errors
    /// `path` is a folder or a device; the file system refuses; more than 64 bits of bytes.
    pub fn create(&self, path: &Path) -> Result<FileStream> {
        FileStream::create(self, path)
    }

    fn alignment(&self) -> u64 {
        self.alignment.map_or(DEFAULT_ALIGNMENT, u64::from)
    }

    /// The header, padded to where the data begins, and the bytes of the data.
    fn encode(&self) -> Result<(Vec<u8>, u64)> {
        let alignment = self.alignment();
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.keys.len() as u64).to_le_bytes());
        header.extend(&self.encoded_keys);
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_string(tensor.name.as_bytes(), &mut header);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for dim in tensor.shape.iter().rev() {
                header.extend((*dim as u64).to_le_bytes());
            }
            header.extend(tensor.number.to_le_bytes());
            header.extend(offset.to_le_bytes());
            let end =
                offset.checked_add(tensor.bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            offset = end.ok_or_else(too_large)?;
        }
        if !self.tensors.is_empty() {
            header.resize(header.len().next_multiple_of(alignment as usize), 0);
        }
        Ok((header, offset))
    }
}

fn too_large() -> Error {
    Error::Header("the tensors together do not fit in 64 bits of bytes".into())
}

/// An [`Outline`] that holds its tensors' bytes, for files that fit in memory.
///
/// ```
/// use ingle_tensor::{Bytes, DType, gguf::{Gguf, Writer}};
///
/// let mut writer = Writer::new();
/// writer.set("general.architecture", "llama")?;
/// writer.set("llama.block_count", &2u32)?;
/// writer.tensor("output_norm.weight", DType::F32, &[2], [1f32, 1.0].map(f32::to_le_bytes).concat())?;
/// let gguf = Gguf::parse(&Bytes::from(writer.to_bytes()))?;
/// assert_eq!(gguf.metadata.usize("llama.block_count")?, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Writer<'a> {
    outline: Outline,
    data: Vec<Cow<'a, [u8]>>,
}

impl<'a> Writer<'a> {
    /// An empty file of version 3 with the default alignment.
    pub fn new() -> Self {
        Self::default()
    }

    /// As [`Outline::set`].
    pub fn set(&mut self, key: &str, value: &(impl ToValue + ?Sized)) -> Result<()> {
        self.outline.set(key, value)
    }

    /// As [`Outline::copy`].
    pub fn copy(&mut self, metadata: &Metadata, except: &[&str]) -> Result<()> {
        self.outline.copy(metadata, except)
    }

    /// Adds a tensor as [`Outline::tensor`] does; an error too if it does not take exactly these bytes.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<()> {
        let bytes = bytes.into();
        let expected = dtype.tensor_bytes(shape).map_err(|error| error.in_tensor(name))?;
        if bytes.len() as u64 != expected {
            let problem = format!("{shape:?} of {dtype} takes {expected} bytes, not {}", bytes.len());
            return Err(Error::Header(problem).in_tensor(name));
        }
        self.outline.tensor(name, dtype, shape)?;
        self.data.push(bytes);
        Ok(())
    }

    /// Writes the file.
    ///
    /// # Errors
    /// `out` refuses.
    pub fn write(&self, out: &mut impl Write) -> Result<()> {
        let mut stream = self.outline.begin(out)?;
        for (tensor, bytes) in self.outline.tensors.iter().zip(&self.data) {
            stream.write(&tensor.name, bytes)?;
        }
        stream.finish().map(drop)
    }

    /// The file in memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).expect("memory takes every byte, and each tensor has as many as it declares");
        bytes
    }
}

#[cfg(test)]
mod tests;
