//! Every value of every tensor, decoded to f32 once: is it finite, and is it not all zero. All processors take part, in
//! pieces that cost the same memory however large the tensor is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ingle_tensor::{Checkpoint, DType, TensorInfo, quant};

use super::{CONVERT, Findings, in_order, of_tensor};
use crate::term::bytes;
use crate::{sys, term, threads};

/// Values of one piece of work, and of one decode; blocks of every type tile both.
const PIECE: usize = 1 << 20;
const BATCH: usize = 4096;

const NOT_WHOLE: &str = "a download that was not finished leaves that: fetch the file again";

/// What is known of some of a tensor's values.
#[derive(Clone, Copy, Default)]
struct Seen {
    not_finite: usize,
    /// Index of the first value that is not finite.
    first: Option<usize>,
    is_any_nonzero: bool,
}

impl Seen {
    fn add(self, other: Self) -> Self {
        Self {
            not_finite: self.not_finite + other.not_finite,
            first: [self.first, other.first].into_iter().flatten().min(),
            is_any_nonzero: self.is_any_nonzero || other.is_any_nonzero,
        }
    }
}

/// Looks at all values, and says how far it is.
pub(super) fn check(checkpoint: &Checkpoint, findings: &mut Findings) {
    let tensors = checkpoint.tensors();
    let pieces: Vec<(usize, usize)> = tensors
        .iter()
        .enumerate()
        .flat_map(|(at, tensor)| (0..tensor.elements()).step_by(PIECE).map(move |first| (at, first)))
        .collect();
    let watch = term::Watch::new("checking", tensors.iter().map(|t| t.bytes).sum());
    let (turn, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::<usize, Seen>::new()));
    threads::share(sys::processors().min(pieces.len()), || {
        while let Some(&(at, first)) = pieces.get(turn.fetch_add(1, Ordering::Relaxed)) {
            let part = piece(&tensors[at], first);
            let seen = look(checkpoint.data(&part), part.dtype, first);
            // What was looked at need not stay in memory.
            checkpoint.release(&part);
            watch.advance(part.bytes);
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            let all = found.entry(at).or_default();
            *all = all.add(seen);
        }
    });
    watch.finish();
    let mut zeros = Vec::new();
    for (at, seen) in found.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let (tensor, place) = (&tensors[at], of_tensor(&tensors[at].name));
        if let Some(first) = seen.first {
            let (row, column) = (first / tensor.cols(), first % tensor.cols());
            let what = format!(
                "{} of its {} values are not finite, the first in row {row}, column {column}",
                seen.not_finite,
                tensor.elements()
            );
            findings.problem(&place, what, CONVERT);
        } else if !seen.is_any_nonzero {
            zeros.push(tensor);
        }
    }
    zeros.sort_by(|a, b| in_order(&a.name, &b.name));
    tell_zeros(&zeros, findings);
}

/// Tells of tensors that hold only zeros, in order: a vector may, but a matrix of zeros is what a download leaves that made
/// its file in full length and did not fill it.
fn tell_zeros(zeros: &[&TensorInfo], findings: &mut Findings) {
    match zeros {
        [first, .., last] if zeros.iter().any(|tensor| tensor.rows() > 1) => {
            let what = format!(
                "{} tensors, {} in all, hold only zeros: {} to {}",
                zeros.len(),
                bytes(zeros.iter().map(|tensor| tensor.bytes).sum()),
                first.name,
                last.name
            );
            findings.problem("tensors", what, NOT_WHOLE);
        }
        [only] if only.rows() > 1 => {
            findings.problem(&of_tensor(&only.name), "it holds only zeros", NOT_WHOLE)
        }
        _ => {
            let names = zeros.iter().map(|tensor| tensor.name.as_str()).collect();
            findings.note_tensors(names, "all its values are zero", "with zeros alone");
        }
    }
}

/// The part of a tensor from value `first` on, of [`PIECE`] values or what is left.
fn piece(tensor: &TensorInfo, first: usize) -> TensorInfo {
    let bytes = |values: usize| (values / tensor.dtype.block_len() * tensor.dtype.block_bytes()) as u64;
    let values = PIECE.min(tensor.elements() - first);
    TensorInfo {
        offset: tensor.offset + bytes(first),
        bytes: bytes(values),
        shape: vec![values],
        ..tensor.clone()
    }
}

/// Looks at values that begin with number `first` of their tensor.
fn look(data: &[u8], dtype: DType, first: usize) -> Seen {
    let mut values = [0.0; BATCH];
    let batch_bytes = BATCH / dtype.block_len() * dtype.block_bytes();
    let mut seen = Seen::default();
    for (i, bytes) in data.chunks(batch_bytes).enumerate() {
        let values = &mut values[..bytes.len() / dtype.block_bytes() * dtype.block_len()];
        quant::decode_row(dtype, bytes, values);
        let not_finite = values.iter().filter(|v| !v.is_finite()).count();
        if not_finite > 0 && seen.first.is_none() {
            seen.first = values.iter().position(|v| !v.is_finite()).map(|at| first + i * BATCH + at);
        }
        seen.not_finite += not_finite;
        seen.is_any_nonzero |= values.iter().any(|&v| v != 0.0);
    }
    seen
}
