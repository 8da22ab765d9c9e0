//! A GGUF file, from its bytes to two tokens of a reply.
#![no_main]

use ingle_tests::attack::walk;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = walk::gguf(data);
});
