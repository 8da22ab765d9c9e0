//! `ingle inspect`: what a model is and what it needs, before it is loaded, from the objects that would run.

use std::collections::{BTreeMap, HashMap};
use std::io::{Write, stdout};

use ingle_cpu::planned_bytes;
use ingle_engine::runner::{Plan as Asked, buckets, kv_group_bytes, kv_plan};
use ingle_engine::step::EngineOptions;
use ingle_graph::op::{Elem, Weight, WeightUse};
use ingle_graph::split::Share;
use ingle_graph::{
    Bucket, CONTRACT_VERSION, FloatArithmetic, Graph, KvGroup, KvPlan, PlanKey, PlanOptions, Program, Slot,
    WeightId, dump, passes,
};
use ingle_models::Model;
use ingle_tensor::gguf::Value as GgufValue;
use ingle_tensor::{Checkpoint, Source};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::files;
use crate::flags::Inspect;
use crate::layout::{HOST, Layout};
use crate::session;
use crate::term::{Paint, bytes, plain, thousands};

/// Longest array that JSON shows whole; longer ones are vocabularies.
const ARRAY_MAX: usize = 64;

/// Prints what was asked for. A model of an unknown family still shows its metadata and tensors before the error.
pub fn inspect(flags: &Inspect) -> Result<()> {
    let Some(model) = flags.model.named() else {
        return Err(Error::Usage("no MODEL: name one, as in `ingle inspect model.gguf`".into()));
    };
    session::require_gpu(&flags.device)?;
    let path = session::resolve(Some(model))?;
    let checkpoint = session::open_files(&path)?;
    let planned = Model::open(&checkpoint).map_err(Error::from).and_then(|model| Plan::new(model, flags));
    if let (Some(file), Ok(plan)) = (&flags.graph, &planned) {
        let graph = passes::optimize(&plan.model.graph, &plan.decode.key)?;
        let dot = plain_lines(&dump::graph_dot(&graph));
        if file.as_os_str() == "-" {
            write!(stdout(), "{dot}")?;
            return Ok(());
        }
        files::write(file, &dot, &path)?;
    }
    match (flags.json, flags.plan) {
        (true, _) => writeln!(stdout(), "{:#}", json(&checkpoint, planned.as_ref(), flags.plan))?,
        (false, true) => {
            let plan = planned?;
            if let Some(layout) = &plan.layout {
                writeln!(stdout(), "{}", layout.line())?;
            }
            write!(stdout(), "{}", plain_lines(&dump::program_text(&plan.decode)))?;
            return Ok(());
        }
        (false, false) => print(&checkpoint, planned.as_ref())?,
    }
    planned.map(|_| ())
}

/// A model with its programs and its memory, to the byte.
struct Plan {
    model: Model,
    options: PlanOptions,
    kv: KvPlan,
    /// One sequence, one token.
    decode: Program,
    memory: Memory,
    /// What lies where, if a GPU was asked for.
    layout: Option<Layout>,
}

/// Bytes of everything that lives as long as the model is loaded for one conversation.
struct Memory {
    /// Most tokens of one step.
    step_tokens: usize,
    /// Packed matrices and widened vectors.
    weights: u64,
    /// Tensors read in place from the mapped file: matrices of floats, and tables of which rows are looked up. The system
    /// holds the pages that are touched and can drop them, so they are not part of the total.
    mapped: u64,
    /// Keys and values, by group of layers.
    kv: Vec<Kv>,
    arena: u64,
    rope_tables: u64,
    outputs: u64,
}

/// Keys and values of the layers that keep the same positions.
struct Kv {
    window: Option<usize>,
    layers: usize,
    pages: usize,
    bytes: u64,
}

impl Memory {
    fn kv_bytes(&self) -> u64 {
        self.kv.iter().map(|group| group.bytes).sum()
    }

    fn total(&self) -> u64 {
        self.weights + self.kv_bytes() + self.arena + self.rope_tables + self.outputs
    }
}

impl Plan {
    fn new(model: Model, flags: &Inspect) -> Result<Self> {
        let mut options = session::plan_options(&flags.options);
        let engine = EngineOptions::default();
        let context = session::context(&model, flags.options.context);
        let kv = kv_plan(&model.graph, context, 1, engine.chunk);
        let step_tokens = engine.step_tokens.min(kv.context);
        let buckets = buckets(step_tokens, 1);
        let layout = session::layout(
            &flags.device,
            Asked { graph: &model.graph, options: &mut options, kv: &kv, buckets },
        )?;
        let compile = |t| -> Result<Program> {
            Ok(passes::compile(
                &model.graph,
                &PlanKey { bucket: Bucket::holding(t, 1, 1), options: options.clone() },
            )?)
        };
        let (decode, largest) = (compile(1)?, compile(step_tokens)?);
        let bucket = largest.key.bucket;
        // Of what is on a GPU its layout tells.
        let host = layout.as_ref().map(|_| Share::of(&model.graph, &options.placement, HOST).graph);
        let graph = host.as_ref().unwrap_or(&model.graph);
        let device = if layout.is_some() { HOST } else { 0 };
        let on_device = |program: &Program, index: usize| {
            let segments = program.segments.iter().filter(|segment| segment.device == device);
            let mut slots = segments.flat_map(|segment| &segment.steps).flat_map(|step| &step.outputs);
            slots.any(|slot| matches!(slot, Slot::Output { index: at, .. } if *at == index))
        };
        let outputs = largest.outputs.iter().enumerate().filter(|(at, _)| on_device(&largest, *at));
        let rope_pairs: usize = graph.ropes.iter().map(|r| r.inv_freq.len()).sum();
        let memory = Memory {
            step_tokens: bucket.t,
            weights: graph.weights.iter().map(|w| planned_bytes(w, options.activations) as u64).sum(),
            mapped: mapped_bytes(graph, &options),
            kv: kv_groups(graph, &options, &kv),
            arena: largest.arena_bytes.get(device).copied().unwrap_or(0) as u64,
            rope_tables: (kv.context * rope_pairs * 2 * size_of::<f32>()) as u64,
            outputs: outputs.map(|(_, o)| o.ty.bytes(bucket.rows(o.ty.rows)) as u64).sum(),
        };
        Ok(Self { model, options, kv, decode, memory, layout })
    }

    /// The weights by kind (`blk.3.attn_q.weight` is of kind `attn_q.weight`) and type, with how they are read.
    fn kinds(&self) -> Vec<Kind> {
        let multiplied: HashMap<WeightId, Elem> = self.decode.products().collect();
        let mut kinds: BTreeMap<(String, &str, String), (usize, u64)> = BTreeMap::new();
        for (id, weight) in (0..).map(WeightId).zip(&self.decode.weights) {
            let arithmetic = arithmetic(weight, multiplied.get(&id).copied());
            let key = (kind(&weight.name), weight.dtype.name(), arithmetic);
            let (count, bytes) = kinds.entry(key).or_default();
            *count += 1;
            *bytes += weight.bytes() as u64;
        }
        let rows = kinds.into_iter();
        rows.map(|((kind, dtype, arithmetic), (count, bytes))| Kind { kind, dtype, arithmetic, count, bytes })
            .collect()
    }
}

/// What each group of layers keeps.
fn kv_groups(graph: &Graph, options: &PlanOptions, kv: &KvPlan) -> Vec<Kv> {
    let of = |(group, KvGroup { window }): (usize, &KvGroup)| Kv {
        window: *window,
        layers: graph.kv.iter().filter(|layer| layer.group == group).count(),
        pages: kv.pages[group],
        bytes: kv_group_bytes(graph, options.kv, kv, group),
    };
    graph.kv_groups.iter().enumerate().map(of).filter(|group| group.layers > 0).collect()
}

/// Bytes of the tensors that are read in place, each counted once.
fn mapped_bytes(graph: &Graph, options: &PlanOptions) -> u64 {
    let in_place = graph.weights.iter().filter(|w| planned_bytes(w, options.activations) == 0);
    let tensors: BTreeMap<&str, usize> = in_place.map(|w| (w.name.as_str(), w.bytes())).collect();
    tensors.values().map(|&bytes| bytes as u64).sum()
}

/// Weights of one kind and type.
struct Kind {
    kind: String,
    dtype: &'static str,
    arithmetic: String,
    count: usize,
    bytes: u64,
}

/// The part of a tensor's name that is the same in every layer.
fn kind(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    match name.split('.').position(is_number) {
        Some(at) => name.split('.').skip(at + 1).collect::<Vec<_>>().join("."),
        None => name.to_string(),
    }
}

/// How a weight takes part, in the words of the numeric contract; `multiplied` is what the plan multiplies a matrix with.
fn arithmetic(weight: &Weight, multiplied: Option<Elem>) -> String {
    match (weight.used, multiplied.and_then(|elem| Some((elem, elem.digits()?)))) {
        (WeightUse::Rows, _) => "rows looked up".into(),
        (WeightUse::Vector, _) => "widened to f32".into(),
        (WeightUse::Matrix, Some((elem, (unit, _)))) => {
            format!("int, {} activations in units of {unit}", elem.name())
        }
        (WeightUse::Matrix, None) => FloatArithmetic::F32x32.to_string(),
    }
}

fn print(checkpoint: &Checkpoint, plan: std::result::Result<&Plan, &Error>) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    let path = checkpoint.path().display();
    let (total, tensors) = (thousands(checkpoint.total_bytes()), checkpoint.tensors().len());
    writeln!(out, "{} {path}: {total} bytes, {tensors} tensors", paint.bold("file"))?;
    if let Ok(Plan { model, .. }) = plan {
        let c = &model.config;
        writeln!(
            out,
            "{} {}: {} layers, width {}, {} heads ({} for keys) of {}, feed-forward {}, vocabulary {}, context {}",
            paint.bold("model"),
            c.family,
            c.layers,
            c.hidden,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.ffn,
            c.vocabulary,
            c.context
        )?;
    }
    match checkpoint.source() {
        Source::Gguf(metadata) => {
            writeln!(out, "\n{}", paint.bold("metadata"))?;
            for (key, value) in metadata.iter() {
                writeln!(out, "  {} = {}", plain(key), shortened(&value.to_string()))?;
            }
        }
        Source::SafeTensors { config, config_path, .. } => {
            writeln!(out, "\n{} of {}", paint.bold("metadata"), config_path.display())?;
            for (key, value) in config.as_object().into_iter().flatten() {
                writeln!(out, "  {} = {}", plain(key), shortened(&value.to_string()))?;
            }
        }
    }
    writeln!(out, "\n{}", paint.bold("tensors"))?;
    for tensor in checkpoint.tensors() {
        let shape = format!("{:?}", tensor.shape);
        let size = thousands(tensor.bytes);
        writeln!(
            out,
            "  {:<40} {:<8} {shape:<20} {size:>14} bytes",
            plain(&tensor.name),
            tensor.dtype.name()
        )?;
    }
    let Ok(plan) = plan else { return Ok(()) };
    writeln!(out, "\n{} (contract {CONTRACT_VERSION}, {})", paint.bold("arithmetic"), plan.options.numerics)?;
    for Kind { kind, dtype, arithmetic, count, bytes } in plan.kinds() {
        let size = thousands(bytes);
        writeln!(out, "  {:<28} {count:>4} x {dtype:<8} {size:>14} bytes  {arithmetic}", plain(&kind))?;
    }
    writeln!(out, "  attention runs {}", plan.options.float)?;
    let (kv, m) = (&plan.kv, &plan.memory);
    writeln!(
        out,
        "\n{} for one conversation of {} tokens, KV in {}, steps of up to {} tokens",
        paint.bold("memory"),
        kv.context,
        plan.options.kv,
        m.step_tokens
    )?;
    if let Some(layout) = &plan.layout {
        writeln!(out, "  {}; of the GPU's bytes", layout.line())?;
        for (what, n) in layout.parts() {
            writeln!(out, "    {what:<16} {:>14} bytes  {}", thousands(n), paint.dim(&bytes(n)))?;
        }
        writeln!(out, "  and on the CPU")?;
    }
    for (what, n) in [
        ("weights", m.weights),
        ("keys and values", m.kv_bytes()),
        ("arena", m.arena),
        ("rope tables", m.rope_tables),
        ("outputs", m.outputs),
        ("total", m.total()),
        ("mapped beside it", m.mapped),
    ] {
        writeln!(out, "  {what:<16} {:>16} bytes  {}", thousands(n), paint.dim(&bytes(n)))?;
    }
    for Kv { window, layers, pages, bytes } in &m.kv {
        let keep = window.map_or("all positions".into(), |w| format!("a window of {w} positions"));
        let size = thousands(*bytes);
        writeln!(out, "of keys and values, {layers} layers keep {keep}: {pages} pages, {size} bytes")?;
    }
    writeln!(
        out,
        "not in the total: what is mapped (tensors read in place from the file, whose pages the system can drop), the \
         tokenizer, the process itself"
    )?;
    writeln!(out, "one token reads {} bytes of weights", thousands(plan.decode.weight_bytes()))?;
    Ok(())
}

/// Lines of a dump, each fit for a terminal.
fn plain_lines(text: &str) -> String {
    text.lines().flat_map(|line| [plain(line), "\n".into()]).collect()
}

/// One line of a terminal.
fn shortened(text: &str) -> String {
    const WIDTH: usize = 100;
    match text.char_indices().nth(WIDTH) {
        Some((at, _)) => format!("{}... ({} characters)", plain(&text[..at]), text.chars().count()),
        None => plain(text),
    }
}

fn json(checkpoint: &Checkpoint, plan: std::result::Result<&Plan, &Error>, with_program: bool) -> Value {
    let metadata = match checkpoint.source() {
        Source::Gguf(metadata) => {
            Value::Object(metadata.iter().map(|(key, value)| (key.to_string(), gguf_json(value))).collect())
        }
        Source::SafeTensors { config, .. } => config.clone(),
    };
    let tensors: Vec<Value> = checkpoint
        .tensors()
        .iter()
        .map(|t| json!({ "name": t.name, "dtype": t.dtype.name(), "shape": t.shape, "bytes": t.bytes }))
        .collect();
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.into(), value);
    put("path", checkpoint.path().to_string_lossy().into());
    if let Source::SafeTensors { config_path, .. } = checkpoint.source() {
        put("config", config_path.to_string_lossy().into());
    }
    put("bytes", checkpoint.total_bytes().into());
    put("contract", CONTRACT_VERSION.into());
    match plan {
        Err(error) => {
            put("error", error.line().into());
        }
        Ok(plan) => {
            let (c, m) = (&plan.model.config, &plan.memory);
            put(
                "model",
                json!({ "family": c.family, "layers": c.layers, "hidden": c.hidden, "heads": c.heads,
                    "kv_heads": c.kv_heads, "head_dim": c.head_dim, "ffn": c.ffn, "vocabulary": c.vocabulary,
                    "context": c.context }),
            );
            let kinds: Vec<Value> = plan
                .kinds()
                .iter()
                .map(|k| {
                    json!({ "kind": k.kind, "dtype": k.dtype, "count": k.count, "bytes": k.bytes,
                        "arithmetic": k.arithmetic })
                })
                .collect();
            let kv_groups: Vec<Value> = m
                .kv
                .iter()
                .map(
                    |g| json!({ "window": g.window, "layers": g.layers, "pages": g.pages, "bytes": g.bytes }),
                )
                .collect();
            put("numerics", plan.options.numerics.to_string().into());
            put("attention", plan.options.float.to_string().into());
            put("arithmetic", kinds.into());
            put(
                "memory",
                json!({ "context": plan.kv.context, "kv_type": plan.options.kv.to_string(),
                    "step_tokens": m.step_tokens, "weights_bytes": m.weights, "mapped_bytes": m.mapped, "kv_bytes": m.kv_bytes(), "kv_groups": kv_groups,
                    "arena_bytes": m.arena, "rope_bytes": m.rope_tables, "outputs_bytes": m.outputs,
                    "total_bytes": m.total() }),
            );
            if let Some(layout) = &plan.layout {
                put("layout", layout.json());
            }
            put("weight_bytes_per_token", plan.decode.weight_bytes().into());
            if with_program {
                put("plan", dump::program_text(&plan.decode).into());
            }
        }
    }
    put("metadata", metadata);
    put("tensors", tensors.into());
    Value::Object(object)
}

/// A metadata value; of a long array only its type and length.
fn gguf_json(value: GgufValue<'_>) -> Value {
    match value {
        GgufValue::U8(v) => v.into(),
        GgufValue::I8(v) => v.into(),
        GgufValue::U16(v) => v.into(),
        GgufValue::I16(v) => v.into(),
        GgufValue::U32(v) => v.into(),
        GgufValue::I32(v) => v.into(),
        GgufValue::U64(v) => v.into(),
        GgufValue::I64(v) => v.into(),
        GgufValue::F32(v) => v.into(),
        GgufValue::F64(v) => v.into(),
        GgufValue::Bool(v) => v.into(),
        GgufValue::String(v) => String::from_utf8_lossy(v).into(),
        GgufValue::Array(a) if a.len() > ARRAY_MAX => {
            json!({ "array_of": a.kind().name(), "length": a.len() })
        }
        GgufValue::Array(a) => a.values().map(gguf_json).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_tensors() {
        for (name, want) in [
            ("blk.12.attn_q.weight", "attn_q.weight"),
            ("model.layers.3.mlp.up_proj.weight", "mlp.up_proj.weight"),
            ("token_embd.weight", "token_embd.weight"),
        ] {
            assert_eq!(kind(name), want);
        }
    }
}
