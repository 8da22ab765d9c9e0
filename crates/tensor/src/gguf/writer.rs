//! Writing GGUF version 3: keys, then tensors, then their bytes.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};

use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, Metadata, Value, ValueType, check_alignment};
use crate::{DType, Error, Result};

/// Collects keys and tensors, then writes them in the order they were given.
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
#[derive(Default)]
pub struct Writer<'a> {
    keys: HashSet<String>,
    names: HashSet<String>,
    encoded_keys: Vec<u8>,
    tensors: Vec<Tensor<'a>>,
    alignment: Option<u32>,
}

struct Tensor<'a> {
    name: String,
    dtype: u32,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Writer<'a> {
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
    /// than four dimensions or one of 0, or does not take exactly these bytes.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<()> {
        let bytes = bytes.into();
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
        let expected = dtype.tensor_bytes(shape).map_err(|error| error.in_tensor(name))?;
        if bytes.len() as u64 != expected {
            return Err(problem(format!("{shape:?} of {dtype} takes {expected} bytes, not {}", bytes.len())));
        }
        if !self.names.insert(name.into()) {
            return Err(problem("it was added already".into()));
        }
        self.tensors.push(Tensor { name: name.into(), dtype: number, shape: shape.to_vec(), bytes });
        Ok(())
    }

    /// Writes the file.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let alignment = self.alignment.map_or(DEFAULT_ALIGNMENT, u64::from);
        let padding = |at: u64| vec![0; (at.next_multiple_of(alignment) - at) as usize];

        let mut header = MAGIC.to_vec();
        header.extend(3u32.to_le_bytes());
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
            header.extend(tensor.dtype.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes.len() as u64).next_multiple_of(alignment);
        }
        if !self.tensors.is_empty() {
            header.extend(padding(header.len() as u64));
        }
        out.write_all(&header)?;
        for tensor in &self.tensors {
            out.write_all(&tensor.bytes)?;
            out.write_all(&padding(tensor.bytes.len() as u64))?;
        }
        Ok(())
    }

    /// The file in memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).expect("writing to memory does not fail");
        bytes
    }
}

fn put_string(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

/// What can be written as a metadata value: numbers, bool, text, and slices of them.
pub trait ToValue {
    /// The type in the file, known without a value so that empty arrays have one.
    const KIND: ValueType;

    /// The type in the file.
    fn kind(&self) -> ValueType {
        Self::KIND
    }

    /// Appends the value's bytes.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! scalars {
    ($($type:ty as $kind:ident;)*) => {$(
        impl ToValue for $type {
            const KIND: ValueType = ValueType::$kind;

            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}

scalars! {
    u8 as U8;
    i8 as I8;
    u16 as U16;
    i16 as I16;
    u32 as U32;
    i32 as I32;
    u64 as U64;
    i64 as I64;
    f32 as F32;
    f64 as F64;
}

impl ToValue for bool {
    const KIND: ValueType = ValueType::Bool;

    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl ToValue for str {
    const KIND: ValueType = ValueType::String;

    fn put(&self, out: &mut Vec<u8>) {
        put_string(self.as_bytes(), out);
    }
}

impl ToValue for String {
    const KIND: ValueType = ValueType::String;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_str().put(out);
    }
}

impl<T: ToValue> ToValue for [T] {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        out.extend((T::KIND as u32).to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        for value in self {
            value.put(out);
        }
    }
}

impl<T: ToValue> ToValue for Vec<T> {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

impl<T: ToValue, const N: usize> ToValue for [T; N] {
    const KIND: ValueType = ValueType::Array;

    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }
}

/// So that `&["a", "b"]` is an array of strings.
impl<T: ToValue + ?Sized> ToValue for &T {
    const KIND: ValueType = T::KIND;

    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
}
