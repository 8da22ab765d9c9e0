//! Repository automation: `cargo run --bin xtask -- tidy`.

mod gate;
mod kernels;
mod mutate;
mod texts;
mod tidy;

use std::process::ExitCode;

use ingle_tests::attack::watch::Watched;

/// So that `mutate` knows what an input asks for.
#[global_allocator]
static ALLOCATOR: Watched = Watched;

const USAGE: &str = "usage: cargo run --release --bin xtask -- COMMAND
  tidy                    check what the compiler does not: crate edges, marks, sizes
  kernels [ARCH...]       compile every CUDA kernel (with NVRTC, without a GPU) and check what came out
  gate TEXT MODEL.gguf... what int8 activations cost beside what quantized weights cost (docs/numerics.md)
  texts VOCABULARIES TOKENIZERS TEMPLATES [MODEL.gguf...]
                          compare every string and render in the folders with its reference, and time long words
  mutate [--seconds 60] [--seed 1] [--target gguf|safetensors|tokenizer|template|all] [--from 0]
                          walk damaged files: no panic, no memory out of proportion, no long wait";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("tidy") => tidy::run(),
        Some("kernels") => kernels::run(&arguments[1..]),
        Some("gate") => gate::run(&arguments[1..]),
        Some("texts") => texts::run(&arguments[1..]),
        Some("mutate") => mutate::run(&arguments[1..]),
        Some("--help" | "-h") => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
