//! What a tensor is and where its bytes are: dtypes, quantization formats, GGUF, safetensors, checkpoints.
