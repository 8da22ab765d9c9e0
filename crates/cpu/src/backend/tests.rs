//! Whole programs against the scalar reference, as bits.

use super::*;
use ingle_graph::op::{RopeSpec, RopeStyle, ValueId};
use ingle_graph::reference::Interpreter;
use ingle_graph::{Activation, AttentionSpec, Bucket, Builder, KvInputs, PAGE, PlanKey, ValueType, passes};
use ingle_tensor::{DType, gguf, quant};

/// Numbers that look like weights: about normal, from a counter.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        let mut unit = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        unit() + unit() + unit()
    }
}

/// One layer of everything, with odd sizes.
#[derive(Clone, Copy)]
struct Shape {
    cols: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotated: usize,
    style: RopeStyle,
    ffn: usize,
    act: Activation,
    window: Option<usize>,
    softcap: Option<f32>,
    matrix: DType,
}

const SHAPE: Shape = Shape {
    cols: 96,
    heads: 4,
    kv_heads: 2,
    head_dim: 40,
    rotated: 40,
    style: RopeStyle::Half,
    ffn: 160,
    act: Activation::Silu,
    window: None,
    softcap: None,
    matrix: DType::F32,
};

const VOCABULARY: usize = 61;
const POISONED: u32 = 60;

fn checkpoint(shape: &Shape, planted: impl Fn(&str, &mut [f32])) -> (tempfile::TempDir, Arc<Checkpoint>) {
    let Shape { cols, heads, kv_heads, head_dim, ffn, matrix, .. } = *shape;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let mut noise = Noise(7);
    let mut data: Vec<(&str, Vec<usize>, DType, Vec<u8>)> = Vec::new();
    let mut add = |name: &'static str, shape: &[usize], dtype: DType, center: f32, spread: f32| {
        let count = shape.iter().product();
        let mut x: Vec<f32> = (0..count).map(|_| center + spread * noise.next()).collect();
        if name == "embed" {
            x[POISONED as usize * cols + 3] = f32::NAN;
        }
        planted(name, &mut x);
        let row = *shape.last().unwrap();
        let mut bytes = vec![0; dtype.row_bytes(row).unwrap() * (count / row)];
        for (x, out) in x.chunks(row).zip(bytes.chunks_mut(dtype.row_bytes(row).unwrap())) {
            assert!(quant::encode_row(dtype, x, out));
        }
        data.push((name, shape.to_vec(), dtype, bytes));
    };
    add("embed", &[VOCABULARY, cols], DType::F32, 0.0, 2.0);
    add("norm", &[cols], DType::F32, 1.0, 0.3);
    add("head_norm", &[head_dim], DType::F16, 0.0, 0.3);
    add("q", &[q, cols], matrix, 0.0, 0.2);
    add("k", &[kv, cols], matrix, 0.0, 0.2);
    add("v", &[kv, cols], matrix, 0.0, 0.2);
    add("k_bias", &[kv], DType::F32, 0.0, 0.5);
    add("o", &[cols, q], DType::F16, 0.0, 0.2);
    add("gate", &[ffn, cols], matrix, 0.0, 0.3);
    add("up", &[ffn, cols], matrix, 0.0, 0.3);
    add("down", &[cols, ffn], matrix, 0.0, 0.2);
    add("head", &[VOCABULARY, cols], DType::BF16, 0.0, 0.2);
    let mut writer = gguf::Writer::new();
    for (name, shape, dtype, bytes) in &data {
        writer.tensor(name, *dtype, shape, bytes).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, writer.to_bytes()).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    (dir, checkpoint)
}

fn graph(shape: &Shape, checkpoint: &Checkpoint) -> Graph {
    let Shape { cols, heads, kv_heads, head_dim, ffn, .. } = *shape;
    let mut b = Builder::new(checkpoint);
    let pairs = shape.rotated / 2;
    let rope = b.rope_table(RopeSpec {
        style: shape.style,
        inv_freq: (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect(),
        scale: 1.25,
    });
    let layer = b.kv_layer(kv_heads, head_dim, shape.window);
    let matrices = [
        ("q", heads * head_dim, cols),
        ("k", kv_heads * head_dim, cols),
        ("v", kv_heads * head_dim, cols),
        ("o", cols, heads * head_dim),
        ("gate", ffn, cols),
        ("up", ffn, cols),
        ("down", cols, ffn),
        ("head", VOCABULARY, cols),
    ];
    let [q, k, v, o, gate, up, down, head] = matrices.map(|(name, rows, cols)| b.matrix(name, rows, cols));
    let (norm, head_norm) = (b.vector("norm", cols, 0.0), b.vector("head_norm", head_dim, 1.0));
    let bias = b.vector("k_bias", kv_heads * head_dim, 0.0);
    let x = b.embed("embed", VOCABULARY, cols, 1.5);
    b.set_layer(Some(0));
    let h = b.rms_norm("norm", x, norm, 1e-5);
    let (q, k, v) = (b.linear("q", h, q, None), b.linear("k", h, k, Some(bias)), b.linear("v", h, v, None));
    let q = b.rms_norm("q_norm", q, head_norm, 1e-6);
    let (q, k) = (b.rope("q_rope", q, rope, head_dim), b.rope("k_rope", k, rope, head_dim));
    b.kv_store(layer, k, v);
    let spec = AttentionSpec {
        layer,
        heads,
        kv_heads,
        head_dim,
        scale: 0.21,
        window: shape.window,
        softcap: shape.softcap,
    };
    let a = b.attention(q, spec);
    let a = b.linear("o", a, o, None);
    let x = b.add("residual", x, a);
    let h = b.rms_norm("ffn_norm", x, norm, 1e-5);
    let (gate, up) = (b.linear("gate", h, gate, None), b.linear("up", h, up, None));
    let h = b.glu("glu", shape.act, gate, up);
    let h = b.linear("down", h, down, None);
    let x = b.add("residual2", x, h);
    b.set_layer(None);
    b.output("hidden", x);
    let r = b.take_rows(x);
    let r = b.rms_norm("last_norm", r, norm, 1e-5);
    let r: ValueId = b.linear("head", r, head, None);
    let r = b.softcap("cap", r, 30.0);
    let r = b.scale("scale", r, 0.77);
    b.output("logits", r);
    b.finish().unwrap()
}

/// Rows of one step: token, position, sequence. Pages are scattered over the pool.
fn inputs(rows: &[(u32, u32, u32)], wanted: &[u32]) -> Inputs {
    let stride = 12;
    let page = |sequence: u32, at: u32| 1 + (at * 5 + sequence * 3) % 12 + sequence * 12;
    let cell = |&(_, position, sequence): &(u32, u32, u32)| {
        page(sequence, position / PAGE as u32) * PAGE as u32 + position % PAGE as u32
    };
    Inputs {
        tokens: rows.iter().map(|r| r.0).collect(),
        positions: rows.iter().map(|r| r.1).collect(),
        sequences: rows.iter().map(|r| r.2).collect(),
        kv: vec![KvInputs {
            cells: rows.iter().map(cell).collect(),
            tables: (0..3).flat_map(|s| (0..stride as u32).map(move |at| page(s, at))).collect(),
            table_stride: stride,
        }],
        wanted: wanted.to_vec(),
        ..Inputs::default()
    }
}

/// A prompt of 300 in two chunks, then two short ones, then steps that mix sequences, lengths and a prompt.
fn steps() -> Vec<Inputs> {
    let token = |i: u32| i * 37 % POISONED;
    let run = |sequence, from, to| (from..to).map(move |i| (token(i + 11 * sequence), i, sequence));
    let chunk =
        |sequence, from, to, wanted: &[u32]| inputs(&run(sequence, from, to).collect::<Vec<_>>(), wanted);
    vec![
        chunk(0, 0, 37, &[36]),
        chunk(0, 37, 290, &[]),
        chunk(1, 0, 5, &[0, 4]),
        inputs(&[(7, 290, 0), (9, 5, 1)], &[1, 0]),
        inputs(&run(2, 0, 9).chain([(3, 291, 0), (4, 6, 1)]).collect::<Vec<_>>(), &[8, 9, 10]),
        chunk(0, 292, 293, &[0]),
        inputs(&[(POISONED, 9, 2), (5, 7, 1)], &[0, 1]),
        inputs(&[(8, 10, 2), (5, 8, 1)], &[0, 1]),
    ]
}

fn kv() -> KvPlan {
    KvPlan { pages: vec![40], context: 384 }
}

/// Results of every step, outputs one after the other.
fn results(
    backend: &mut dyn Backend,
    graph: &Graph,
    checkpoint: &Arc<Checkpoint>,
    options: &PlanOptions,
) -> Vec<f32> {
    backend.load(graph, checkpoint.clone(), options, kv()).unwrap();
    let mut all = Vec::new();
    for step in steps() {
        let bucket = Bucket::holding(step.tokens.len(), 3, step.wanted.len());
        let key = PlanKey { bucket, options: options.clone() };
        let program = backend.prepare(Arc::new(passes::compile(graph, &key).unwrap())).unwrap();
        backend.run(program, &step).unwrap();
        all.extend_from_slice(backend.read(program, 0).unwrap());
        all.extend_from_slice(backend.read(program, 1).unwrap());
    }
    all
}

/// Positions where two results differ as bits; all NaN are one.
fn differences(a: &[f32], b: &[f32]) -> usize {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan())).count()
}

fn saturated(backend: &dyn Backend) -> u64 {
    backend.paths().iter().find(|p| p.path == PathCount::SATURATED).unwrap().count
}

fn check(shape: &Shape, options: &PlanOptions, teams: &[usize]) {
    let (_dir, checkpoint) = checkpoint(shape, |_, _| {});
    let graph = graph(shape, &checkpoint);
    let mut reference = Interpreter::new();
    let want = results(&mut reference, &graph, &checkpoint, options);
    assert!(want.iter().filter(|x| x.is_nan()).count() > 0, "the planted NaN has vanished");
    assert!(want.iter().filter(|x| x.is_finite()).count() > want.len() / 2);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for &threads in teams {
            let mut cpu = Cpu::new(&CpuOptions { threads, isa: Some(isa) }).unwrap();
            let got = results(&mut cpu, &graph, &checkpoint, options);
            assert_eq!(differences(&got, &want), 0, "{isa}, {threads} threads, of {} values", want.len());
            assert_eq!(saturated(&cpu), saturated(&reference), "{isa}, {threads} threads");
        }
    }
}

#[test]
fn programs_give_the_reference_bits_on_every_instruction_set_and_team() {
    check(&SHAPE, &PlanOptions::default(), &[1, 2, 3]);
}

#[test]
fn unfused_programs_too() {
    check(&SHAPE, &PlanOptions::default().unfused(), &[2]);
}

#[test]
fn head_sizes_styles_windows_caps_and_activations() {
    let shapes = [
        Shape { head_dim: 64, heads: 3, kv_heads: 1, rotated: 64, style: RopeStyle::Interleaved, ..SHAPE },
        Shape { head_dim: 128, heads: 2, rotated: 100, window: Some(70), act: Activation::GeluTanh, ..SHAPE },
        Shape { head_dim: 256, heads: 5, kv_heads: 1, rotated: 64, softcap: Some(3.0), ..SHAPE },
        Shape { head_dim: 20, rotated: 6, style: RopeStyle::Interleaved, act: Activation::GeluErf, ..SHAPE },
        Shape { cols: 101, ffn: 37, matrix: DType::BF16, window: Some(1), ..SHAPE },
    ];
    for shape in shapes {
        check(&shape, &PlanOptions::default(), &[2]);
    }
}

#[test]
fn every_kv_type() {
    for kv in [KvType::BF16, KvType::F32, KvType::Q8_0] {
        for head_dim in [40, 64] {
            let options = PlanOptions { kv, ..PlanOptions::default() };
            check(&Shape { head_dim, rotated: head_dim, ..SHAPE }, &options, &[2]);
        }
    }
}

#[test]
fn quantized_matrices_with_every_activation() {
    let shape = Shape { ffn: 256, cols: 256, matrix: DType::Q8_0, ..SHAPE };
    for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
        for options in [PlanOptions::default(), PlanOptions::default().unfused()] {
            check(&shape, &PlanOptions { activations, ..options }, &[2]);
        }
    }
    check(&Shape { matrix: DType::Q4K, ..shape }, &PlanOptions::default(), &[2]);
}

#[test]
fn large_keys_saturate_and_are_counted() {
    let huge = |name: &str, x: &mut [f32]| {
        if name == "v" {
            x.iter_mut().for_each(|x| *x *= 3e5);
        }
    };
    for (kv, at_all) in [(KvType::F16, true), (KvType::BF16, false)] {
        let (_dir, checkpoint) = checkpoint(&SHAPE, huge);
        let graph = graph(&SHAPE, &checkpoint);
        let options = PlanOptions { kv, ..PlanOptions::default() };
        let mut reference = Interpreter::new();
        let mut cpu = Cpu::new(&CpuOptions { threads: 2, isa: None }).unwrap();
        let want = results(&mut reference, &graph, &checkpoint, &options);
        let got = results(&mut cpu, &graph, &checkpoint, &options);
        assert_eq!((differences(&got, &want), saturated(&cpu)), (0, saturated(&reference)));
        assert_eq!(saturated(&cpu) > 0, at_all, "{kv}");
    }
}

/// The comparison of this file sees one unit in the last place of one weight.
#[test]
fn one_last_place_is_seen() {
    let nudge = |name: &str, x: &mut [f32]| {
        if name == "norm" {
            x[5] = f32::from_bits(x[5].to_bits() + 1);
        }
    };
    let (_dir, plain) = checkpoint(&SHAPE, |_, _| {});
    let (_other, nudged) = checkpoint(&SHAPE, nudge);
    let graph = graph(&SHAPE, &plain);
    let options = PlanOptions::default();
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    let want = results(&mut cpu, &graph, &plain, &options);
    let got = results(&mut cpu, &graph, &nudged, &options);
    assert!(differences(&got, &want) > 0);
    let mut bumped = want.clone();
    bumped[9] = f32::from_bits(bumped[9].to_bits() ^ 1);
    assert_eq!(differences(&bumped, &want), 1);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (_dir, checkpoint) = checkpoint(&SHAPE, |_, _| {});
    let graph = graph(&SHAPE, &checkpoint);
    let options = PlanOptions::default();
    let key = |options: &PlanOptions| PlanKey { bucket: Bucket::holding(4, 3, 1), options: options.clone() };
    let program = Arc::new(passes::compile(&graph, &key(&options)).unwrap());
    let mut cpu = Cpu::new(&CpuOptions { threads: 2, isa: None }).unwrap();
    let says = |error: Error, what: &str| assert!(error.to_string().contains(what), "{error}");
    says(cpu.prepare(program.clone()).unwrap_err(), "call load first");
    cpu.load(&graph, checkpoint.clone(), &options, kv()).unwrap();
    says(cpu.read(Prepared(0), 0).unwrap_err(), "has not run");
    let f32_keys = PlanOptions { kv: KvType::F32, ..options.clone() };
    let other = Arc::new(passes::compile(&graph, &key(&f32_keys)).unwrap());
    says(cpu.prepare(other).unwrap_err(), "a program for f32 keys, loaded for f16");
    let mut split = (*program).clone();
    split.segments[0].device = 1;
    says(cpu.prepare(Arc::new(split)).unwrap_err(), "is placed on device 1");
    let mut foreign = (*program).clone();
    foreign.weights.pop();
    says(cpu.prepare(Arc::new(foreign)).unwrap_err(), "not of the loaded graph");
    let ready = cpu.prepare(program.clone()).unwrap();
    says(cpu.run(ready, &inputs(&[(1, 384, 0)], &[0])).unwrap_err(), "position 384 of a context of 384");
    says(cpu.read(ready, 0).unwrap_err(), "has not run");
    cpu.run(ready, &inputs(&[(1, 0, 0)], &[0])).unwrap();
    assert_eq!(cpu.read(ready, 1).unwrap().len(), VOCABULARY);
    says(cpu.read(ready, 2).unwrap_err(), "output 2 of 2");
    assert_eq!(ValueType::f32(Rows::R, VOCABULARY), program.outputs[1].ty);
}

#[test]
fn every_step_is_counted_and_timed() {
    let (_dir, checkpoint) = checkpoint(&SHAPE, |_, _| {});
    let graph = graph(&SHAPE, &checkpoint);
    let options = PlanOptions::default();
    let key = PlanKey { bucket: Bucket::holding(1, 3, 1), options: options.clone() };
    let program = Arc::new(passes::compile(&graph, &key).unwrap());
    let mut cpu = Cpu::new(&CpuOptions::default()).unwrap();
    cpu.load(&graph, checkpoint, &options, kv()).unwrap();
    let ready = cpu.prepare(program.clone()).unwrap();
    cpu.run(ready, &inputs(&[(1, 0, 0)], &[0])).unwrap();
    assert!(cpu.profile().is_none(), "nobody asked");
    cpu.set_profile(true);
    cpu.run(ready, &inputs(&[(1, 0, 0)], &[0])).unwrap();
    let profile = cpu.profile().unwrap();
    assert_eq!(profile.program, program);
    assert_eq!(profile.times.len(), program.steps().count());
    // The embedding, and in a layer: query, key and value; attention; its output; gate and up; down. Then the row wanted,
    // the head and what follows it.
    assert_eq!(profile.nodes, 1 + 5 * program.kv_groups.len() + 2);
    assert!(profile.times.iter().all(|time| 0.0 <= time.waited && time.waited <= time.seconds));
    let counted: u64 =
        cpu.paths().iter().filter(|path| path.path != PathCount::SATURATED).map(|path| path.count).sum();
    assert_eq!(counted, 2 * program.steps().count() as u64);
    let attention = format!("attention.{}", cpu.isa());
    assert!(cpu.paths().iter().any(|path| path.path == attention && path.count == 2));
}

/// `amx3` asks for the mode, for tiles, and for queries enough to a key-value head.
#[test]
fn the_arithmetic_of_attention_follows_mode_tiles_and_queries() {
    let of = |isa: Isa, numerics, kv_heads| {
        let shape = Shape { kv_heads, ..SHAPE };
        let (_dir, checkpoint) = checkpoint(&shape, |_, _| {});
        isa.float_for(numerics, &graph(&shape, &checkpoint))
    };
    use ingle_graph::FloatArithmetic::{Amx3, F32x32};
    use ingle_graph::Numerics::{Exact, Fast};
    assert_eq!(of(Isa::Amx, Fast, 1), Amx3);
    assert_eq!(of(Isa::Amx, Exact, 1), F32x32);
    assert_eq!(of(Isa::Avx512, Fast, 1), F32x32);
    for kv_heads in [2, 4] {
        assert_eq!(of(Isa::Amx, Fast, kv_heads), F32x32, "{} queries to a head", SHAPE.heads / kv_heads);
    }
}
