//! The language models are written in and devices run: ops, builder, passes, programs, the scalar reference.
