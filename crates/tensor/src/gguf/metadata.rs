//! Typed metadata: views into the file, found by key, converted where the value fits.

use std::collections::HashMap;
use std::ops::Range;

use super::Cursor;
use crate::bytes::Bytes;
use crate::{Error, Result};

/// How deep arrays may hold arrays. Writers use one level.
const MAX_DEPTH: usize = 4;

/// The type of a metadata value, as numbered in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    fn from_number(number: u32) -> Option<Self> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(number as usize).copied()
    }

    /// The name used in messages and by `inspect`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of a value of fixed size.
    const fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// One metadata value; strings and arrays are views into the file.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// UTF-8 by the format's rule; checked where it is read as text.
    String(&'a [u8]),
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// A scalar from exactly its bytes; `None` for a bool that is neither 0 nor 1.
    fn scalar(kind: ValueType, bytes: &[u8]) -> Option<Self> {
        fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
            std::array::from_fn(|i| bytes[i])
        }
        Some(match kind {
            ValueType::U8 => Self::U8(bytes[0]),
            ValueType::I8 => Self::I8(bytes[0] as i8),
            ValueType::Bool if bytes[0] <= 1 => Self::Bool(bytes[0] == 1),
            ValueType::U16 => Self::U16(u16::from_le_bytes(array(bytes))),
            ValueType::I16 => Self::I16(i16::from_le_bytes(array(bytes))),
            ValueType::U32 => Self::U32(u32::from_le_bytes(array(bytes))),
            ValueType::I32 => Self::I32(i32::from_le_bytes(array(bytes))),
            ValueType::F32 => Self::F32(f32::from_le_bytes(array(bytes))),
            ValueType::U64 => Self::U64(u64::from_le_bytes(array(bytes))),
            ValueType::I64 => Self::I64(i64::from_le_bytes(array(bytes))),
            ValueType::F64 => Self::F64(f64::from_le_bytes(array(bytes))),
            ValueType::Bool | ValueType::String | ValueType::Array => return None,
        })
    }

    /// The type as it is in the file.
    pub const fn kind(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F32(_) => ValueType::F32,
            Self::F64(_) => ValueType::F64,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
        }
    }

    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    fn float(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// Type and value in a few words, for messages.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::String(_) => "a string".into(),
            Self::Array(array) => format!("an array of {} {}", array.len, array.kind.name()),
            _ => format!("{} {self}", self.kind().name()),
        }
    }
}

/// The value as `inspect` prints it: long arrays are cut after a few values, bytes that are no text replaced.
impl std::fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::U8(v) => write!(f, "{v}"),
            Self::I8(v) => write!(f, "{v}"),
            Self::U16(v) => write!(f, "{v}"),
            Self::I16(v) => write!(f, "{v}"),
            Self::U32(v) => write!(f, "{v}"),
            Self::I32(v) => write!(f, "{v}"),
            Self::U64(v) => write!(f, "{v}"),
            Self::I64(v) => write!(f, "{v}"),
            Self::F32(v) => write!(f, "{v}"),
            Self::F64(v) => write!(f, "{v}"),
            Self::Bool(v) => write!(f, "{v}"),
            Self::String(v) => write!(f, "{:?}", String::from_utf8_lossy(v)),
            Self::Array(array) => {
                const SHOWN: usize = 6;
                write!(f, "[")?;
                for (i, value) in array.values().take(SHOWN).enumerate() {
                    write!(f, "{}{value}", if i == 0 { "" } else { ", " })?;
                }
                if array.len > SHOWN {
                    write!(f, ", ... {} in all", array.len)?;
                }
                write!(f, "]")
            }
        }
    }
}

/// An array of metadata values, decoded as it is walked.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of the elements.
    pub const fn kind(&self) -> ValueType {
        self.kind
    }

    /// How many elements there are.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order. Fewer than [`Array::len`] only if the file was changed while it was open.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let kind = self.kind;
        let mut cursor = Cursor::new(self.bytes);
        // Scalars and strings skip the general walk: vocabularies hold hundreds of thousands of them.
        (0..self.len).map_while(move |_| match (kind.size(), kind) {
            (Some(size), _) => Value::scalar(kind, cursor.take(size, "").ok()?),
            (None, ValueType::String) => cursor.string(String::new).ok().map(Value::String),
            (None, _) => Stored::read(&mut cursor, kind, 0).ok()?.value(cursor.bytes),
        })
    }
}

impl std::fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Array({} {})", self.len, self.kind.name())
    }
}

/// Where a value is: byte ranges into the file, so that a key costs the same whatever it holds.
#[derive(Clone, Debug)]
enum Stored {
    Scalar(ValueType, Range<usize>),
    String(Range<usize>),
    Array { kind: ValueType, len: usize, bytes: Range<usize> },
}

impl Stored {
    /// Walks over one value and checks it: lengths, element types, depth, bools.
    fn read(cursor: &mut Cursor<'_>, kind: ValueType, depth: usize) -> Result<Self> {
        let start = cursor.at;
        if let Some(size) = kind.size() {
            let bytes = cursor.take(size, kind.name())?;
            if Value::scalar(kind, bytes).is_none() {
                return Err(Error::Header(format!("bool {} at byte {start} is neither 0 nor 1", bytes[0])));
            }
            return Ok(Self::Scalar(kind, start..cursor.at));
        }
        if kind == ValueType::String {
            let len = cursor.string(|| "string".into())?.len();
            return Ok(Self::String(cursor.at - len..cursor.at));
        }
        if depth == MAX_DEPTH {
            return Err(Error::Header(format!(
                "arrays are nested more than {MAX_DEPTH} deep at byte {start}"
            )));
        }
        let kind = read_type(cursor, "array element type")?;
        let len = cursor.u64("array length")?;
        let least = kind.size().unwrap_or(if kind == ValueType::String { 8 } else { 12 });
        let len = cursor.count(len, least, "array elements")?;
        let start = cursor.at;
        match kind.size() {
            Some(size) if kind != ValueType::Bool => drop(cursor.take(len * size, "array")?),
            _ => {
                for _ in 0..len {
                    Self::read(cursor, kind, depth + 1)?;
                }
            }
        }
        Ok(Self::Array { kind, len, bytes: start..cursor.at })
    }

    fn value<'a>(&self, file: &'a [u8]) -> Option<Value<'a>> {
        match self {
            Self::Scalar(kind, bytes) => Value::scalar(*kind, &file[bytes.clone()]),
            Self::String(bytes) => Some(Value::String(&file[bytes.clone()])),
            Self::Array { kind, len, bytes } => {
                Some(Value::Array(Array { kind: *kind, len: *len, bytes: &file[bytes.clone()] }))
            }
        }
    }
}

fn read_type(cursor: &mut Cursor<'_>, what: &str) -> Result<ValueType> {
    let at = cursor.at;
    let number = cursor.u32(what)?;
    ValueType::from_number(number)
        .ok_or_else(|| Error::Header(format!("{what} {number} at byte {at} is unknown; 0 to 12 are known")))
}

#[derive(Clone, Debug)]
struct Entry {
    key: String,
    stored: Stored,
    /// The whole entry in the file, name and type included.
    bytes: Range<usize>,
}

/// The typed keys of one file. Getters come in pairs: `u32` for a key that must be there, `u32_opt` for one
/// that may be absent; a key of the wrong type is an error in both. Integers of any width are taken where the
/// value fits.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Bytes,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

macro_rules! integer_getters {
    ($($type:ident $optional:ident $doc:literal;)*) => {$(
        #[doc = concat!("The integer at `key` as ", $doc, ".")]
        pub fn $type(&self, key: &str) -> Result<$type> {
            self.required(key, self.$optional(key)?)
        }

        #[doc = concat!("The integer at `key` as ", $doc, ", if the key is there.")]
        pub fn $optional(&self, key: &str) -> Result<Option<$type>> {
            self.convert(key, stringify!($type), |value| value.integer()?.try_into().ok())
        }
    )*};
}

impl Metadata {
    pub(super) fn parse(file: &Bytes, cursor: &mut Cursor<'_>, count: usize) -> Result<Self> {
        let mut entries = Vec::with_capacity(cursor.room::<Entry>(count));
        let mut index = HashMap::new();
        for i in 0..count {
            let start = cursor.at;
            let key = cursor.utf8(|| format!("name of metadata key {i}"))?.to_owned();
            let stored = read_type(cursor, "value type")
                .and_then(|kind| Stored::read(cursor, kind, 0))
                .map_err(|error| Error::key(&key, error.to_string()))?;
            if index.insert(key.clone(), i).is_some() {
                return Err(Error::key(&key, "it is there twice"));
            }
            entries.push(Entry { key, stored, bytes: start..cursor.at });
        }
        Ok(Self { file: file.clone(), entries, index })
    }

    /// The keys in file order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.key.as_str())
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|entry| Some((entry.key.as_str(), entry.stored.value(&self.file)?)))
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the key is there, whatever its type.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The value at `key` as it is.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.entries[*self.index.get(key)?].stored.value(&self.file)
    }

    integer_getters! {
        u32 u32_opt "an unsigned 32-bit number";
        i32 i32_opt "a signed 32-bit number";
        u64 u64_opt "an unsigned 64-bit number";
        usize usize_opt "a count";
    }

    /// The float at `key`.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.required(key, self.f32_opt(key)?)
    }

    /// The float at `key`, if the key is there; an f64 rounds to nearest even.
    pub fn f32_opt(&self, key: &str) -> Result<Option<f32>> {
        self.convert(key, "f32", Value::float)
    }

    /// The flag at `key`.
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.required(key, self.bool_opt(key)?)
    }

    /// The flag at `key`, if the key is there.
    pub fn bool_opt(&self, key: &str) -> Result<Option<bool>> {
        self.convert(key, "bool", |value| if let Value::Bool(v) = value { Some(*v) } else { None })
    }

    /// The text at `key`.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.required(key, self.str_opt(key)?)
    }

    /// The text at `key`, if the key is there.
    pub fn str_opt(&self, key: &str) -> Result<Option<&str>> {
        let text =
            self.convert(key, "string", |value| if let Value::String(v) = value { Some(*v) } else { None })?;
        text.map(|bytes| std::str::from_utf8(bytes).map_err(|_| Error::key(key, "it is not UTF-8")))
            .transpose()
    }

    /// The texts at `key`: views into the file, one `Vec` and no allocation per string.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        self.required(key, self.strings_opt(key)?)
    }

    /// The texts at `key`, if the key is there.
    pub fn strings_opt(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(strings) = self.byte_strings_opt(key)? else { return Ok(None) };
        let text = |(i, bytes)| {
            std::str::from_utf8(bytes).map_err(|_| Error::key(key, format!("string {i} of it is not UTF-8")))
        };
        strings.into_iter().enumerate().map(text).collect::<Result<_>>().map(Some)
    }

    /// The strings at `key` as bytes, if the key is there: for the few vocabularies whose tokens are no text.
    pub fn byte_strings_opt(&self, key: &str) -> Result<Option<Vec<&[u8]>>> {
        self.array(key, "array of strings", |value| if let Value::String(v) = value { Some(v) } else { None })
    }

    /// The floats at `key`.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.required(key, self.f32s_opt(key)?)
    }

    /// The floats at `key`, if the key is there.
    pub fn f32s_opt(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.array(key, "array of f32", |value| value.float())
    }

    /// The integers at `key`.
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>> {
        self.required(key, self.u32s_opt(key)?)
    }

    /// The integers at `key`, if the key is there.
    pub fn u32s_opt(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.array(key, "array of u32", |value| value.integer()?.try_into().ok())
    }

    /// The integers at `key`.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.required(key, self.i32s_opt(key)?)
    }

    /// The integers at `key`, if the key is there.
    pub fn i32s_opt(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.array(key, "array of i32", |value| value.integer()?.try_into().ok())
    }

    /// The flags at `key`, if the key is there.
    pub fn bools_opt(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.array(key, "array of bool", |value| if let Value::Bool(v) = value { Some(v) } else { None })
    }

    /// One integer per layer: an array of exactly `layers`, or one number that stands for all of them.
    pub fn u32_per_layer_opt(&self, key: &str, layers: usize) -> Result<Option<Vec<u32>>> {
        let Some(Value::Array(array)) = self.get(key) else {
            return Ok(self.u32_opt(key)?.map(|value| vec![value; layers]));
        };
        if array.len() != layers {
            return Err(Error::key(key, format!("it has {} values for {layers} layers", array.len())));
        }
        self.u32s_opt(key)
    }

    /// The encoded entries, in file order: what a writer copies.
    pub(super) fn encoded(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.entries.iter().map(|entry| (entry.key.as_str(), &self.file[entry.bytes.clone()]))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::MissingKey { key: key.into() })
    }

    fn convert<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(&value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(Error::KeyType { key: key.into(), found: value.describe(), wanted }),
        }
    }

    fn array<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let key_type = |found| Error::KeyType { key: key.into(), found, wanted };
        let Value::Array(array) = value else { return Err(key_type(value.describe())) };
        let mut out = Vec::with_capacity(array.len());
        for (i, element) in array.values().enumerate() {
            let converted = convert(element);
            out.push(converted.ok_or_else(|| {
                key_type(format!("{} with {} at index {i}", value.describe(), element.describe()))
            })?);
        }
        if out.len() != array.len() {
            return Err(Error::key(key, "the file changed while it was open"));
        }
        Ok(Some(out))
    }
}
