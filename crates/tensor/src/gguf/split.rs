//! Split files: parts named `name-00001-of-00003.gguf`, of which each is a whole GGUF file.
//!
//! Any part opens the model. The keys that count are the first part's; `split.no` counts from 0 and file names
//! from 1; `split.tensors.count` is the total over all parts.

use std::path::{Path, PathBuf};

use super::{Gguf, Metadata};
use crate::bytes::Bytes;
use crate::checkpoint::TensorInfo;
use crate::{Error, Result};

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The parts of a model in order, or its only file.
pub(crate) struct Parts {
    pub files: Vec<Bytes>,
    /// Of each file: where its data begins, and its alignment.
    pub areas: Vec<(u64, u64)>,
    /// The first part's.
    pub metadata: Metadata,
    pub tensors: Vec<TensorInfo>,
}

/// The model that the opened file belongs to: itself, or all parts.
pub(crate) fn open_parts(path: &Path, bytes: Bytes, opened: Gguf) -> Result<Parts> {
    let count = opened.metadata.usize_opt(COUNT).map_err(|error| error.in_file(path))?.unwrap_or(1);
    if count <= 1 {
        let areas = vec![(opened.data_start, opened.alignment)];
        return Ok(Parts { files: vec![bytes], areas, metadata: opened.metadata, tensors: opened.tensors });
    }
    let no = opened.metadata.usize(NO).map_err(|error| error.in_file(path))?;
    let stem = stem(path, no, count).map_err(|error| error.in_file(path))?;

    let (mut files, mut areas) = (Vec::new(), Vec::new());
    let mut tensors = Vec::new();
    let mut metadata = None;
    for part in 0..count {
        let path = stem.with_file_name(part_name(
            &stem.file_name().unwrap_or_default().to_string_lossy(),
            part,
            count,
        ));
        let missing =
            || format!("part {} of {count} of the model is missing: fetch it, or restore its name", part + 1);
        let bytes = Bytes::map(&path).map_err(|error| error.or_missing(missing))?;
        let gguf = Gguf::parse(&bytes).and_then(|gguf| check_part(gguf, part, count));
        let gguf = gguf.map_err(|error| error.in_file(&path))?;
        tensors.extend(gguf.tensors.into_iter().map(|tensor| TensorInfo { file: part, ..tensor }));
        areas.push((gguf.data_start, gguf.alignment));
        metadata.get_or_insert(gguf.metadata);
        files.push(bytes);
    }
    let metadata = metadata.unwrap_or(opened.metadata);
    match metadata.usize_opt(TENSORS).map_err(|error| error.in_file(path))? {
        Some(total) if total != tensors.len() => {
            let problem = format!("it is {total}, but the {count} parts hold {} tensors", tensors.len());
            Err(Error::key(TENSORS, problem).in_file(path))
        }
        _ => Ok(Parts { files, areas, metadata, tensors }),
    }
}

fn part_name(stem: &str, part: usize, count: usize) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", part + 1)
}

/// The path without `-0000n-of-0000m.gguf`, from which the other parts' names are made.
fn stem(path: &Path, no: usize, count: usize) -> Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let suffix = (no < count).then(|| part_name("", no, count));
    match suffix.as_deref().and_then(|suffix| name.strip_suffix(suffix)) {
        Some(stem) => Ok(path.with_file_name(stem)),
        None => Err(Error::Apart(format!(
            "this is part {} of {count} of a split model, but its name does not end in {}: restore the names of \
             its parts",
            no.saturating_add(1),
            suffix.as_deref().unwrap_or("its number"),
        ))),
    }
}

fn check_part(gguf: Gguf, part: usize, count: usize) -> Result<Gguf> {
    let found = (gguf.metadata.usize(NO)?, gguf.metadata.usize(COUNT)?);
    if found != (part, count) {
        let problem = format!("it is {} of {} parts, where {part} of {count} belongs", found.0, found.1);
        return Err(Error::key(NO, problem));
    }
    Ok(gguf)
}
