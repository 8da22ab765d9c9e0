//! Programs as text and graphs as DOT, from the same objects that run.

use std::fmt::Write;

use crate::builder::Graph;
use crate::op::{Op, ValueType};
use crate::program::{Program, Slot};

fn ty(t: ValueType) -> String {
    let unit = t.elem.digits().map_or(String::new(), |(unit, _)| format!("/{unit}"));
    format!("[{:?}, {}] {}{unit}", t.rows, t.cols, t.elem.name())
}

fn weights(op: &Op, name: &dyn Fn(crate::op::WeightId) -> String) -> Vec<String> {
    match op {
        Op::Embed { table, .. } => vec![name(*table)],
        Op::RmsNorm { weight, .. } => vec![name(*weight)],
        Op::Linear { parts, .. } => {
            parts.iter().flat_map(|p| [Some(p.weight), p.bias].into_iter().flatten()).map(name).collect()
        }
        _ => Vec::new(),
    }
}

/// The graph in DOT: boxes are nodes, edges are values with their types.
pub fn graph_dot(graph: &Graph) -> String {
    let mut out = String::from("digraph ingle {\n  rankdir=TB; node [shape=box, fontname=monospace];\n");
    let mut writer = vec![None; graph.values.len()];
    for (i, n) in graph.nodes.iter().enumerate() {
        let weights = weights(&n.op, &|w| {
            let w = graph.weight(w);
            format!("{} {} [{}, {}]", w.name, w.dtype.name(), w.rows, w.cols)
        });
        let label: Vec<String> =
            std::iter::once(format!("{} ({})", n.name, n.op.name())).chain(weights).collect();
        let _ = writeln!(out, "  n{i} [label={:?}];", label.join("\n"));
        for v in &n.inputs {
            if let Some(w) = writer[v.0 as usize] {
                let _ = writeln!(out, "  n{w} -> n{i} [label={:?}];", ty(graph.ty(*v)));
            }
        }
        for v in &n.outputs {
            writer[v.0 as usize] = Some(i);
        }
    }
    for (i, (name, v)) in graph.outputs.iter().enumerate() {
        let _ = writeln!(out, "  out{i} [label={name:?}, shape=ellipse];");
        if let Some(w) = writer[v.0 as usize] {
            let _ = writeln!(out, "  n{w} -> out{i} [label={:?}];", ty(graph.ty(*v)));
        }
    }
    out.push_str("}\n");
    out
}

/// One line per group of KV layers, and one per step of a program: places, bytes and flops. Attention costs little by the
/// row and grows with the context: its line says what each cached token that a row sees adds, the softmax left out.
pub fn program_text(program: &Program) -> String {
    let slot = |s: &Slot| match s {
        Slot::Arena { offset, ty: t } => format!("{offset:#x} {}", ty(*t)),
        Slot::Output { index, ty: t } => format!("{} {}", program.outputs[*index].name, ty(*t)),
    };
    let slots = |s: &[Slot]| s.iter().map(slot).collect::<Vec<_>>().join(", ");
    let mut out = format!("program {:?} {:?}\n", program.key.bucket, program.key.options);
    for (g, group) in program.kv_groups.iter().enumerate() {
        let layers = (0..program.kv.len()).filter(|&l| program.kv[l].group == g);
        let layers = layers.map(|l| l.to_string()).collect::<Vec<_>>().join(" ");
        let keeps = group.window.map_or("all positions".into(), |w| format!("a window of {w} positions"));
        let _ = writeln!(out, "kv group {g} keeps {keeps}: layers {layers}");
    }
    for (i, segment) in program.segments.iter().enumerate() {
        let _ = writeln!(
            out,
            "segment {i} device {} arena {} bytes",
            segment.device, program.arena_bytes[segment.device]
        );
        for s in &segment.steps {
            let flops = match &s.op {
                Op::Attention { spec, .. } => {
                    let bytes = 2 * spec.kv_heads * program.key.options.kv.bytes(spec.head_dim);
                    let flops = 4 * spec.heads * spec.head_dim;
                    format!("a row, {bytes} B and {flops} flops more for each cached token it sees")
                }
                _ => format!("and {} flops a row", s.cost.row_flops),
            };
            let _ = writeln!(
                out,
                "  {:28} {:10} {} -> {} | weights {} B, {} B {flops}",
                s.name,
                s.op.name(),
                slots(&s.inputs),
                slots(&s.outputs),
                s.cost.weight_bytes,
                s.cost.row_bytes
            );
        }
    }
    out
}
