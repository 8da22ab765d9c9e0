//! Files that mean harm: what public bug reports did to other engines, every cut and every changed header byte, and the
//! driver that damages files at random. Everything goes the whole way, from a path to a reply, under an allocator that
//! counts.

mod bytes;
mod cases;
mod driver;
mod gguf;
mod models;
mod safetensors;

use std::path::{Path, PathBuf};

use ingle_tests::attack::driver::{SLOW, timed};
use ingle_tests::attack::walk::Outcome;
use ingle_tests::attack::watch::{Watched, measure_here};
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Memory that reading a header may take whatever it says, in bytes.
const HEADER: usize = 256 << 10;

/// A folder with one file.
fn file(name: &str, bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    (dir, path)
}

/// The file must be refused in these words, at once, and for no more memory than its size accounts for.
fn refused(path: &Path, bytes: usize, walk: impl FnOnce(&Path) -> Outcome, words: &[&str]) {
    let ((outcome, time), usage) = measure_here(|| timed(|| walk(path)));
    let message = outcome.expect_err("the file must be refused");
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
    assert!(usage.peak <= HEADER + 2 * bytes, "{message}: {usage:?}");
    assert!(time < SLOW, "{message}: {time:?}");
}
