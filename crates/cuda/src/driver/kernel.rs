//! Kernels on a device: modules, functions, and their launches.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::memory::Allocation;
use super::sys::{self, Handle};
use super::{Context, Span, Stream, capture};
use crate::{Error, Result};

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// It may begin before the kernel ahead of it has ended (programmatic dependent launch): it waits itself where it
    /// needs that one's results.
    pub overlap: bool,
}

impl Launch {
    /// Blocks in two dimensions, of `threads` threads in a row.
    pub fn new(blocks: [u32; 2], threads: u32) -> Self {
        Self { grid: [blocks[0], blocks[1], 1], block: [threads, 1, 1], shared_bytes: 0, overlap: false }
    }

    fn check(&self, entry: &Entry) -> Result<()> {
        if self.grid.contains(&0) || self.block.contains(&0) {
            return Err(Error::Refused(format!("{}: no blocks or threads in {self:?}", entry.name)));
        }
        Ok(())
    }
}

/// Most arguments of a kernel.
pub const MAX_ARGUMENTS: usize = 32;

/// Type of a kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Param {
    /// An address in device memory.
    Memory,
    /// 32-bit integer.
    U32,
    /// 32-bit float.
    F32,
}

impl Param {
    /// Bytes it takes.
    pub fn bytes(self) -> usize {
        match self {
            Param::Memory => 8,
            Param::U32 | Param::F32 => 4,
        }
    }
}

/// An argument of a launch.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// Memory of the device.
    Memory(Span<'a>),
    /// No memory, where a kernel allows it.
    Nothing,
    /// 32-bit integer.
    U32(u32),
    /// 32-bit float.
    F32(f32),
}

impl Arg<'_> {
    fn param(&self) -> Param {
        match self {
            Arg::Memory(_) | Arg::Nothing => Param::Memory,
            Arg::U32(_) => Param::U32,
            Arg::F32(_) => Param::F32,
        }
    }

    fn owner(&self) -> Option<&Arc<Allocation>> {
        match self {
            Arg::Memory(span) => Some(span.owner()),
            _ => None,
        }
    }

    /// The value, in the bytes that come first.
    pub(super) fn bits(&self) -> u64 {
        let word = |bits: u32| {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&bits.to_ne_bytes());
            u64::from_ne_bytes(bytes)
        };
        match self {
            Arg::Memory(span) => span.address(),
            Arg::Nothing => 0,
            Arg::U32(value) => word(*value),
            Arg::F32(value) => word(value.to_bits()),
        }
    }
}

/// Declaration of a kernel: what its `.cu` file says of it, for those who launch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in the file.
    pub name: &'static str,
    /// Parameters in order, at most [`MAX_ARGUMENTS`].
    pub params: &'static [Param],
}

impl Entry {
    /// That these are its arguments.
    ///
    /// # Errors
    /// The first that differs.
    pub fn check(&self, arguments: &[Arg<'_>]) -> Result<()> {
        let given = arguments.iter().map(Arg::param);
        if self.params.len() <= MAX_ARGUMENTS && given.eq(self.params.iter().copied()) {
            return Ok(());
        }
        let given: Vec<Param> = arguments.iter().map(Arg::param).collect();
        Err(Error::Refused(format!("{}: takes {:?}, given {given:?}", self.name, self.params)))
    }
}

/// Compiled kernels on a device.
#[derive(Clone)]
pub struct Module(pub(super) Arc<ModuleInner>);

pub(super) struct ModuleInner {
    context: Context,
    handle: Handle,
    bytes: usize,
}

// SAFETY: as for the context.
unsafe impl Send for ModuleInner {}
// SAFETY: as for the context.
unsafe impl Sync for ModuleInner {}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        let context = &self.context;
        // Kernels that still run would lose their code.
        context.synchronize().ok();
        // SAFETY: loaded by us; functions and graphs hold the module, so nothing refers to it any more.
        context.call(|f| unsafe { (f.module_unload)(self.handle) }, || "cuModuleUnload".into()).ok();
        context.ledger().freed(self.bytes);
    }
}

impl Module {
    /// Brings a cubin to the device.
    ///
    /// # Errors
    /// Inside a capture window; a cubin that is not for this device, with the driver's log.
    pub fn load(context: &Context, cubin: &[u8]) -> Result<Self> {
        capture::allow("a module", cubin.len())?;
        let mut handle = null_mut();
        let mut log = [0u8; 1024];
        // CU_JIT_ERROR_LOG_BUFFER and its size, which is passed by value in place of an address.
        let mut options = [5, 6];
        let mut values = [log.as_mut_ptr().cast(), (log.len() - 1) as *mut c_void];
        // SAFETY: the image is a whole cubin, as the compiler gave it; options and values are two each, the log has the
        // size that is said.
        let load = |f: &sys::DriverFunctions| unsafe {
            let image = cubin.as_ptr().cast();
            (f.module_load)(&mut handle, image, 2, options.as_mut_ptr(), values.as_mut_ptr())
        };
        let loaded = context.call(load, || format!("cuModuleLoadDataEx of {} bytes", cubin.len()));
        if let Err(Error::Call { call, code, name, mut text }) = loaded {
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            if !log.trim().is_empty() {
                text = format!("{text}: {}", log.trim());
            }
            return Err(Error::Call { call, code, name, text });
        }
        loaded?;
        context.ledger().allocated(cubin.len());
        Ok(Self(Arc::new(ModuleInner { context: context.clone(), handle, bytes: cubin.len() })))
    }

    /// One of its kernels, compared with its declaration where the driver can tell its parameters (CUDA 12.4).
    ///
    /// # Errors
    /// No such kernel; parameters of other sizes than declared.
    pub fn function(&self, entry: Entry) -> Result<Function> {
        let context = &self.0.context;
        let symbol =
            CString::new(entry.name).map_err(|_| Error::Refused("a kernel's name with a NUL".into()))?;
        let mut handle = null_mut();
        // SAFETY: our own module; the name ends with NUL.
        let get = |f: &sys::DriverFunctions| unsafe {
            (f.module_function)(&mut handle, self.0.handle, symbol.as_ptr())
        };
        context.call(get, || format!("cuModuleGetFunction {}", entry.name))?;
        if let Some(parameter) = context.0.driver.f.function_parameter {
            let mut found = Vec::new();
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: our own function; pointers to our own variables. The call fails for the first index that is none.
            while unsafe { parameter(handle, found.len(), &mut offset, &mut bytes) } == 0 {
                found.push(bytes);
            }
            if !found.iter().copied().eq(entry.params.iter().map(|p| p.bytes())) {
                let declared = entry.params;
                let what = format!("{}: parameters of {found:?} bytes, declared as {declared:?}", entry.name);
                return Err(Error::Refused(what));
            }
        }
        // A multiprocessor changes what of its memory is a cache only when it stands idle: kernels that are to overlap all
        // ask for the same. 9 is CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent.
        // SAFETY: our own function.
        let prefer = |f: &sys::DriverFunctions| unsafe { (f.function_set_attribute)(handle, 9, 100) };
        context.call(prefer, || format!("preference of {} for shared memory", entry.name))?;
        Ok(Function { module: self.clone(), handle, entry, shared_bytes: AtomicU32::new(0) })
    }
}

/// A kernel that can be launched.
pub struct Function {
    pub(super) module: Module,
    handle: Handle,
    entry: Entry,
    /// Dynamic shared memory that was asked for.
    shared_bytes: AtomicU32,
}

// SAFETY: as for the context.
unsafe impl Send for Function {}
// SAFETY: as for the context.
unsafe impl Sync for Function {}

/// What the compiler gave a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionUse {
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes of a thread that lie in memory: spilled registers, arrays that are indexed.
    pub local_bytes: usize,
    /// Static shared memory of a block.
    pub shared_bytes: usize,
    /// Most threads of a block.
    pub threads_max: usize,
}

impl Function {
    /// Its declaration.
    pub fn entry(&self) -> Entry {
        self.entry
    }

    fn attribute(&self, id: c_int) -> Result<usize> {
        let mut value = 0;
        // SAFETY: our own function; the pointer is to our own integer.
        let get = |f: &sys::DriverFunctions| unsafe { (f.function_attribute)(&mut value, id, self.handle) };
        self.module.0.context.call(get, || format!("cuFuncGetAttribute {id} of {}", self.entry.name))?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// What the compiler gave it.
    ///
    /// # Errors
    /// A call that failed.
    pub fn usage(&self) -> Result<FunctionUse> {
        Ok(FunctionUse {
            registers: self.attribute(4)?,
            local_bytes: self.attribute(3)?,
            shared_bytes: self.attribute(1)?,
            threads_max: self.attribute(0)?,
        })
    }

    /// Allows launches with up to this much dynamic shared memory, and no less than before.
    ///
    /// # Errors
    /// Inside a capture window; more than the device has.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        capture::outside("a shared-memory opt-in")?;
        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if self.attribute(8)? >= bytes as usize {
            return Ok(());
        }
        let context = &self.module.0.context;
        // SAFETY: our own function; 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
        let set =
            |f: &sys::DriverFunctions| unsafe { (f.function_set_attribute)(self.handle, 8, bytes as c_int) };
        context.call(set, || {
            let most = context.device().shared_bytes_max;
            format!("opt-in of {} to {bytes} bytes of shared memory of at most {most}", self.entry.name)
        })?;
        self.shared_bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Blocks of this shape that fit on one multiprocessor at once.
    ///
    /// # Errors
    /// A call that failed.
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<usize> {
        let mut blocks = 0;
        // SAFETY: our own function; the pointer is to our own integer.
        let get = |f: &sys::DriverFunctions| unsafe {
            (f.occupancy)(&mut blocks, self.handle, threads as c_int, shared_bytes as usize)
        };
        self.module.0.context.call(get, || format!("occupancy of {}", self.entry.name))?;
        Ok(usize::try_from(blocks).unwrap_or(0))
    }
}

/// A launch with its arguments, checked once, that can be issued again and again. It keeps its memory alive.
pub struct Call {
    function: Arc<Function>,
    shape: Launch,
    values: Vec<u64>,
    memory: Vec<Arc<Allocation>>,
}

impl Call {
    /// Checks and keeps arguments and shape.
    ///
    /// # Errors
    /// Arguments that are not those of the kernel's declaration; a grid without blocks.
    pub fn new(function: Arc<Function>, shape: Launch, arguments: &[Arg<'_>]) -> Result<Self> {
        function.entry.check(arguments)?;
        shape.check(&function.entry)?;
        let memory = arguments.iter().filter_map(Arg::owner).cloned().collect();
        Ok(Self { function, shape, values: arguments.iter().map(Arg::bits).collect(), memory })
    }

    /// The kernel.
    pub fn function(&self) -> &Function {
        &self.function
    }
}

impl Stream {
    /// Issues a call; inside a capture window, records it.
    ///
    /// # Errors
    /// A launch that failed.
    pub fn issue(&self, call: &Call) -> Result<()> {
        let mut values = [0u64; MAX_ARGUMENTS];
        values[..call.values.len()].copy_from_slice(&call.values);
        self.start(&call.function, &call.shape, &mut values[..call.values.len()])?;
        capture::keep(&call.function, call.memory.iter());
        Ok(())
    }

    /// Issues one kernel; inside a capture window, records it.
    ///
    /// # Errors
    /// Arguments that are not those of the kernel's declaration, a grid without blocks, or a launch that failed.
    pub fn launch(&self, function: &Function, shape: &Launch, arguments: &[Arg<'_>]) -> Result<()> {
        function.entry.check(arguments)?;
        shape.check(&function.entry)?;
        let mut values = [0u64; MAX_ARGUMENTS];
        arguments.iter().zip(&mut values).for_each(|(argument, value)| *value = argument.bits());
        self.start(function, shape, &mut values[..arguments.len()])?;
        capture::keep(function, arguments.iter().filter_map(Arg::owner));
        Ok(())
    }

    /// Arguments and shape have been checked.
    fn start(&self, function: &Function, shape: &Launch, values: &mut [u64]) -> Result<()> {
        let mut pointers = [null_mut::<c_void>(); MAX_ARGUMENTS];
        values.iter_mut().zip(&mut pointers).for_each(|(value, pointer)| *pointer = (&raw mut *value).cast());
        let mut attribute = sys::LaunchAttribute { id: 6, pad: [0; 4], value: [0; 64] };
        attribute.value[..4].copy_from_slice(&1i32.to_ne_bytes());
        let config = sys::LaunchConfig {
            grid: shape.grid,
            block: shape.block,
            shared_bytes: shape.shared_bytes,
            stream: self.handle,
            attributes: &mut attribute,
            attribute_count: shape.overlap.into(),
        };
        // SAFETY: the configuration and the arguments outlive the call, which copies them; there are as many arguments as
        // the kernel takes, each of its size (`Entry::check`, `Module::function`).
        let status = |f: &sys::DriverFunctions| unsafe {
            (f.launch)(&config, function.handle, pointers.as_mut_ptr(), null_mut())
        };
        self.context.call(status, || format!("launch of {} as {shape:?}", function.entry.name))
    }
}
