//! A case becomes a small graph over a small file: values enter through embedding tables whose rows are the inputs, so
//! that every backend runs the same program through the same four verbs.

use std::collections::HashMap;
use std::sync::Arc;

use ingle_graph::op::{AttentionSpec, RopeSpec};
use ingle_graph::{
    Backend, Bucket, Builder, FloatArithmetic, Graph, Inputs, KvGroup, KvInputs, KvPlan, PAGE, PlanKey,
    PlanOptions, ValueId, passes,
};
use ingle_tensor::{Checkpoint, DType, TensorInfo, gguf, quant};

use super::cases::Case;
use ingle_tests::Random;

/// Rows of every input table, and of those of products, which are wide.
const TABLE: usize = 1024;
const TABLE_OF_PRODUCTS: usize = 64;

/// Most tokens of a sequence in one step before the step under test.
const CHUNK: usize = 64;

/// A case made ready: a file, a graph, options, and the steps to run.
pub struct Rig {
    checkpoint: Arc<Checkpoint>,
    graph: Graph,
    options: PlanOptions,
    steps: Vec<Inputs>,
    kv: KvPlan,
    _file: tempfile::NamedTempFile,
}

/// Values with the edges an op must get right: zeros, tiny, large, and now and then a row that is not finite.
fn inputs(random: &mut Random, rows: usize, cols: usize, wild: bool) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * cols).map(|_| random.normal() * 2.0).collect();
    if wild {
        for (row, x) in x.chunks_mut(cols).enumerate() {
            match row % 16 {
                3 => x.fill(0.0),
                5 => x.iter_mut().for_each(|x| *x *= 1e-36),
                6 => x.iter_mut().for_each(|x| *x *= 1e30),
                9 => x[random.below(cols)] = f32::NAN,
                11 => x[random.below(cols)] = f32::INFINITY,
                12 => x.iter_mut().for_each(|x| *x = -0.0 * x.signum()),
                13 => x[random.below(cols)] *= 1e4,
                _ => {}
            }
        }
    }
    x
}

/// Rows of a tensor that differ; larger ones repeat them, since some encoders search for long.
const DISTINCT: usize = 96;

/// Bytes of a tensor: encoded normal values, or random integers, some of which f32 rounds.
pub fn tensor_bytes(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let row_bytes = dtype.row_bytes(cols).expect("whole blocks");
    let mut out = vec![0u8; row_bytes * rows.min(DISTINCT)];
    for out in out.chunks_mut(row_bytes) {
        let values: Vec<f32> = (0..cols).map(|_| random.normal() * 0.5).collect();
        if !quant::encode_row(dtype, &values, out) {
            out.fill_with(|| random.bits() as u8);
        }
    }
    out.iter().copied().cycle().take(row_bytes * rows).collect()
}

/// File under construction.
struct Draft {
    random: Random,
    tensors: Vec<(String, DType, Vec<usize>, Vec<u8>)>,
}

impl Draft {
    fn add(&mut self, name: &str, dtype: DType, shape: &[usize]) {
        let (rows, cols) = (shape[..shape.len() - 1].iter().product(), shape[shape.len() - 1]);
        let bytes = tensor_bytes(&mut self.random, dtype, rows, cols);
        self.tensors.push((name.into(), dtype, shape.into(), bytes));
    }

    /// A table of inputs.
    fn table(&mut self, name: &str, cols: usize, wild: bool) {
        self.table_of(name, TABLE, cols, wild);
    }

    fn table_of(&mut self, name: &str, rows: usize, cols: usize, wild: bool) {
        let x = inputs(&mut self.random, rows, cols, wild);
        let bytes = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensors.push((name.into(), DType::F32, vec![rows, cols], bytes));
    }

    fn write(&self) -> (tempfile::NamedTempFile, Arc<Checkpoint>) {
        let mut writer = gguf::Writer::new();
        writer.set("general.architecture", "case").expect("a fresh key");
        for (name, dtype, shape, bytes) in &self.tensors {
            writer.tensor(name, *dtype, shape, bytes.as_slice()).expect("a fresh tensor");
        }
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
        writer.write(&mut file.as_file()).expect("room for a small file");
        let checkpoint = Checkpoint::open(file.path()).expect("the file just written");
        (file, Arc::new(checkpoint))
    }
}

/// One step: for each part (sequence, past, n, first) `n` tokens from position `past` on, reading rows `first..` of the
/// input tables. Page tables are rings of `stride` pages.
fn step(parts: &[(usize, usize, usize, usize)], stride: usize) -> Inputs {
    let mut inputs = Inputs::default();
    let mut kv = KvInputs { table_stride: stride, ..KvInputs::default() };
    for &(sequence, past, n, first) in parts {
        while kv.tables.len() < (sequence + 1) * stride {
            // Pages of a sequence are scattered: 1 + sequence, then every few pages on.
            let s = kv.tables.len() / stride;
            let parts = parts.len().max(1);
            kv.tables.extend((0..stride).map(|p| (1 + s + p * parts) as u32));
        }
        for i in 0..n {
            let position = past + i;
            let page = kv.page(sequence as u32, position) as u32;
            inputs.wanted.push(inputs.tokens.len() as u32);
            inputs.tokens.push(((first + i) % TABLE) as u32);
            inputs.positions.push(position as u32);
            kv.cells.push(page * PAGE as u32 + (position % PAGE) as u32);
            inputs.sequences.push(sequence as u32);
        }
    }
    inputs.kv.push(kv);
    inputs
}

/// One row of a step, with its sequence alone.
fn row(inputs: &Inputs, i: usize) -> Inputs {
    let sequence = inputs.sequences[i] as usize;
    let kv = |kv: &KvInputs| KvInputs {
        cells: vec![kv.cells[i]],
        tables: kv.tables[sequence * kv.table_stride..][..kv.table_stride].to_vec(),
        table_stride: kv.table_stride,
    };
    Inputs {
        tokens: vec![inputs.tokens[i]],
        positions: vec![inputs.positions[i]],
        sequences: vec![0],
        kv: inputs.kv.iter().map(kv).collect(),
        wanted: vec![0],
        ..Inputs::default()
    }
}

impl Rig {
    /// The same rig with the other attention arithmetic.
    pub fn in_arithmetic(mut self, float: FloatArithmetic) -> Self {
        self.options.float = float;
        self
    }

    /// The same rig with a step for each row.
    pub fn one_by_one(mut self) -> Self {
        let rows = |inputs: &Inputs| (0..inputs.tokens.len()).map(|i| row(inputs, i)).collect::<Vec<_>>();
        self.steps = self.steps.iter().flat_map(rows).collect();
        self
    }

    /// Makes a case ready; the same case always gives the same rig. Layers with a window keep what it sees, in a ring.
    pub fn new(case: &Case) -> Self {
        Self::keeping(case, false)
    }

    /// The same, but every layer keeps every position: what a ring must be equal to.
    pub fn keeping_all(case: &Case) -> Self {
        Self::keeping(case, true)
    }

    fn keeping(case: &Case, all: bool) -> Self {
        let mut draft = Draft { random: Random::new(7), tensors: Vec::new() };
        let mut options = PlanOptions::default();
        let rows = case.rows();
        let mut steps = vec![step(&[(0, 0, rows, 0)], 4)];
        let mut pages = 64;
        match *case {
            Case::Linear { dtype, n, k, scaled, activations, .. } => {
                draft.table_of("x", TABLE_OF_PRODUCTS, k, true);
                draft.table_of("r", TABLE_OF_PRODUCTS, n, false);
                draft.add("w.weight", dtype, &[n, k]);
                if scaled {
                    draft.add("w.scale", DType::F32, &[1]);
                }
                draft.add("b", DType::F32, &[n]);
                options.activations = activations;
            }
            Case::Embed { dtype, cols, .. } => draft.add("x", dtype, &[TABLE, cols]),
            Case::Norm { cols, group, feeds, .. } => {
                draft.table("x", cols, true);
                draft.add("w", DType::F32, &[group]);
                draft.add("m", feeds.unwrap_or(DType::F32), &[19, cols]);
            }
            Case::Glu { cols, feeds, .. } => {
                draft.table("x", cols, true);
                draft.table("y", cols, true);
                draft.add("m", feeds.unwrap_or(DType::F32), &[19, cols]);
            }
            Case::Gated { dtype, n, k, feeds, .. } => {
                draft.table("x", k, true);
                draft.add("gate.weight", dtype, &[n, k]);
                draft.add("up.weight", dtype, &[n, k]);
                draft.add("m", feeds.unwrap_or(DType::F32), &[19, n]);
            }
            Case::Add { cols, .. } => {
                draft.table("x", cols, true);
                draft.table("y", cols, true);
            }
            Case::Scale { cols, .. }
            | Case::Softcap { cols, .. }
            | Case::Peaks { cols, .. }
            | Case::TakeRows { cols, .. } => {
                draft.table("x", cols, true);
            }
            Case::Rope { heads, head_dim, .. } => {
                draft.table("x", heads * head_dim, true);
                // Far and scattered positions.
                for (row, position) in steps[0].positions.iter_mut().enumerate() {
                    *position = (row as u32 * 37) % 128;
                }
            }
            Case::Attention { past, apart, heads, kv_heads, head_dim, kv, window, wild, .. } => {
                for (name, heads) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                    draft.table(name, heads * head_dim, wild == Some(name));
                }
                options.kv = kv;
                let last = if apart { 1 } else { rows };
                let group = KvGroup { window: window.filter(|_| !all) };
                let stride = group.ring(last.max(CHUNK), past + rows, PAGE);
                // As one sequence, or as `rows` sequences of lengths that differ.
                let lengths: Vec<usize> =
                    if apart { (0..rows).map(|i| past * (i + 1) / rows).collect() } else { vec![past] };
                steps.clear();
                let mut done = vec![0; lengths.len()];
                while done != lengths {
                    let parts: Vec<_> = (0..lengths.len())
                        .map(|s| (s, done[s], (lengths[s] - done[s]).min(CHUNK), s * 131 + done[s]))
                        .collect();
                    steps.push(step(&parts, stride));
                    done.iter_mut().zip(&parts).for_each(|(d, p)| *d += p.2);
                }
                let parts: Vec<_> =
                    (0..lengths.len()).map(|s| (s, done[s], last, s * 131 + done[s])).collect();
                steps.push(step(&parts, stride));
                pages = 2 + stride * lengths.len();
            }
        }
        let (file, checkpoint) = draft.write();
        let mut graph = graph(case, &checkpoint);
        if all {
            graph.kv_groups.iter_mut().for_each(|group| group.window = None);
        }
        let kv = KvPlan::uniform(&graph, pages, TABLE);
        Self { checkpoint, graph, options, steps, kv, _file: file }
    }

    /// Runs all steps; the outputs of every step, in order.
    pub fn run(&self, backend: &mut dyn Backend) -> Vec<Vec<f32>> {
        backend
            .load(&self.graph, self.checkpoint.clone(), &self.options, self.kv.clone())
            .expect("the device loads the case");
        let mut outputs = Vec::new();
        let mut programs = HashMap::new();
        for inputs in &self.steps {
            let bucket = Bucket::holding(inputs.tokens.len(), inputs.sequence_count(), inputs.wanted.len());
            let (prepared, n) = *programs.entry(bucket).or_insert_with(|| {
                let key = PlanKey { bucket, options: self.options.clone() };
                let program = Arc::new(passes::compile(&self.graph, &key).expect("the case compiles"));
                let n = program.outputs.len();
                (backend.prepare(program).expect("the device prepares the case"), n)
            });
            backend.run(prepared, inputs).expect("the device runs the case");
            for output in 0..n {
                outputs.push(backend.read(prepared, output).expect("the run's outputs").to_vec());
            }
        }
        outputs
    }
}

fn graph(case: &Case, checkpoint: &Checkpoint) -> Graph {
    let mut b = Builder::new(checkpoint);
    let enter = |b: &mut Builder<'_>, name: &str, cols: usize| {
        let rows = checkpoint.get(name).map_or(TABLE, TensorInfo::rows);
        b.embed(name, rows, cols, 1.0)
    };
    // A value that also feeds a product is quantized; its f32 result stays visible too.
    let feed = |b: &mut Builder<'_>, y: ValueId, cols: usize, feeds: Option<DType>| {
        if feeds.is_some() {
            let m = b.matrix("m", 19, cols);
            let z = b.linear("m", y, m, None);
            b.output("z", z);
        }
        y
    };
    b.set_layer(Some(0));
    let y = match *case {
        Case::Linear { n, k, bias, residual, .. } => {
            let x = enter(&mut b, "x", k);
            let (w, bias) = (b.matrix("w.weight", n, k), bias.then(|| b.vector("b", n, 0.0)));
            let y = b.linear("y", x, w, bias);
            if residual {
                let r = enter(&mut b, "r", n);
                b.add("sum", r, y)
            } else {
                y
            }
        }
        Case::Embed { cols, scale, .. } => b.embed("x", TABLE, cols, scale),
        Case::Norm { cols, group, feeds, .. } => {
            let x = enter(&mut b, "x", cols);
            let w = b.vector("w", group, 0.0);
            let y = b.rms_norm("y", x, w, 1e-5);
            feed(&mut b, y, cols, feeds)
        }
        Case::Glu { cols, act, feeds, .. } => {
            let (x, y) = (enter(&mut b, "x", cols), enter(&mut b, "y", cols));
            let y = b.glu("glu", act, x, y);
            feed(&mut b, y, cols, feeds)
        }
        Case::Gated { n, k, act, feeds, .. } => {
            let x = enter(&mut b, "x", k);
            let (gate, up) = (b.matrix("gate.weight", n, k), b.matrix("up.weight", n, k));
            let (gate, up) = (b.linear("gate", x, gate, None), b.linear("up", x, up, None));
            let y = b.glu("glu", act, gate, up);
            feed(&mut b, y, n, feeds)
        }
        Case::Add { cols, .. } => {
            let (x, y) = (enter(&mut b, "x", cols), enter(&mut b, "y", cols));
            b.add("sum", x, y)
        }
        Case::Scale { cols, .. } => {
            let x = enter(&mut b, "x", cols);
            b.scale("scaled", x, 0.3)
        }
        Case::Softcap { cols, .. } => {
            let x = enter(&mut b, "x", cols);
            b.softcap("capped", x, 2.5)
        }
        Case::Peaks { cols, span, .. } => {
            let x = enter(&mut b, "x", cols);
            b.peaks("peaks", x, span)
        }
        Case::TakeRows { cols, .. } => {
            let x = enter(&mut b, "x", cols);
            b.take_rows(x)
        }
        Case::Rope { heads, head_dim, pairs, style, .. } => {
            let inv_freq = (0..pairs).map(|i| (10000f64.powf(-(i as f64) / pairs as f64)) as f32).collect();
            let rope = b.rope_table(RopeSpec { style, inv_freq, scale: 1.25 });
            let x = enter(&mut b, "x", heads * head_dim);
            b.rope("rotated", x, rope, head_dim)
        }
        Case::Attention { heads, kv_heads, head_dim, window, softcap, .. } => {
            let q = enter(&mut b, "q", heads * head_dim);
            let k = enter(&mut b, "k", kv_heads * head_dim);
            let v = enter(&mut b, "v", kv_heads * head_dim);
            let layer = b.kv_layer(kv_heads, head_dim, window);
            let inv_freq = (0..head_dim / 2).map(|i| 1.0 / (1.0 + i as f32)).collect();
            let rope =
                b.rope_table(RopeSpec { style: ingle_graph::op::RopeStyle::Half, inv_freq, scale: 1.0 });
            let q = b.rope("rope_q", q, rope, head_dim);
            let k = b.rope("rope_k", k, rope, head_dim);
            b.kv_store(layer, k, v);
            let scale = 1.0 / (head_dim as f32).sqrt();
            b.attention(q, AttentionSpec { layer, heads, kv_heads, head_dim, scale, window, softcap })
        }
    };
    b.output("y", y);
    b.finish().expect("a well-formed case")
}

/// First place where two lists of outputs differ.
pub struct Difference {
    pub at: String,
    pub got: f32,
    pub want: f32,
}

/// Compares as bits, with NaN payloads canonical.
pub fn bits_equal(got: &[Vec<f32>], want: &[Vec<f32>]) -> Option<Difference> {
    let canonical = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    if got.len() != want.len() {
        let at = format!("{} outputs instead of {}", got.len(), want.len());
        return Some(Difference { at, got: f32::NAN, want: f32::NAN });
    }
    for (o, (got, want)) in got.iter().zip(want).enumerate() {
        if got.len() != want.len() {
            let at = format!("output {o}: {} elements instead of {}", got.len(), want.len());
            return Some(Difference { at, got: f32::NAN, want: f32::NAN });
        }
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            if canonical(got) != canonical(want) {
                return Some(Difference { at: format!("output {o} element {i}"), got, want });
            }
        }
    }
    None
}
