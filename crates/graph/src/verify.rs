//! The rules of the language, checked after the build and after every pass: values are written once and before they are
//! read, on the device that reads them, and every op's types fit.

use crate::builder::Graph;
use crate::op::{Elem, Gated, LinearPart, Node, Op, Rows, UNITS, ValueType};
use crate::{Error, Result};

/// Checks `graph` after `pass`.
///
/// # Errors
/// [`Error::Verify`] naming the pass, the node and the rule.
pub fn check(graph: &Graph, pass: &'static str) -> Result<()> {
    for (layer, kv) in graph.kv.iter().enumerate() {
        let group = graph.kv_groups.get(kv.group);
        if group.is_none_or(|g| g.window == Some(0)) {
            let what =
                format!("group {} of {:?}: wants one with a window above 0", kv.group, graph.kv_groups);
            return Err(Error::Verify { pass, node: format!("kv layer {layer}"), what });
        }
    }
    let mut device: Vec<Option<usize>> = vec![None; graph.values.len()];
    for node in &graph.nodes {
        let fail = |what: String| Err(Error::Verify { pass, node: node.name.clone(), what });
        for v in &node.inputs {
            match device.get(v.0 as usize) {
                None => return fail(format!("reads value {} of {}", v.0, graph.values.len())),
                Some(None) => return fail(format!("reads value {} before it is written", v.0)),
                Some(&Some(d)) if d != if let Op::Copy { from } = node.op { from } else { node.device } => {
                    return fail(format!(
                        "runs on device {} but reads value {} of device {d}",
                        node.device, v.0
                    ));
                }
                Some(_) => {}
            }
        }
        for v in &node.outputs {
            match device.get_mut(v.0 as usize) {
                None => return fail(format!("writes value {} of {}", v.0, graph.values.len())),
                Some(Some(_)) => return fail(format!("writes value {} a second time", v.0)),
                Some(slot) => *slot = Some(node.device),
            }
        }
        if let Err(what) = types(graph, node) {
            return fail(what);
        }
    }
    let mut results = std::collections::HashSet::new();
    for (name, v) in &graph.outputs {
        if !results.insert(v) {
            let what = format!("value {} is a result twice", v.0);
            return Err(Error::Verify { pass, node: name.clone(), what });
        }
    }
    for (name, v) in graph.outputs.iter().chain(&graph.taps) {
        if device.get(v.0 as usize).copied().flatten().is_none() {
            let what = format!("value {} is a result but nothing writes it", v.0);
            return Err(Error::Verify { pass, node: name.clone(), what });
        }
    }
    Ok(())
}

fn types(graph: &Graph, node: &Node) -> std::result::Result<(), String> {
    let input: Vec<ValueType> = node.inputs.iter().map(|&v| graph.ty(v)).collect();
    let output: Vec<ValueType> = node.outputs.iter().map(|&v| graph.ty(v)).collect();
    let want = |ok: bool, rule: &str| {
        if ok { Ok(()) } else { Err(format!("{rule}; inputs {input:?}, outputs {output:?}")) }
    };
    let f32_in = |i: usize| input.get(i).is_some_and(|t| t.elem == Elem::F32);
    // Outputs of an op that may quantize: the shape of `of`, elements as the emission says.
    let emits = |emit: &crate::op::Emit, of: ValueType| {
        let elems = emit.elems();
        elems.len() == output.len()
            && !elems.is_empty()
            && emit.quantized.is_sorted_by(|a, b| a.digits() < b.digits())
            && emit
                .quantized
                .iter()
                .all(|e| e.digits().is_some_and(|(u, _)| UNITS.contains(&u) && of.cols.is_multiple_of(u)))
            && elems.iter().zip(&output).all(|(&elem, o)| *o == ValueType { elem, ..of })
    };
    let emitted = |emit: &crate::op::Emit| emits(emit, input[0]);
    let same = output.len() == 1 && input.iter().chain(&output).all(|t| Some(t) == input.first());
    let kv = |k: &ValueType, v: &ValueType, layer: usize| {
        graph.kv.get(layer).is_some_and(|l| k.cols == l.heads * l.head_dim && v == k)
    };
    match &node.op {
        Op::Embed { table, .. } => want(
            input.is_empty() && output == [ValueType::f32(Rows::T, graph.weight(*table).cols)],
            "wants one f32 output [T, columns of the table]",
        ),
        Op::RmsNorm { weight, group, emit, .. } => want(
            input.len() == 1
                && f32_in(0)
                && *group > 0
                && input[0].cols.is_multiple_of(*group)
                && graph.weight(*weight).cols == *group
                && emitted(emit),
            "wants one f32 input whose columns are a multiple of the group",
        ),
        Op::Quantize { emit } => {
            want(input.len() == 1 && f32_in(0) && !emit.f32 && emitted(emit), "wants one f32 input")
        }
        Op::Linear { parts, residual, gated } => {
            let n = input.len() - usize::from(*residual);
            let product = |p: &LinearPart| {
                ValueType::f32(input.get(p.input).map_or(Rows::T, |x| x.rows), graph.weight(p.weight).rows)
            };
            let fits = parts.iter().all(|p| {
                let w = graph.weight(p.weight);
                let unit_fits = |x: &ValueType| match x.elem {
                    Elem::F32 => true,
                    Elem::Int8 { unit } | Elem::Int16 { unit } => w.unit() == Some(unit),
                };
                p.input < n
                    && input[p.input].cols == w.cols
                    && unit_fits(&input[p.input])
                    && p.bias.is_none_or(|b| graph.weight(b).cols == w.rows)
            });
            let written = match (gated, parts.as_slice()) {
                (None, _) => parts.iter().map(product).eq(output.iter().copied()),
                (Some(unit), [gate, up]) => {
                    !residual && product(gate) == product(up) && emits(&unit.emit, product(gate))
                }
                _ => false,
            };
            want(
                !parts.is_empty()
                    && fits
                    && written
                    && (!residual
                        || (parts.len() == 1 && parts[0].scale.is_none() && input.last() == output.first())),
                "wants inputs of each matrix's width and unit, f32 outputs of its height (gated: those of two equal ones, and no residual), at most one residual and then no scale",
            )
        }
        Op::Add => want(input.len() == 2 && f32_in(0) && same, "wants two equal f32 inputs"),
        Op::Scale(_) | Op::Softcap(_) => want(input.len() == 1 && f32_in(0) && same, "wants one f32 input"),
        Op::Peaks { span } => want(
            input.len() == 1
                && f32_in(0)
                && *span > 0
                && output == [ValueType { cols: input[0].cols.div_ceil(*span), ..input[0] }],
            "wants one f32 input, spans of at least one column, and an output column for each",
        ),
        Op::Sample { span } => want(
            input.len() == 2
                && f32_in(0)
                && *span > 0
                && input[0].rows == Rows::R
                && (1..=1 << 24).contains(&input[0].cols)
                && input[1] == ValueType { cols: input[0].cols.div_ceil(*span), ..input[0] }
                && output == [ValueType::f32(Rows::R, 1)],
            "wants logits [R, cols] of at most 2^24 columns, the largest of each span of them, and an output [R, 1]",
        ),
        Op::Glu(Gated { emit, .. }) => want(
            input.len() == 2 && f32_in(0) && input[0] == input[1] && emitted(emit),
            "wants two equal f32 inputs",
        ),
        Op::Rope { rope, head_dim } => want(
            input.len() == 1
                && f32_in(0)
                && same
                && input[0].rows == Rows::T
                && input[0].cols.is_multiple_of(*head_dim)
                && graph.ropes.get(rope.0 as usize).is_some_and(|r| 2 * r.inv_freq.len() <= *head_dim),
            "wants one f32 input [T, heads * head_dim] and a table no wider than a head",
        ),
        Op::KvStore { layer } => want(
            input.len() == 2 && f32_in(0) && output.is_empty() && kv(&input[0], &input[1], *layer),
            "wants k and v of the layer's shape",
        ),
        Op::RopeStore { rope, head_dim, layer } => want(
            input.len() == 3
                && f32_in(0)
                && output == [input[0]]
                && input[0].rows == Rows::T
                && input[0].cols.is_multiple_of(*head_dim)
                && kv(&input[1], &input[2], *layer)
                && graph.kv[*layer].head_dim == *head_dim
                && graph.ropes.get(rope.0 as usize).is_some_and(|r| 2 * r.inv_freq.len() <= *head_dim),
            "wants q, k and v of the layer's shape",
        ),
        Op::Attention { spec, emit } => want(
            input.len() == 1
                && f32_in(0)
                && input[0] == ValueType::f32(Rows::T, spec.heads * spec.head_dim)
                && spec.kv_heads > 0
                && spec.heads.is_multiple_of(spec.kv_heads)
                && spec.window != Some(0)
                && graph.kv.get(spec.layer).is_some_and(|l| {
                    l.heads == spec.kv_heads
                        && l.head_dim == spec.head_dim
                        && graph.kv_groups[l.group].keeps(spec.window)
                })
                && emitted(emit),
            "wants q [T, heads * head_dim], heads a multiple of kv heads, and a layer that keeps what its window sees",
        ),
        Op::TakeRows => want(
            input.len() == 1
                && input[0].rows == Rows::T
                && output == [ValueType { rows: Rows::R, ..input[0] }]
                && f32_in(0),
            "wants one f32 input [T, cols] and an output [R, cols]",
        ),
        Op::Copy { .. } => {
            want(input.len() == 1 && f32_in(0) && output == input, "wants one f32 input and an equal output")
        }
        Op::Carried { .. } => {
            want(input.is_empty() && output.len() == 1 && output[0].elem == Elem::F32, "wants one f32 output")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{ValueId, WeightId};

    fn chain() -> Graph {
        let ty = ValueType::f32(Rows::T, 8);
        let node = |op, inputs: &[u32], outputs: &[u32]| Node {
            name: "n".into(),
            op,
            inputs: inputs.iter().map(|&v| ValueId(v)).collect(),
            outputs: outputs.iter().map(|&v| ValueId(v)).collect(),
            layer: None,
            device: 0,
        };
        Graph {
            nodes: vec![
                node(Op::Embed { table: WeightId(0), scale: 1.0 }, &[], &[0]),
                node(Op::Scale(2.0), &[0], &[1]),
                node(Op::Add, &[0, 1], &[2]),
            ],
            values: vec![ty; 3],
            weights: vec![crate::op::Weight {
                name: "table".into(),
                dtype: ingle_tensor::DType::F32,
                rows: 4,
                cols: 8,
                used: crate::op::WeightUse::Rows,
                offset: 0.0,
            }],
            outputs: vec![("y".into(), ValueId(2))],
            ..Graph::default()
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        assert!(check(&chain(), "test").is_ok());
        type Fault = fn(&mut Graph);
        let faults: [(&str, Fault); 8] = [
            ("before it is written", |g| g.nodes.swap(1, 2)),
            ("a second time", |g| g.nodes[2].outputs = vec![ValueId(1)]),
            ("reads value 9", |g| g.nodes[2].inputs[0] = ValueId(9)),
            ("reads value 0 of device 0", |g| g.nodes[1].device = 1),
            ("two equal f32 inputs", |g| g.nodes[2].inputs.truncate(1)),
            ("wants one f32 input;", |g| g.values[1].cols = 9),
            ("wants one f32 output", |g| g.weights[0].cols = 9),
            ("nothing writes it", |g| g.nodes.truncate(2)),
        ];
        for (what, fault) in faults {
            let mut graph = chain();
            fault(&mut graph);
            let error = check(&graph, "test").unwrap_err().to_string();
            assert!(
                error.contains(what) || what == "two equal f32 inputs" && error.contains("f32 input"),
                "{error}"
            );
        }
    }
}
