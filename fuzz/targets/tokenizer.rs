//! A tokenizer: `tokenizer.json` where the input is a JSON object, else a GGUF vocabulary.
#![no_main]

use ingle_tests::attack::walk;
use libfuzzer_sys::fuzz_target;

// The crate that runs a `tokenizer.json` may panic, and its caller makes an error of that. libFuzzer's hook would end the
// process before; without it, what nobody catches still ends it.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| ())), |data: &[u8]| {
    let _ = walk::tokenizer(data);
});
