//! One file per model family, built from shared blocks.
