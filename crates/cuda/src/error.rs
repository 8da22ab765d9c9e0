//! Everything that can keep CUDA from being used, or fail while it is.

use std::io;
use std::path::{Path, PathBuf};

/// What failed: which call or file, what was found, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No library of the driver.
    #[error("no NVIDIA driver: the loader finds none of {}; install the driver (its libcuda.so.1), or, in a container, pass the GPU through", .tried.join(", "))]
    NoDriver {
        /// Names that were tried.
        tried: Vec<String>,
    },
    /// A library is there and cannot be loaded.
    #[error("{} cannot be loaded: {reason}", .library.display())]
    Unopened {
        /// Name or path.
        library: PathBuf,
        /// The loader's.
        reason: String,
    },
    /// A library lacks a function: too old.
    #[error("{} has no {function}: it is too old; install a driver and NVRTC of CUDA 12.0 or newer", .library.display())]
    NoFunction {
        /// Name or path.
        library: PathBuf,
        /// The missing one.
        function: &'static str,
    },
    /// The driver is older than what is called.
    #[error("the NVIDIA driver supports CUDA {}.{}, wanted is {}.{} or newer: update the driver", .found / 1000, .found % 1000 / 10, .wanted / 1000, .wanted % 1000 / 10)]
    OldDriver {
        /// 1000 * major + 10 * minor.
        found: i32,
        /// The same.
        wanted: i32,
    },
    /// The driver works and has no device.
    #[error("the NVIDIA driver finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// No device of this number.
    #[error("no GPU {index}: there are {count}, numbered from 0")]
    NoSuchDevice {
        /// Asked for.
        index: usize,
        /// Present.
        count: usize,
    },
    /// A device without what the kernels need.
    #[error("{device} has compute capability {}.{}: {wanted} or newer is needed", .found.0, .found.1)]
    OldDevice {
        /// Its name.
        device: String,
        /// Its compute capability.
        found: (u32, u32),
        /// The least.
        wanted: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call}: {name} ({text}){}", advice(*.code))]
    Call {
        /// Function and what it was asked for.
        call: String,
        /// Number of the error.
        code: i32,
        /// Its name.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// Device memory was asked for, or freed, while a stream is captured.
    #[error(
        "{what} of {bytes} bytes inside a capture window: refused, and the capture is cancelled; allocate before it"
    )]
    InWindow {
        /// The kind of memory.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// A misuse that was refused before the driver saw it.
    #[error("{0}")]
    Refused(String),
    /// NVRTC is nowhere.
    #[error("no NVRTC: tried {}; install it (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) or name it: INGLE_NVRTC=/path/to/libnvrtc.so", .tried.join(", "))]
    NoCompiler {
        /// Names and folders that were tried.
        tried: Vec<String>,
    },
    /// A kernel does not compile.
    #[error("{kernel}.cu for {arch}: {what}")]
    Compile {
        /// Its file.
        kernel: String,
        /// Architecture.
        arch: String,
        /// NVRTC's log.
        what: String,
    },
    /// A file of the cubin cache.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The verb.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn unopened(library: &Path, reason: &dyn std::error::Error) -> Self {
        // The loader's own words are the source of libloading's.
        let reason = reason.source().map_or_else(|| reason.to_string(), ToString::to_string);
        Error::Unopened { library: library.into(), reason }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Error::Io { action, path: path.into(), source }
    }
}

impl From<Error> for ingle_graph::Error {
    fn from(error: Error) -> Self {
        ingle_graph::Error::Device { device: "cuda".into(), what: error.to_string() }
    }
}

/// What to do about an error of the driver, where there is something to do.
fn advice(code: i32) -> &'static str {
    match code {
        2 => ": free memory on the GPU, or take a smaller context (-c) or --gpu-memory",
        3 | 4 | 46 | 802 | 999 => ": see nvidia-smi; a reset or a restart of the driver may help",
        100 => ": the driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES",
        200 | 209 | 218 | 222 => {
            ": the kernel was compiled for another GPU or by a newer NVRTC than the driver; update the driver, or use an NVRTC of its version"
        }
        214 | 220 | 714 | 715 => ": the GPU reports a hardware error; see nvidia-smi and the system's log",
        700..=719 => ": a kernel failed; results since then are lost and the process must start again",
        803 => ": the driver's library and its kernel module differ; restart the machine after the update",
        804 => ": this GPU does not support the compatibility package; remove it from the loader's path",
        900..=908 => ": an operation that a capture forbids",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_found_and_what_to_do() {
        let call = |code| Error::Call {
            call: "cuMemAlloc of 4096 bytes".into(),
            code,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            text: "out of memory".into(),
        };
        let said = call(2).to_string();
        assert!(said.starts_with("cuMemAlloc of 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory): free"));
        assert!(call(12345).to_string().ends_with("(out of memory)"));
        let old = Error::OldDriver { found: 11080, wanted: 12000 }.to_string();
        assert!(old.contains("supports CUDA 11.8, wanted is 12.0"), "{old}");
        let graph: ingle_graph::Error = Error::NoDevice.into();
        assert!(graph.to_string().starts_with("device cuda: the NVIDIA driver finds no GPU"), "{graph}");
    }
}
