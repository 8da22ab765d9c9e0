//! Safetensors: folders of config.json and one or more weight files.
//!
//! Layout of a file: header length u64; a JSON object of name → dtype, shape, `data_offsets` [begin, end)
//! relative to the data; data. The offsets must tile the data without gap or overlap, and shape times element
//! size must equal the range, so no header can point outside the file or at another tensor's bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::Value;

use crate::bytes::Bytes;
use crate::checkpoint::{Source, TensorInfo, check_ranges, index_by_name};
use crate::{DType, Error, Result};

/// Bytes a header may have, as in the format's own library.
const MAX_HEADER: u64 = 100_000_000;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const LEGACY_CONFIG: &str = "config.legacy.json";

/// What a checkpoint needs of a folder.
pub(crate) struct Opened {
    pub source: Source,
    pub files: Vec<Bytes>,
    pub tensors: Vec<TensorInfo>,
}

/// Opens a folder, one of its weight files, its index, or one of its configs.
pub(crate) fn open(path: &Path) -> Result<Opened> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let (dir, weights, config) = if path.is_dir() {
        (path, None, None)
    } else if name.ends_with(".json") && !name.ends_with(".index.json") {
        (parent, None, Some(path.to_path_buf()))
    } else {
        (parent, Some(path.to_path_buf()), None)
    };
    let weights = weights.map_or_else(|| find_weights(dir), Ok)?;
    let config = config.map_or_else(|| find_config(dir), Ok)?;

    let config = read_object(&config)?;
    let (files, tensors) = if weights.extension().is_some_and(|extension| extension == "json") {
        open_index(dir, &weights)?
    } else {
        let bytes = Bytes::map(&weights)?;
        let tensors = parse(&bytes, 0).map_err(|error| error.in_file(&weights))?;
        (vec![bytes], tensors)
    };
    Ok(Opened { source: Source::SafeTensors { config, dir: dir.into() }, files, tensors })
}

fn find_weights(dir: &Path) -> Result<PathBuf> {
    let found = [SINGLE, INDEX].into_iter().map(|name| dir.join(name)).find(|path| path.exists());
    found.ok_or_else(|| {
        let other = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let other =
            other.filter(|path| path.extension().is_some_and(|e| e == "gguf" || e == "safetensors")).min();
        let hint =
            other.map_or(String::new(), |path| format!("; name a file to open it: {}", path.display()));
        Error::Header(format!("the folder has neither {SINGLE} nor {INDEX}{hint}")).in_file(dir)
    })
}

fn find_config(dir: &Path) -> Result<PathBuf> {
    let found = [CONFIG, LEGACY_CONFIG].into_iter().map(|name| dir.join(name)).find(|path| path.exists());
    found.ok_or_else(|| {
        Error::Header(format!("there is no {CONFIG} beside the weights: copy it from the model's source"))
            .in_file(dir)
    })
}

fn read_object(path: &Path) -> Result<Value> {
    let text =
        std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
    match serde_json::from_slice(&text) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(Error::Header("it is JSON but not an object".into()).in_file(path)),
        Err(error) => Err(Error::Header(format!("it is not JSON: {error}")).in_file(path)),
    }
}

/// Opens the files that an index names, sorted by name.
fn open_index(dir: &Path, path: &Path) -> Result<(Vec<Bytes>, Vec<TensorInfo>)> {
    let index = read_object(path)?;
    let bad = |problem: String| Error::Header(problem).in_file(path);
    let Some(Value::Object(map)) = index.get("weight_map") else {
        return Err(bad("weight_map is missing or not an object".into()));
    };
    let mut wanted = BTreeMap::new();
    for (tensor, file) in map {
        let plain = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|f| f == *name));
        let file =
            plain.ok_or_else(|| bad(format!("tensor {tensor:?} is in {file}, not a plain file name")))?;
        wanted.insert(tensor.as_str(), file);
    }
    let names: BTreeSet<&str> = wanted.values().copied().collect();
    let (mut files, mut tensors, mut positions) = (Vec::new(), Vec::new(), HashMap::new());
    for (i, name) in names.into_iter().enumerate() {
        let path = dir.join(name);
        let bytes = Bytes::map(&path)?;
        tensors.extend(parse(&bytes, i).map_err(|error| error.in_file(&path))?);
        files.push(bytes);
        positions.insert(name, i);
    }
    let found = index_by_name(&tensors).map_err(|error| error.in_file(path))?;
    for (tensor, file) in wanted {
        if found.get(tensor).is_none_or(|&i| tensors[i].file != positions[file]) {
            let problem = format!("the index says that it is in {file}, where it is not");
            return Err(Error::Header(problem).in_tensor(tensor).in_file(path));
        }
    }
    Ok((files, tensors))
}

/// Reads and checks the header of one file. Tensors come in order of offset, with offsets from the start of the
/// file, and with `file` as given.
pub fn parse(bytes: &[u8], file: usize) -> Result<Vec<TensorInfo>> {
    let (what, len) = ("the header".to_string(), bytes.len() as u64);
    let Some((prefix, rest)) = bytes.split_first_chunk() else {
        return Err(Error::Truncated { what, offset: 0, needed: 8, remaining: len });
    };
    let header_len = u64::from_le_bytes(*prefix);
    if header_len > len - 8 {
        return Err(Error::Truncated { what, offset: 8, needed: header_len, remaining: len - 8 });
    }
    if header_len > MAX_HEADER {
        return Err(Error::Header(format!(
            "the header has {header_len} bytes; at most {MAX_HEADER} are possible"
        )));
    }
    let (header, _) = rest.split_at(header_len as usize);
    let data_start = 8 + header_len;
    let Header(entries) = serde_json::from_slice(header)
        .map_err(|error| Error::Header(format!("the header is not what safetensors asks for: {error}")))?;

    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let info = entry.check(data_start).map_err(|error| error.in_tensor(&name))?;
        tensors.push(TensorInfo { name, file, ..info });
    }
    index_by_name(&tensors)?;
    let order = check_ranges(&tensors, len)?;
    let mut end = data_start;
    for &i in &order {
        let tensor = &tensors[i];
        if tensor.offset != end {
            let problem = format!("{} bytes before it belong to no tensor", tensor.offset - end);
            return Err(Error::Header(problem).in_tensor(&tensor.name));
        }
        end += tensor.bytes;
    }
    if end != len {
        return Err(Error::Header(format!("the last {} bytes of the file belong to no tensor", len - end)));
    }
    let mut slots: Vec<Option<TensorInfo>> = tensors.into_iter().map(Some).collect();
    Ok(order.into_iter().filter_map(|i| slots[i].take()).collect())
}

/// A tensor's entry in the header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl Entry {
    /// The entry as a tensor that still lacks its name.
    fn check(self, data_start: u64) -> Result<TensorInfo> {
        let dtype = DType::from_safetensors(&self.dtype)?;
        let bytes = dtype.tensor_bytes(&self.shape)?;
        let (begin, end) = self.data_offsets;
        if end.checked_sub(begin) != Some(bytes) {
            let shape = &self.shape;
            let problem =
                format!("{shape:?} of {dtype} takes {bytes} bytes, but its offsets are [{begin}, {end}]");
            return Err(Error::Header(problem));
        }
        let offset = begin
            .checked_add(data_start)
            .ok_or_else(|| Error::Header(format!("its offsets [{begin}, {end}] overflow")))?;
        Ok(TensorInfo { name: String::new(), dtype, shape: self.shape, file: 0, offset, bytes })
    }
}

/// The header in its own order. A map type would let the last of two equal names win in silence.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    let named = |error| A::Error::custom(format!("{name:?}: {error}"));
                    if name == "__metadata__" {
                        map.next_value::<HashMap<String, String>>().map_err(named)?;
                    } else {
                        let entry = map.next_value().map_err(named)?;
                        entries.push((name, entry));
                    }
                }
                Ok(Header(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests;
