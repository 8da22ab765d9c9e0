//! The activation gate of NUMERICS.md section 2: what rounding activations to int8 costs, beside what rounding the
//! weights cost.
//!
//! For a quantized model file, the same text is run with int8, int16 and f32 activations, and on float weights. The
//! published float weights of a file are not always at hand, so they are drawn: each weight uniformly from the cell of
//! values that its code stands for (the code, give or take half a step, which is what rounding to nearest leaves open).
//! The planted model goes the other way: float weights with outlier channels are made first, then quantized.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use ingle_cpu::{Cpu, CpuOptions};
use ingle_engine::batch::{self, Part};
use ingle_engine::kv::Span;
use ingle_engine::runner::{Runner, kv_plan_of_all};
use ingle_engine::text::{Specials, Tokenizer};
use ingle_graph::{Activations, Inputs, PlanOptions};
use ingle_models::Model;
use ingle_tensor::{Checkpoint, DType, Source, gguf, quant};
use ingle_tests::Random;

type Failure = Box<dyn std::error::Error>;

/// Tokens of one step.
const CHUNK: usize = 64;
/// Tokens of one independent passage.
const PASSAGE: usize = 512;
/// Largest share of the weights' divergence that activations may add.
const LIMIT: f64 = 0.10;

/// Runs the gate on the files and the text given; the last line says whether every file passed.
pub fn run(arguments: &[String]) -> ExitCode {
    match arguments {
        [text, models @ ..] if !models.is_empty() => match gate(Path::new(text), models) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(e) => {
                eprintln!("error: {e}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: cargo run --release --bin xtask -- gate TEXT MODEL.gguf...");
            ExitCode::from(2)
        }
    }
}

fn gate(text: &Path, models: &[String]) -> Result<bool, Failure> {
    let text = std::fs::read_to_string(text)?;
    println!("mean KL per token in nats; limit: int8 at most {LIMIT} of weights");
    println!(
        "{:44}{:>8}{:>11}{:>11}{:>8}{:>11}{:>8}",
        "model", "tokens", "weights", "int8", "share", "int16", "share"
    );
    let mut passed = true;
    for path in models {
        let path = Path::new(path);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let checkpoint = Arc::new(Checkpoint::open(path)?);
        let tokens = tokenizer(&checkpoint)?.encode_prompt(&text, Specials::AsText)?;
        let float = rewrite(&checkpoint, |info, random| {
            (DType::F32, drawn(info.dtype, checkpoint.data(info), info.elements(), random))
        })?;
        passed &= row(&name, &checkpoint, &open(&float)?, &tokens)?;
        if checkpoint.tensors().iter().all(|t| t.elements() < 1 << 18) {
            for plant in PLANTS {
                for dtype in [None, Some(DType::Q4_0)] {
                    passed &= planted(&checkpoint, plant, dtype, &tokens)?;
                }
            }
        }
    }
    println!("{}", if passed { "passed" } else { "FAILED: see the shares above" });
    Ok(passed)
}

/// Strength of a planted channel. Times a normal variable it gives rows whose largest value is over 16 times the rms of
/// the rest in a third of all rows and over 32 times in a twentieth, which is what both real models show.
const STRENGTH: f32 = 16.0;

/// One place for outlier channels: what writes them grows, what reads them shrinks as much, so that in exact arithmetic
/// the model computes the same.
struct Plant {
    /// The products that read the channels.
    what: &'static str,
    /// Tensors whose elements (vectors) or rows (matrices) are the channels.
    grow: &'static [&'static str],
    /// Tensors whose columns read them.
    shrink: &'static [&'static str],
    channels: &'static [usize],
}

const PLANTS: &[Plant] = &[
    Plant {
        what: "attn_q, attn_k, attn_v",
        grow: &["attn_norm"],
        shrink: &["attn_q.", "attn_k.", "attn_v."],
        channels: &[11, 100],
    },
    Plant { what: "attn_output", grow: &["attn_v."], shrink: &["attn_output"], channels: &[7, 71] },
    Plant {
        what: "ffn_gate, ffn_up",
        grow: &["ffn_norm"],
        shrink: &["ffn_gate", "ffn_up"],
        channels: &[11, 100],
    },
    Plant { what: "ffn_down", grow: &["ffn_up"], shrink: &["ffn_down"], channels: &[7, 130] },
];

/// Outlier channels are planted in the model's weights drawn as floats; that model is quantized and compared with itself.
fn planted(
    base: &Arc<Checkpoint>,
    plant: &Plant,
    dtype: Option<DType>,
    tokens: &[u32],
) -> Result<bool, Failure> {
    let Plant { what, grow, shrink, channels } = *plant;
    let settings = Model::open(base)?.config;
    let (head_dim, group) = (settings.head_dim, settings.heads / settings.kv_heads);
    let float = rewrite(base, |info, random| {
        let mut values = drawn(info.dtype, base.data(info), info.elements(), random);
        let is = |names: &[&str]| names.iter().any(|name| info.name.contains(name));
        let cols = info.cols();
        if is(grow) {
            let width = values.len() / if info.shape.len() == 1 { cols } else { info.rows() };
            for &channel in channels {
                values[channel * width..(channel + 1) * width].iter_mut().for_each(|v| *v *= STRENGTH);
            }
        }
        if is(shrink) {
            // A channel of a value head is read once for each query head of its group.
            let copies = if what == "attn_output" { group } else { 1 };
            let read = |channel: usize, copy: usize| {
                if copies == 1 {
                    channel
                } else {
                    (channel / head_dim * group + copy) * head_dim + channel % head_dim
                }
            };
            for row in values.chunks_exact_mut(cols) {
                for &channel in channels {
                    (0..copies).for_each(|copy| row[read(channel, copy)] /= STRENGTH);
                }
            }
        }
        (DType::F32, values)
    })?;
    let name = format!("outliers in {what}, {}", dtype.map_or("q4_k and q6_k".into(), |d| d.to_string()));
    let float = open(&float)?;
    let quantized = rewrite(&float, |info, _| {
        let mut values = vec![0.0; info.elements()];
        quant::decode_row(info.dtype, float.data(info), &mut values);
        let six = info.name.contains("ffn_down") || info.name.contains("attn_v");
        let kind = dtype.unwrap_or(if six { DType::Q6K } else { DType::Q4K });
        let matrix = info.shape.len() == 2 && info.cols().is_multiple_of(kind.block_len());
        (if matrix { kind } else { DType::F32 }, values)
    })?;
    row(&name, &open(&quantized)?, &float, tokens)
}

/// One line of the table: the file against itself under each activation type and against the float weights.
fn row(name: &str, file: &Arc<Checkpoint>, float: &Arc<Checkpoint>, tokens: &[u32]) -> Result<bool, Failure> {
    let mut arms = [
        runner(file, Activations::F32)?,
        runner(float, Activations::F32)?,
        runner(file, Activations::Int8)?,
        runner(file, Activations::Int16)?,
    ];
    let [mut weights, mut int8, mut int16] = [0.0; 3];
    for passage in tokens.chunks(PASSAGE) {
        for from in (0..passage.len()).step_by(CHUNK) {
            let to = (from + CHUNK).min(passage.len());
            let mut rows = arms.iter_mut().map(|arm| logits(arm, passage, from, to));
            let mut next = || rows.next().expect("four arms");
            let (reference, original, eight, sixteen) = (next()?, next()?, next()?, next()?);
            let columns = reference.len() / (to - from);
            for at in (0..reference.len()).step_by(columns) {
                let [r, o, e, s] = [&reference, &original, &eight, &sixteen].map(|l| &l[at..at + columns]);
                weights += divergence(r, o);
                int8 += divergence(e, r);
                int16 += divergence(s, r);
            }
        }
    }
    let n = tokens.len() as f64;
    println!(
        "{name:44}{:8}{:11.6}{:11.6}{:7.1}%{:11.7}{:7.2}%",
        tokens.len(),
        weights / n,
        int8 / n,
        100.0 * int8 / weights,
        int16 / n,
        100.0 * int16 / weights
    );
    Ok(int8 <= LIMIT * weights)
}

fn runner(checkpoint: &Arc<Checkpoint>, activations: Activations) -> Result<Runner, Failure> {
    let model = Arc::new(Model::open(checkpoint)?);
    let options = PlanOptions { activations, ..PlanOptions::default() };
    let cpu = Box::new(Cpu::new(&CpuOptions::default())?);
    let kv = kv_plan_of_all(&model.graph, PASSAGE, 1);
    Ok(Runner::new(cpu, model, checkpoint.clone(), options, kv)?)
}

/// Logits of tokens `from..to`: `[to - from, vocabulary]`.
fn logits(runner: &mut Runner, tokens: &[u32], from: usize, to: usize) -> Result<Vec<f32>, Failure> {
    let spans = Span::whole(runner.kv());
    let strides: Vec<usize> = spans.iter().map(|span| span.pages.len()).collect();
    let part = Part { tokens, computed: from, n: to - from, spans: &spans, all_rows: true };
    let mut inputs = Inputs::default();
    batch::fill(&mut inputs, &[part], &strides);
    runner.run(&inputs)?;
    Ok(runner.output("logits")?.to_vec())
}

/// KL(p || q) of two rows of logits, in nats, in f64.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let normal = |x: &[f32]| {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = x.iter().map(|&x| f64::from(x - max).exp()).sum();
        f64::from(max) + sum.ln()
    };
    let (np, nq) = (normal(p), normal(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (lp, lq) = (f64::from(p) - np, f64::from(q) - nq);
        lp.exp() * (lp - lq)
    });
    terms.sum()
}

/// The values of a tensor, each drawn from the cell its code stands for; float tensors as they are.
fn drawn(dtype: DType, bytes: &[u8], elements: usize, random: &mut Random) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    quant::decode_row(dtype, bytes, &mut values);
    let Some(format) = quant::format(dtype) else { return values };
    let mut view = quant::UnitView::default();
    for (block, values) in
        bytes.chunks_exact(dtype.block_bytes()).zip(values.chunks_exact_mut(dtype.block_len()))
    {
        for (unit, values) in values.chunks_exact_mut(format.unit).enumerate() {
            (format.unit_view)(block, unit, &mut view);
            // Sub-scales cover 16 or 32 values, and every code of such a group is a multiple of the group's step.
            for (w, values) in view.w[..view.len].chunks(16).zip(values.chunks_mut(16)) {
                let step = view.d.abs() * f32::from(w.iter().fold(0, |a, &b| gcd(a, b.unsigned_abs())));
                values.iter_mut().for_each(|v| *v += step * (uniform(random) - 0.5));
            }
        }
    }
    values
}

fn gcd(a: u16, b: u16) -> u16 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Uniform in [0, 1).
fn uniform(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1u64 << 24) as f32
}

/// The same model with other tensors: `make` gives the type and the values of each.
fn rewrite(
    from: &Checkpoint,
    mut make: impl FnMut(&ingle_tensor::TensorInfo, &mut Random) -> (DType, Vec<f32>),
) -> Result<tempfile::NamedTempFile, Failure> {
    let Source::Gguf(metadata) = from.source() else { return Err("the gate reads GGUF files".into()) };
    let mut writer = gguf::Writer::new();
    writer.copy(metadata, &["split.no", "split.count", "split.tensors.count"])?;
    for (i, info) in from.tensors().iter().enumerate() {
        let (dtype, values) = make(info, &mut Random::new(i as u64));
        let bytes = dtype.row_bytes(info.cols())? * info.rows();
        let mut out = vec![0; bytes];
        let row = bytes / info.rows();
        for (values, out) in values.chunks(info.cols()).zip(out.chunks_mut(row)) {
            if !quant::encode_row(dtype, values, out) {
                return Err(format!("{dtype} has no encoder").into());
            }
        }
        writer.tensor(&info.name, dtype, &info.shape, out)?;
    }
    let file = tempfile::Builder::new().suffix(".gguf").tempfile()?;
    writer.write(&mut file.as_file())?;
    Ok(file)
}

fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer, Failure> {
    match checkpoint.source() {
        Source::Gguf(metadata) => Ok(Tokenizer::from_gguf(metadata)?),
        Source::SafeTensors { .. } => Err("the gate reads GGUF files".into()),
    }
}

fn open(file: &tempfile::NamedTempFile) -> Result<Arc<Checkpoint>, Failure> {
    Ok(Arc::new(Checkpoint::open(&PathBuf::from(file.path()))?))
}
