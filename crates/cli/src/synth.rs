//! `ingle synth`: a model file of a published shape with random weights, for speed, memory and tests without a download.
//!
//! Such a file is like the real one in everything but its weights and most of its vocabulary: shapes, types, settings,
//! size to within the metadata. What it answers means nothing.

mod shapes;
mod vocabulary;
mod weights;

use std::io::{BufWriter, IsTerminal, Write, stdout};

use ingle_tensor::DType;
use ingle_tensor::gguf::{FileStream, Outline};

use crate::error::{Error, Result};
use crate::files;
use crate::flags::Synth;
use crate::mix::{Mix, QUANTIZATION_VERSION, Role};
use crate::sys;
use crate::term::{self, bytes, thousands};
pub use shapes::{Preset, Shape, names, which_run};
use weights::{Fill, Pools};

/// One tensor to be made.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dtype: DType,
    /// Outermost first.
    shape: Vec<usize>,
    fill: Fill,
}

impl Tensor {
    fn new(name: impl Into<String>, dtype: DType, shape: &[usize], fill: Fill) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec(), fill }
    }

    fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    fn row_bytes(&self) -> usize {
        self.cols() / self.dtype.block_len() * self.dtype.block_bytes()
    }
}

/// A file that is described to the byte and not yet made.
struct Synthesis {
    outline: Outline,
    tensors: Vec<Tensor>,
    seed: u64,
}

impl Synthesis {
    fn new(shape: &Shape, mix: &Mix, seed: u64) -> Result<Self> {
        let tensors = tensors(shape, mix);
        let mut outline = Outline::new();
        settings(shape, mix, seed, &mut outline)?;
        shape.words.describe(shape.vocabulary, &mut outline)?;
        for tensor in &tensors {
            outline.tensor(&tensor.name, tensor.dtype, &tensor.shape)?;
        }
        Ok(Self { outline, tensors, seed })
    }

    /// Makes the file; `watch` hears of the bytes of each piece, and its error ends the work. Nothing is left of a file
    /// that does not get whole, or whose name another has taken meanwhile, unless this one `replaces` it.
    fn write(
        &self,
        mut file: FileStream,
        replaces: bool,
        threads: usize,
        watch: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.stream(threads, watch, |name, bytes| file.write(name, bytes))?;
        Ok(if replaces { file.finish() } else { file.finish_new() }?)
    }

    /// Makes the same bytes and gives them to `out` as they come.
    fn write_to(
        &self,
        out: impl Write,
        threads: usize,
        watch: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut file = self.outline.begin(out)?;
        self.stream(threads, watch, |name, bytes| file.write(name, bytes))?;
        file.finish()?;
        Ok(())
    }

    fn stream(
        &self,
        threads: usize,
        watch: &mut dyn FnMut(u64) -> Result<()>,
        mut put: impl FnMut(&str, &[u8]) -> ingle_tensor::Result<()>,
    ) -> Result<()> {
        Pools::new(self.seed, &self.tensors).stream(&self.tensors, threads, |name, bytes| {
            put(name, bytes)?;
            watch(bytes.len() as u64)
        })
    }
}

/// The keys beside the tokenizer's.
fn settings(shape: &Shape, mix: &Mix, seed: u64, outline: &mut Outline) -> Result<()> {
    let count = |n: usize| n as u32;
    outline.set("general.architecture", shape.architecture)?;
    outline.set("general.type", "model")?;
    outline.set("general.name", &format!("{} with random weights, seed {seed}", shape.model))?;
    outline.set("general.file_type", &mix.file_type)?;
    outline.set("general.quantization_version", &QUANTIZATION_VERSION)?;
    let mut set =
        |key: &str, value: usize| outline.set(&format!("{}.{key}", shape.architecture), &count(value));
    set("block_count", shape.layers)?;
    set("context_length", shape.context)?;
    set("embedding_length", shape.hidden)?;
    set("feed_forward_length", shape.ffn)?;
    set("attention.head_count", shape.heads)?;
    set("attention.head_count_kv", shape.kv_heads)?;
    set("attention.key_length", shape.head_dim)?;
    set("attention.value_length", shape.head_dim)?;
    set("rope.dimension_count", shape.head_dim)?;
    set("vocab_size", shape.vocabulary)?;
    if let Some(experts) = shape.experts {
        set("expert_count", experts.count)?;
        set("expert_used_count", experts.used)?;
        set("expert_feed_forward_length", experts.ffn)?;
    }
    outline.set(&format!("{}.rope.freq_base", shape.architecture), &shape.rope_theta)?;
    Ok(outline.set(&format!("{}.attention.layer_norm_rms_epsilon", shape.architecture), &shape.eps)?)
}

/// Every tensor, in the order of the file.
fn tensors(shape: &Shape, mix: &Mix) -> Vec<Tensor> {
    let &Shape { layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary, .. } = shape;
    let matrix = |name: String, role: Role, dims: &[usize]| {
        let cols = dims.last().copied().unwrap_or(1);
        Tensor::new(name, mix.dtype(role, cols), dims, Fill::Matrix)
    };
    let norm = |name: String, len: usize| Tensor::new(name, DType::F32, &[len], Fill::Norm);

    let table = if shape.is_tied { Role::Output } else { Role::Other };
    let mut all = vec![matrix("token_embd.weight".into(), table, &[vocabulary, hidden])];
    if shape.llama3_rope {
        let divisors = llama3_divisors(f64::from(shape.rope_theta), head_dim);
        all.push(Tensor::new("rope_freqs.weight", DType::F32, &[divisors.len()], Fill::Exact(divisors)));
    }
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let sensitive = Role::Sensitive { layer, layers };
        all.push(norm(name("attn_norm"), hidden));
        all.push(matrix(name("attn_q"), Role::Other, &[heads * head_dim, hidden]));
        all.push(matrix(name("attn_k"), Role::Other, &[kv_heads * head_dim, hidden]));
        all.push(matrix(name("attn_v"), sensitive, &[kv_heads * head_dim, hidden]));
        all.push(matrix(name("attn_output"), Role::Other, &[hidden, heads * head_dim]));
        if shape.qk_norm {
            all.push(norm(name("attn_q_norm"), head_dim));
            all.push(norm(name("attn_k_norm"), head_dim));
        }
        all.push(norm(name("ffn_norm"), hidden));
        match shape.experts {
            None => {
                all.push(matrix(name("ffn_gate"), Role::Other, &[ffn, hidden]));
                all.push(matrix(name("ffn_up"), Role::Other, &[ffn, hidden]));
                all.push(matrix(name("ffn_down"), sensitive, &[hidden, ffn]));
            }
            Some(experts) => {
                let (count, ffn) = (experts.count, experts.ffn);
                all.push(Tensor::new(name("ffn_gate_inp"), DType::F32, &[count, hidden], Fill::Matrix));
                all.push(matrix(name("ffn_gate_exps"), Role::Other, &[count, ffn, hidden]));
                all.push(matrix(name("ffn_up_exps"), Role::Other, &[count, ffn, hidden]));
                all.push(matrix(name("ffn_down_exps"), sensitive, &[count, hidden, ffn]));
            }
        }
    }
    all.push(norm("output_norm.weight".into(), hidden));
    if !shape.is_tied {
        all.push(matrix("output.weight".into(), Role::Output, &[vocabulary, hidden]));
    }
    all
}

/// What Llama 3.1 divides its rotary frequencies by: 1 for short waves, 8 for long ones, a blend between, with waves told
/// apart by how often they fit into the 8192 tokens of the first training (4 times and once).
fn llama3_divisors(theta: f64, head_dim: usize) -> Vec<f32> {
    let (factor, low, high, original) = (8.0, 1.0, 4.0, 8192.0);
    let divisor = |pair: usize| {
        let wave = std::f64::consts::TAU * theta.powf(2.0 * pair as f64 / head_dim as f64);
        let share = ((original / wave - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - share) / factor + share)) as f32
    };
    (0..head_dim / 2).map(divisor).collect()
}

/// Writes the file, or its bytes to standard output where it is called `-`, or with `--dry-run` says what it would be.
///
/// # Errors
/// A file that is there already; a disk without room, with the numbers; a terminal; a signal; the file system.
pub fn synth(flags: &Synth) -> Result<()> {
    let Preset { shape, mix } = flags.preset;
    let synthesis = Synthesis::new(shape, mix, flags.seed)?;
    let total = synthesis.outline.file_bytes()?;
    let what = format!(
        "{}-{}: {} bytes ({}), {} tensors, seed {}",
        shape.name,
        mix.name,
        thousands(total),
        bytes(total),
        synthesis.tensors.len(),
        flags.seed
    );
    let caveat = || {
        if let Some(declined) = shape.declined() {
            term::say(&format!("note: {declined}"));
        }
    };
    if flags.dry_run {
        writeln!(stdout(), "{what}")?;
        caveat();
        return Ok(());
    }
    let out = &flags.out;
    let is_stream = out.as_os_str() == "-";
    match is_stream {
        true if stdout().is_terminal() => {
            return Err(Error::Refused(
                "a model is not written to a terminal: redirect standard output, or name a file (./- is one)"
                    .into(),
            ));
        }
        true => {}
        false => files::require_place(out, flags.force, total)?,
    }
    let signals = match is_stream {
        true => sys::Signals::catch_all(),
        false => sys::Signals::catch_all_and_outlive_readers(),
    };
    // What cannot be begun is not announced.
    let file = if is_stream { None } else { Some(synthesis.outline.create(out)?) };
    term::say(&what);
    let threads = flags.threads.map_or_else(sys::processors, usize::from);
    let bar = term::bytes_bar(&out.display().to_string(), Some(total));
    let mut watch = |n| {
        bar.inc(n);
        let left = if is_stream { "the model is cut short" } else { "nothing is left of the file" };
        signals.caught().map_or(Ok(()), |signal| Err(Error::Interrupted { signal, left }))
    };
    let written = match file {
        None => synthesis.write_to(BufWriter::new(stdout().lock()), threads, &mut watch),
        Some(file) => synthesis.write(file, flags.force, threads, &mut watch),
    };
    bar.finish_and_clear();
    drop(signals);
    written.map_err(|error| match error {
        Error::Tensor(ingle_tensor::Error::Write(refused)) => Error::Stream(refused),
        error => files::advise_taken(error),
    })?;
    if !is_stream {
        writeln!(stdout(), "{}", out.display())?;
    }
    caveat();
    Ok(())
}

#[cfg(test)]
mod tests;
