//! Tokens from logits.

use ingle_graph::LOGITS_SPAN;

use super::Source;
use crate::driver::Param::{Memory, U32};
use crate::driver::{Arg, Entry, Launch, Span};
use crate::{Error, Result};

/// A token of each row.
pub const SAMPLE: Entry = Entry { name: "sample_rows", params: &[Memory, U32, Memory, Memory, Memory] };

/// The file.
pub const SOURCE: Source = Source { name: "sample", text: include_str!("sample.cu"), entries: &[SAMPLE] };

/// Threads of a block, which has one for each peak of a row: `THREADS`.
const THREADS: u32 = 1024;

/// Most logits of a row.
const COLS: usize = THREADS as usize * LOGITS_SPAN;

/// Shape of [`SAMPLE`] for the bucket's rows, of so many logits with a peak for each `span`.
///
/// # Errors
/// A row that the kernel does not take.
pub fn shape(rows: u32, cols: usize, span: usize) -> Result<Launch> {
    if span != LOGITS_SPAN || cols > COLS {
        return Err(Error::Refused(format!("sample from {cols} logits with peaks of {span}")));
    }
    Ok(Launch::new([rows, 1], THREADS))
}

/// Arguments of [`SAMPLE`]: logits `[R, cols]`, their peaks, y `[R, 1]`.
pub fn arguments<'a>(
    step: Span<'a>,
    cols: u32,
    logits: Span<'a>,
    peaks: Span<'a>,
    y: Span<'a>,
) -> [Arg<'a>; 5] {
    let [step, logits, peaks, y] = [step, logits, peaks, y].map(Arg::Memory);
    [step, Arg::U32(cols), logits, peaks, y]
}

#[cfg(test)]
mod tests {
    use super::*;
    use ingle_graph::sample;

    /// The numbers that both sides must have.
    #[test]
    fn the_kernel_has_the_same_sizes() {
        for (name, value) in
            [("THREADS", THREADS as usize), ("SPAN", LOGITS_SPAN), ("CHANGES", sample::CHANGES)]
        {
            let line = format!("#define {name} {value}u");
            assert!(SOURCE.text.lines().any(|text| text.split(" //").next() == Some(&line)), "{line}");
        }
        assert!(SOURCE.text.contains("#define ONE (1ull << 43)") && sample::ONE == 1 << 43);
    }
}
