//! Memory that a device reads: its own, address ranges that are backed in steps, and pinned memory of the host.

use std::cell::Cell;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::sys::{Access, Address, AllocationProperties, DriverFunctions, Location};
use super::{Context, Event, Stream, capture};
use crate::{Error, Result};

/// Counts every allocation of a context, so that a test, or a capture, can tell that none was made.
#[derive(Debug, Default)]
pub struct Ledger {
    allocations: AtomicU64,
    frees: AtomicU64,
    live_bytes: AtomicUsize,
}

/// A reading of the ledger: two that are equal have no allocation and no free between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Allocations since the context was made: device and pinned memory, backed steps, modules, graphs.
    pub allocations: u64,
    /// Frees.
    pub frees: u64,
    /// Bytes that are allocated now.
    pub live_bytes: usize,
}

impl Ledger {
    /// The counts now.
    pub fn tally(&self) -> Tally {
        Tally {
            allocations: self.allocations.load(Ordering::Relaxed),
            frees: self.frees.load(Ordering::Relaxed),
            live_bytes: self.live_bytes.load(Ordering::Relaxed),
        }
    }

    pub(super) fn allocated(&self, bytes: usize) {
        self.allocations.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn freed(&self, bytes: usize) {
        self.frees.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Memory of the device and who it belongs to. Frees itself, but not while this thread captures: then the window keeps
/// it until it is closed.
pub(super) struct Allocation(Option<Raw>);

/// What [`Allocation`] frees.
pub(super) struct Raw {
    context: Context,
    base: Address,
    kind: Kind,
}

enum Kind {
    /// All of it from the start.
    Whole { bytes: usize },
    /// An address range and what backs it so far.
    Reserved { bytes: usize, usable: AtomicUsize, backed: Mutex<Vec<Backing>> },
}

/// Physical memory behind a part of a range.
struct Backing {
    handle: u64,
    offset: usize,
    bytes: usize,
}

impl Allocation {
    fn new(context: &Context, base: Address, kind: Kind) -> Arc<Self> {
        Arc::new(Self(Some(Raw { context: context.clone(), base, kind })))
    }

    fn raw(&self) -> &Raw {
        self.0.as_ref().expect("taken only by drop")
    }

    /// Bytes from the base that can be read and written.
    fn usable(&self) -> usize {
        match &self.raw().kind {
            Kind::Whole { bytes } => *bytes,
            Kind::Reserved { usable, .. } => usable.load(Ordering::Acquire),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(raw) = self.0.take() {
            capture::park(raw);
        }
    }
}

impl Raw {
    /// Its size, for a report.
    pub(super) fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Whole { bytes } => *bytes,
            Kind::Reserved { usable, .. } => usable.load(Ordering::Acquire),
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let (context, base) = (&self.context, self.base);
        // Kernels may still use it. Errors below have no one to go to; a device in error gives its memory back at exit.
        context.synchronize().ok();
        match &mut self.kind {
            Kind::Whole { bytes } => {
                // SAFETY: allocated by us; no span is left, since each borrows the allocation.
                context.call(|f| unsafe { (f.memory_free)(base) }, || "cuMemFree".into()).ok();
                context.ledger().freed(*bytes);
            }
            Kind::Reserved { bytes, backed, .. } => {
                for backing in backed.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                    backing.release(context, base);
                }
                // SAFETY: reserved by us with this size; nothing is mapped in it any more.
                context
                    .call(|f| unsafe { (f.address_free)(base, *bytes) }, || "cuMemAddressFree".into())
                    .ok();
            }
        }
    }
}

impl Backing {
    fn release(self, context: &Context, base: Address) {
        // SAFETY: mapped and created by us, with this size.
        context
            .call(
                |f| unsafe { (f.memory_unmap)(base + self.offset as u64, self.bytes) },
                || "cuMemUnmap".into(),
            )
            .ok();
        // SAFETY: as above.
        context.call(|f| unsafe { (f.memory_release)(self.handle) }, || "cuMemRelease".into()).ok();
        context.ledger().freed(self.bytes);
    }
}

/// A part of device memory, borrowed from what owns it.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    allocation: &'a Arc<Allocation>,
    offset: usize,
    bytes: usize,
}

impl<'a> Span<'a> {
    fn new(allocation: &'a Arc<Allocation>, offset: usize, bytes: usize) -> Result<Self> {
        let usable = allocation.usable();
        match offset.checked_add(bytes) {
            Some(end) if end <= usable => Ok(Self { allocation, offset, bytes }),
            _ => Err(Error::Refused(format!(
                "bytes {offset} to {offset}+{bytes} of device memory of {usable} bytes"
            ))),
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A part of it.
    ///
    /// # Errors
    /// One that is not inside.
    pub fn part(&self, offset: usize, bytes: usize) -> Result<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Self { offset: self.offset + offset, bytes, ..*self }),
            _ => Err(Error::Refused(format!(
                "bytes {offset} to {offset}+{bytes} of a span of {} bytes",
                self.bytes
            ))),
        }
    }

    /// The same memory, kept alive.
    pub fn owned(&self) -> Buffer {
        Buffer { memory: self.allocation.clone(), offset: self.offset, bytes: self.bytes }
    }

    /// Whether both have a byte in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.address(), other.address());
        a < b + other.bytes as u64 && b < a + self.bytes as u64
    }

    /// Where it is: for arguments, and to show that it did not move.
    pub fn address(&self) -> u64 {
        self.allocation.raw().base + self.offset as u64
    }

    pub(super) fn owner(&self) -> &'a Arc<Allocation> {
        self.allocation
    }
}

impl std::fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}+{}", self.address(), self.bytes)
    }
}

/// Device memory: an allocation, or a piece of one.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<Allocation>,
    offset: usize,
    bytes: usize,
}

impl Buffer {
    /// Uninitialized memory.
    ///
    /// # Errors
    /// Inside a capture window; too little memory, with the size.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        capture::allow("device memory", bytes)?;
        let mut base = 0;
        // SAFETY: the pointer is to our own variable. A size of zero is refused by the driver.
        let allocate = |f: &DriverFunctions| unsafe { (f.memory_allocate)(&mut base, bytes.max(1)) };
        context.call(allocate, || format!("cuMemAlloc of {bytes} bytes"))?;
        context.ledger().allocated(bytes);
        Ok(Self { memory: Allocation::new(context, base, Kind::Whole { bytes }), offset: 0, bytes })
    }

    /// A piece of it, which keeps all of it alive: large allocations take whole pages, so pieces of one take less than as many
    /// allocations.
    ///
    /// # Errors
    /// One that is not inside.
    pub fn piece(&self, offset: usize, bytes: usize) -> Result<Self> {
        let Span { offset, bytes, .. } = self.span(offset, bytes)?;
        Ok(Self { memory: self.memory.clone(), offset, bytes })
    }

    /// All of it.
    pub fn all(&self) -> Span<'_> {
        Span { allocation: &self.memory, offset: self.offset, bytes: self.bytes }
    }

    /// A part of it.
    ///
    /// # Errors
    /// One that is not inside.
    pub fn span(&self, offset: usize, bytes: usize) -> Result<Span<'_>> {
        self.all().part(offset, bytes)
    }
}

/// An address range reserved at its largest size and backed with memory in steps: growing changes no address.
pub struct Reservation {
    memory: Arc<Allocation>,
    granularity: usize,
}

impl Reservation {
    /// Reserves addresses for at least `bytes`; none of them is backed.
    ///
    /// # Errors
    /// A call that failed.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        capture::allow("an address range", bytes)?;
        let (mut granularity, mut base) = (0, 0);
        let properties = properties(context);
        // SAFETY: pointers to our own variables; 1 asks for the recommended granularity.
        let get = |f: &DriverFunctions| unsafe { (f.memory_granularity)(&mut granularity, &properties, 1) };
        context.call(get, || "cuMemGetAllocationGranularity".into())?;
        let bytes = bytes.max(1).checked_next_multiple_of(granularity.max(1));
        let bytes = bytes.ok_or_else(|| Error::Refused("an address range beyond all addresses".into()))?;
        // SAFETY: the pointer is to our own variable; any address will do.
        let reserve = |f: &DriverFunctions| unsafe { (f.address_reserve)(&mut base, bytes, 0, 0, 0) };
        context.call(reserve, || format!("cuMemAddressReserve of {bytes} bytes"))?;
        let kind = Kind::Reserved { bytes, usable: AtomicUsize::new(0), backed: Mutex::default() };
        Ok(Self { memory: Allocation::new(context, base, kind), granularity })
    }

    /// Bytes that are backed.
    pub fn backed_bytes(&self) -> usize {
        self.memory.usable()
    }

    /// Bytes that a step of it is a multiple of.
    pub fn granularity(&self) -> usize {
        self.granularity
    }

    /// Bytes that can be backed.
    pub fn reserved_bytes(&self) -> usize {
        match &self.memory.raw().kind {
            Kind::Reserved { bytes, .. } | Kind::Whole { bytes } => *bytes,
        }
    }

    /// A part of what is backed.
    ///
    /// # Errors
    /// One that is not inside.
    pub fn span(&self, offset: usize, bytes: usize) -> Result<Span<'_>> {
        Span::new(&self.memory, offset, bytes)
    }

    /// Backs at least the first `bytes`. What is backed already stays where it is; on an error nothing changes.
    ///
    /// # Errors
    /// Inside a capture window; more than is reserved; too little memory, with the size.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let Raw { context, base, kind } = self.memory.raw();
        let Kind::Reserved { bytes: reserved, usable, backed } = kind else { return Ok(()) };
        let offset = usable.load(Ordering::Acquire);
        if bytes > *reserved {
            return Err(Error::Refused(format!("{bytes} bytes of an address range of {reserved} bytes")));
        }
        if bytes <= offset {
            return Ok(());
        }
        let step = bytes.next_multiple_of(self.granularity) - offset;
        capture::allow("a step of an address range", step)?;
        let mut handle = 0;
        let properties = properties(context);
        // SAFETY: the pointer is to our own variable; the size is a multiple of the granularity.
        let create = |f: &DriverFunctions| unsafe { (f.memory_create)(&mut handle, step, &properties, 0) };
        context.call(create, || format!("cuMemCreate of {step} bytes"))?;
        let at = base + offset as u64;
        // SAFETY: the range is reserved, not mapped yet, and as large as what was created.
        let map = |f: &DriverFunctions| unsafe { (f.memory_map)(at, step, 0, handle, 0) };
        if let Err(error) = context.call(map, || format!("cuMemMap of {step} bytes")) {
            // SAFETY: created above and mapped nowhere.
            context.call(|f| unsafe { (f.memory_release)(handle) }, || "cuMemRelease".into()).ok();
            return Err(error);
        }
        context.ledger().allocated(step);
        let backing = Backing { handle, offset, bytes: step };
        let access = Access { location: properties.location, flags: 3 };
        // SAFETY: the range was mapped above; one description.
        let open = |f: &DriverFunctions| unsafe { (f.memory_set_access)(at, step, &access, 1) };
        if let Err(error) = context.call(open, || format!("cuMemSetAccess of {step} bytes")) {
            backing.release(context, *base);
            return Err(error);
        }
        backed.lock().unwrap_or_else(PoisonError::into_inner).push(backing);
        usable.store(offset + step, Ordering::Release);
        Ok(())
    }
}

fn properties(context: &Context) -> AllocationProperties {
    let location = Location { kind: 1, id: context.0.device.ordinal };
    AllocationProperties { kind: 1, handle_kinds: 0, location, metadata: null_mut(), flags: [0; 8] }
}

/// Memory of the host that the device copies from and to without a stop. Copies that are under way hold it: to look at its
/// bytes, or to change them, is to wait for those.
pub struct Pinned {
    context: Context,
    memory: NonNull<u8>,
    bytes: usize,
    copied: Event,
    busy: Cell<bool>,
}

// SAFETY: the memory is owned; copies under way are ordered by the event.
unsafe impl Send for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.settle().is_err() {
            // A copy may still be under way: its memory must not become another's. It is given back with the process.
            return;
        }
        let memory = self.memory.as_ptr().cast();
        // SAFETY: allocated by us; no copy is under way.
        self.context.call(|f| unsafe { (f.host_free)(memory) }, || "cuMemFreeHost".into()).ok();
        self.context.ledger().freed(self.bytes);
    }
}

impl Pinned {
    /// Zeros.
    ///
    /// # Errors
    /// Inside a capture window; too little memory, with the size.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        capture::allow("pinned memory", bytes)?;
        let copied = Event::new(context, false)?;
        let mut memory = null_mut();
        // SAFETY: the pointer is to our own variable; no flags.
        let allocate = |f: &DriverFunctions| unsafe { (f.host_allocate)(&mut memory, bytes.max(1), 0) };
        context.call(allocate, || format!("cuMemHostAlloc of {bytes} bytes"))?;
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Error::Refused(format!("cuMemHostAlloc of {bytes} bytes gave no memory")))?;
        // SAFETY: that many bytes were allocated; they may be anything.
        unsafe { memory.as_ptr().write_bytes(0, bytes) };
        context.ledger().allocated(bytes);
        Ok(Self { context: context.clone(), memory, bytes, copied, busy: Cell::new(false) })
    }

    fn settle(&self) -> Result<()> {
        if self.busy.get() {
            self.copied.synchronize()?;
            self.busy.set(false);
        }
        Ok(())
    }

    /// Whether copies are under way.
    ///
    /// # Errors
    /// An error of earlier work.
    pub fn is_busy(&self) -> Result<bool> {
        Ok(self.busy.get() && !self.copied.is_done()?)
    }

    /// Its bytes, once copies under way are done. None can begin while they are borrowed mutably or, to it, at all.
    ///
    /// # Errors
    /// Inside a capture window while copies are under way; an error of earlier work.
    pub fn bytes(&mut self) -> Result<&mut [u8]> {
        self.settle()?;
        // SAFETY: owned, initialized, and nobody else looks at it: no copy is under way, and `&mut self` lets none begin.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) })
    }

    fn inside(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        match offset.checked_add(bytes) {
            // SAFETY: inside the memory.
            Some(end) if end <= self.bytes => Ok(unsafe { self.memory.as_ptr().add(offset) }),
            _ => Err(Error::Refused(format!(
                "bytes {offset} to {offset}+{bytes} of pinned memory of {}",
                self.bytes
            ))),
        }
    }
}

impl Stream {
    /// Copies from pinned memory, from `offset` on, to all of `to`; returns before it is done.
    ///
    /// # Errors
    /// Inside a capture window, which must refer to no memory of the host that changes; bytes that are not inside; a call
    /// that failed.
    pub fn upload(&self, to: Span<'_>, from: &Pinned, offset: usize) -> Result<()> {
        capture::outside("a copy from memory of the host")?;
        let source = from.inside(offset, to.bytes())?;
        // SAFETY: both ranges are inside their memory, which `Pinned` and the free of device memory hold until it is done.
        let copy = |f: &DriverFunctions| unsafe {
            (f.copy_to_device)(to.address(), source.cast_const().cast(), to.bytes(), self.handle)
        };
        // Before the call: whatever comes of it, the memory is not free without a look at the event.
        from.busy.set(true);
        self.context.call(copy, || format!("cuMemcpyHtoDAsync of {} bytes", to.bytes()))?;
        from.copied.record(self)
    }

    /// Copies all of `from` into pinned memory, from `offset` on; returns before it is done.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn download(&self, to: &mut Pinned, offset: usize, from: Span<'_>) -> Result<()> {
        capture::outside("a copy to memory of the host")?;
        let target = to.inside(offset, from.bytes())?;
        // SAFETY: as in `upload`.
        let copy = |f: &DriverFunctions| unsafe {
            (f.copy_to_host)(target.cast(), from.address(), from.bytes(), self.handle)
        };
        to.busy.set(true);
        self.context.call(copy, || format!("cuMemcpyDtoHAsync of {} bytes", from.bytes()))?;
        to.copied.record(self)
    }

    /// Copies bytes to all of `to` and waits.
    ///
    /// # Errors
    /// Inside a capture window; sizes that differ; a call that failed.
    pub fn write(&self, to: Span<'_>, from: &[u8]) -> Result<()> {
        capture::outside("a copy from memory of the host")?;
        same_size(to.bytes(), from.len())?;
        // SAFETY: both have this size; the wait below comes before `from` can go.
        let copy = |f: &DriverFunctions| unsafe {
            (f.copy_to_device)(to.address(), from.as_ptr().cast(), from.len(), self.handle)
        };
        let issued = self.context.call(copy, || format!("cuMemcpyHtoDAsync of {} bytes", from.len()));
        self.synchronize().and(issued)
    }

    /// Copies all of `from` and waits.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn read(&self, to: &mut [u8], from: Span<'_>) -> Result<()> {
        capture::outside("a copy to memory of the host")?;
        same_size(to.len(), from.bytes())?;
        // SAFETY: both have this size; the wait below comes before `to` can go.
        let copy = |f: &DriverFunctions| unsafe {
            (f.copy_to_host)(to.as_mut_ptr().cast(), from.address(), from.bytes(), self.handle)
        };
        let issued = self.context.call(copy, || format!("cuMemcpyDtoHAsync of {} bytes", from.bytes()));
        self.synchronize().and(issued)
    }

    /// Copies within the device; inside a capture window, records it.
    ///
    /// # Errors
    /// Sizes that differ; a call that failed.
    pub fn copy(&self, to: Span<'_>, from: Span<'_>) -> Result<()> {
        same_size(to.bytes(), from.bytes())?;
        // SAFETY: both are device memory of this size.
        let copy = |f: &DriverFunctions| unsafe {
            (f.copy_on_device)(to.address(), from.address(), to.bytes(), self.handle)
        };
        self.context.call(copy, || format!("cuMemcpyDtoDAsync of {} bytes", to.bytes()))?;
        capture::keep_spans(&[to, from]);
        Ok(())
    }

    /// Sets every byte; inside a capture window, records it.
    ///
    /// # Errors
    /// A call that failed.
    pub fn fill(&self, to: Span<'_>, value: u8) -> Result<()> {
        // SAFETY: device memory of this size.
        let fill =
            |f: &DriverFunctions| unsafe { (f.fill_bytes)(to.address(), value, to.bytes(), self.handle) };
        self.context.call(fill, || format!("cuMemsetD8Async of {} bytes", to.bytes()))?;
        capture::keep_spans(&[to]);
        Ok(())
    }
}

fn same_size(to: usize, from: usize) -> Result<()> {
    match to == from {
        true => Ok(()),
        false => Err(Error::Refused(format!("a copy of {from} bytes to {to} bytes"))),
    }
}
