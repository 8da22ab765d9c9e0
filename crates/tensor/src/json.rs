//! The JSON files beside a model's weights, read key by key with a type.
//!
//! A key that is absent or null is `None`: Hugging Face writes null for what does not apply. A key of any other type than
//! the one asked for is an error that names file, key, what was found and what is wanted, so nothing that a file says is
//! ever taken for unsaid.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// A file that holds one object.
#[derive(Clone, Debug)]
pub struct Document {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Document {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// A file that cannot be read, is not JSON, or holds something else than an object.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
        let problem = match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => return Ok(Self { path: path.into(), map }),
            Ok(value) => format!("it is JSON but not an object: want {{...}}, found {}", shown(&value)),
            Err(error) => format!("it is not JSON: {error}"),
        };
        Err(Error::Header(problem).in_file(path))
    }

    /// Reads the file at `path`; where there is none, an object without keys.
    ///
    /// # Errors
    /// As [`Document::read`], for a file that is there.
    pub fn read_or_empty(path: &Path) -> Result<Self> {
        match Self::read(path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Ok(Self { path: path.into(), map: Map::new() })
            }
            read => read,
        }
    }

    /// Its object.
    pub fn object(&self) -> Object<'_> {
        Object { file: &self.path, within: String::new(), map: &self.map }
    }

    /// Its object as a plain value.
    pub fn into_value(self) -> Value {
        Value::Object(self.map)
    }
}

/// An object in a file: keys are read from it with a type.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    file: &'a Path,
    /// Keys that lead here, each with a dot behind it.
    within: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    /// The object that is all of `file`.
    ///
    /// # Errors
    /// `value` is something else than an object.
    pub fn of(file: &'a Path, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { file, within: String::new(), map }),
            other => Err(Error::Header(format!("want an object, found {}", shown(other))).in_file(file)),
        }
    }

    /// The value at `key`; `None` where the key is absent or null.
    ///
    /// # Errors
    /// [`Error::Setting`]: the value is no `T`.
    pub fn get<T: FromJson<'a>>(&self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        T::from_json(value).map(Some).map_err(|mismatch| {
            let optional = if mismatch.at.is_empty() { ", or null" } else { "" };
            self.mismatch(key, Mismatch { wanted: mismatch.wanted + optional, ..mismatch })
        })
    }

    /// The value at `key`, which must be there.
    ///
    /// # Errors
    /// [`Error::Setting`]: the key is absent or null, or its value is no `T`.
    pub fn require<T: FromJson<'a>>(&self, key: &str) -> Result<T> {
        let value = match self.map.get(key) {
            Some(value) => T::from_json(value),
            None => Err(Mismatch { at: String::new(), wanted: T::wanted(), found: "no such key".into() }),
        };
        value.map_err(|mismatch| self.mismatch(key, mismatch))
    }

    /// The object at `key`; `None` where the key is absent or null.
    ///
    /// # Errors
    /// [`Error::Setting`]: the value is no object.
    pub fn object(&self, key: &str) -> Result<Option<Object<'a>>> {
        let map = self.get::<&Map<String, Value>>(key)?;
        Ok(map.map(|map| Object { file: self.file, within: format!("{}.", self.name(key)), map }))
    }

    /// Whether the key is there, if only as null.
    pub fn contains(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The keys that hold objects, in file order.
    pub fn keys_of_objects(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, value)| value.is_object()).map(|(key, _)| key.as_str())
    }

    /// `key` with the keys that lead to it: `rope_parameters.full_attention.factor`.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}", self.within)
    }

    fn mismatch(&self, key: &str, Mismatch { at, wanted, found }: Mismatch) -> Error {
        Error::Setting { key: self.name(key) + &at, wanted, found }.in_file(self.file)
    }
}

/// Why a value is not of the type asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Where inside the value: empty, or as `[3]`.
    pub at: String,
    /// The type asked for, in words.
    pub wanted: String,
    /// What is there.
    pub found: String,
}

impl Mismatch {
    /// `value` itself is no `T`.
    pub fn of<'a, T: FromJson<'a>>(value: &Value) -> Self {
        Self { at: String::new(), wanted: T::wanted(), found: shown(value) }
    }

    /// The same, in a value that is at `place` of another one.
    pub fn within(self, place: &str) -> Self {
        Self { at: place.to_string() + &self.at, ..self }
    }
}

/// A type that a key may have.
pub trait FromJson<'a>: Sized {
    /// The type in words: "a text".
    fn wanted() -> String;

    /// The value as this type.
    ///
    /// # Errors
    /// What does not fit, and where.
    fn from_json(value: &'a Value) -> std::result::Result<Self, Mismatch>;
}

/// A whole number, also where it is written as a float (`1e6`).
fn whole(value: &Value) -> Option<i128> {
    // Above it, floats do not tell whole numbers apart.
    const EXACT: f64 = (1u64 << 53) as f64;
    let integer = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    integer.or_else(|| {
        let float = value.as_f64().filter(|float| float.fract() == 0.0 && float.abs() <= EXACT)?;
        Some(float as i128)
    })
}

macro_rules! from_json {
    ($($type:ty, $wanted:expr, $value:ident => $convert:expr;)*) => {$(
        impl<'a> FromJson<'a> for $type {
            fn wanted() -> String {
                $wanted.into()
            }

            fn from_json($value: &'a Value) -> std::result::Result<Self, Mismatch> {
                $convert.ok_or_else(|| Mismatch::of::<Self>($value))
            }
        }
    )*};
}

from_json! {
    bool, "true or false", value => value.as_bool();
    u32, format!("a whole number from 0 to {}", u32::MAX), value => whole(value).and_then(|n| n.try_into().ok());
    i64, "a whole number", value => whole(value).and_then(|n| n.try_into().ok());
    f64, "a number", value => value.as_f64();
    &'a str, "a text", value => value.as_str();
    &'a Map<String, Value>, "an object", value => value.as_object();
}

impl<'a, T: FromJson<'a>> FromJson<'a> for Vec<T> {
    fn wanted() -> String {
        format!("a list (each entry {})", T::wanted())
    }

    fn from_json(value: &'a Value) -> std::result::Result<Self, Mismatch> {
        let Value::Array(values) = value else { return Err(Mismatch::of::<Self>(value)) };
        let entry = |(i, value)| T::from_json(value).map_err(|mismatch| mismatch.within(&format!("[{i}]")));
        values.iter().enumerate().map(entry).collect()
    }
}

/// A value as the file has it, cut: files may hold megabytes where a number belongs.
fn shown(value: &Value) -> String {
    const LIMIT: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LIMIT) {
        None => text,
        Some((end, _)) => format!("{}... ({} bytes)", &text[..end], text.len()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(value: &Value) -> Object<'_> {
        Object::of(Path::new("dir/config.json"), value).unwrap()
    }

    #[test]
    fn only_absent_and_null_are_nothing() {
        let value = json!({"null": null, "n": 3, "f": 1e6, "half": 0.5, "s": "x", "l": ["a", "b"], "o": {"p": {"q": 1}},
            "yes": true, "most": 4294967295u32, "big": 9_223_372_036_854_775_808u64, "less": -1.0});
        let object = at(&value);
        for key in ["null", "absent"] {
            assert_eq!(object.get::<u32>(key).unwrap(), None);
            assert!(object.object(key).unwrap().is_none());
            assert!(object.get::<Vec<&str>>(key).unwrap().is_none());
            assert_eq!(object.contains(key), key == "null");
        }
        assert_eq!(object.get::<u32>("n").unwrap(), Some(3));
        assert_eq!(object.get::<f64>("n").unwrap(), Some(3.0));
        assert_eq!(object.get::<u32>("f").unwrap(), Some(1_000_000));
        assert_eq!(object.get::<u32>("most").unwrap(), Some(u32::MAX));
        assert_eq!(object.get::<i64>("less").unwrap(), Some(-1));
        assert!(object.require::<bool>("yes").unwrap());
        assert_eq!(object.get::<Vec<&str>>("l").unwrap().unwrap(), ["a", "b"]);
        let inner = object.object("o").unwrap().unwrap().object("p").unwrap().unwrap();
        assert_eq!((inner.get::<u32>("q").unwrap(), inner.name("q")), (Some(1), "o.p.q".into()));

        let says = |error: Error, words: &[&str]| {
            let text = error.to_string();
            assert!(
                text.starts_with("dir/config.json: ") && words.iter().all(|w| text.contains(w)),
                "{text}"
            );
        };
        says(object.get::<u32>("s").unwrap_err(), &["setting s: ", "4294967295, or null", "found \"x\""]);
        for key in ["half", "big", "less", "yes", "l", "o"] {
            says(object.get::<u32>(key).unwrap_err(), &[key, "want a whole number", "found"]);
        }
        for key in ["n", "s", "l", "o"] {
            says(object.get::<bool>(key).unwrap_err(), &[key, "want true or false"]);
        }
        for key in ["n", "s", "l", "yes"] {
            says(object.object(key).unwrap_err(), &[key, "want an object, or null"]);
        }
        for key in ["n", "l", "o", "yes"] {
            says(object.get::<&str>(key).unwrap_err(), &[key, "want a text"]);
        }
        says(object.get::<Vec<u32>>("l").unwrap_err(), &["l[0]: want a whole number", "found \"a\""]);
        says(object.get::<Vec<u32>>("n").unwrap_err(), &["n: want a list (each entry a whole number"]);
        says(inner.get::<&str>("q").unwrap_err(), &["o.p.q: want a text"]);
        for (key, found) in [("null", "found null"), ("absent", "no such key")] {
            says(object.require::<&str>(key).unwrap_err(), &[key, "want a text", found]);
        }
        let long = json!({"k": "é".repeat(1000)});
        assert!(at(&long).get::<bool>("k").unwrap_err().to_string().len() < 300);
    }

    #[test]
    fn a_document_is_an_object() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        assert!(!Document::read_or_empty(&path).unwrap().object().contains("a"));
        assert!(matches!(Document::read(&path), Err(Error::Io { .. })));
        for text in ["null", "[]", "3", "\"{}\"", "", "{", "{}x"] {
            std::fs::write(&path, text).unwrap();
            let error = Document::read_or_empty(&path).unwrap_err().to_string();
            assert!(error.contains("a.json: it is "), "{text}: {error}");
        }
        std::fs::write(&path, r#"{"a": 1}"#).unwrap();
        assert_eq!(Document::read(&path).unwrap().object().get::<u32>("a").unwrap(), Some(1));
        // What is there and cannot be read is not absent.
        assert!(Document::read_or_empty(dir.path()).is_err());
    }
}
