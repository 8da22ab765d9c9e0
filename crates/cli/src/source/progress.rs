//! How fetching tells whoever watches: the command line draws bars on a terminal and stays quiet elsewhere.

use std::io::Write;

/// Watches a fetch. One transfer is open at a time: `start`, any number of `advance`, `finish`.
pub trait Progress {
    /// A transfer called `what` begins with `bytes_done` of `bytes_total` bytes already here (`None`: length unknown).
    fn start(&mut self, what: &str, bytes_done: u64, bytes_total: Option<u64>);
    /// `bytes` more have arrived; zero means that work goes on without a count.
    fn advance(&mut self, bytes: u64);
    /// The transfer is over, well or badly.
    fn finish(&mut self);
    /// One line worth reading, such as a source that failed before the next is tried.
    fn note(&mut self, line: &str);
}

/// No bars; notes go to standard error.
#[derive(Debug, Default, Clone, Copy)]
pub struct Notes;

impl Progress for Notes {
    fn start(&mut self, _what: &str, _bytes_done: u64, _bytes_total: Option<u64>) {}
    fn advance(&mut self, _bytes: u64) {}
    fn finish(&mut self) {}
    fn note(&mut self, line: &str) {
        // Where standard error cannot be written, nobody is left to be told.
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
}
