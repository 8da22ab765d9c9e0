//! Runs large language models: GGUF or safetensors in, tokens out.

mod source;

use std::process::ExitCode;

use source::{Cache, Cached, Notes, Result, Sources, Spec};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (command, spec) = match args[..] {
        ["pull"] => ("pull", Ok(Spec::Default)),
        ["list"] => ("list", Ok(Spec::Default)),
        [command @ ("pull" | "rm"), spec] => (command, Spec::parse(spec)),
        _ => {
            eprintln!("usage: ingle pull [SPEC] | list | rm SPEC");
            return ExitCode::from(2);
        }
    };
    let result = match (command, spec) {
        (_, Err(error)) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
        ("pull", Ok(spec)) => pull(&spec),
        ("rm", Ok(spec)) => remove(&spec),
        _ => list(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Fetches a model and prints where it is.
fn pull(spec: &Spec) -> Result<()> {
    println!("{}", Sources::from_env()?.resolve(spec, &mut Notes)?.display());
    Ok(())
}

/// Prints name, size in bytes and path of every cached model.
fn list() -> Result<()> {
    for Cached { name, bytes, path, .. } in Cache::from_env()?.list()? {
        println!("{name}\t{bytes}\t{}", path.display());
    }
    Ok(())
}

/// Removes models from the cache and prints what they were.
fn remove(spec: &Spec) -> Result<()> {
    for Cached { name, bytes, path, .. } in Cache::from_env()?.remove(spec, &mut Notes)? {
        println!("{name}\t{bytes}\t{}", path.display());
    }
    Ok(())
}
