//! Runs Programs on the host processor.

mod memory;
mod simd;
mod threads;

pub use simd::Isa;
pub use threads::physical_cores;
