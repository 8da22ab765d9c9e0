//! The weights of a small model's folder, from their bytes to two tokens of a reply.
#![no_main]

use ingle_tests::attack::walk;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = walk::safetensors(data);
});
