//! Repository automation: `cargo run -p xtask -- tidy`.

mod tidy;

use std::process::ExitCode;

const USAGE: &str =
    "usage: cargo run -p xtask -- tidy    check what the compiler does not: crate edges, marks, sizes";

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => tidy::run(),
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
