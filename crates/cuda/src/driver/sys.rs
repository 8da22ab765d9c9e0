//! What of the driver's and NVRTC's C interfaces is called, by the names the libraries export.
//!
//! The interfaces are bound by hand instead of through a generated crate for three reasons. A status is an integer here:
//! a driver newer than the bindings may return a number they do not list, which an `enum` must never hold. A library or
//! a function that is missing is an error with its name, where generated bindings end the process. And libraries are
//! opened from where they are (NVRTC lies in many places), not from a fixed list of names.
//!
//! Structs are those of CUDA 12 and later on 64-bit machines; a test holds their sizes.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

use crate::{Error, Result};

/// `CUresult` and `nvrtcResult`: 0 is success.
pub type Status = c_int;
/// `CUdeviceptr`.
pub type Address = u64;
/// An opaque object of a library.
pub type Handle = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Location {
    /// 1: a device.
    pub kind: c_int,
    /// Ordinal.
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProperties {
    /// 1: pinned, the only kind.
    pub kind: c_int,
    /// Handles that can be exported: none.
    pub handle_kinds: c_int,
    /// Where.
    pub location: Location,
    /// Unused outside Windows.
    pub metadata: *mut c_void,
    /// Compression and other flags: none.
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    /// Who.
    pub location: Location,
    /// 3: reads and writes.
    pub flags: c_int,
}

/// `CUlaunchAttribute`: an id and a value of 64 bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    /// Which.
    pub id: c_int,
    /// Padding.
    pub pad: [u8; 4],
    /// The value's bytes, of which an `int` takes the first four.
    pub value: [u8; 64],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: c_uint,
    /// The stream.
    pub stream: Handle,
    /// Attributes.
    pub attributes: *mut LaunchAttribute,
    /// How many.
    pub attribute_count: c_uint,
}

/// Declares a struct of function pointers, and how it is filled from a library; those in the second braces may be missing.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident {
        $($field:ident = $symbol:literal ( $($argument:ty),* $(,)? );)+
    } {
        $($optional:ident = $optional_symbol:literal ( $($optional_argument:ty),* $(,)? );)*
    }) => {
        $(#[$doc])*
        pub struct $table {
            /// Keeps the code in memory.
            _library: Library,
            $(#[doc = concat!("`", $symbol, "`")] pub $field: unsafe extern "C" fn($($argument),*) -> Status,)+
            $(#[doc = concat!("`", $optional_symbol, "`, which older libraries lack")]
            pub $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> Status>,)*
        }

        impl $table {
            /// Opens a library, by name on the loader's path or by path.
            ///
            /// # Errors
            /// The loader's reason, or the first function that is missing.
            pub fn open(file: &Path) -> Result<Self> {
                // SAFETY: loading runs the library's initializers. It is the vendor's library under one of its own names,
                // or the file that the user named as such.
                let library = unsafe { Library::new(file) }.map_err(|e| Error::unopened(file, &e))?;
                // SAFETY: the types are those of the C declarations of these names.
                unsafe {
                    Ok(Self {
                        $($field: *library
                            .get($symbol.as_bytes())
                            .map_err(|_| Error::NoFunction { library: file.into(), function: $symbol })?,)+
                        $($optional: library.get($optional_symbol.as_bytes()).ok().map(|function| *function),)*
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    /// The driver's functions.
    DriverFunctions {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        error_name = "cuGetErrorName"(Status, *mut *const c_char);
        error_text = "cuGetErrorString"(Status, *mut *const c_char);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut c_int, c_int);
        device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
        device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
        context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
        context_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
        context_set_current = "cuCtxSetCurrent"(Handle);
        context_synchronize = "cuCtxSynchronize"();
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        memory_allocate = "cuMemAlloc_v2"(*mut Address, usize);
        memory_free = "cuMemFree_v2"(Address);
        host_allocate = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        host_free = "cuMemFreeHost"(*mut c_void);
        address_reserve = "cuMemAddressReserve"(*mut Address, usize, usize, Address, u64);
        address_free = "cuMemAddressFree"(Address, usize);
        memory_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const AllocationProperties, c_int);
        memory_create = "cuMemCreate"(*mut u64, usize, *const AllocationProperties, u64);
        memory_release = "cuMemRelease"(u64);
        memory_map = "cuMemMap"(Address, usize, usize, u64, u64);
        memory_unmap = "cuMemUnmap"(Address, usize);
        memory_set_access = "cuMemSetAccess"(Address, usize, *const Access, usize);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(Address, *const c_void, usize, Handle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, Address, usize, Handle);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(Address, Address, usize, Handle);
        fill_bytes = "cuMemsetD8Async"(Address, u8, usize, Handle);
        stream_create = "cuStreamCreate"(*mut Handle, c_uint);
        stream_destroy = "cuStreamDestroy_v2"(Handle);
        stream_synchronize = "cuStreamSynchronize"(Handle);
        stream_wait = "cuStreamWaitEvent"(Handle, Handle, c_uint);
        capture_begin = "cuStreamBeginCapture_v2"(Handle, c_int);
        capture_end = "cuStreamEndCapture"(Handle, *mut Handle);
        capture_status = "cuStreamIsCapturing"(Handle, *mut c_int);
        event_create = "cuEventCreate"(*mut Handle, c_uint);
        event_destroy = "cuEventDestroy_v2"(Handle);
        event_record = "cuEventRecord"(Handle, Handle);
        event_query = "cuEventQuery"(Handle);
        event_synchronize = "cuEventSynchronize"(Handle);
        event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle);
        module_load = "cuModuleLoadDataEx"(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
        module_unload = "cuModuleUnload"(Handle);
        module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
        function_attribute = "cuFuncGetAttribute"(*mut c_int, c_int, Handle);
        function_set_attribute = "cuFuncSetAttribute"(Handle, c_int, c_int);
        occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(*mut c_int, Handle, c_int, usize);
        launch = "cuLaunchKernelEx"(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
        graph_nodes = "cuGraphGetNodes"(Handle, *mut Handle, *mut usize);
        graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, u64);
        graph_upload = "cuGraphUpload"(Handle, Handle);
        graph_launch = "cuGraphLaunch"(Handle, Handle);
        graph_destroy = "cuGraphDestroy"(Handle);
        graph_exec_destroy = "cuGraphExecDestroy"(Handle);
    } {
        function_parameter = "cuFuncGetParamInfo"(Handle, usize, *mut usize, *mut usize);
    }
}

functions! {
    /// NVRTC's functions.
    CompilerFunctions {
        version = "nvrtcVersion"(*mut c_int, *mut c_int);
        create = "nvrtcCreateProgram"(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        destroy = "nvrtcDestroyProgram"(*mut Handle);
        compile = "nvrtcCompileProgram"(Handle, c_int, *const *const c_char);
        cubin_bytes = "nvrtcGetCUBINSize"(Handle, *mut usize);
        cubin = "nvrtcGetCUBIN"(Handle, *mut c_char);
        ptx_bytes = "nvrtcGetPTXSize"(Handle, *mut usize);
        ptx = "nvrtcGetPTX"(Handle, *mut c_char);
        log_bytes = "nvrtcGetProgramLogSize"(Handle, *mut usize);
        log = "nvrtcGetProgramLog"(Handle, *mut c_char);
        arch_count = "nvrtcGetNumSupportedArchs"(*mut c_int);
        archs = "nvrtcGetSupportedArchs"(*mut c_int);
    } {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes and offsets of cuda.h on a 64-bit machine.
    #[test]
    fn structs_are_those_of_the_c_interface() {
        assert_eq!(size_of::<AllocationProperties>(), 32);
        assert_eq!(std::mem::offset_of!(AllocationProperties, metadata), 16);
        assert_eq!(size_of::<Access>(), 12);
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(std::mem::offset_of!(LaunchAttribute, value), 8);
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!(std::mem::offset_of!(LaunchConfig, attribute_count), 48);
    }
}
