//! What the test binaries share with the mutation driver (`xtask mutate`) and the fuzz targets (`fuzz/`).

pub mod attack;
mod random;

pub use random::Random;
