//! Repository automation: tidy checks, fixtures.

fn main() {}
