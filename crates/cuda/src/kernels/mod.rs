//! The kernels: `<op>.cu` is what runs on the device, `<op>.rs` beside it how it is launched. [`SOURCES`] lists the files,
//! [`HEADERS`] what they include.
//!
//! Kernels take arena addresses and shapes, which are fixed once a program is prepared, and the address of the step's
//! data; whatever changes between two steps they read from there. The launch has as many blocks as the bucket has rows,
//! and blocks of rows that the step does not have end at once.

pub mod attention;
mod attention_mma;
pub mod elementwise;
pub mod embed;
pub mod float;
pub mod kv;
pub mod linear;
pub mod norm;
pub mod quantize;
pub mod rates;
pub mod sample;
mod tile;

use ingle_graph::Rows;

use crate::driver::{Arg, Entry, Launch, Span};

/// A `.cu` file.
#[derive(Debug)]
pub struct Source {
    /// Its name without `.cu`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The kernels in it.
    pub entries: &'static [Entry],
}

/// A launch of a kernel with its arguments.
#[derive(Clone, Debug)]
pub struct Issue<'a> {
    /// The kernel.
    pub entry: Entry,
    /// Its blocks and threads.
    pub shape: Launch,
    /// What it is given.
    pub arguments: Vec<Arg<'a>>,
}

/// What sources include, by name.
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", include_str!("common.cuh")),
    ("kv.cuh", include_str!("kv.cuh")),
    ("halves.cuh", include_str!("halves.cuh")),
    ("attend.cuh", include_str!("attend.cuh")),
    ("attend_mma.cuh", include_str!("attend_mma.cuh")),
    ("overlap.cuh", include_str!("overlap.cuh")),
    ("copies.cuh", include_str!("copies.cuh")),
    ("quantize.cuh", include_str!("quantize.cuh")),
    ("matrix.cuh", include_str!("matrix.cuh")),
    ("tensor.cuh", include_str!("tensor.cuh")),
    ("operand.cuh", include_str!("operand.cuh")),
    ("tile.cuh", include_str!("tile.cuh")),
    ("panel.cuh", include_str!("panel.cuh")),
    ("linear.cuh", include_str!("linear.cuh")),
    ("stream.cuh", include_str!("stream.cuh")),
    ("float.cuh", include_str!("float.cuh")),
    ("quant/iq4_levels.cuh", include_str!("quant/iq4_levels.cuh")),
    ("quant/iq4_nl.cuh", include_str!("quant/iq4_nl.cuh")),
    ("quant/iq4_xs.cuh", include_str!("quant/iq4_xs.cuh")),
    ("quant/mxfp4.cuh", include_str!("quant/mxfp4.cuh")),
    ("quant/q4_0.cuh", include_str!("quant/q4_0.cuh")),
    ("quant/q4_1.cuh", include_str!("quant/q4_1.cuh")),
    ("quant/q4_k.cuh", include_str!("quant/q4_k.cuh")),
    ("quant/q5_0.cuh", include_str!("quant/q5_0.cuh")),
    ("quant/q5_1.cuh", include_str!("quant/q5_1.cuh")),
    ("quant/q5_k.cuh", include_str!("quant/q5_k.cuh")),
    ("quant/q6_k.cuh", include_str!("quant/q6_k.cuh")),
    ("quant/q8_0.cuh", include_str!("quant/q8_0.cuh")),
    ("quant/wide.cuh", include_str!("quant/wide.cuh")),
];

/// All files.
pub const SOURCES: &[&Source] = &[
    &attention::SOURCE,
    attention_mma::SOURCES[0],
    attention_mma::SOURCES[1],
    attention_mma::SOURCES[2],
    attention_mma::SOURCES[3],
    attention_mma::SOURCES[4],
    attention_mma::SOURCES[5],
    &elementwise::SOURCE,
    &embed::SOURCE,
    &kv::SOURCE,
    &norm::SOURCE,
    &quantize::SOURCE,
    &rates::SOURCE,
    &sample::SOURCE,
    &float::F32,
    &float::F16,
    &float::BF16,
    &linear::Q4_0,
    &linear::Q4_1,
    &linear::Q5_0,
    &linear::Q5_1,
    &linear::Q8_0,
    &linear::IQ4_NL,
    &linear::MXFP4,
    &linear::Q4_K,
    &linear::Q4_K_Q6_K,
    &linear::IQ4_XS_Q5_K,
    &linear::Q5_K,
    &linear::Q6_K,
    &linear::IQ4_XS,
    &linear::WIDE,
];

/// Architectures every kernel is compiled for in tests, the oldest first.
pub const ARCHS: &[&str] = &["sm_80", "sm_89", "sm_90a", "sm_100a"];

/// The file that compiles fastest.
pub fn smallest() -> &'static Source {
    let bytes = |source: &Source| -> usize {
        source.text.len() + included(source.text).iter().map(|(_, header)| header.len()).sum::<usize>()
    };
    SOURCES.iter().min_by_key(|source| bytes(source)).expect("there are kernels")
}

/// A symbolic row count, as kernels are told it.
fn rows(rows: Rows) -> Arg<'static> {
    Arg::U32(match rows {
        Rows::T => 0,
        Rows::R => 1,
    })
}

/// Memory, or none.
fn optional(memory: Option<Span<'_>>) -> Arg<'_> {
    memory.map_or(Arg::Nothing, Arg::Memory)
}

/// Headers that a text includes, and those that they include, in the order of [`HEADERS`].
pub fn included(text: &str) -> Vec<(&'static str, &'static str)> {
    let mut wanted = vec![false; HEADERS.len()];
    let mut texts = vec![text];
    while let Some(text) = texts.pop() {
        for line in text.lines().filter_map(|line| line.trim_start().strip_prefix("#include \"")) {
            let name = line.split('"').next().unwrap_or_default();
            if let Some(i) = HEADERS.iter().position(|(header, _)| *header == name)
                && !std::mem::replace(&mut wanted[i], true)
            {
                texts.push(HEADERS[i].1);
            }
        }
    }
    HEADERS.iter().zip(wanted).filter_map(|(header, wanted)| wanted.then_some(*header)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header that is included and not listed is found here, and not at a user's first run.
    #[test]
    fn every_include_is_a_listed_header() {
        let texts = SOURCES.iter().map(|source| source.text).chain(HEADERS.iter().map(|(_, text)| *text));
        for line in texts.flat_map(str::lines).filter(|line| line.trim_start().starts_with("#include")) {
            let name = line.split('"').nth(1).unwrap_or_default();
            assert!(HEADERS.iter().any(|(header, _)| *header == name), "{line}");
        }
        assert_eq!(included("#include \"common.cuh\"\n").len(), 1);
        assert!(included("// no header").is_empty());
    }

    /// Names are unique: they name kernels in reports and in the tests' table.
    #[test]
    fn names_are_unique_and_in_their_files() {
        let mut names: Vec<&str> = SOURCES.iter().flat_map(|s| s.entries).map(|entry| entry.name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        for source in SOURCES {
            assert!(!source.entries.is_empty(), "{}", source.name);
        }
    }
}
