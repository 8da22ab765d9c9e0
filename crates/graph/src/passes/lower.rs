//! Nodes with places become steps; runs of steps on one device become segments.

use crate::builder::Graph;
use crate::op::{Node, Op, ValueId};
use crate::options::PlanKey;
use crate::passes::memory::{Place, Plan};
use crate::program::{Cost, Output, Program, Segment, Slot, Step};

/// Lowers `graph` with its memory plan.
pub fn run(graph: &Graph, plan: &Plan, key: &PlanKey) -> Program {
    let slot = |v: &ValueId| {
        let ty = graph.ty(*v);
        match plan.places[v.0 as usize] {
            Place::Output(index) => Slot::Output { index, ty },
            Place::Arena(offset) => Slot::Arena { offset, ty },
            Place::Unused => unreachable!("verify: every value read or written has a writer"),
        }
    };
    let mut segments: Vec<Segment> = Vec::new();
    for node in &graph.nodes {
        let step = Step {
            name: node.name.clone(),
            op: node.op.clone(),
            inputs: node.inputs.iter().map(slot).collect(),
            outputs: node.outputs.iter().map(slot).collect(),
            layer: node.layer,
            cost: cost(graph, node),
        };
        match segments.last_mut().filter(|s| s.device == node.device) {
            Some(segment) => segment.steps.push(step),
            None => segments.push(Segment { device: node.device, steps: vec![step] }),
        }
    }
    Program {
        key: key.clone(),
        part: None,
        segments,
        outputs: graph
            .outputs
            .iter()
            .map(|(name, v)| Output { name: name.clone(), ty: graph.ty(*v) })
            .collect(),
        arena_bytes: plan.arena_bytes.clone(),
        weights: graph.weights.clone(),
        ropes: graph.ropes.clone(),
        kv: graph.kv.clone(),
        kv_groups: graph.kv_groups.clone(),
    }
}

/// Attention's share is counted without its keys and values, which depend on lengths and not on the program.
fn cost(graph: &Graph, node: &Node) -> Cost {
    let values = node.inputs.iter().chain(&node.outputs);
    let row_bytes = values.map(|&v| graph.ty(v).bytes(1) as u64).sum();
    let elements: u64 = node.outputs.first().or(node.inputs.first()).map_or(0, |&v| graph.ty(v).cols as u64);
    let (weight_bytes, row_flops) = match &node.op {
        Op::Linear { parts, gated, .. } => {
            let weights = parts.iter().map(|p| graph.weight(p.weight));
            let unit = if gated.is_some() { 4 * elements } else { 0 };
            weights.fold((0, unit), |(b, f), w| (b + w.bytes() as u64, f + 2 * (w.rows * w.cols) as u64))
        }
        Op::Embed { .. } | Op::TakeRows | Op::Copy { .. } | Op::Carried { .. } | Op::KvStore { .. } => (0, 0),
        Op::RmsNorm { weight, .. } => (graph.weight(*weight).bytes() as u64, 4 * elements),
        Op::Rope { .. } | Op::RopeStore { .. } => (0, 6 * elements),
        Op::Quantize { .. } | Op::Glu(_) | Op::Softcap(_) => (0, 4 * elements),
        Op::Add | Op::Scale(_) => (0, elements),
        Op::Peaks { span } => (0, elements * *span as u64),
        Op::Sample { .. } => (0, elements),
        Op::Attention { .. } => (0, 0),
    };
    Cost { weight_bytes, row_bytes, row_flops }
}
