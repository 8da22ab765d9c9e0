//! A chat template, compiled and rendered over two conversations.
#![no_main]

use ingle_tests::attack::walk;
use libfuzzer_sys::fuzz_target;

// A template that breaks the engine's compiler is an error to its caller. libFuzzer's hook would end the process before.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| ())), |data: &[u8]| {
    if let Ok(source) = std::str::from_utf8(data) {
        let _ = walk::template(source);
    }
});
