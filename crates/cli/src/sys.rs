//! What only the system knows or does: signals, memory, the processor's name, where state lies.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

/// Ends the process quietly when the reader of standard output has gone, as other filters do.
pub fn end_quietly_on_closed_pipe() {
    #[cfg(unix)]
    // SAFETY: sets a signal's default action before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// A write beyond a limit on file sizes (`ulimit -f`) becomes an error like that of a full disk, so that what was begun is
/// removed.
pub fn fail_on_size_limit() {
    #[cfg(unix)]
    // SAFETY: ignores a signal, before any thread is started.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// The last signal that was caught; 0 for none.
static CAUGHT: AtomicI32 = AtomicI32::new(0);
/// When the first was, in milliseconds of the system's clock; 0 for never.
static FIRST_MS: AtomicI64 = AtomicI64::new(0);
/// Signals within this time are one wish: `timeout` sends each to the process and to its group.
#[cfg(unix)]
const ONE_WISH_MS: i64 = 200;

/// A signal that asks the process to stop. Displayed as what it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The terminal is gone.
    Hangup = 1,
    /// Ctrl-C.
    Interrupt = 2,
    /// Somebody ends the process.
    Terminate = 15,
}

impl Signal {
    /// What a process exits with that one ended: 128 and the signal's number, as shells say it.
    pub fn exit_code(self) -> u8 {
        128 + self as u8
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signal::Hangup => "interrupted by SIGHUP",
            Signal::Interrupt => "interrupted",
            Signal::Terminate => "interrupted by SIGTERM",
        })
    }
}

/// While this lives, some signals do not end the process but are remembered.
#[derive(Debug)]
pub struct Signals {
    /// What was done before this, by signal.
    #[cfg(unix)]
    before: Vec<(libc::c_int, libc::sighandler_t)>,
}

impl Signals {
    /// Starts to catch Ctrl-C; what was caught earlier is forgotten.
    pub fn catch_ctrl_c() -> Self {
        #[cfg(unix)]
        return Self::catch(&[Signal::Interrupt], remember);
        #[cfg(not(unix))]
        Self {}
    }

    /// Starts to catch all that would end the process; what was caught earlier is forgotten. Who sends a second one will not
    /// wait: it ends the process at once.
    pub fn catch_all() -> Self {
        #[cfg(unix)]
        return Self::catch(&[Signal::Hangup, Signal::Interrupt, Signal::Terminate], remember_first);
        #[cfg(not(unix))]
        Self {}
    }

    /// As [`Signals::catch_all`], for work that leaves something behind when it is cut short: nor does it end the process
    /// that nobody reads its output any more.
    pub fn catch_all_and_outlive_readers() -> Self {
        let mut signals = Self::catch_all();
        #[cfg(unix)]
        {
            // SAFETY: ignores a signal, so that writes fail instead.
            let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
            signals.before.push((libc::SIGPIPE, before));
        }
        signals
    }

    #[cfg(unix)]
    fn catch(signals: &[Signal], handler: extern "C" fn(libc::c_int)) -> Self {
        CAUGHT.store(0, Ordering::SeqCst);
        FIRST_MS.store(0, Ordering::SeqCst);
        let handler = handler as libc::sighandler_t;
        let caught = |&signal: &Signal| {
            let number = signal as libc::c_int;
            // SAFETY: the handlers do only what is safe at any point of any thread.
            let before = unsafe { libc::signal(number, handler) };
            // What runs under nohup outlives its terminal.
            if signal == Signal::Hangup && before == libc::SIG_IGN {
                // SAFETY: puts back the action that was there before.
                unsafe { libc::signal(number, before) };
            }
            (number, before)
        };
        Self { before: signals.iter().map(caught).collect() }
    }

    /// The last signal that came since.
    pub fn caught(&self) -> Option<Signal> {
        let caught = CAUGHT.load(Ordering::SeqCst);
        [Signal::Hangup, Signal::Interrupt, Signal::Terminate]
            .into_iter()
            .find(|&signal| signal as i32 == caught)
    }
}

#[cfg(unix)]
extern "C" fn remember(signal: libc::c_int) {
    CAUGHT.store(signal, Ordering::SeqCst);
}

/// Remembers a signal; one that comes after the first ends the process.
#[cfg(unix)]
extern "C" fn remember_first(signal: libc::c_int) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a handler may ask for the time; the struct outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    // The types of the fields differ between systems.
    #[allow(clippy::unnecessary_cast)]
    let now_ms = (time.tv_sec as i64 * 1000 + time.tv_nsec as i64 / 1_000_000).max(1);
    match FIRST_MS.compare_exchange(0, now_ms, Ordering::SeqCst, Ordering::SeqCst) {
        // SAFETY: a handler may end the process.
        Err(first_ms) if now_ms - first_ms > ONE_WISH_MS => unsafe { libc::_exit(128 + signal) },
        _ => CAUGHT.store(signal, Ordering::SeqCst),
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        #[cfg(unix)]
        for &(number, before) in &self.before {
            // SAFETY: puts back the action that was there before.
            unsafe { libc::signal(number, before) };
        }
    }
}

/// Where state that is no cache lies: `$XDG_STATE_HOME/ingle`, else `~/.local/state/ingle`.
pub fn state_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // The XDG specification wants a relative path ignored.
    let own = || var("XDG_STATE_HOME").filter(|dir| dir.is_absolute());
    let home = || Some(var("HOME").or_else(|| var("USERPROFILE"))?.join(".local/state"));
    own().or_else(home).map(|dir| dir.join("ingle"))
}

/// Whether files can be made in `folder`, or in the nearest folder above it that is there: tried, since permissions do
/// not tell of disks that are full or read-only.
///
/// # Errors
/// The folder tried, and the reason.
pub fn try_writing(folder: &Path) -> Result<(), (PathBuf, io::Error)> {
    let there = folder.ancestors().find(|above| above.exists()).unwrap_or(Path::new("."));
    let probe = there.join(format!(".ingle-{}.tmp", std::process::id()));
    File::create_new(&probe).and_then(|_| fs::remove_file(&probe)).map_err(|e| (there.to_path_buf(), e))
}

/// Most memory this process has had in RAM at once, in bytes; `None` where the system does not say.
pub fn peak_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    Some(kib * 1024)
}

/// Name of the processor, where the system says it.
pub fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// A line of /proc/meminfo, in bytes.
pub fn memory_bytes(field: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 =
        info.lines().find_map(|l| l.strip_prefix(field))?.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Bytes that this user can still write to the disk on which `folder` lies; `None` where the system does not say.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
        // SAFETY: all zeros is a value of this C struct of numbers.
        let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: the path ends in a zero byte, and the struct outlives the call, which fills it.
        let result = unsafe { libc::statvfs(path.as_ptr(), &mut found) };
        // The types of the fields differ between systems.
        #[allow(clippy::unnecessary_cast)]
        (result == 0).then(|| (found.f_bavail as u64).saturating_mul(found.f_frsize as u64))
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

/// Processors that this process may run on.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
