//! Runs Programs on the host processor.
