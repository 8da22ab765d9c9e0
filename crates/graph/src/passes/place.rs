//! Which device runs a node: layers are given to devices by the placement; values cross by `copy` nodes.

use std::collections::HashMap;

use crate::builder::Graph;
use crate::op::{Node, Op, ValueId};
use crate::options::Placement;

/// Assigns devices and inserts the copies between them.
pub fn run(graph: &mut Graph, placement: &Placement) {
    let last = graph.nodes.iter().filter_map(|n| n.layer).max().unwrap_or(0);
    let device_of = |layer: usize| placement.first.iter().rposition(|&first| first <= layer).unwrap_or(0);
    let mut seen_layer = false;
    let mut home: HashMap<ValueId, usize> = HashMap::new();
    let mut copies: HashMap<(ValueId, usize), ValueId> = HashMap::new();
    for mut node in std::mem::take(&mut graph.nodes) {
        seen_layer |= node.layer.is_some();
        node.device = device_of(node.layer.unwrap_or(if seen_layer { last } else { 0 }));
        for v in &mut node.inputs {
            let source = *v;
            let Some(&from) = home.get(&source).filter(|&&d| d != node.device) else { continue };
            *v = *copies.entry((source, node.device)).or_insert_with(|| {
                let ty = graph.values[source.0 as usize];
                graph.values.push(ty);
                let copy = ValueId(graph.values.len() as u32 - 1);
                graph.nodes.push(Node {
                    name: format!("{}.copy", node.name),
                    op: Op::Copy { from },
                    inputs: vec![source],
                    outputs: vec![copy],
                    layer: node.layer,
                    device: node.device,
                });
                copy
            });
        }
        home.extend(node.outputs.iter().map(|&v| (v, node.device)));
        graph.nodes.push(node);
    }
}
