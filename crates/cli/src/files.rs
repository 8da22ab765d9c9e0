//! Files of the user's: read up to a limit, written whole or not at all, and never over the model that is open.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::source;
use crate::sys;
use crate::term::bytes;

/// Longest text that is taken as a prompt or a conversation.
pub const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Refuses what is no file or larger than `bytes_max`: a device need not end, and a pipe need not begin.
///
/// # Errors
/// Nothing there; no regular file; too large, with both sizes.
pub fn require(file: &Path, bytes_max: u64) -> Result<()> {
    let found = fs::metadata(file).map_err(|e| Error::io("read", file, e))?;
    let bad = |what: String| Err(Error::Content { path: file.to_path_buf(), what });
    match found.len() {
        _ if !found.is_file() => bad(format!("it is {}; want a file", source::kind_of(&found))),
        n if n > bytes_max => bad(format!("it has {}, but at most {} are read", bytes(n), bytes(bytes_max))),
        _ => Ok(()),
    }
}

/// The text of a file of at most [`TEXT_BYTES_MAX`].
///
/// # Errors
/// As [`require`]; what is not UTF-8.
pub fn read_text(file: &Path) -> Result<String> {
    require(file, TEXT_BYTES_MAX)?;
    let mut text = String::new();
    // A file may grow while it is read.
    File::open(file)
        .and_then(|open| open.take(TEXT_BYTES_MAX).read_to_string(&mut text))
        .map_err(|e| Error::io("read", file, e))?;
    Ok(text)
}

/// Writes a file, which is whole or unchanged at any time. Where `file` is a device or a pipe, writes to that.
///
/// # Errors
/// `file` is a file of the model at `model`; the file system refuses.
pub fn write(file: &Path, text: &str, model: &Path) -> Result<()> {
    let failed = |e| Error::io("write", file, e);
    let before = match fs::metadata(file) {
        Ok(found) => Some(found),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed(e)),
    };
    require_other(file, model)?;
    if before.as_ref().is_some_and(|found| !found.is_file()) {
        return fs::write(file, text).map_err(failed);
    }
    // Through a link to the file it stands for, so that the link stays.
    let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_path_buf());
    let mut temp = target.clone().into_os_string();
    temp.push(format!(".{}.tmp", std::process::id()));
    let temp = PathBuf::from(temp);
    let replaced = File::create_new(&temp).and_then(|mut open| {
        open.write_all(text.as_bytes())?;
        if let Some(found) = &before {
            open.set_permissions(found.permissions())?;
        }
        open.sync_all()?;
        fs::rename(&temp, &target)
    });
    replaced.map_err(|e| {
        // The first error is the one to report.
        let _ = fs::remove_file(&temp);
        failed(e)
    })
}

/// Refuses a file of the model at `model`.
///
/// # Errors
/// It is one, through links of either kind.
pub fn require_other(file: &Path, model: &Path) -> Result<()> {
    match source::files_of(model).iter().any(|part| is_same(part, file)) {
        true => Err(Error::Refused(format!(
            "{} is a file of the model itself, and writing would destroy it: give another name",
            file.display()
        ))),
        false => Ok(()),
    }
}

/// Refuses a disk that has less room than the file takes; `free` is `None` where the system does not say.
fn require_room(out: &Path, folder: &Path, total: u64, free: Option<u64>) -> Result<()> {
    match free.filter(|&free| free < total) {
        None => Ok(()),
        Some(free) => Err(Error::Refused(format!(
            "{} takes {total} bytes ({}), but the disk of {} has {free} ({}) free: free some, or choose another folder",
            out.display(),
            bytes(total),
            folder.display(),
            bytes(free)
        ))),
    }
}

/// Refuses a file that is there already, unless it is to be replaced, and a disk without room for `total` bytes.
///
/// # Errors
/// Which of them, with the numbers.
pub fn require_place(out: &Path, replaces: bool, total: u64) -> Result<()> {
    if !replaces && out.symlink_metadata().is_ok() {
        return Err(Error::Refused(format!(
            "{} is there already: give another name, or --force to replace it",
            out.display()
        )));
    }
    let folder = match out.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    require_room(out, folder, total, sys::free_bytes(folder))
}

/// Says what to do where a file that was to be new has come to be there meanwhile.
pub fn advise_taken(error: Error) -> Error {
    match error {
        Error::Tensor(taken @ ingle_tensor::Error::Taken { .. }) => Error::Refused(format!(
            "{taken}; nothing is left of this one: give another name, or --force to replace it"
        )),
        error => error,
    }
}

/// Whether two names are of one file, through links of either kind.
fn is_same(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
        matches!((id(a), id(b)), (Ok(a), Ok(b)) if a == b)
    }
    #[cfg(not(unix))]
    matches!((fs::canonicalize(a), fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_but_never_the_model() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let models = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(path);
        models.iter().for_each(|model| fs::write(model, "weights").unwrap());
        fs::hard_link(&models[1], path("hard")).unwrap();
        std::os::unix::fs::symlink(&models[0], path("soft")).unwrap();
        for name in ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "hard", "soft"] {
            let said = write(&path(name), "x", &models[0]).unwrap_err().to_string();
            assert!(said.contains("is a file of the model itself"), "{name}: {said}");
        }
        fs::write(path("out"), "old").unwrap();
        std::os::unix::fs::symlink(path("out"), path("link")).unwrap();
        write(&path("link"), "new", &models[0]).unwrap();
        write(&path("fresh"), "new", &models[0]).unwrap();
        assert_eq!(fs::read(&models[1]).unwrap(), b"weights");
        assert_eq!([path("out"), path("fresh")].map(|file| fs::read_to_string(file).unwrap()), ["new"; 2]);
        assert!(path("link").is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 7, "a temporary file is left");
    }

    #[test]
    fn only_files_of_a_bounded_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "text").unwrap();
        assert_eq!(read_text(&file).unwrap(), "text");
        for (path, limit, want) in [
            (Path::new("/dev/zero"), 9, "it is a device; want a file"),
            (dir.path(), 9, "it is a folder; want a file"),
            (&file, 3, "it has 4 B, but at most 3 B are read"),
        ] {
            let said = require(path, limit).unwrap_err().to_string();
            assert!(said.contains(want), "{said}");
        }
    }

    #[test]
    fn a_disk_without_room_is_refused_with_the_numbers() {
        let room = |free| require_room(Path::new("a/m.gguf"), Path::new("a"), 5 << 30, free);
        let said = room(Some(1 << 30)).unwrap_err().to_string();
        for part in
            ["a/m.gguf takes 5368709120 bytes (5.0 GiB)", "the disk of a has 1073741824 (1.0 GiB) free"]
        {
            assert!(said.contains(part), "{said}");
        }
        assert!(room(Some(5 << 30)).is_ok() && room(None).is_ok());
        assert!(sys::free_bytes(Path::new(".")).is_none_or(|free| free > 0));
        assert_eq!(sys::free_bytes(Path::new("/no/such/folder")), None);
    }
}
