//! Safetensors: folders of config.json and one or more weight files.
//!
//! Layout of a file: header length u64; a JSON object of name → dtype, shape, `data_offsets` [begin, end)
//! relative to the data; data. The offsets must tile the data without gap or overlap, and shape times element
//! size must equal the range, so no header can point outside the file or at another tensor's bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::bytes::Bytes;
use crate::checkpoint::{Source, TensorInfo, check_ranges, index_by_name};
use crate::json::Document;
use crate::{DType, Error, Result};

/// Bytes a header may have, as in the format's own library.
const MAX_HEADER: u64 = 100_000_000;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const LEGACY_CONFIG: &str = "config.legacy.json";

/// Element types that are not read, each with a type of its size: a file may hold such tensors beside the weights.
const UNREAD: &[(&str, DType)] = &[
    ("BOOL", DType::I8),
    ("U8", DType::I8),
    ("F8_E4M3", DType::I8),
    ("F8_E5M2", DType::I8),
    ("F8_E8M0", DType::I8),
    ("U16", DType::I16),
    ("U32", DType::I32),
    ("U64", DType::I64),
];

/// What a checkpoint needs of a folder.
pub(crate) struct Opened {
    pub source: Source,
    pub files: Vec<Bytes>,
    pub tensors: Vec<TensorInfo>,
    pub unread: Vec<Unread>,
}

/// A tensor whose element type has a known size and no decoder.
pub(crate) struct Unread {
    pub name: String,
    /// The type as the file names it.
    pub element: &'static str,
    file: usize,
}

/// What one file holds.
#[derive(Default)]
struct Contents {
    /// In order of offset.
    tensors: Vec<TensorInfo>,
    unread: Vec<Unread>,
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
    let weights = weights.map_or_else(|| find_weights(dir), whole)?;
    let config_path = config.map_or_else(|| find_config(dir), Ok)?;

    let config = Document::read(&config_path)?.into_value();
    let (files, Contents { tensors, unread }) =
        if weights.extension().is_some_and(|extension| extension == "json") {
            open_index(dir, &weights)?
        } else {
            let bytes = Bytes::map(&weights)?;
            let contents = contents(&bytes, 0).map_err(|error| error.in_file(&weights))?;
            (vec![bytes], contents)
        };
    Ok(Opened {
        source: Source::SafeTensors { config, config_path, dir: dir.into() },
        files,
        tensors,
        unread,
    })
}

fn find_weights(dir: &Path) -> Result<PathBuf> {
    let found = [SINGLE, INDEX].into_iter().map(|name| dir.join(name)).find(|path| path.exists());
    found.ok_or_else(|| {
        let other = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let other =
            other.filter(|path| path.extension().is_some_and(|e| e == "gguf" || e == "safetensors")).min();
        let hint = match other {
            Some(path) => format!("name a file to open it: {}", path.display()),
            None => "it is no model's: name a .gguf file, or a folder with those".into(),
        };
        Error::Apart(format!("the folder has neither {SINGLE} nor {INDEX}; {hint}")).in_file(dir)
    })
}

/// What opens the model of this weight file: itself, or where it is one of several shards the index beside it.
fn whole(path: PathBuf) -> Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((stem, shard, count)) = shard(&name).filter(|(.., count)| *count > 1) else { return Ok(path) };
    let index = path.with_file_name(format!("{stem}.safetensors.index.json"));
    if index.exists() {
        return Ok(index);
    }
    let index = index.file_name().unwrap_or_default().display();
    let problem =
        format!("this is shard {shard} of {count}: fetch all of them, and {index}, which opens them");
    Err(Error::Apart(problem).in_file(&path))
}

/// Stem, number and count of `stem-00001-of-00002.safetensors`.
fn shard(name: &str) -> Option<(&str, u32, u32)> {
    let (stem, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, shard) = stem.rsplit_once('-')?;
    Some((stem, shard.parse().ok()?, count.parse().ok()?))
}

fn find_config(dir: &Path) -> Result<PathBuf> {
    let found = [CONFIG, LEGACY_CONFIG].into_iter().map(|name| dir.join(name)).find(|path| path.exists());
    found.ok_or_else(|| {
        Error::Apart(format!("there is no {CONFIG} beside the weights: copy it from the model's source"))
            .in_file(dir)
    })
}

/// Opens the files that an index names, sorted by name. Index and files must list the same tensors.
fn open_index(dir: &Path, path: &Path) -> Result<(Vec<Bytes>, Contents)> {
    let text =
        std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
    let bad = |problem: String| Error::Header(problem).in_file(path);
    let index: Index = serde_json::from_slice(&text)
        .map_err(|error| bad(format!("it is not the index of a model in several files: {error}")))?;
    let mut wanted = BTreeMap::new();
    for (tensor, file) in &index.weight_map.0 {
        let plain = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|f| f == *name));
        let file = plain.ok_or_else(|| {
            bad(format!("weight_map: tensor {tensor:?} is in {file}, not a plain file name"))
        })?;
        if wanted.insert(tensor.as_str(), file).is_some() {
            return Err(Error::Header("the index lists it twice".into()).in_tensor(tensor).in_file(path));
        }
    }
    let names: BTreeSet<&str> = wanted.values().copied().collect();
    let (mut files, mut all) = (Vec::new(), Contents::default());
    for (i, name) in names.iter().enumerate() {
        let path = dir.join(name);
        let missing = || "the index names this file, but it is not there: fetch it".to_string();
        let bytes = Bytes::map(&path).map_err(|error| error.or_missing(missing))?;
        let Contents { tensors, unread } = contents(&bytes, i).map_err(|error| error.in_file(&path))?;
        all.tensors.extend(tensors);
        all.unread.extend(unread);
        files.push(bytes);
    }
    let names: Vec<&str> = names.into_iter().collect();
    let tensors = all.tensors.iter().map(|t| (&*t.name, t.file));
    let mut found = BTreeMap::new();
    for (tensor, file) in tensors.chain(all.unread.iter().map(|t| (&*t.name, t.file))) {
        let problem = match found.insert(tensor, names[file]) {
            Some(other) => format!("it is there twice, in {other} and in {}", names[file]),
            None if wanted.contains_key(tensor) => continue,
            None => {
                format!("it is in {}, but the index does not list it: fetch the index again", names[file])
            }
        };
        return Err(Error::Header(problem).in_tensor(tensor).in_file(path));
    }
    match wanted.into_iter().find(|(tensor, file)| found.get(tensor) != Some(file)) {
        None => Ok((files, all)),
        Some((tensor, file)) => {
            let problem = format!("the index says that it is in {file}, where it is not");
            Err(Error::Header(problem).in_tensor(tensor).in_file(path))
        }
    }
}

/// Which file holds which tensor.
struct Index {
    weight_map: Pairs<Value>,
}

/// Reads and checks the header of one file. Tensors come in order of offset, with offsets from the start of the
/// file, and with `file` as given. Those of element types that are known but not read are checked and left out.
pub fn parse(bytes: &[u8], file: usize) -> Result<Vec<TensorInfo>> {
    contents(bytes, file).map(|contents| contents.tensors)
}

fn contents(bytes: &[u8], file: usize) -> Result<Contents> {
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
    let Header(Pairs(entries)) = serde_json::from_slice(header)
        .map_err(|error| Error::Header(format!("the header is not what safetensors asks for: {error}")))?;

    let (mut tensors, mut elements) = (Vec::with_capacity(entries.len()), Vec::with_capacity(entries.len()));
    for (name, entry) in entries {
        let (info, element) = entry.check(data_start).map_err(|error| error.in_tensor(&name))?;
        tensors.push(TensorInfo { name, file, ..info });
        elements.push(element);
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
    let mut contents = Contents::default();
    for i in order {
        match (slots[i].take(), elements[i]) {
            (Some(tensor), None) => contents.tensors.push(tensor),
            (Some(TensorInfo { name, .. }), Some(element)) => {
                contents.unread.push(Unread { name, element, file });
            }
            (None, _) => {}
        }
    }
    Ok(contents)
}

/// A tensor's entry in the header.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl Entry {
    /// The entry as a tensor that still lacks its name; with the name of its element type where that is not read, and
    /// then as one of a type of the same size.
    fn check(self, data_start: u64) -> Result<(TensorInfo, Option<&'static str>)> {
        let (dtype, element) = match UNREAD.iter().find(|(name, _)| *name == self.dtype) {
            Some((name, same_size)) => (*same_size, Some(*name)),
            None => (DType::from_safetensors(&self.dtype)?, None),
        };
        let bytes = dtype.tensor_bytes(&self.shape)?;
        let (begin, end) = self.data_offsets;
        if end.checked_sub(begin) != Some(bytes) {
            let shape = &self.shape;
            let problem = format!(
                "{shape:?} of {} takes {bytes} bytes, but its offsets are [{begin}, {end}]",
                self.dtype
            );
            return Err(Error::Header(problem));
        }
        let offset = begin
            .checked_add(data_start)
            .ok_or_else(|| Error::Header(format!("its offsets [{begin}, {end}] overflow")))?;
        Ok((TensorInfo { name: String::new(), dtype, shape: self.shape, file: 0, offset, bytes }, element))
    }
}

/// The header's tensors; its `__metadata__`, an object of texts, is checked and dropped.
struct Header(Pairs<Entry>);

/// An object in its own order. A map type would let the last of two equal names win in silence.
struct Pairs<T>(Vec<(String, T)>);

/// Reads an object; `is_metadata` says which names are of texts and not of a `T`.
struct PairsVisitor<T> {
    is_metadata: fn(&str) -> bool,
    values: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for PairsVisitor<T> {
    type Value = Pairs<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Pairs<T>, A::Error> {
        let mut pairs = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            let named = |error| A::Error::custom(format!("{name:?}: {error}"));
            if (self.is_metadata)(&name) {
                map.next_value::<HashMap<String, String>>().map_err(named)?;
            } else {
                let value = map.next_value().map_err(named)?;
                pairs.push((name, value));
            }
        }
        Ok(Pairs(pairs))
    }
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Index;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with \"weight_map\"")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Index, A::Error> {
        const KEY: &str = "weight_map";
        let mut weight_map = None;
        while let Some(name) = map.next_key::<String>()? {
            if name != KEY {
                map.next_value::<IgnoredAny>()?;
            } else if weight_map.is_some() {
                return Err(A::Error::duplicate_field(KEY));
            } else {
                let named = |error| A::Error::custom(format!("{KEY:?}: {error}"));
                weight_map = Some(map.next_value().map_err(named)?);
            }
        }
        let weight_map = weight_map.ok_or_else(|| A::Error::missing_field(KEY))?;
        Ok(Index { weight_map })
    }
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(IndexVisitor)
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let is_metadata = |name: &str| name == "__metadata__";
        deserializer.deserialize_map(PairsVisitor { is_metadata, values: PhantomData }).map(Header)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor { is_metadata: |_| false, values: PhantomData })
    }
}

#[cfg(test)]
mod tests;
