//! A model's files behind one face: name → dtype, shape, byte range.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::bytes::Bytes;
use crate::gguf::{self, Gguf};
use crate::{DType, Error, Result, safetensors};

/// One tensor: what it is and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in the file.
    pub name: String,
    /// The element type as stored.
    pub dtype: DType,
    /// Dimensions, outermost first: a matrix is `[rows, cols]` and its rows are contiguous.
    pub shape: Vec<usize>,
    /// Which of the checkpoint's files holds it.
    pub file: usize,
    /// Where it begins, in bytes from the start of that file.
    pub offset: u64,
    /// How many bytes it takes.
    pub bytes: u64,
}

impl TensorInfo {
    /// Values in one row: the innermost dimension, 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Values in all.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Where a checkpoint came from, with what only that format has.
#[derive(Debug)]
pub enum Source {
    /// One GGUF file, or all parts of a split one; the keys are those of the first part.
    Gguf(gguf::Metadata),
    /// Safetensors files and their folder.
    SafeTensors {
        /// config.json, an object.
        config: serde_json::Value,
        /// The file that `config` is from.
        config_path: PathBuf,
        /// The folder, which may also hold tokenizer.json and the like.
        dir: PathBuf,
    },
}

/// An open model: mapped files, checked headers. Tensor bytes are not read before they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    source: Source,
    files: Vec<Bytes>,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
    /// Names and element types of the tensors that are there but not read.
    unread: BTreeMap<String, &'static str>,
    /// Where the data of each GGUF file begins, and its alignment; nothing for safetensors, whose tensors leave no gaps.
    areas: Vec<(u64, u64)>,
}

/// Bytes of a file's data that belong to no tensor and are no padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap<'a> {
    /// Which of the checkpoint's files.
    pub file: usize,
    /// Where, in bytes from the start of that file.
    pub bytes: Range<u64>,
    /// The tensor after the gap; none at the end of the file.
    pub before: Option<&'a str>,
}

impl Checkpoint {
    /// Opens what `path` is:
    /// - a GGUF file, or any part of a split one (`name-00002-of-00005.gguf`);
    /// - a folder with safetensors and config.json, or config.legacy.json where that is absent;
    /// - one of the folder's `.safetensors` files or its `.safetensors.index.json`: that one, with the
    ///   folder's config; a shard (`model-00001-of-00002.safetensors`) opens all of them, by the index beside it;
    /// - another `.json` file of the folder: its weights, with this as the config.
    ///
    /// All headers are read and checked, and every tensor lies inside its file.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() || name.ends_with(".safetensors") || name.ends_with(".json") {
            let opened = safetensors::open(path)?;
            let new = Self::new(path, opened.source, opened.files, opened.tensors)?;
            let unread = opened.unread.into_iter().map(|tensor| (tensor.name, tensor.element)).collect();
            return Ok(Self { unread, ..new });
        }
        let bytes = Bytes::map(path)?;
        if !bytes.starts_with(&gguf::MAGIC) {
            if bytes.is_empty() {
                return Err(Error::Apart("the file is empty: fetch it again".into()).in_file(path));
            }
            let start = &bytes[..bytes.len().min(8)];
            let hint = match start {
                [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => {
                    "it looks like a PyTorch pickle, which can run code: convert it to safetensors"
                }
                b"version " => "it is a Git LFS pointer: fetch the file itself",
                _ => "name a .gguf file, or a folder with config.json and .safetensors files",
            };
            let found = format!("\"{}\"", start.escape_ascii());
            return Err(Error::NotAModel { found, hint }.in_file(path));
        }
        let gguf = Gguf::parse(&bytes).map_err(|error| error.in_file(path))?;
        let parts = gguf::open_parts(path, bytes, gguf)?;
        let new = Self::new(path, Source::Gguf(parts.metadata), parts.files, parts.tensors)?;
        Ok(Self { areas: parts.areas, ..new })
    }

    fn new(path: &Path, source: Source, files: Vec<Bytes>, tensors: Vec<TensorInfo>) -> Result<Self> {
        let index = index_by_name(&tensors).map_err(|error| error.in_file(path))?;
        Ok(Self {
            path: path.into(),
            source,
            files,
            tensors,
            index,
            unread: BTreeMap::new(),
            areas: Vec::new(),
        })
    }

    /// The stretches of data that belong to no tensor, file by file. Padding up to the alignment is none, and what
    /// follows the last tensor counts only beyond it.
    pub fn gaps(&self) -> Vec<Gap<'_>> {
        let mut order: Vec<&TensorInfo> = self.tensors.iter().collect();
        order.sort_unstable_by_key(|tensor| (tensor.file, tensor.offset));
        let mut gaps = Vec::new();
        for (file, &(start, alignment)) in self.areas.iter().enumerate() {
            let mut end = start;
            let mut note = |bytes: Range<u64>, before| {
                if bytes.start.next_multiple_of(alignment) < bytes.end {
                    gaps.push(Gap { file, bytes, before });
                }
            };
            for tensor in order.iter().filter(|tensor| tensor.file == file) {
                note(end..tensor.offset, Some(tensor.name.as_str()));
                end = tensor.offset + tensor.bytes;
            }
            note(end..self.files[file].len() as u64, None);
        }
        gaps
    }

    /// Refuses a GGUF file that is something else than a model, saying what it is.
    ///
    /// # Errors
    /// An importance matrix, an adapter, a projector, a control vector, or a vocabulary without tensors.
    pub fn require_model(&self) -> Result<()> {
        let Source::Gguf(metadata) = &self.source else { return Ok(()) };
        let text = |key| metadata.str_opt(key).map_err(|error| error.in_file(&self.path));
        let (kind, architecture) = (text("general.type")?, text("general.architecture")?);
        let what = match (kind, architecture) {
            (Some("imatrix"), _) => "it is an importance matrix, made for quantizing a model".into(),
            (Some("adapter"), _) => "it is an adapter (LoRA), which changes a model and is none".into(),
            (Some("mmproj"), _) | (_, Some("clip")) => {
                "it is a projector of images or sound for a model".into()
            }
            (_, Some("controlvector")) => "it is a control vector, which steers a model and is none".into(),
            (Some(kind), _) if kind != "model" => format!("it says that it is of the type {kind:?}"),
            (_, None) => "it does not name an architecture (general.architecture)".into(),
            _ if self.tensors.is_empty() => "it holds a vocabulary and no tensors".into(),
            _ => return Ok(()),
        };
        let hint = "this is not a model that can run: name the model's own file";
        Err(Error::Header(format!("{what}; {hint}")).in_file(&self.path))
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format, with its metadata or config.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Every tensor, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|i| &self.tensors[*i])
    }

    /// Whether there is a tensor of this name, of an element type that is read or not.
    pub fn has(&self, name: &str) -> bool {
        self.index.contains_key(name) || self.unread.contains_key(name)
    }

    /// Names and element types, as the file has them, of the tensors that have no decoder. They keep no model from
    /// loading that does not ask for them.
    pub fn unread(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.unread.iter().map(|(name, element)| (name.as_str(), *element))
    }

    /// The tensor of this name, or an error that names it.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        let error = || match self.unread.get(name) {
            Some(element) => Error::UnknownType { found: format!("{element:?}") }.in_tensor(name),
            None => Error::MissingTensor { name: name.into(), count: self.tensors.len() },
        };
        self.get(name).ok_or_else(|| error().in_file(&self.path))
    }

    /// The bytes of one of this checkpoint's tensors. They may begin at any address: safetensors aligns
    /// nothing.
    ///
    /// # Panics
    /// If `tensor` is of another checkpoint and does not fit this one's files.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        let start = tensor.offset as usize;
        &self.files[tensor.file][start..start + tensor.bytes as usize]
    }

    /// Tells the system that a tensor's pages are not needed for now, for who has copied or repacked them. Its
    /// bytes stay readable.
    pub fn release(&self, tensor: &TensorInfo) {
        let start = tensor.offset as usize;
        self.files[tensor.file].release(start..start + tensor.bytes as usize);
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// An id of the content for cache keys: a digest of lengths, headers and a sample of every tensor, so that
    /// two trainings of one shape differ. It does not depend on path or time, is the same on every machine, and
    /// is no defence against a forger: for that, hash the file.
    pub fn fingerprint(&self) -> u64 {
        const SAMPLE: usize = 64;
        let mut digest = Digest::default();
        for (i, file) in self.files.iter().enumerate() {
            digest.add(&(file.len() as u64).to_le_bytes());
            let data = self.tensors.iter().filter(|t| t.file == i).map(|t| t.offset).min();
            digest.add(&file[..data.unwrap_or(file.len() as u64) as usize]);
        }
        for tensor in &self.tensors {
            let data = self.data(tensor);
            let start = data.len() / 2;
            digest.add(&data[start..data.len().min(start + SAMPLE)]);
        }
        digest.0
    }
}

/// A 64-bit digest by multiply and fold, eight bytes at a time.
#[derive(Default)]
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        self.mix(bytes.len() as u64);
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.mix(u64::from_le_bytes(last));
    }

    fn mix(&mut self, word: u64) {
        // Two odd constants (fractions of the golden ratio and of sqrt(3)) keep zero from being absorbing.
        let product =
            u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * u128::from(0xbb67_ae85_84ca_a73b_u64);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

/// Name → position; an error that names the tensor if one is there twice.
pub(crate) fn index_by_name(tensors: &[TensorInfo]) -> Result<HashMap<String, usize>> {
    let mut index = HashMap::with_capacity(tensors.len());
    for (i, tensor) in tensors.iter().enumerate() {
        if let Some(other) = index.insert(tensor.name.clone(), i) {
            let problem = match (tensors[other].file, tensor.file) {
                (a, b) if a == b => "it is there twice".into(),
                (a, b) => format!("it is there twice, in parts {} and {} of the model", a + 1, b + 1),
            };
            return Err(Error::Header(problem).in_tensor(&tensor.name));
        }
    }
    Ok(index)
}

/// Checks that tensors of one file lie inside its `len` bytes and do not overlap; errors name the tensor.
/// Returns their positions in order of offset.
pub(crate) fn check_ranges(tensors: &[TensorInfo], len: u64) -> Result<Vec<usize>> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by_key(|&i| (tensors[i].offset, tensors[i].bytes));
    let mut previous: Option<&TensorInfo> = None;
    for &i in &order {
        let tensor = &tensors[i];
        if tensor.offset.checked_add(tensor.bytes).is_none_or(|end| end > len) {
            let (what, offset) = ("its data".into(), tensor.offset);
            let error = Error::Truncated {
                what,
                offset,
                needed: tensor.bytes,
                remaining: len.saturating_sub(offset),
            };
            return Err(error.in_tensor(&tensor.name));
        }
        // No overflow: the previous one passed the check above.
        if let Some(previous) = previous
            && previous.offset + previous.bytes > tensor.offset
        {
            let (start, end) = (tensor.offset, previous.offset + previous.bytes);
            let problem =
                format!("it begins at byte {start}, inside tensor {:?}, which ends at {end}", previous.name);
            return Err(Error::Header(problem).in_tensor(&tensor.name));
        }
        if tensor.bytes > 0 {
            previous = Some(tensor);
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests;
