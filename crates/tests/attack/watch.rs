//! An allocator that counts what a process asks for. A binary that measures makes it its global allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// The system's allocator, with a count.
pub struct Watched;

/// What a piece of work asked for, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// The largest single request.
    pub largest: usize,
    /// The most that was held at once, beyond what was held before.
    pub peak: usize,
}

/// Bytes held since the count began, less those that were held before and are not any more.
static HELD: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The same three numbers of this thread alone: held, most held, largest.
    static HERE: Cell<(isize, isize, usize)> = const { Cell::new((0, 0, 0)) };
}

/// A request above this is refused, which ends the process: better than to fill the machine.
const REFUSED: usize = 4 << 30;

/// Counts a request for `size` bytes where `old` bytes were held before; false if it is to be refused.
fn count(size: usize, old: usize) -> bool {
    let change = size as isize - old as isize;
    // A thread that is ending has no count any more.
    let _ = HERE.try_with(|here| {
        let (held, peak, largest) = here.get();
        let held = held + change;
        here.set((held, peak.max(held), if change > 0 { largest.max(size) } else { largest }));
    });
    let held = HELD.fetch_add(change, Relaxed) + change;
    if change > 0 {
        PEAK.fetch_max(held, Relaxed);
        LARGEST.fetch_max(size, Relaxed);
    }
    size <= REFUSED
}

// SAFETY: every request goes to the system's allocator unchanged, or is refused by a null pointer, which the trait
// allows; the bookkeeping allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count(layout.size(), 0) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duties are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !count(layout.size(), 0) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duties are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's duties are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !count(size, layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's duties are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Runs `work` and says what the process asked for meanwhile: all 0 in a binary with another allocator. One measurement
/// at a time; a test binary keeps its other work small, or inside one too.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Usage) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    HELD.store(0, Relaxed);
    PEAK.store(0, Relaxed);
    LARGEST.store(0, Relaxed);
    let result = work();
    (result, Usage { largest: LARGEST.load(Relaxed), peak: PEAK.load(Relaxed).max(0) as usize })
}

/// The same for what this thread alone asks for: exact whatever other threads do, for work that starts none.
pub fn measure_here<T>(work: impl FnOnce() -> T) -> (T, Usage) {
    HERE.set((0, 0, 0));
    let result = work();
    let (_, peak, largest) = HERE.get();
    (result, Usage { largest, peak: peak.max(0) as usize })
}
