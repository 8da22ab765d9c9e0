//! The terminal: colour and progress bars only where somebody watches; numbers for people.

use std::io::{IsTerminal, Write, stderr, stdin, stdout};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::Error;
use crate::source::{Notes, Progress};

/// Whether standard input comes from a person.
pub fn stdin_is_person() -> bool {
    stdin().is_terminal()
}

/// One line on standard error. Where that cannot be written, the line is lost: nobody is left to be told.
pub fn say(line: &str) {
    let _ = writeln!(stderr().lock(), "{line}");
}

/// A failure, as one line on standard error.
pub fn error(error: &Error) {
    say(&format!("{} {}", Paint::stderr().bad("error:"), error.line()));
}

/// Text from a file as a terminal may show it: what would move the cursor or turn the line around is escaped.
pub fn plain(text: &str) -> String {
    let is_active = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_active(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// A counter of `steps` steps on standard error; invisible where that is no terminal. It is drawn when it is advanced
/// and by no thread of its own, so that it takes nothing from what is timed.
pub fn counter(what: &str, steps: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    bar.set_style(
        ProgressStyle::with_template("{msg} {pos}/{len}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar.set_message(what.to_string());
    bar
}

/// A bar of bytes on standard error, of how many if that is known; invisible where that is no terminal.
pub fn bytes_bar(what: &str, total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => {
            (ProgressBar::new(total), "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        }
        None => (ProgressBar::no_length(), "{spinner} {msg} {bytes} {elapsed}"),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_string());
    bar
}

/// How far a long pass over bytes is, on standard error: a bar on a terminal, elsewhere a line for every tenth of what
/// takes a while.
pub struct Watch {
    bar: ProgressBar,
    what: &'static str,
    total: u64,
    done: AtomicU64,
    says_lines: bool,
}

impl Watch {
    /// Fewer bytes are read in a moment and get no lines.
    const LONG_BYTES: u64 = 1 << 30;

    /// A pass over `total` bytes that is about to begin.
    pub fn new(what: &'static str, total: u64) -> Self {
        let says_lines = total >= Self::LONG_BYTES && !stderr().is_terminal();
        Self { bar: bytes_bar(what, Some(total)), what, total, done: AtomicU64::new(0), says_lines }
    }

    /// So many bytes more are done.
    pub fn advance(&self, bytes_done: u64) {
        self.bar.inc(bytes_done);
        let before = self.done.fetch_add(bytes_done, Ordering::Relaxed);
        let tenth = |done: u64| u128::from(done) * 10 / u128::from(self.total.max(1));
        let now = tenth(before + bytes_done);
        if self.says_lines && now > tenth(before) && now < 10 {
            say(&format!("{}: {}% of {}", self.what, now * 10, bytes(self.total)));
        }
    }

    /// The end.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Colours for one stream: empty strings where it is no terminal, or where NO_COLOR says so.
#[derive(Debug, Clone, Copy)]
pub struct Paint(bool);

impl Paint {
    /// For standard output.
    pub fn stdout() -> Self {
        Self(wanted(stdout().is_terminal()))
    }

    /// For standard error.
    pub fn stderr() -> Self {
        Self(wanted(stderr().is_terminal()))
    }

    fn wrap(self, code: u8, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// What matters most.
    pub fn bold(self, text: &str) -> String {
        self.wrap(1, text)
    }

    /// What matters least.
    pub fn dim(self, text: &str) -> String {
        self.wrap(2, text)
    }

    /// What is well.
    pub fn good(self, text: &str) -> String {
        self.wrap(32, text)
    }

    /// What is not.
    pub fn bad(self, text: &str) -> String {
        self.wrap(31, text)
    }
}

/// NO_COLOR (no-color.org) counts when it holds anything at all.
fn wanted(is_terminal: bool) -> bool {
    is_terminal
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Bars on a terminal, nothing elsewhere; notes are one line on standard error either way.
pub fn progress() -> Box<dyn Progress> {
    match stderr().is_terminal() {
        true => Box::new(Bars { bar: None }),
        false => Box::new(Notes),
    }
}

/// Bars on standard error; nothing is drawn before the first transfer starts.
#[derive(Debug)]
struct Bars {
    bar: Option<ProgressBar>,
}

impl Progress for Bars {
    fn start(&mut self, what: &str, bytes_done: u64, bytes_total: Option<u64>) {
        let bar = bytes_bar(what, bytes_total);
        bar.set_position(bytes_done);
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(100));
        self.bar = Some(bar);
    }

    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

/// `123.4 MiB`: bytes for people.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

/// `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        for (n, want) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98_362_432, "93.8 MiB"), (1 << 30, "1.0 GiB")]
        {
            assert_eq!(bytes(n), want);
        }
        for (n, want) in [(0, "0"), (999, "999"), (1000, "1,000"), (98_362_432, "98,362,432")] {
            assert_eq!(thousands(n), want);
        }
    }

    #[test]
    fn nothing_from_a_file_acts_on_the_terminal() {
        for (text, want) in
            [("blk.0 \u{e9}", "blk.0 \u{e9}"), ("a\x1b[2Jb\n", r"a\u{1b}[2Jb\n"), ("\u{202e}x", r"\u{202e}x")]
        {
            assert_eq!(plain(text), want);
        }
    }

    #[test]
    fn no_colour_without_a_terminal() {
        assert_eq!(Paint(false).bad("FAIL"), "FAIL");
        assert_eq!(Paint(true).bad("FAIL"), "\x1b[31mFAIL\x1b[0m");
    }
}
