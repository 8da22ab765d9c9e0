//! What only the system knows or does: signals, memory, the processor's name, where state lies.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Ends the process quietly when the reader of standard output has gone, as other filters do.
pub fn end_quietly_on_closed_pipe() {
    #[cfg(unix)]
    // SAFETY: sets a signal's default action before any thread is started.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// While this lives, Ctrl-C does not end the process but is remembered.
#[derive(Debug)]
pub struct CtrlC {
    #[cfg(unix)]
    before: libc::sighandler_t,
}

impl CtrlC {
    /// Starts to catch; an earlier Ctrl-C is forgotten.
    pub fn catch() -> Self {
        INTERRUPTED.store(false, Ordering::SeqCst);
        #[cfg(unix)]
        {
            extern "C" fn remember(_: libc::c_int) {
                INTERRUPTED.store(true, Ordering::SeqCst);
            }
            let handler = remember as extern "C" fn(libc::c_int) as libc::sighandler_t;
            // SAFETY: the handler only stores to an atomic, which is safe at any point of any thread.
            let before = unsafe { libc::signal(libc::SIGINT, handler) };
            Self { before }
        }
        #[cfg(not(unix))]
        Self {}
    }

    /// Whether Ctrl-C was pressed since.
    pub fn pressed(&self) -> bool {
        INTERRUPTED.load(Ordering::SeqCst)
    }
}

impl Drop for CtrlC {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: puts back the action that was there before.
        unsafe {
            libc::signal(libc::SIGINT, self.before);
        }
    }
}

/// Where state that is no cache lies: `$XDG_STATE_HOME/ingle`, else `~/.local/state/ingle`.
pub fn state_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = || var("XDG_STATE_HOME");
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
