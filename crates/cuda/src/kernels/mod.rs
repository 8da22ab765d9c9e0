//! The kernels: `<op>.cu` is what runs on the device, `<op>.rs` beside it how it is launched. [`SOURCES`] lists the files,
//! [`HEADERS`] what they include.
//!
//! Kernels take arena addresses and shapes, which are fixed once a program is prepared, and the address of the step's
//! data; whatever changes between two steps they read from there. The launch has as many blocks as the bucket has rows,
//! and blocks of rows that the step does not have end at once.

pub mod elementwise;
pub mod embed;
pub mod kv;
pub mod norm;

use ingle_graph::Rows;

use crate::driver::{Arg, Entry};

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

/// What sources include, by name.
pub const HEADERS: &[(&str, &str)] =
    &[("common.cuh", include_str!("common.cuh")), ("kv.cuh", include_str!("kv.cuh"))];

/// All files.
pub const SOURCES: &[&Source] = &[&elementwise::SOURCE, &embed::SOURCE, &kv::SOURCE, &norm::SOURCE];

/// Architectures every kernel is compiled for in tests, the oldest first.
pub const ARCHS: &[&str] = &["sm_80", "sm_89", "sm_90a", "sm_100a"];

/// The file that compiles fastest.
pub fn smallest() -> &'static Source {
    SOURCES.iter().min_by_key(|source| source.text.len()).expect("there are kernels")
}

/// A symbolic row count, as kernels are told it.
fn rows(rows: Rows) -> Arg<'static> {
    Arg::U32(match rows {
        Rows::T => 0,
        Rows::R => 1,
    })
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
