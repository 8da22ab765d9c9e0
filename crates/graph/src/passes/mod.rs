//! From graph to program: sample, fuse, place, memory, lower, in this order, each checked by [`crate::verify`].

pub mod fuse;
pub mod lower;
pub mod memory;
pub mod place;
pub mod sample;

use crate::builder::Graph;
use crate::options::PlanKey;
use crate::program::Program;
use crate::verify::check;
use crate::{Error, Result};

/// The graph after fusion and placement, before memory is planned: what `inspect --graph` draws.
///
/// # Errors
/// A rule of the language broken by the graph or by a pass.
pub fn optimize(graph: &Graph, key: &PlanKey) -> Result<Graph> {
    let mut graph = graph.clone();
    if key.options.taps {
        graph.outputs.append(&mut graph.taps);
    } else {
        graph.taps.clear();
    }
    check(&graph, "build")?;
    if key.options.sample {
        sample::run(&mut graph)?;
        check(&graph, "sample")?;
    }
    fuse::run(&mut graph, &key.options);
    check(&graph, "fuse")?;
    place::run(&mut graph, &key.options.placement);
    check(&graph, "place")?;
    Ok(graph)
}

/// Compiles `graph` for one key.
///
/// # Errors
/// A rule of the language broken by the graph or by a pass, or two values that share memory while both live.
pub fn compile(graph: &Graph, key: &PlanKey) -> Result<Program> {
    let graph = optimize(graph, key)?;
    let plan = memory::run(&graph, &key.bucket);
    memory::check(&graph, &plan, &key.bucket).map_err(|(node, what)| Error::Verify {
        pass: "memory",
        node,
        what,
    })?;
    Ok(lower::run(&graph, &plan, key))
}
