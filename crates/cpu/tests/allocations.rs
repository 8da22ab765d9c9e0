//! A step takes no memory from the allocator once its program is prepared, on any thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ingle_cpu::{Cpu, CpuOptions, Isa};
use ingle_graph::op::{RopeSpec, RopeStyle};
use ingle_graph::{
    Activation, AttentionSpec, Backend, Bucket, Builder, Graph, Inputs, KvInputs, KvPlan, PAGE, PlanKey,
    PlanOptions, passes,
};
use ingle_tensor::{Checkpoint, DType, gguf};

/// The system's allocator, counted.
struct Counted;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on as it came.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

const COLS: usize = 64;
const FFN: usize = 256;
const VOCABULARY: usize = 100;
const CONTEXT: usize = 640;

/// Tensors of a layer: name, type, rows (0 for a vector), columns. A packed format, one with sub-scales, plain floats.
const TENSORS: [(&str, DType, usize, usize); 9] = [
    ("embed", DType::Q8_0, VOCABULARY, COLS),
    ("norm", DType::F32, 0, COLS),
    ("q", DType::Q4_0, COLS, COLS),
    ("k", DType::Q4_0, COLS, COLS),
    ("v", DType::F16, COLS, COLS),
    ("o", DType::Q5_1, COLS, COLS),
    ("gate", DType::Q4_1, FFN, COLS),
    ("down", DType::Q6K, COLS, FFN),
    ("head", DType::Q8_0, VOCABULARY, COLS),
];

/// All zeros: what a step takes from the allocator does not depend on values.
fn checkpoint() -> (tempfile::TempDir, Arc<Checkpoint>) {
    let mut writer = gguf::Writer::new();
    for (name, dtype, rows, cols) in TENSORS {
        let shape = if rows == 0 { vec![cols] } else { vec![rows, cols] };
        let bytes = vec![0; dtype.row_bytes(cols).unwrap() * rows.max(1)];
        writer.tensor(name, dtype, &shape, bytes).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, writer.to_bytes()).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    (dir, checkpoint)
}

/// One layer of everything.
fn graph(checkpoint: &Checkpoint) -> Graph {
    let mut b = Builder::new(checkpoint);
    let inv_freq = (0..16).map(|i| 1.0 / (1 + i) as f32).collect();
    let rope = b.rope_table(RopeSpec { style: RopeStyle::Half, inv_freq, scale: 1.0 });
    let layer = b.kv_layer(2, 32, None);
    let norm = b.vector("norm", COLS, 0.0);
    let x = b.embed("embed", VOCABULARY, COLS, 1.0);
    b.set_layer(Some(0));
    let h = b.rms_norm("norm", x, norm, 1e-5);
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let weight = b.matrix(name, COLS, COLS);
        b.linear(name, h, weight, None)
    });
    let (q, k) = (b.rope("rope_q", q, rope, 32), b.rope("rope_k", k, rope, 32));
    b.kv_store(layer, k, v);
    let spec =
        AttentionSpec { layer, heads: 2, kv_heads: 2, head_dim: 32, scale: 0.2, window: None, softcap: None };
    let a = b.attention(q, spec);
    let o = b.matrix("o", COLS, COLS);
    let a = b.linear("o", a, o, None);
    let x = b.add("residual", x, a);
    let h = b.rms_norm("ffn_norm", x, norm, 1e-5);
    let gate = b.matrix("gate", FFN, COLS);
    let gate = b.linear("gate", h, gate, None);
    let h = b.glu("glu", Activation::Silu, gate, gate);
    let down = b.matrix("down", COLS, FFN);
    let h = b.linear("down", h, down, None);
    let x = b.add("residual2", x, h);
    b.set_layer(None);
    let r = b.take_rows(x);
    let head = b.matrix("head", VOCABULARY, COLS);
    let logits = b.linear("head", r, head, None);
    let logits = b.softcap("cap", logits, 30.0);
    b.output("logits", logits);
    let peaks = b.peaks("peaks", logits, 64);
    b.output("peaks", peaks);
    b.finish().unwrap()
}

/// Rows `(sequence, position)`; each sequence has pages of its own.
fn inputs(rows: &[(u32, u32)]) -> Inputs {
    let stride = CONTEXT / PAGE;
    let page = |sequence: u32, at: u32| 1 + sequence * stride as u32 + at;
    let sequences = 1 + rows.iter().map(|row| row.0).max().unwrap();
    let cell =
        |&(s, position): &(u32, u32)| page(s, position / PAGE as u32) * PAGE as u32 + position % PAGE as u32;
    Inputs {
        tokens: rows.iter().map(|row| row.1 % VOCABULARY as u32).collect(),
        positions: rows.iter().map(|row| row.1).collect(),
        sequences: rows.iter().map(|row| row.0).collect(),
        kv: vec![KvInputs {
            cells: rows.iter().map(cell).collect(),
            tables: (0..sequences).flat_map(|s| (0..stride as u32).map(move |at| page(s, at))).collect(),
            table_stride: stride,
        }],
        wanted: vec![rows.len() as u32 - 1],
        ..Inputs::default()
    }
}

/// Returns when all threads of a team have begun: a thread allocates when it starts, and a job waits for none.
fn all_begun(threads: usize) {
    let begun = || {
        let tasks = std::fs::read_dir("/proc/self/task").ok()?;
        let names = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        Some(names.filter(|name| name.starts_with("ingle-cpu-")).count())
    };
    while begun().is_some_and(|begun| begun + 1 < threads) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // From its name to its work, or to there where names cannot be seen.
    std::thread::sleep(Duration::from_millis(30));
}

#[test]
fn a_prepared_step_allocates_nothing() {
    let (_dir, checkpoint) = checkpoint();
    let graph = graph(&checkpoint);
    let options = PlanOptions::default();
    // A long prompt, decode of one at depth, two together, a prompt beside a decode.
    let steps = [
        inputs(&(0..300).map(|i| (0, i)).collect::<Vec<_>>()),
        inputs(&[(0, 300)]),
        inputs(&[(0, 301), (1, 0)]),
        inputs(&(1..70).map(|i| (1, i)).chain([(0, 302)]).collect::<Vec<_>>()),
    ];
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for threads in [1, 3] {
            let mut cpu = Cpu::new(&CpuOptions { threads, isa: Some(isa) }).unwrap();
            all_begun(threads);
            let kv = KvPlan::uniform(&graph, 1 + 2 * CONTEXT / PAGE, CONTEXT);
            cpu.load(&graph, checkpoint.clone(), &options, kv).unwrap();
            let mut counts = Vec::new();
            for step in &steps {
                let bucket = Bucket::holding(step.tokens.len(), step.sequence_count(), step.wanted.len());
                let key = PlanKey { bucket, options: options.clone() };
                let program = cpu.prepare(Arc::new(passes::compile(&graph, &key).unwrap())).unwrap();
                let before = ALLOCATIONS.load(Ordering::SeqCst);
                cpu.run(program, step).unwrap();
                cpu.read(program, 0).unwrap();
                counts.push(ALLOCATIONS.load(Ordering::SeqCst) - before);
            }
            assert_eq!(counts, [0; 4], "{isa}, {threads} threads");
        }
    }
}
