//! Large memory: aligned, zero, and lazy: a page costs nothing before it is written.

use std::io;
use std::ptr::NonNull;

/// Alignment of every [`Aligned`], in bytes: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// Bytes from which huge pages are asked for.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// A zeroed byte buffer at an address that never changes, read and written through pointers by a team of threads.
pub struct Aligned {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns plain bytes; who writes where is decided by whoever uses the pointer, under unsafe.
unsafe impl Send for Aligned {}
// SAFETY: as above: `&Aligned` alone lets nobody write.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// `len` zero bytes that will all be used: from 2 MiB on, huge pages are asked for. On Unix they are an anonymous
    /// mapping, which takes memory as it is touched.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(len: usize) -> io::Result<Self> {
        let memory = Self::sparse(len)?;
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // SAFETY: the range is our own mapping. A refusal costs only speed.
            unsafe { libc::madvise(memory.start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        }
        Ok(memory)
    }

    /// `len` zero bytes of which perhaps few will be used: taken in the system's smallest pages, so that a length may
    /// stand for address space.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn sparse(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::<Line>::dangling().cast(), len });
        }
        Self::map(len)
    }

    #[cfg(unix)]
    fn map(len: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping; no memory of ours is touched.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    #[cfg(not(unix))]
    fn map(len: usize) -> io::Result<Self> {
        let layout = std::alloc::Layout::from_size_align(len, ALIGN).map_err(io::Error::other)?;
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// First byte, aligned to [`ALIGN`]. Who writes through it makes sure that nobody holds a slice of these bytes.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl std::ops::Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialized bytes, owned by self; writers through the pointer keep clear of slices.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for Aligned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Aligned({} bytes)", self.len)
    }
}

#[repr(align(64))]
struct Line;

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        #[cfg(unix)]
        // SAFETY: exactly the mapping made in `map`, which nothing outlives.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.len);
        }
        #[cfg(not(unix))]
        // SAFETY: the layout is the one it was allocated with.
        unsafe {
            std::alloc::dealloc(
                self.start.as_ptr(),
                std::alloc::Layout::from_size_align_unchecked(self.len, ALIGN),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zero_and_as_long_as_asked() {
        for len in [0, 1, 4097, (2 << 20) + 1] {
            let memory = Aligned::new(len).unwrap();
            assert_eq!((memory.len(), memory.as_mut_ptr() as usize % ALIGN), (len, 0));
            assert!(memory.iter().all(|&b| b == 0));
            if len > 0 {
                // SAFETY: the last byte is inside, this is the only thread, and no slice is alive.
                unsafe { memory.as_mut_ptr().add(len - 1).write(7) };
                assert_eq!(memory[len - 1], 7);
            }
        }
    }

    #[test]
    fn an_impossible_length_is_an_error() {
        assert!(Aligned::new(usize::MAX / 2).is_err());
    }
}
