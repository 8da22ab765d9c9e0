//! The bytes of one file: mapped into memory, or owned.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::{Error, Result};

/// The bytes of one file, read-only; clones share them.
///
/// A mapping shows what the file holds *now*. Nobody may write to or shorten a model file while it is open:
/// changed bytes would be read as other weights, and reading past a shortened end kills the process. That is
/// the price of loading in milliseconds, and the habit of every engine; downloads go to a file of another
/// name and are renamed when whole.
#[derive(Clone)]
pub struct Bytes(Arc<Storage>);

enum Storage {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a file.
    pub fn map(path: &Path) -> Result<Self> {
        let io = |action| move |source| Error::Io { action, path: path.into(), source };
        let file = File::open(path).map_err(io("open"))?;
        let metadata = file.metadata().map_err(io("read"))?;
        if !metadata.is_file() {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(Error::Io { action: "map", path: path.into(), source });
        }
        if metadata.len() == 0 {
            return Ok(Self::from(Vec::new()));
        }
        // SAFETY: the mapping is private and read-only, and Rust sees it as bytes only, of which every value is
        // valid. That the file does not change while it is mapped is the documented duty of this type's user.
        let map = unsafe { Mmap::map(&file) }.map_err(io("map"))?;
        Ok(Self(Arc::new(Storage::Mapped(map))))
    }

    /// Tells the system that the whole pages inside `range` are not needed for now. The bytes stay readable:
    /// they are fetched from the file again at the next touch. A range outside the file, owned bytes and
    /// systems without `madvise` are left alone.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Storage::Mapped(map) = &*self.0 {
            let page = page_size();
            let start = range.start.min(map.len()).next_multiple_of(page);
            let end = range.end.min(map.len()) / page * page;
            if start < end {
                // SAFETY: the range is whole pages inside the mapping, which is private, of a file and never
                // written, so dropped pages come back with the file's bytes. A refusal costs only memory.
                let _ = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(unix)]
fn page_size() -> usize {
    // SAFETY: sysconf reads a constant of the system and touches no memory of ours.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Storage::Owned(bytes)))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Storage::Mapped(map) => map,
            Storage::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({})", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_read_the_same() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..100_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        std::fs::write(file.path(), &content).unwrap();
        let bytes = Bytes::map(file.path()).unwrap();
        for range in [0..100_000, 1..99_999, 5..6, 4096..8192, 0..usize::MAX, 200_000..300_000] {
            bytes.release(range);
            assert_eq!(&bytes[..], &content[..]);
        }
    }

    #[test]
    fn an_empty_file_is_empty_and_a_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("empty"), b"").unwrap();
        assert!(Bytes::map(&dir.path().join("empty")).unwrap().is_empty());
        let error = Bytes::map(dir.path()).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        let error = Bytes::map(&dir.path().join("absent")).unwrap_err().to_string();
        assert!(error.starts_with("cannot open "), "{error}");
    }
}
