//! How a model file says its graph. The builder keeps errors and goes on, so that a model reads like its paper and
//! [`Builder::finish`] is the one place that can fail.

use ingle_tensor::{Checkpoint, DType, quant};

use crate::op::*;
use crate::program::{KvGroup, KvLayer};
use crate::{Error, Result, verify};

/// A model, declared once, with symbolic row counts.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Graph {
    /// Operations in build order, which is an execution order.
    pub nodes: Vec<Node>,
    /// Types of all values.
    pub values: Vec<ValueType>,
    /// Weights.
    pub weights: Vec<Weight>,
    /// Rotary embeddings.
    pub ropes: Vec<RopeSpec>,
    /// Attention layers.
    pub kv: Vec<KvLayer>,
    /// Groups of attention layers, by the positions they keep.
    pub kv_groups: Vec<KvGroup>,
    /// Named results.
    pub outputs: Vec<(String, ValueId)>,
    /// Named hidden states, results only with `PlanOptions::taps`.
    pub taps: Vec<(String, ValueId)>,
}

impl Graph {
    /// Type of a value.
    pub fn ty(&self, v: ValueId) -> ValueType {
        self.values[v.0 as usize]
    }

    /// A weight.
    pub fn weight(&self, w: WeightId) -> &Weight {
        &self.weights[w.0 as usize]
    }

    /// Adds a value.
    pub fn add_value(&mut self, ty: ValueType) -> ValueId {
        self.values.push(ty);
        ValueId(self.values.len() as u32 - 1)
    }

    /// How many times each value is read: by nodes and as a result.
    pub fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.values.len()];
        let results = self.outputs.iter().map(|(_, v)| v);
        for v in self.nodes.iter().flat_map(|n| &n.inputs).chain(results) {
            uses[v.0 as usize] += 1;
        }
        uses
    }

    /// Distinct tensors of the checkpoint this graph reads, with their stored bytes (a tensor used twice counts once).
    pub fn tensors(&self) -> Vec<(&str, usize)> {
        let mut seen = std::collections::HashSet::new();
        self.weights.iter().filter(|w| seen.insert(&w.name)).map(|w| (w.name.as_str(), w.bytes())).collect()
    }
}

/// Builds a [`Graph`] against the tensors of one checkpoint.
pub struct Builder<'a> {
    checkpoint: &'a Checkpoint,
    graph: Graph,
    layer: Option<usize>,
    errors: Vec<Error>,
}

/// Errors that are kept: enough for a person, and a bound for a file that lies about its layers.
const ERRORS_MAX: usize = 1000;

impl<'a> Builder<'a> {
    /// An empty graph whose weights are looked up in `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, graph: Graph::default(), layer: None, errors: Vec::new() }
    }

    /// Whether the checkpoint has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.has(name)
    }

    /// Nodes added from now on belong to this layer.
    pub fn set_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    fn fail(&mut self, error: Error) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(error);
        }
    }

    fn weight(&mut self, name: &str, shape: &[usize], used: WeightUse, offset: f32) -> WeightId {
        let (rows, cols) = match *shape {
            [rows, cols] => (rows, cols),
            _ => (1, shape.iter().product()),
        };
        let dtype = match self.checkpoint.require(name) {
            Ok(info) if info.shape != shape => {
                self.fail(Error::Weight {
                    name: name.into(),
                    what: format!("shape {:?}, but the model's settings ask for {shape:?}", info.shape),
                });
                info.dtype
            }
            Ok(info) => info.dtype,
            Err(e) => {
                self.fail(e.into());
                DType::F32
            }
        };
        if dtype.is_quantized() && used == WeightUse::Vector {
            let what = format!("type {dtype} cannot be used as a norm weight or bias: want a plain type");
            self.fail(Error::Weight { name: name.into(), what });
        }
        let weight = Weight { name: name.into(), dtype, rows, cols, used, offset };
        let weights = &mut self.graph.weights;
        let at = weights.iter().rposition(|w| *w == weight).unwrap_or_else(|| {
            weights.push(weight);
            weights.len() - 1
        });
        WeightId(at as u32)
    }

    /// The factor that the file has beside the matrix `name.weight`, as `name.scale`, if it has one. NVFP4 needs it: its
    /// own scales reach only so far.
    fn scale_of(&mut self, name: &str) -> Option<f32> {
        let checkpoint = self.checkpoint;
        let name = format!("{}.scale", name.strip_suffix(".weight")?);
        let info = checkpoint.get(&name)?;
        let mut scale = [0.0];
        if info.elements() == 1 && !info.dtype.is_quantized() {
            quant::decode_row(info.dtype, checkpoint.data(info), &mut scale);
        }
        if scale[0] == 0.0 || !scale[0].is_finite() {
            let (dtype, shape) = (info.dtype, &info.shape);
            let what = format!(
                "{dtype} of shape {shape:?}, but the scale of a matrix is one number, finite and not 0"
            );
            self.fail(Error::Weight { name, what });
        }
        Some(scale[0])
    }

    /// A matrix `[rows, cols]`: `rows` output features of `cols` inputs.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> WeightId {
        self.weight(name, &[rows, cols], WeightUse::Matrix, 0.0)
    }

    /// A vector of `len` elements; `offset` is added to each after widening to f32.
    pub fn vector(&mut self, name: &str, len: usize, offset: f32) -> WeightId {
        self.weight(name, &[len], WeightUse::Vector, offset)
    }

    /// Declares a rotary embedding.
    pub fn rope_table(&mut self, spec: RopeSpec) -> RopeId {
        let ropes = &mut self.graph.ropes;
        let at = ropes.iter().position(|r| *r == spec).unwrap_or_else(|| {
            ropes.push(spec);
            ropes.len() - 1
        });
        RopeId(at as u32)
    }

    /// Declares the keys and values of the next attention layer and returns its index. Positions that `window` no longer
    /// sees are not kept; layers of equal windows form a group.
    pub fn kv_layer(&mut self, heads: usize, head_dim: usize, window: Option<usize>) -> usize {
        let groups = &mut self.graph.kv_groups;
        let group = groups.iter().position(|g| g.window == window).unwrap_or_else(|| {
            groups.push(KvGroup { window });
            groups.len() - 1
        });
        self.graph.kv.push(KvLayer { heads, head_dim, group });
        self.graph.kv.len() - 1
    }

    fn node(&mut self, name: &str, op: Op, inputs: &[ValueId], outputs: &[ValueType]) -> Vec<ValueId> {
        let outputs: Vec<_> = outputs.iter().map(|&ty| self.graph.add_value(ty)).collect();
        self.graph.nodes.push(Node {
            name: match self.layer {
                Some(l) => format!("blk.{l}.{name}"),
                None => name.to_string(),
            },
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            layer: self.layer,
            device: 0,
        });
        outputs
    }

    fn map(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> ValueId {
        let ty = self.graph.ty(inputs[0]);
        self.node(name, op, inputs, &[ty])[0]
    }

    /// `[T, cols]`: the rows of table `[vocabulary, cols]` named by the step's tokens, times `scale`.
    pub fn embed(&mut self, table: &str, vocabulary: usize, cols: usize, scale: f32) -> ValueId {
        if self.scale_of(table).is_some() {
            let what = "its .scale tensor has no meaning for a table of which rows are looked up".into();
            self.fail(Error::Weight { name: table.into(), what });
        }
        let table = self.weight(table, &[vocabulary, cols], WeightUse::Rows, 0.0);
        self.node("embed", Op::Embed { table, scale }, &[], &[ValueType::f32(Rows::T, cols)])[0]
    }

    /// Root-mean-square norm over groups of `weight.len()` columns.
    pub fn rms_norm(&mut self, name: &str, x: ValueId, weight: WeightId, eps: f32) -> ValueId {
        let group = self.graph.weight(weight).cols;
        self.map(name, Op::RmsNorm { weight, eps, group, emit: Emit::plain() }, &[x])
    }

    /// W x (+ bias): `[n, cols_in]` to `[n, cols_out]`. The product is scaled if the file has a scale for the matrix.
    pub fn linear(&mut self, name: &str, x: ValueId, weight: WeightId, bias: Option<WeightId>) -> ValueId {
        let ty = ValueType::f32(self.graph.ty(x).rows, self.graph.weight(weight).rows);
        let scale = self.scale_of(&self.graph.weight(weight).name.clone());
        let parts = vec![LinearPart { weight, scale, bias, input: 0 }];
        self.node(name, Op::Linear { parts, residual: false, gated: None }, &[x], &[ty])[0]
    }

    /// a + b.
    pub fn add(&mut self, name: &str, a: ValueId, b: ValueId) -> ValueId {
        self.map(name, Op::Add, &[a, b])
    }

    /// x * factor.
    pub fn scale(&mut self, name: &str, x: ValueId, factor: f32) -> ValueId {
        self.map(name, Op::Scale(factor), &[x])
    }

    /// cap * tanh(x / cap).
    pub fn softcap(&mut self, name: &str, x: ValueId, cap: f32) -> ValueId {
        self.map(name, Op::Softcap(cap), &[x])
    }

    /// `[n, ceil(cols / span)]`: the largest of each `span` neighbouring columns.
    pub fn peaks(&mut self, name: &str, x: ValueId, span: usize) -> ValueId {
        let ty = self.graph.ty(x);
        let ty = ValueType { cols: ty.cols.div_ceil(span), ..ty };
        self.node(name, Op::Peaks { span }, &[x], &[ty])[0]
    }

    /// act(gate) * up.
    pub fn glu(&mut self, name: &str, act: Activation, gate: ValueId, up: ValueId) -> ValueId {
        self.map(name, Op::Glu(Gated { act, emit: Emit::plain() }), &[gate, up])
    }

    /// Rotary embedding of every head.
    pub fn rope(&mut self, name: &str, x: ValueId, rope: RopeId, head_dim: usize) -> ValueId {
        self.map(name, Op::Rope { rope, head_dim }, &[x])
    }

    /// Writes k and v of this step to the layer's pages.
    pub fn kv_store(&mut self, layer: usize, k: ValueId, v: ValueId) {
        self.node("kv_store", Op::KvStore { layer }, &[k, v], &[]);
    }

    /// Softmax attention of q over the layer's pages; comes after the layer's store.
    pub fn attention(&mut self, q: ValueId, spec: AttentionSpec) -> ValueId {
        self.map("attention", Op::Attention { spec, emit: Emit::plain() }, &[q])
    }

    /// The rows whose result is wanted: `[T, cols]` to `[R, cols]`.
    pub fn take_rows(&mut self, x: ValueId) -> ValueId {
        let ty = ValueType { rows: Rows::R, ..self.graph.ty(x) };
        self.node("take_rows", Op::TakeRows, &[x], &[ty])[0]
    }

    /// Names a result.
    pub fn output(&mut self, name: &str, v: ValueId) {
        self.graph.outputs.push((name.into(), v));
    }

    /// Names a hidden state, a result only when taps are asked for.
    pub fn tap(&mut self, name: &str, v: ValueId) {
        self.graph.taps.push((name.into(), v));
    }

    /// The finished, checked graph.
    ///
    /// # Errors
    /// The first missing or misshapen tensor, or a rule of the language that the model broke; a scale of a matrix that
    /// the file does not have (of a head that is the embedding table, say), since it would be ignored.
    pub fn finish(mut self) -> Result<Graph> {
        self.refuse_stray_scales();
        match self.errors.into_iter().next() {
            Some(e) => Err(e),
            None => verify::check(&self.graph, "build").map(|()| self.graph),
        }
    }

    /// The graph as far as it goes, unchecked, and what was missing or did not fit, in the order of the model: for who
    /// tells a person all of it. At most 1000 errors are kept.
    pub fn survey(mut self) -> (Graph, Vec<Error>) {
        self.refuse_stray_scales();
        (self.graph, self.errors)
    }

    fn refuse_stray_scales(&mut self) {
        let checkpoint = self.checkpoint;
        for tensor in checkpoint.tensors() {
            let matrix = tensor.name.strip_suffix(".scale").map(|name| format!("{name}.weight"));
            if let Some(matrix) = matrix.filter(|matrix| checkpoint.get(matrix).is_none()) {
                let what = format!("there is no {matrix:?} that it could scale");
                self.fail(Error::Weight { name: tensor.name.clone(), what });
            }
        }
    }
}
