//! Quantization made explicit, then neighbours made one: each fusion behind its own gate, all with the same bits.

use crate::builder::Graph;
use crate::op::{Elem, Emit, LinearPart, Node, Op, ValueId, ValueType};
use crate::options::{Activations, PlanOptions};

/// Inserts the quantizations integer products need, then fuses what the options allow.
pub fn run(graph: &mut Graph, options: &PlanOptions) {
    if options.activations != Activations::F32 {
        insert_quantize(graph, options.activations);
    }
    if options.fuse_quantize {
        emit_quantized(graph);
    }
    group_linears(graph, options.fuse_qkv, options.fuse_gate_up);
    if options.fuse_rope_store {
        rope_store(graph);
    }
    if options.fuse_residual {
        residual(graph);
    }
    if options.fuse_gated {
        gated(graph);
    }
}

/// Products whose inputs take two digits even with int8 activations, where one scale covers [`WIDE`] columns: the part
/// of their names that tells their kind. What the activation gate found too coarse with one digit (`docs/numerics.md`).
const TWO_DIGITS: &[&str] = &["attn_q", "attn_k", "attn_v"];

/// Unit from which [`TWO_DIGITS`] holds.
const WIDE: usize = 256;

/// Element type of the input of a quantized product, from its format's unit and its kind.
fn element(node: &str, unit: usize, activations: Activations) -> Elem {
    let kind = node.rsplit('.').next().unwrap_or(node);
    match activations {
        Activations::Int8 if !(unit == WIDE && TWO_DIGITS.contains(&kind)) => Elem::Int8 { unit },
        _ => Elem::Int16 { unit },
    }
}

/// Before the first product that wants a value quantized: one `quantize` node with every element type that value is
/// wanted in.
fn insert_quantize(graph: &mut Graph, activations: Activations) {
    let mut elements: Vec<Vec<Elem>> = vec![Vec::new(); graph.values.len()];
    for node in &graph.nodes {
        if let Op::Linear { parts, .. } = &node.op {
            for part in parts {
                if let Some(unit) = graph.weight(part.weight).unit() {
                    let element = element(&node.name, unit, activations);
                    elements[node.inputs[part.input].0 as usize].push(element);
                }
            }
        }
    }
    for e in &mut elements {
        e.sort_unstable_by_key(|e| e.digits());
        e.dedup();
    }
    let mut quantized: Vec<Option<Vec<ValueId>>> = vec![None; elements.len()];
    for mut node in std::mem::take(&mut graph.nodes) {
        if let Op::Linear { parts, residual, .. } = &mut node.op {
            let tail: Vec<_> = if *residual { node.inputs.pop().into_iter().collect() } else { Vec::new() };
            let mut inputs: Vec<ValueId> = Vec::new();
            for part in parts {
                let source = node.inputs[part.input];
                let value = match graph.weights[part.weight.0 as usize].unit() {
                    None => source,
                    Some(unit) => {
                        let wanted = &elements[source.0 as usize];
                        let made = quantized[source.0 as usize].get_or_insert_with(|| {
                            let emit = Emit { f32: false, quantized: wanted.clone() };
                            let ty = graph.values[source.0 as usize];
                            let outputs: Vec<_> = emit
                                .elems()
                                .into_iter()
                                .map(|elem| {
                                    graph.values.push(ValueType { elem, ..ty });
                                    ValueId(graph.values.len() as u32 - 1)
                                })
                                .collect();
                            graph.nodes.push(Node {
                                name: format!("{}.quantize", node.name),
                                op: Op::Quantize { emit },
                                inputs: vec![source],
                                outputs: outputs.clone(),
                                layer: node.layer,
                                device: node.device,
                            });
                            outputs
                        });
                        let element = element(&node.name, unit, activations);
                        made[wanted.iter().position(|&e| e == element).expect("it was collected above")]
                    }
                };
                part.input = inputs.iter().position(|&v| v == value).unwrap_or_else(|| {
                    inputs.push(value);
                    inputs.len() - 1
                });
            }
            inputs.extend(tail);
            node.inputs = inputs;
        }
        graph.nodes.push(node);
    }
}

/// `quantize(f(x))` becomes `f` with quantized outputs; f's f32 output goes when nothing else reads it.
fn emit_quantized(graph: &mut Graph) {
    let mut uses = graph.uses();
    let mut nodes: Vec<Node> = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        if let Op::Quantize { emit: wanted } = &node.op {
            let source = node.inputs[0];
            let producer = nodes.iter_mut().find(|n| n.outputs == [source]);
            if let Some(producer) = producer.filter(|p| !matches!(p.op, Op::Quantize { .. }))
                && let Some(emit) = producer.op.emit_mut()
            {
                uses[source.0 as usize] -= 1;
                *emit = Emit { f32: uses[source.0 as usize] > 0, ..wanted.clone() };
                producer.outputs = if emit.f32 { vec![source] } else { Vec::new() };
                producer.outputs.extend(&node.outputs);
                continue;
            }
        }
        nodes.push(node);
    }
    graph.nodes = nodes;
}

/// Products of one layer that read what one node wrote become one node: gate and up when one gated unit reads both,
/// query, key and value otherwise.
fn group_linears(graph: &mut Graph, qkv: bool, gate_up: bool) {
    let mut writer = vec![usize::MAX; graph.values.len()];
    for (i, n) in graph.nodes.iter().enumerate() {
        for v in &n.outputs {
            writer[v.0 as usize] = i;
        }
    }
    let glu_of =
        |v: ValueId| graph.nodes.iter().position(|n| matches!(n.op, Op::Glu(_)) && n.inputs.contains(&v));
    // (source node, gated unit or none, index of the node it joins)
    let mut heads: Vec<(usize, Option<usize>, usize)> = Vec::new();
    let mut joins: Vec<Option<usize>> = vec![None; graph.nodes.len()];
    for (i, n) in graph.nodes.iter().enumerate() {
        let Op::Linear { residual: false, .. } = n.op else { continue };
        let source = writer[n.inputs[0].0 as usize];
        if n.layer.is_none() || n.inputs.iter().any(|v| writer[v.0 as usize] != source) {
            continue;
        }
        let glu = glu_of(n.outputs[0]);
        if !(if glu.is_some() { gate_up } else { qkv }) {
            continue;
        }
        match heads.iter().find(|h| h.0 == source && h.1 == glu) {
            Some(h) => joins[i] = Some(h.2),
            None => heads.push((source, glu, i)),
        }
    }
    for i in 0..joins.len() {
        let Some(head) = joins[i] else { continue };
        let Node { op: Op::Linear { parts, .. }, inputs, outputs, name, .. } = graph.nodes[i].clone() else {
            continue;
        };
        let node = &mut graph.nodes[head];
        node.name = format!("{}+{}", node.name, name.rsplit('.').next().unwrap_or(&name));
        node.outputs.extend(outputs);
        for part in parts {
            let value = inputs[part.input];
            let input = node.inputs.iter().position(|&v| v == value).unwrap_or_else(|| {
                node.inputs.push(value);
                node.inputs.len() - 1
            });
            if let Op::Linear { parts, .. } = &mut node.op {
                parts.push(LinearPart { input, ..part });
            }
        }
    }
    let mut i = 0;
    graph.nodes.retain(|_| {
        i += 1;
        joins[i - 1].is_none()
    });
}

/// rope(q), rope(k) and the store of k and v become one node where the store stood.
fn rope_store(graph: &mut Graph) {
    let uses = graph.uses();
    let mut i = 0;
    while i < graph.nodes.len() {
        let found = match graph.nodes[i].op {
            Op::KvStore { layer } => pattern(graph, i, layer, &uses),
            _ => None,
        };
        if let Some((k_at, q_at, node)) = found {
            graph.nodes[i] = node;
            let (first, second) = (k_at.min(q_at), k_at.max(q_at));
            graph.nodes.remove(second);
            graph.nodes.remove(first);
            i -= 2;
        }
        i += 1;
    }
}

fn pattern(graph: &Graph, store_at: usize, layer: usize, uses: &[usize]) -> Option<(usize, usize, Node)> {
    let store = &graph.nodes[store_at];
    let (k, v) = (store.inputs[0], store.inputs[1]);
    let k_at = graph.nodes.iter().position(|n| n.outputs == [k])?;
    let Op::Rope { rope, head_dim } = graph.nodes[k_at].op else { return None };
    let attention = graph.nodes[store_at..]
        .iter()
        .find(|n| matches!(&n.op, Op::Attention { spec, .. } if spec.layer == layer))?;
    let q = attention.inputs[0];
    let q_at = graph.nodes.iter().position(|n| n.outputs == [q])?;
    let sole = uses[q.0 as usize] == 1 && uses[k.0 as usize] == 1;
    if graph.nodes[q_at].op != (Op::Rope { rope, head_dim }) || q_at > store_at || !sole {
        return None;
    }
    let node = Node {
        name: store.name.replace("kv_store", "rope_store"),
        op: Op::RopeStore { rope, head_dim, layer },
        inputs: vec![graph.nodes[q_at].inputs[0], graph.nodes[k_at].inputs[0], v],
        outputs: vec![q],
        layer: store.layer,
        device: store.device,
    };
    Some((k_at, q_at, node))
}

/// add(x, W y) becomes the product with x added in its tail. A product with a scale keeps its sum apart: backends scale
/// what they have written.
fn residual(graph: &mut Graph) {
    let uses = graph.uses();
    let mut i = 0;
    while i < graph.nodes.len() {
        if graph.nodes[i].op == Op::Add {
            let inputs = graph.nodes[i].inputs.clone();
            let tail = [1, 0].into_iter().find_map(|side| {
                let v = inputs[side];
                let at = graph.nodes[..i].iter().position(|n| n.outputs == [v])?;
                let single = matches!(&graph.nodes[at].op, Op::Linear { parts, residual: false, .. }
                    if parts.len() == 1 && parts[0].scale.is_none());
                (single && uses[v.0 as usize] == 1).then_some((at, inputs[1 - side]))
            });
            if let Some((at, x)) = tail {
                let mut node = graph.nodes[at].clone();
                if let Op::Linear { residual, .. } = &mut node.op {
                    *residual = true;
                }
                node.inputs.push(x);
                node.outputs = graph.nodes[i].outputs.clone();
                graph.nodes[i] = node;
                graph.nodes.remove(at);
                continue;
            }
        }
        i += 1;
    }
}

/// act(gate) * up becomes the tail of the product that gives the two and nothing else.
fn gated(graph: &mut Graph) {
    let uses = graph.uses();
    let mut i = 0;
    while i < graph.nodes.len() {
        let Node { op, inputs, outputs, .. } = &graph.nodes[i];
        if let Op::Glu(unit) = op
            && inputs.iter().all(|v| uses[v.0 as usize] == 1)
            && let Some(at) = graph.nodes[..i].iter().position(|n| n.outputs == *inputs)
            && let Op::Linear { parts, residual: false, gated: None } = &graph.nodes[at].op
        {
            let op = Op::Linear { parts: parts.clone(), residual: false, gated: Some(unit.clone()) };
            graph.nodes[i] = Node { op, outputs: outputs.clone(), ..graph.nodes[at].clone() };
            graph.nodes.remove(at);
            continue;
        }
        i += 1;
    }
}
