//! Where values live: one arena per device, offsets from first and last use in build order. Inputs of a step are not
//! values, so they are never recycled; results have buffers of their own and live to the end; an output takes its
//! input's place only where that input has no other reader on the device.

use crate::builder::Graph;
use crate::op::{Op, ValueId};
use crate::options::Bucket;

/// Alignment of every value, in bytes.
pub const ALIGN: usize = 64;

/// Place of a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Byte offset in the arena of its device.
    Arena(usize),
    /// Result of this index.
    Output(usize),
    /// Never written.
    Unused,
}

/// Places of all values and the arena bytes of each device.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Place by value.
    pub places: Vec<Place>,
    /// Arena bytes by device.
    pub arena_bytes: Vec<usize>,
}

/// First writer and last reader of a value, and the device it lives on.
#[derive(Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
    device: usize,
}

fn lives(graph: &Graph) -> Vec<Option<Life>> {
    let mut lives: Vec<Option<Life>> = vec![None; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for v in &node.outputs {
            lives[v.0 as usize] = Some(Life { first: i, last: i, device: node.device });
        }
        for v in &node.inputs {
            if let Some(life) = &mut lives[v.0 as usize] {
                life.last = i;
            }
        }
    }
    lives
}

fn bytes(graph: &Graph, v: usize, bucket: &Bucket) -> usize {
    let ty = graph.values[v];
    ty.bytes(bucket.rows(ty.rows)).next_multiple_of(ALIGN)
}

/// Which input, if any, an output of node `i` may overwrite.
fn reusable(
    graph: &Graph,
    lives: &[Option<Life>],
    places: &[Place],
    i: usize,
    output: ValueId,
) -> Option<usize> {
    let node = &graph.nodes[i];
    let candidates = node.inputs.iter().enumerate().filter(|&(at, v)| {
        let residual = matches!(node.op, Op::Linear { residual: true, .. }) && at + 1 == node.inputs.len();
        (node.op.in_place(at) || residual)
            && graph.ty(*v) == graph.ty(output)
            && node.inputs.iter().filter(|w| *w == v).count() == 1
            && lives[v.0 as usize].is_some_and(|l| l.last == i && l.device == node.device)
    });
    candidates.map(|(_, v)| v.0 as usize).find_map(|v| match places[v] {
        Place::Arena(offset) => Some(offset),
        _ => None,
    })
}

/// Plans the memory of `graph` for `bucket`: first fit among the values alive at the same time.
pub fn run(graph: &Graph, bucket: &Bucket) -> Plan {
    let lives = lives(graph);
    let devices = graph.nodes.iter().map(|n| n.device + 1).max().unwrap_or(1);
    let mut places = vec![Place::Unused; graph.values.len()];
    for (at, (_, v)) in graph.outputs.iter().enumerate() {
        places[v.0 as usize] = Place::Output(at);
    }
    let mut arena_bytes = vec![0; devices];
    for (i, node) in graph.nodes.iter().enumerate() {
        for &output in &node.outputs {
            let v = output.0 as usize;
            if places[v] != Place::Unused {
                continue;
            }
            let need = bytes(graph, v, bucket);
            let offset = reusable(graph, &lives, &places, i, output).unwrap_or_else(|| {
                // Alive now: placed, on this device, and not read for the last time before this node.
                let mut taken: Vec<(usize, usize)> = (0..places.len())
                    .filter(|&w| {
                        lives[w].is_some_and(|l| l.device == node.device && l.first <= i && l.last >= i)
                    })
                    .filter_map(|w| match places[w] {
                        Place::Arena(at) => Some((at, at + bytes(graph, w, bucket))),
                        _ => None,
                    })
                    .collect();
                taken.sort_unstable();
                let mut offset = 0;
                for (from, to) in taken {
                    if from >= offset + need {
                        break;
                    }
                    offset = offset.max(to);
                }
                offset
            });
            places[v] = Place::Arena(offset);
            arena_bytes[node.device] = arena_bytes[node.device].max(offset + need);
        }
    }
    Plan { places, arena_bytes }
}

/// Checks that no two values alive at the same time share bytes, but for an output in its last-read input's place.
///
/// # Errors
/// The node at which they meet and what overlaps.
pub fn check(graph: &Graph, plan: &Plan, bucket: &Bucket) -> Result<(), (String, String)> {
    let lives = lives(graph);
    let region = |v: usize| match plan.places[v] {
        Place::Arena(at) => Some((at, at + bytes(graph, v, bucket))),
        _ => None,
    };
    for (i, node) in graph.nodes.iter().enumerate() {
        for &output in &node.outputs {
            let v = output.0 as usize;
            let Some((from, to)) = region(v) else { continue };
            if to > plan.arena_bytes[node.device] {
                return Err((node.name.clone(), format!("value {v} ends at {to}, past its arena")));
            }
            for w in (0..plan.places.len()).filter(|&w| w != v) {
                let (Some(life), Some((wfrom, wto))) = (lives[w], region(w)) else { continue };
                let meets = life.device == node.device && life.first <= i && life.last >= i;
                let shared_input = life.last == i
                    && (wfrom, wto) == (from, to)
                    && reusable(graph, &lives, &plan.places, i, output) == Some(from);
                if meets && from < wto && wfrom < to && !shared_input {
                    return Err((
                        node.name.clone(),
                        format!("value {v} at {from}..{to} overlaps value {w} at {wfrom}..{wto}"),
                    ));
                }
            }
        }
    }
    Ok(())
}
