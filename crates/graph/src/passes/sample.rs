//! Tokens are chosen by the program: one node more, which reads the results `logits` and `peaks`. A model knows of no
//! sampling, and a device that leaves it to the host gets no such node.

use crate::builder::Graph;
use crate::op::{Node, Op, Rows, ValueId, ValueType};
use crate::{Error, LOGITS_SPAN, Result};

/// Adds the result `sampled`.
///
/// # Errors
/// [`Error::Verify`]: a graph without the results that it reads.
pub fn run(graph: &mut Graph) -> Result<()> {
    let result = |name: &str| {
        let found = graph.outputs.iter().find(|(output, _)| output == name).map(|(_, v)| *v);
        let missing = || format!("no result {name} to choose tokens from");
        found.ok_or_else(|| Error::Verify { pass: "sample", node: "sample".into(), what: missing() })
    };
    let inputs: Vec<ValueId> = vec![result("logits")?, result("peaks")?];
    let sampled = graph.add_value(ValueType::f32(Rows::R, 1));
    graph.nodes.push(Node {
        name: "sample".into(),
        op: Op::Sample { span: LOGITS_SPAN },
        inputs,
        outputs: vec![sampled],
        layer: None,
        device: 0,
    });
    graph.outputs.push(("sampled".into(), sampled));
    Ok(())
}
