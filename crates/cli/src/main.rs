//! Runs large language models: GGUF or safetensors in, tokens out.

fn main() {}
