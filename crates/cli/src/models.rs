//! `ingle pull`, `list` and `rm`: the models on this machine.

use std::io::{Write, stdout};

use crate::error::Result;
use crate::flags::{Pull, Remove};
use crate::session;
use crate::source::{Cache, Cached};
use crate::term;

/// Fetches a model and prints where it is.
pub fn pull(flags: &Pull) -> Result<()> {
    let path = session::resolve(flags.model.named())?;
    writeln!(stdout(), "{}", path.display())?;
    Ok(())
}

/// Prints name, size in bytes and path of every cached model, separated by tabs.
pub fn list() -> Result<()> {
    print(&Cache::from_env()?.list()?)
}

/// Removes models from the cache and prints what they were.
pub fn remove(flags: &Remove) -> Result<()> {
    print(&Cache::from_env()?.remove(&flags.model, &mut *term::progress())?)
}

fn print(models: &[Cached]) -> Result<()> {
    let mut out = stdout().lock();
    for Cached { name, bytes, path, .. } in models {
        writeln!(out, "{name}\t{bytes}\t{}", path.display())?;
    }
    Ok(())
}
