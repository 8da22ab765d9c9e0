//! Stand-ins for what the sources of models talk to: a web server and a package index.

pub mod server;
pub mod wheels;

use sha2::{Digest, Sha256};

/// Bytes that differ everywhere and compress badly.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// SHA-256 as hexadecimal text.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
