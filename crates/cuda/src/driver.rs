//! The driver, safe to use: everything unsafe of this crate is in this file and its folder.
//!
//! Every object holds the [`Context`] it belongs to, so none outlives it, and a [`Span`] borrows the memory it points
//! into, so no kernel is handed a stale address. What a captured graph refers to is kept alive by the graph
//! ([`capture`]). Device memory is freed after the device has come to rest.
//!
//! A launch is safe to write, since a kernel's declaration ([`Entry`]) is compared with its compiled form when it is
//! loaded and with the arguments of every launch. That a kernel stays inside the spans it is given is the duty of the
//! `.cu` file: each guards its rows and columns against the shape it was told.
//!
//! Streams are non-blocking and there is no tracking of who uses what: the caller orders streams with events.

mod capture;
mod kernel;
mod memory;
mod nvrtc;
#[cfg(feature = "stand-in")]
pub mod stand_in;
mod sys;

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub use capture::Graph;
pub use kernel::{Arg, Call, Entry, Function, FunctionUse, Launch, MAX_ARGUMENTS, Module, Param};
pub use memory::{Buffer, Ledger, Pinned, Reservation, Span, Tally};
pub use nvrtc::{Compiled, Nvrtc};

use crate::{Error, Result};
use sys::{Handle, Status};

/// Names of the driver's library, best first.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// The oldest driver: launch attributes and kernels of an NVRTC of CUDA 12 need this.
const OLDEST: i32 = 12_000;

/// The oldest device kernels are written for: integer matrix products, bf16 and asynchronous copies.
const OLDEST_DEVICE: (u32, u32) = (8, 0);

/// The driver's library, loaded and initialized. It is never unloaded: its threads live as long as the process.
pub struct Driver {
    f: sys::DriverFunctions,
    library: PathBuf,
    version: i32,
}

impl Driver {
    /// The driver of this process.
    ///
    /// # Errors
    /// [`Error::NoDriver`] and the other reasons why it cannot be used, by name.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => {
                let driver = Self::open(NAMES)?;
                Ok(DRIVER.get_or_init(|| driver))
            }
        }
    }

    /// The driver at this path, whatever its name is.
    ///
    /// # Errors
    /// As [`Driver::get`].
    pub fn at(library: &Path) -> Result<&'static Self> {
        let name = library.to_string_lossy();
        // What runs on a device refers to its driver until the process ends.
        Ok(Box::leak(Box::new(Self::open(&[&name])?)))
    }

    /// Loads the first of these libraries that the loader finds, and initializes it.
    fn open(names: &[&str]) -> Result<Self> {
        let mut unusable = None;
        for name in names {
            match sys::DriverFunctions::open(Path::new(name)) {
                Ok(f) => return Self { f, library: name.into(), version: 0 }.initialized(),
                // A file that is not there says so; anything else is worth telling.
                Err(Error::Unopened { reason, .. }) if reason.contains("No such file") => {}
                Err(error) => unusable = unusable.or(Some(error)),
            }
        }
        let tried = || names.iter().map(ToString::to_string).collect();
        Err(unusable.unwrap_or_else(|| Error::NoDriver { tried: tried() }))
    }

    fn initialized(mut self) -> Result<Self> {
        // SAFETY: the version may be asked for before anything else; the pointer is to our own integer.
        let status = unsafe { (self.f.driver_version)(&mut self.version) };
        self.check(status, || "cuDriverGetVersion".into())?;
        if self.version < OLDEST {
            return Err(Error::OldDriver { found: self.version, wanted: OLDEST });
        }
        // SAFETY: no flags are defined.
        match unsafe { (self.f.init)(0) } {
            100 => Err(Error::NoDevice),
            status => self.check(status, || "cuInit".into()).map(|()| self),
        }
    }

    /// The name under which the loader found it.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Newest CUDA version it supports, as (major, minor).
    pub fn version(&self) -> (u32, u32) {
        (self.version as u32 / 1000, self.version as u32 % 1000 / 10)
    }

    /// An error of the driver, in words, unless `status` is success.
    fn check(&self, status: Status, call: impl FnOnce() -> String) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let words = |f: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = null();
            // SAFETY: the driver stores the address of a text of its own, which lives forever, or null.
            unsafe {
                f(status, &mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        Err(Error::Call {
            call: call(),
            code: status,
            name: words(self.f.error_name).unwrap_or_else(|| format!("CUDA error {status}")),
            text: words(self.f.error_text).unwrap_or_else(|| "unknown to this driver".into()),
        })
    }

    /// All devices, in the driver's order.
    ///
    /// # Errors
    /// [`Error::NoDevice`], or a call that failed.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let mut count = 0;
        // SAFETY: the pointer is to our own integer.
        self.check(unsafe { (self.f.device_count)(&mut count) }, || "cuDeviceGetCount".into())?;
        if count == 0 {
            return Err(Error::NoDevice);
        }
        (0..count).map(|index| self.device(index)).collect()
    }

    fn device(&self, index: c_int) -> Result<Device> {
        let (mut ordinal, mut bytes, mut name) = (0, 0usize, [0u8; 256]);
        // SAFETY: pointers to our own variables, the name with its length.
        unsafe {
            self.check((self.f.device_get)(&mut ordinal, index), || format!("cuDeviceGet {index}"))?;
            self.check((self.f.device_memory)(&mut bytes, ordinal), || format!("cuDeviceTotalMem {index}"))?;
            let status = (self.f.device_name)(name.as_mut_ptr().cast(), 255, ordinal);
            self.check(status, || format!("cuDeviceGetName {index}"))?;
        }
        let attribute = |id: c_int| -> Result<usize> {
            let mut value = 0;
            // SAFETY: the pointer is to our own integer.
            let status = unsafe { (self.f.device_attribute)(&mut value, id, ordinal) };
            self.check(status, || format!("cuDeviceGetAttribute {id} of device {index}"))?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(Device {
            index: index as usize,
            ordinal,
            name: name.to_string_lossy().into_owned(),
            capability: (attribute(75)? as u32, attribute(76)? as u32),
            memory_bytes: bytes,
            multiprocessors: attribute(16)?,
            l2_bytes: attribute(38)?,
            shared_bytes_max: attribute(97)?,
            virtual_memory: attribute(102)? != 0,
        })
    }
}

/// What the driver says of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its number, from 0.
    pub index: usize,
    ordinal: c_int,
    /// `NVIDIA H200`.
    pub name: String,
    /// Compute capability: (9, 0).
    pub capability: (u32, u32),
    /// All its memory.
    pub memory_bytes: usize,
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of its second cache.
    pub l2_bytes: usize,
    /// Most shared memory a block may ask for, with opt-in.
    pub shared_bytes_max: usize,
    /// Address ranges can be reserved and backed later.
    pub virtual_memory: bool,
}

impl Device {
    /// Name of its architecture for the compiler, with the features that only this one has: `sm_90a`.
    pub fn arch(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Whether a kernel may begin before the one ahead of it has ended (programmatic dependent launch).
    pub fn overlaps(&self) -> bool {
        self.capability >= (9, 0)
    }

    /// That kernels are written for it.
    ///
    /// # Errors
    /// [`Error::OldDevice`]; a device without virtual memory.
    pub fn check(&self) -> Result<()> {
        if self.capability < OLDEST_DEVICE {
            let (device, found) = (self.name.clone(), self.capability);
            return Err(Error::OldDevice { device, found, wanted: "8.0 (Ampere)" });
        }
        if !self.virtual_memory {
            return Err(Error::Refused(format!(
                "{} cannot reserve address ranges (cuMemAddressReserve)",
                self.name
            )));
        }
        Ok(())
    }
}

thread_local! {
    /// Id of the context that is current on this thread; nothing else in the process changes it.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// A device's primary context. Clones are the same one; it is released with the last object that belongs to it.
#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    driver: &'static Driver,
    /// Never used twice, unlike the handle.
    id: u64,
    handle: Handle,
    device: Device,
    ledger: Ledger,
}

// SAFETY: the driver's functions may be called from any thread with any context; the handle is only passed to them.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: retained once in `Context::new`; every object that belongs to it is gone, since each holds a clone.
        unsafe { (self.driver.f.context_release)(self.device.ordinal) };
    }
}

impl Context {
    /// The primary context of device `index`.
    ///
    /// # Errors
    /// No such device, one that is too old, or a call that failed.
    pub fn new(driver: &'static Driver, index: usize) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let devices = driver.devices()?;
        let device = devices.get(index).ok_or(Error::NoSuchDevice { index, count: devices.len() })?.clone();
        device.check()?;
        let mut handle = null_mut();
        // SAFETY: the pointer is to our own variable; released in Drop.
        let status = unsafe { (driver.f.context_retain)(&mut handle, device.ordinal) };
        driver.check(status, || format!("cuDevicePrimaryCtxRetain of device {index}"))?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self(Arc::new(ContextInner { driver, id, handle, device, ledger: Ledger::default() })))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// What was allocated in it.
    pub fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// Free and all bytes of the device, other processes counted.
    ///
    /// # Errors
    /// A call that failed.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        let (mut free, mut all) = (0, 0);
        // SAFETY: pointers to our own variables.
        self.call(|f| unsafe { (f.memory_info)(&mut free, &mut all) }, || "cuMemGetInfo".into())?;
        Ok((free, all))
    }

    /// Waits for everything that was issued to the device.
    ///
    /// # Errors
    /// Inside a capture window; an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        capture::outside("waiting for the device")?;
        // SAFETY: no arguments.
        self.call(|f| unsafe { (f.context_synchronize)() }, || "cuCtxSynchronize".into())
    }

    /// Makes the context current on this thread and calls the driver.
    fn call(
        &self,
        function: impl FnOnce(&sys::DriverFunctions) -> Status,
        name: impl FnOnce() -> String,
    ) -> Result<()> {
        let driver = self.0.driver;
        if CURRENT.get() != self.0.id {
            // SAFETY: the context is retained for as long as `self` lives.
            let status = unsafe { (driver.f.context_set_current)(self.0.handle) };
            driver.check(status, || "cuCtxSetCurrent".into())?;
            CURRENT.set(self.0.id);
        }
        driver.check(function(&driver.f), name)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context of {}", self.0.device.name)
    }
}

/// A queue of work on the device, independent of the default stream.
pub struct Stream {
    context: Context,
    handle: Handle,
}

// SAFETY: as for the context; what belongs to a window is kept by its thread.
unsafe impl Send for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by us; the driver lets work that is queued end first. An error has no one to go to.
        self.context.call(|f| unsafe { (f.stream_destroy)(self.handle) }, || "cuStreamDestroy".into()).ok();
    }
}

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// A call that failed.
    pub fn new(context: &Context) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: the pointer is to our own variable; 1 is CU_STREAM_NON_BLOCKING.
        context.call(|f| unsafe { (f.stream_create)(&mut handle, 1) }, || "cuStreamCreate".into())?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Waits for everything that was issued to it.
    ///
    /// # Errors
    /// Inside a capture window; an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        capture::outside("waiting for a stream")?;
        // SAFETY: our own stream.
        self.context.call(|f| unsafe { (f.stream_synchronize)(self.handle) }, || "cuStreamSynchronize".into())
    }

    /// Later work of this stream begins when the event has happened.
    ///
    /// # Errors
    /// Inside a capture window; a call that failed.
    pub fn wait(&self, event: &Event) -> Result<()> {
        capture::outside("waiting for an event")?;
        let name = || "cuStreamWaitEvent".into();
        // SAFETY: our own stream and event.
        self.context.call(|f| unsafe { (f.stream_wait)(self.handle, event.handle, 0) }, name)
    }
}

/// A point in a stream's work.
pub struct Event {
    context: Context,
    handle: Handle,
}

// SAFETY: as for the context.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by us; the driver keeps what still waits for it.
        self.context.call(|f| unsafe { (f.event_destroy)(self.handle) }, || "cuEventDestroy".into()).ok();
    }
}

impl Event {
    /// A new one, which counts as happened until it is recorded; `timed` ones can tell the time between two.
    ///
    /// # Errors
    /// A call that failed.
    pub fn new(context: &Context, timed: bool) -> Result<Self> {
        let mut handle = null_mut();
        let flags: c_uint = if timed { 0 } else { 2 };
        // SAFETY: the pointer is to our own variable; 2 is CU_EVENT_DISABLE_TIMING.
        context.call(|f| unsafe { (f.event_create)(&mut handle, flags) }, || "cuEventCreate".into())?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Happens when what was issued to the stream so far is done.
    ///
    /// # Errors
    /// Inside a capture window; a call that failed.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        capture::outside("recording an event")?;
        // SAFETY: our own event and stream.
        self.context
            .call(|f| unsafe { (f.event_record)(self.handle, stream.handle) }, || "cuEventRecord".into())
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// An error of earlier work.
    pub fn is_done(&self) -> Result<bool> {
        let mut status = 0;
        let query = |f: &sys::DriverFunctions| {
            // SAFETY: our own event.
            status = unsafe { (f.event_query)(self.handle) };
            // 600: not yet.
            if status == 600 { 0 } else { status }
        };
        self.context.call(query, || "cuEventQuery".into())?;
        Ok(status == 0)
    }

    /// Waits for it.
    ///
    /// # Errors
    /// Inside a capture window; an error of earlier work.
    pub fn synchronize(&self) -> Result<()> {
        capture::outside("waiting for an event")?;
        // SAFETY: our own event.
        self.context.call(|f| unsafe { (f.event_synchronize)(self.handle) }, || "cuEventSynchronize".into())
    }

    /// Milliseconds from `earlier` to this one, both timed and happened.
    ///
    /// # Errors
    /// One that has not happened, or is not timed.
    pub fn elapsed_ms(&self, earlier: &Event) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: our own events; the pointer is to our own number.
        let get =
            |f: &sys::DriverFunctions| unsafe { (f.event_elapsed)(&mut ms, earlier.handle, self.handle) };
        self.context.call(get, || "cuEventElapsedTime".into())?;
        Ok(ms)
    }
}

#[cfg(test)]
mod tests;
