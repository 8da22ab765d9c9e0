//! NVIDIA GPUs, found at run time.
//!
//! The binary links no library of CUDA: [`driver`] opens the driver's, [`compile`] opens NVRTC and compiles the kernels
//! ([`kernels`]), which need no file of a toolkit. What is missing is an error with a name, never the end of the process.
//! [`survey()`] tells it all at once, for `ingle doctor`. With the feature `stand-in`, tests have a device without a GPU.

mod backend;
mod bind;
pub mod budget;
mod capture;
pub mod compile;
pub mod driver;
mod error;
mod fuse;
pub mod kernels;
pub mod rates;
pub mod step;
pub mod survey;
pub mod weights;

pub use backend::{Cuda, CudaOptions};
#[cfg(feature = "stand-in")]
pub use driver::stand_in;
pub use error::{Error, Result};
pub use kernels::attention::float_for;
pub use survey::survey;
