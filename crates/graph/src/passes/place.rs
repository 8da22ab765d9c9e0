//! Which device runs a node: layers are given to devices by the placement. A run of nodes on one device will be a segment;
//! what it reads of others comes by `copy` nodes before all else, and is an output of the program, so that a segment can
//! run alone once it has its inputs ([`crate::split`]).

use std::collections::{HashMap, HashSet};

use crate::builder::Graph;
use crate::op::{Node, Op, ValueId};
use crate::options::Placement;
use crate::program::CARRIED;

/// Assigns devices and inserts the copies between segments.
pub fn run(graph: &mut Graph, placement: &Placement) {
    let after = graph.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last + 1);
    let mut seen_layer = false;
    let mut segments: Vec<Vec<Node>> = Vec::new();
    for mut node in std::mem::take(&mut graph.nodes) {
        seen_layer |= node.layer.is_some();
        node.device = placement.device(node.layer.unwrap_or(if seen_layer { after } else { 0 }));
        match segments.last_mut().filter(|segment| segment[0].device == node.device) {
            Some(segment) => segment.push(node),
            None => segments.push(vec![node]),
        }
    }
    // Of each value: its segment, that one's device, and the node that writes it.
    let mut home: HashMap<ValueId, (usize, usize, String)> = HashMap::new();
    let mut results: HashSet<ValueId> = graph.outputs.iter().map(|(_, v)| *v).collect();
    for (at, mut segment) in segments.into_iter().enumerate() {
        let mut copies: HashMap<ValueId, ValueId> = HashMap::new();
        for node in &mut segment {
            for v in &mut node.inputs {
                let source = *v;
                let Some((_, from, writer)) = home.get(&source).filter(|(of, ..)| *of != at) else {
                    continue;
                };
                *v = *copies.entry(source).or_insert_with(|| {
                    if results.insert(source) {
                        graph.outputs.push((format!("{CARRIED}{writer}"), source));
                    }
                    let ty = graph.values[source.0 as usize];
                    graph.values.push(ty);
                    let copy = ValueId(graph.values.len() as u32 - 1);
                    graph.nodes.push(Node {
                        name: format!("{}.copy", node.name),
                        op: Op::Copy { from: *from },
                        inputs: vec![source],
                        outputs: vec![copy],
                        layer: node.layer,
                        device: node.device,
                    });
                    copy
                });
            }
            home.extend(node.outputs.iter().map(|&v| (v, (at, node.device, node.name.clone()))));
        }
        graph.nodes.append(&mut segment);
    }
}
