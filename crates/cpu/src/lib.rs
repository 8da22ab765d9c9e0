//! Runs Programs on the host processor.
//!
//! - `threads`: the team of threads, which lives as long as the backend. `times`: how long its steps take.
//! - `simd`: instruction sets as types; kernels are written once.
//! - `dot`: matrix products. `kernels`: every other op.
//! - `weights`: a graph's weights, packed or mapped. `task`: one step of a program, shared out among the team.
//! - `backend`: loads, prepares, runs.
//!
//! No sum crosses what workers share out, so the number of threads, the instruction set, and how rows are grouped
//! change no bit of a result (NUMERICS.md).

mod backend;
pub mod dot;
mod kernels;
mod memory;
mod simd;
mod task;
mod threads;
mod times;
mod weights;

pub use backend::{Cpu, CpuOptions, threads_max};
pub use simd::Isa;
pub use threads::{Team, physical_cores, processors};
pub use weights::planned_bytes;
