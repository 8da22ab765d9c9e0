//! `ingle quantize`: a model's weights rounded to another type, each value to the nearest that its block can hold.

use std::collections::BTreeMap;
use std::io::{Write, stdout};

use ingle_tensor::gguf::{FileStream, Metadata, Outline};
use ingle_tensor::{Checkpoint, DType, Source, TensorInfo, quant};

use crate::error::{Error, Result};
use crate::flags::Quantize;
use crate::mix::{Mix, QUANTIZATION_VERSION, Role};
use crate::term::{self, bytes, thousands};
use crate::{files, session, slabs, sys};

/// Keys that are said anew, or that only a part of a split file has.
const NOT_COPIED: [&str; 5] =
    ["general.file_type", "general.quantization_version", "split.no", "split.count", "split.tensors.count"];

/// A file that is described to the byte and not yet made.
struct Quantization<'a> {
    checkpoint: &'a Checkpoint,
    outline: Outline,
    /// New type of each of the checkpoint's tensors.
    types: Vec<DType>,
}

impl<'a> Quantization<'a> {
    /// # Errors
    /// A safetensors folder, or a GGUF file that is no model.
    fn new(checkpoint: &'a Checkpoint, mix: &Mix) -> Result<Self> {
        let metadata = settings(checkpoint)?;
        checkpoint.require_model()?;
        let types = types(checkpoint, mix);
        let mut outline = Outline::new();
        outline.copy(metadata, &NOT_COPIED)?;
        outline.set("general.file_type", &mix.file_type)?;
        outline.set("general.quantization_version", &QUANTIZATION_VERSION)?;
        for (tensor, dtype) in checkpoint.tensors().iter().zip(&types) {
            outline.tensor(&tensor.name, *dtype, &tensor.shape)?;
        }
        Ok(Self { checkpoint, outline, types })
    }

    /// Makes all of a file that was begun; `watch` hears of the bytes of each piece, and its error ends the work. Nothing is
    /// left of a file that does not get whole, or whose name another has taken meanwhile, unless this one `replaces` it.
    fn write(
        &self,
        mut file: FileStream,
        replaces: bool,
        threads: usize,
        watch: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let tensors = self.checkpoint.tensors();
        let row_bytes = |at: usize| self.types[at].row_bytes(tensors[at].cols());
        let sizes: Vec<(usize, usize)> =
            (0..tensors.len()).map(|at| Ok((tensors[at].rows(), row_bytes(at)?))).collect::<Result<_>>()?;
        let mut last = 0;
        let make = |at: usize, first: usize, out: &mut [u8]| self.rows(at, first, sizes[at].1, out);
        slabs::stream(sizes.iter().copied(), threads, make, |at, bytes| {
            // What was read need not stay in memory.
            tensors[last..at].iter().for_each(|tensor| self.checkpoint.release(tensor));
            last = at;
            file.write(&tensors[at].name, bytes)?;
            watch(bytes.len() as u64)
        })?;
        Ok(if replaces { file.finish() } else { file.finish_new() }?)
    }

    /// Rows from `first` on of tensor number `at`, in its new type. A tensor that has this type already is copied, since
    /// to round twice is not always to round once.
    fn rows(&self, at: usize, first: usize, row_bytes: usize, out: &mut [u8]) -> Result<()> {
        let (tensor, dtype) = (&self.checkpoint.tensors()[at], self.types[at]);
        let mut values = vec![0.0; tensor.cols()];
        let source_bytes = tensor.dtype.row_bytes(tensor.cols())?;
        let source = self.checkpoint.data(tensor)[first * source_bytes..].chunks_exact(source_bytes);
        for (row, (source, out)) in source.zip(out.chunks_exact_mut(row_bytes)).enumerate() {
            let unfit = |col: usize, what: String| {
                Err(Error::Content {
                    path: self.checkpoint.path().to_path_buf(),
                    what: format!("tensor {:?}, row {}, column {col}: {what}", tensor.name, first + row),
                })
            };
            quant::decode_row(tensor.dtype, source, &mut values);
            if let Some(col) = values.iter().position(|v| !v.is_finite()) {
                let what = "cannot be rounded: `ingle check` finds all such values";
                return unfit(col, format!("{} {what}", values[col]));
            }
            if dtype == tensor.dtype {
                out.copy_from_slice(source);
                continue;
            }
            let largest = values.iter().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
            let (col, largest) = largest.map_or((0, 0.0), |(col, v)| (col, *v));
            if !quant::encode_row(dtype, &values, out) {
                return unfit(0, format!("no value is stored as {dtype}"));
            }
            quant::decode_row(dtype, out, &mut values);
            if values.iter().any(|v| !v.is_finite()) {
                return unfit(
                    col,
                    format!("{largest:e} is beyond what {dtype} can hold: choose bf16 or f32"),
                );
            }
        }
        Ok(())
    }
}

/// The keys of a GGUF file.
fn settings(checkpoint: &Checkpoint) -> Result<&Metadata> {
    match checkpoint.source() {
        Source::Gguf(metadata) => Ok(metadata),
        Source::SafeTensors { .. } => Err(Error::Refused(format!(
            "{}: safetensors cannot be quantized yet, as settings and tokenizer are not written as GGUF: convert the model \
             to a GGUF file of f16, bf16 or f32 first",
            checkpoint.path().display()
        ))),
    }
}

/// New type of each tensor: the mix decides for matrices; vectors and routers become f32; integers stay.
fn types(checkpoint: &Checkpoint, mix: &Mix) -> Vec<DType> {
    let tensors = checkpoint.tensors();
    let layer = |tensor: &TensorInfo| -> Option<usize> {
        tensor.name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
    };
    let layers = tensors.iter().filter_map(layer).max().map_or(0, |last| last.saturating_add(1));
    let is_tied = !checkpoint.has("output.weight");
    let new_type = |tensor: &TensorInfo| {
        if !tensor.dtype.is_float() && !tensor.dtype.is_quantized() {
            return tensor.dtype;
        }
        match is_matrix(tensor) {
            true => mix.dtype(Role::of(&tensor.name, layers, is_tied), tensor.cols()),
            false => DType::F32,
        }
    };
    tensors.iter().map(new_type).collect()
}

/// Whether a tensor is the matrix of a product or an embedding table, and none that decides or normalizes.
fn is_matrix(tensor: &TensorInfo) -> bool {
    let kept = ["_norm.weight", ".ffn_gate_inp.weight"];
    tensor.shape.len() >= 2
        && tensor.name.ends_with(".weight")
        && !kept.iter().any(|end| tensor.name.ends_with(end))
}

/// How many tensors of each type, the most first.
fn counts(types: impl Iterator<Item = DType>) -> String {
    let mut counts = BTreeMap::new();
    types.for_each(|dtype| *counts.entry(dtype).or_insert(0) += 1);
    let mut counts: Vec<(DType, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.iter().map(|(dtype, count)| format!("{count} {dtype}")).collect::<Vec<_>>().join(", ")
}

/// Writes the file.
///
/// # Errors
/// The input is no GGUF model, or is what would be overwritten; a file that is there already; a disk without room, with the
/// numbers; a value that is not finite or too large, with its place; a signal; the file system.
pub fn quantize(flags: &Quantize) -> Result<()> {
    let Quantize { input, out, mix, .. } = flags;
    if out.as_os_str() == "-" {
        let what = "quantize writes a file, not standard output: give it a name (./- is one, if it must be)";
        return Err(Error::Refused(what.into()));
    }
    let input = &session::resolve(Some(input))?;
    let checkpoint = session::open_files(input)?;
    let quantization = Quantization::new(&checkpoint, mix)?;
    let total = quantization.outline.file_bytes()?;
    files::require_other(out, input)?;
    files::require_place(out, flags.force, total)?;
    let signals = sys::Signals::catch_all_and_outlive_readers();
    // What cannot be begun is not announced.
    let file = quantization.outline.create(out)?;
    term::say(&format!(
        "{}: {} bytes ({}) from {}, {}",
        mix.name,
        thousands(total),
        bytes(total),
        bytes(checkpoint.total_bytes()),
        counts(quantization.types.iter().copied())
    ));
    let again = checkpoint.tensors().iter().zip(&quantization.types);
    let again: Vec<DType> = again
        .filter(|(tensor, dtype)| {
            tensor.dtype.is_quantized() && dtype.is_quantized() && tensor.dtype != **dtype
        })
        .map(|(tensor, _)| tensor.dtype)
        .collect();
    if !again.is_empty() {
        let counts = counts(again.into_iter());
        term::say(&format!("note: rounded before and now again, which loses more: {counts}"));
    }
    let threads = flags.threads.map_or_else(sys::processors, usize::from);
    let bar = term::bytes_bar(&out.display().to_string(), Some(total));
    let written = quantization.write(file, flags.force, threads, &mut |n| {
        bar.inc(n);
        let left = "nothing is left of the file";
        signals.caught().map_or(Ok(()), |signal| Err(Error::Interrupted { signal, left }))
    });
    bar.finish_and_clear();
    drop(signals);
    written.map_err(files::advise_taken)?;
    Ok(writeln!(stdout(), "{}", out.display())?)
}
