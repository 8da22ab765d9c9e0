//! Large memory: aligned, zero, and lazy: a page costs nothing before it is written.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every [`Aligned`], in bytes: a cache line, and the widest vector.
pub const ALIGN: usize = 64;

/// Bytes of a huge page, and from which they are asked for.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// A zeroed byte buffer at an address that never changes, read and written through pointers by a team of threads.
pub struct Aligned {
    start: NonNull<u8>,
    len: usize,
    /// Bytes of the mapping, which are whole huge pages where those are asked for.
    #[cfg(unix)]
    mapped: usize,
}

// SAFETY: it owns plain bytes; who writes where is decided by whoever uses the pointer, under unsafe.
unsafe impl Send for Aligned {}
// SAFETY: as above: `&Aligned` alone lets nobody write.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// `len` zero bytes that will all be used: from 2 MiB on, huge pages are asked for, and it begins with one. On Unix
    /// they are an anonymous mapping, which takes memory as it is touched.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(len: usize) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            return Self::map_huge(len);
        }
        Self::sparse(len)
    }

    /// `len` zero bytes of which perhaps few will be used: taken in the system's smallest pages, so that a length may
    /// stand for address space.
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn sparse(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self {
                start: NonNull::<Line>::dangling().cast(),
                len,
                #[cfg(unix)]
                mapped: 0,
            });
        }
        Self::map(len)
    }

    /// Whole huge pages: a mapping that begins anywhere would have small ones at both ends.
    #[cfg(target_os = "linux")]
    fn map_huge(len: usize) -> io::Result<Self> {
        let mapped = len.checked_next_multiple_of(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut memory = Self::map(mapped.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?)?;
        let before = memory.start.as_ptr().align_offset(HUGE);
        // SAFETY: `before` is less than the huge page that was mapped beyond the whole ones, so all three parts are inside
        // our own mapping; the first and the last are given back and never used. A refusal of the advice costs only speed.
        unsafe {
            let start = memory.start.add(before);
            for (part, bytes) in [(memory.start, before), (start.add(mapped), HUGE - before)] {
                if bytes > 0 {
                    libc::munmap(part.as_ptr().cast(), bytes);
                }
            }
            libc::madvise(start.as_ptr().cast(), mapped, libc::MADV_HUGEPAGE);
            (memory.start, memory.len, memory.mapped) = (start, len, mapped);
        }
        Ok(memory)
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
        Ok(Self { start, len, mapped: len })
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

/// A cache line of [`Lines`], and what an empty [`Aligned`] points at.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; ALIGN]);

/// A worker's scratch: bytes aligned to [`ALIGN`], as many as the largest use so far asked for. What they hold stays when
/// they grow, at another address.
#[derive(Default)]
pub struct Lines(Vec<Line>);

impl Lines {
    /// Makes room, so that [`Lines::bytes`] takes no memory for at most so many.
    pub fn reserve(&mut self, bytes: usize) {
        let lines = bytes.div_ceil(ALIGN);
        if lines > self.0.len() {
            self.0.resize(lines, Line([0; ALIGN]));
        }
    }

    /// At least `bytes` bytes.
    pub fn bytes(&mut self, bytes: usize) -> *mut u8 {
        self.reserve(bytes);
        self.0.as_mut_ptr().cast()
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        #[cfg(unix)]
        // SAFETY: exactly the mapping that was made, or what was kept of it, which nothing outlives.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.mapped);
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

/// One piece of memory, given out in parts: what is too small for huge pages alone shares them.
pub struct Slab {
    memory: Arc<Aligned>,
    used: usize,
}

/// A part of a [`Slab`], zero and aligned as [`Aligned`] is; the memory lives as long as any part does.
pub struct Part {
    memory: Arc<Aligned>,
    at: usize,
    len: usize,
}

impl Slab {
    /// Room for parts of `len` bytes in all, each counted in whole cache lines ([`ALIGN`]).
    ///
    /// # Errors
    /// The system refuses the address space.
    pub fn new(len: usize) -> io::Result<Self> {
        Ok(Self { memory: Arc::new(Aligned::new(len)?), used: 0 })
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// There are fewer left.
    pub fn take(&mut self, len: usize) -> io::Result<Part> {
        let left = self.memory.len() - self.used;
        if len > left {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("{len} bytes of memory for weights, of which {left} are left"),
            ));
        }
        let at = self.used;
        self.used = self.memory.len().min((at + len).next_multiple_of(ALIGN));
        Ok(Part { memory: self.memory.clone(), at, len })
    }
}

impl Part {
    /// First byte, aligned to [`ALIGN`]; as [`Aligned::as_mut_ptr`].
    pub fn as_mut_ptr(&self) -> *mut u8 {
        // SAFETY: `take` placed the part inside the memory.
        unsafe { self.memory.as_mut_ptr().add(self.at) }
    }
}

impl std::ops::Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialized bytes inside the memory, which self keeps; writers through the pointer keep clear of slices.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len) }
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
        assert!(Aligned::new(usize::MAX - 5).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_large_begins_with_a_huge_page_and_frees_whole_ones() {
        for len in [HUGE, HUGE + 1, 5 * HUGE - 64] {
            let memory = Aligned::new(len).unwrap();
            assert_eq!(memory.as_mut_ptr() as usize % HUGE, 0, "{len}");
            assert_eq!(memory.mapped, len.next_multiple_of(HUGE));
        }
    }

    #[test]
    fn parts_of_a_slab_are_apart_and_outlive_it() {
        let mut slab = Slab::new(192 + 64 + 10).unwrap();
        let parts = [129, 64, 0, 10].map(|len| slab.take(len).unwrap());
        assert!(slab.take(1).err().unwrap().to_string().contains("0 are left"));
        drop(slab);
        for (i, part) in parts.iter().enumerate() {
            assert_eq!(part.as_mut_ptr() as usize % ALIGN, 0);
            // SAFETY: the part's own bytes; no slice of them is alive.
            unsafe { part.as_mut_ptr().write_bytes(1 + i as u8, part.len()) };
        }
        for (i, part) in parts.iter().enumerate() {
            assert!(part.iter().all(|&byte| byte == 1 + i as u8), "part {i}");
        }
    }
}
