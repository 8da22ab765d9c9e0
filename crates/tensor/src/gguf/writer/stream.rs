//! Taking tensors' bytes in the declared order, into anything or into a file.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Outline;
use crate::{Error, Result};

/// A file on its way out: the header is written, tensors' bytes follow in the declared order.
#[derive(Debug)]
pub struct Stream<W> {
    out: W,
    /// Names and bytes, in order.
    tensors: Vec<(String, u64)>,
    alignment: u64,
    /// The tensor whose bytes come next, and how many of them are written.
    turn: usize,
    written: u64,
    /// A write failed, so that nobody knows what `out` holds.
    is_broken: bool,
}

impl<W: Write> Stream<W> {
    pub(super) fn new(
        mut out: W,
        header: &[u8],
        tensors: impl Iterator<Item = (String, u64)>,
        alignment: u64,
    ) -> Result<Self> {
        out.write_all(header).map_err(Error::Write)?;
        let tensors = tensors.collect();
        Ok(Self { out, tensors, alignment, turn: 0, written: 0, is_broken: false })
    }

    /// Writes the next bytes of tensor `name`: all of it, some rows, or any piece.
    ///
    /// # Errors
    /// Another tensor's turn, or more bytes than the tensor takes, and then nothing is written; `out` refuses, and then
    /// the stream takes nothing more.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let problem = |problem: String| Err(Error::Header(problem).in_tensor(name));
        if self.is_broken {
            return problem("an earlier write failed, so the file cannot go on".into());
        }
        let Some((next, total)) = self.tensors.get(self.turn) else {
            return problem("every declared tensor is written already".into());
        };
        if next != name {
            return problem(format!(
                "it is not its turn: tensor {next:?} has {} of its {total} bytes",
                self.written
            ));
        }
        let written = self.written + bytes.len() as u64;
        if written > *total {
            return problem(format!("it takes {total} bytes, but {written} were given"));
        }
        let is_whole = written == *total;
        self.put(bytes)?;
        self.written = written;
        if is_whole {
            let padding = written.next_multiple_of(self.alignment) - written;
            self.put(&vec![0; padding as usize])?;
            (self.turn, self.written) = (self.turn + 1, 0);
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|error| {
            self.is_broken = true;
            Error::Write(error)
        })
    }

    /// Ends the file.
    ///
    /// # Errors
    /// A tensor that lacks bytes, by name; `out` refuses.
    pub fn finish(mut self) -> Result<W> {
        if let Some((name, total)) = self.tensors.get(self.turn) {
            let after = self.tensors.len() - self.turn - 1;
            let problem =
                format!("{} of its {total} bytes were written, and {after} tensors follow", self.written);
            return Err(Error::Header(problem).in_tensor(name));
        }
        self.out.flush().map_err(Error::Write)?;
        Ok(self.out)
    }
}

/// A [`Stream`] into a file that gets its name when it is whole. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub struct FileStream {
    stream: Stream<BufWriter<File>>,
    temporary: Temporary,
    target: PathBuf,
}

/// A file that is removed when this is dropped.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Temporary {
    /// A new file, `TARGET.PID.tmp`, with a lock that says that it is being written. Where a file system has no locks, what
    /// a killed process leaves stays.
    fn beside(target: &Path) -> io::Result<(File, Self)> {
        let mut name = target.to_path_buf().into_os_string();
        name.push(format!(".{}.tmp", std::process::id()));
        let path = PathBuf::from(name);
        loop {
            let file = File::create_new(&path)?;
            // Before it had its lock, another process may have taken it for abandoned, and then it is gone.
            if file.lock().is_err() || path.exists() {
                return Ok((file, Self(path)));
            }
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Gone already once the file has its name; otherwise nobody is left to hear of a failure.
        let _ = fs::remove_file(&self.0);
    }
}

impl FileStream {
    pub(super) fn create(outline: &Outline, path: &Path) -> Result<Self> {
        let failed = |source| Error::Io { action: "create", path: path.into(), source };
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            let reason = "it is there and not a regular file";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, reason)));
        }
        // Through a link to the file it stands for, so that the link stays.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        remove_abandoned(&target);
        let (file, temporary) = Temporary::beside(&target).map_err(failed)?;
        let stream = outline.begin(BufWriter::new(file)).map_err(|error| named(error, path))?;
        Ok(Self { stream, temporary, target })
    }

    /// As [`Stream::write`].
    ///
    /// # Errors
    /// As [`Stream::write`], with the file's name.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.stream.write(name, bytes).map_err(|error| named(error, &self.target))
    }

    /// Ends the file, waits until the disk has it, and gives it its name, in place of a file that had it.
    ///
    /// # Errors
    /// As [`Stream::finish`]; the file system refuses. Nothing is left behind then.
    pub fn finish(self) -> Result<()> {
        self.end(|temporary, target| fs::rename(temporary, target))
    }

    /// As [`FileStream::finish`], but a file that has come to be there meanwhile stays.
    ///
    /// # Errors
    /// [`Error::Taken`] by such a file; and as [`FileStream::finish`].
    pub fn finish_new(self) -> Result<()> {
        let path = self.target.clone();
        self.end(publish_new).map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
                Error::Taken { path }
            }
            error => error,
        })
    }

    fn end(self, publish: impl FnOnce(&Path, &Path) -> io::Result<()>) -> Result<()> {
        let Self { stream, temporary, target } = self;
        let out = stream.finish().map_err(|error| named(error, &target))?;
        let file = out.into_inner().map_err(|error| named(Error::Write(error.into_error()), &target))?;
        let published = file.sync_all().and_then(|()| publish(&temporary.0, &target));
        published.map_err(|error| named(Error::Write(error), &target))
    }
}

/// Gives a file a name that none has: of two that try, one gets `AlreadyExists`.
pub(super) fn publish_new(temporary: &Path, target: &Path) -> io::Result<()> {
    match fs::hard_link(temporary, target) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => take_name(temporary, target),
        linked => linked,
    }
}

/// The same where the file system has no links: an empty file takes the name first, and is replaced.
pub(super) fn take_name(temporary: &Path, target: &Path) -> io::Result<()> {
    File::create_new(target)?;
    fs::rename(temporary, target).inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(target);
    })
}

/// Removes the temporary files of `target` that processes left which were killed: those that nobody holds a lock on. What
/// cannot be read or removed stays.
fn remove_abandoned(target: &Path) {
    let folder = target.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let prefix = format!("{}.", target.file_name().unwrap_or_default().to_string_lossy());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".tmp"));
        let is_ours = process.is_some_and(|id| id.parse::<u32>().is_ok());
        // To open a pipe would wait for its other end.
        if is_ours
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && let Ok(file) = File::open(entry.path())
            && file.try_lock().is_ok()
        {
            // The lock is held until the file is gone.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn named(error: Error, path: &Path) -> Error {
    match error {
        Error::Write(source) => Error::Io { action: "write", path: path.into(), source },
        error => error.in_file(path),
    }
}
