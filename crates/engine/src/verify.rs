//! Closeness to the original model: a model file against logits and tokens that another implementation computed from
//! the same weights. Each arm isolates one source of difference and has its own limits.
//!
//! - `a`: every weight decoded to f32, f32 activations, f32 KV, exact mode. Proves file and model.
//! - `b`: the same with f16 KV.
//! - `c`: float weights as they run by default.
//! - `d`: quantized weights as they run by default: an alarm, not a proof; the int8 path is proved by bits.

use std::path::Path;
use std::sync::Arc;

use ingle_graph::sample::{Change, Sampling};
use ingle_graph::{Activations, Inputs, KvType, Numerics, PlanOptions};
use ingle_models::Model;
use ingle_tensor::{Checkpoint, quant, safetensors};
use serde_json::Value;

use crate::batch::{self, Part};
use crate::kv::Span;
use crate::runner::{Open, Plan, Runner, buckets_of_all_rows, kv_plan_of_all};
use crate::{Error, Result};

/// One comparison with its limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// Arm: `a`, `b`, `c`, `d`.
    pub arm: char,
    /// What was compared.
    pub what: String,
    /// What came out.
    pub value: f64,
    /// Largest (or, with `at_least`, smallest) value that passes.
    pub limit: f64,
    /// The value must reach the limit instead of staying under it.
    pub at_least: bool,
}

impl Check {
    /// Whether the value is within its limit; NaN never is.
    pub fn passed(&self) -> bool {
        if self.at_least { self.value >= self.limit } else { self.value <= self.limit }
    }
}

/// A token on which model and reference disagree.
#[derive(Clone, Debug, PartialEq)]
pub struct Miss {
    /// Arm.
    pub arm: char,
    /// Prompt and step.
    pub at: (usize, usize),
    /// What the model chose.
    pub ours: u32,
    /// The reference's two likeliest tokens, if it names them, else its choice alone.
    pub reference: Vec<u32>,
    /// Distance between the reference's two largest logits.
    pub margin: f64,
}

/// All comparisons of a model with a reference file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Comparisons in the order they were made.
    pub checks: Vec<Check>,
    /// Tokens compared, of all arms.
    pub tokens: usize,
    /// Those that differ.
    pub misses: Vec<Miss>,
    /// Arms that do not apply to this file, and why.
    pub skipped: Vec<(char, &'static str)>,
    /// First hidden state of arm `a` outside its limits.
    pub first_layer: Option<String>,
}

impl Report {
    /// Whether every comparison passed.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(Check::passed)
    }
}

/// Limits of one arm; logits of the references have a standard deviation of 5.
#[derive(Clone, Copy)]
struct Limits {
    rms: f64,
    max: f64,
    misses: usize,
    /// Reference margin above which no miss is excused.
    margin: f64,
    overlap: Option<f64>,
}

/// Differences between two lists of numbers.
#[derive(Default)]
struct Difference {
    squares: f64,
    /// Sum of the reference's squares.
    reference: f64,
    count: usize,
    max: f64,
}

impl Difference {
    fn add(&mut self, ours: f32, reference: f64) {
        let d = (f64::from(ours) - reference).abs();
        self.squares += d * d;
        self.reference += reference * reference;
        self.count += 1;
        // Not f64::max: a NaN must stay visible.
        self.max = if d > self.max || d.is_nan() { d } else { self.max };
    }

    fn rms(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }

    /// Limit of a hidden state's rms: that of logits, whose standard deviation is 5, and the same share of a state that
    /// is larger. (Gemma's last state has an rms of 20; its reference is itself 3.2e-5 from the values in f64.)
    fn hidden_limit(&self) -> f64 {
        let share = (self.reference / self.count.max(1) as f64).sqrt() / 5.0;
        (30.0 * share.max(1.0)).round() / 1e6
    }
}

pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().reduce(|a, b| if *b.1 > *a.1 { b } else { a });
    best.map_or(0, |(i, _)| i as u32)
}

/// One sequence fed to a runner token by token or in chunks, with pages of its own.
pub(crate) struct Feed<'a> {
    runner: &'a mut Runner,
    tokens: Vec<u32>,
    /// Every page of each KV group: nothing is ever let go.
    spans: Vec<Span>,
    strides: Vec<usize>,
    inputs: Inputs,
}

impl<'a> Feed<'a> {
    pub(crate) fn new(runner: &'a mut Runner, tokens: Vec<u32>) -> Self {
        let spans = Span::whole(runner.kv());
        let strides = spans.iter().map(|span| span.pages.len()).collect();
        Self { runner, tokens, spans, strides, inputs: Inputs::default() }
    }

    /// Computes tokens `from..to`; the results of all of them are wanted.
    pub(crate) fn run(&mut self, from: usize, to: usize) -> Result<()> {
        let part =
            Part { tokens: &self.tokens, computed: from, n: to - from, spans: &self.spans, all_rows: true };
        batch::fill(&mut self.inputs, &[part], &self.strides);
        if self.runner.options().sample {
            self.inputs.sampling = (from..to).map(|position| Some(self.sampling(position))).collect();
        }
        self.runner.run(&self.inputs)
    }

    /// How the token after `position` is chosen, where the program chooses: another way at each, with the likeliest among
    /// them, and now and then penalties.
    pub(crate) fn sampling(&self, position: usize) -> Sampling {
        let mut seen = self.tokens[position.saturating_sub(8)..=position].to_vec();
        seen.truncate(position % 2 * seen.len());
        seen.sort_unstable();
        seen.dedup();
        let change = |token| Change { token, bias: 0.25, seen: true, count: token % 3 };
        Sampling {
            temperature: [0.0, 1.0, 0.7][position % 3],
            top_k: [0, 20][position / 3 % 2],
            top_p: [1.0, 0.9][position / 6 % 2],
            min_p: [0.0, 0.05][position / 12 % 2],
            repetition_penalty: 1.1,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            seed: 7,
            choice: 0,
            position: position as u64 + 1,
            changes: seen.into_iter().map(change).collect(),
        }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// A result of the last run.
    pub(crate) fn output(&mut self, name: &str) -> Result<&[f32]> {
        self.runner.output(name)
    }

    /// Names of the results.
    pub(crate) fn outputs(&self) -> Vec<String> {
        self.runner.outputs()
    }
}

fn bad(path: &Path, what: impl Into<String>) -> Error {
    Error::Reference { path: path.to_path_buf(), what: what.into() }
}

fn ids(v: &Value) -> Option<Vec<u32>> {
    v.as_array()?.iter().map(|t| t.as_u64().and_then(|t| u32::try_from(t).ok())).collect()
}

fn numbers(v: &Value) -> Option<Vec<f64>> {
    v.as_array()?.iter().map(Value::as_f64).collect()
}

/// One prompt of a tiny model's reference, checked against the model.
struct Prompt {
    input: Vec<u32>,
    /// Logits after the last token, `[vocabulary]`.
    last_logits: Vec<f64>,
    /// Five likeliest tokens at each position, if given.
    top: Option<Vec<Vec<u32>>>,
    greedy: Vec<u32>,
    /// Distance between the two largest logits at each greedy step.
    margins: Vec<f64>,
}

fn tiny_prompts(prompts: &[Value], model: &Model, path: &Path) -> Result<Vec<Prompt>> {
    let vocabulary = model.config.vocabulary;
    if prompts.is_empty() {
        return Err(bad(path, "\"prompts\" is empty: there is nothing to compare"));
    }
    let read = |(p, prompt): (usize, &Value)| {
        let field = |k: &str| prompt.get(k).ok_or_else(|| bad(path, format!("prompt {p} has no {k:?}")));
        let list = |k: &str| {
            let ids = ids(field(k)?).filter(|ids| !ids.is_empty());
            let ids =
                ids.ok_or_else(|| bad(path, format!("prompt {p}: want a list of token ids in {k:?}")))?;
            in_vocabulary(&ids, vocabulary, path).map(|()| ids)
        };
        let floats = |k: &str, len: usize| match numbers(field(k)?) {
            Some(x) if x.len() == len => Ok(x),
            found => {
                let found = found.map_or("no list of numbers".into(), |x| format!("{} numbers", x.len()));
                Err(bad(path, format!("prompt {p}: want {len} numbers in {k:?}, found {found}")))
            }
        };
        let (input, greedy) = (list("input_ids")?, list("greedy")?);
        let top = match prompt.get("top5_ids") {
            None => None,
            Some(top) => {
                let top: Option<Vec<Vec<u32>>> = top.as_array().and_then(|t| t.iter().map(ids).collect());
                let full = |t: &Vec<Vec<u32>>| t.len() == input.len() && t.iter().all(|t| !t.is_empty());
                Some(top.filter(full).ok_or_else(|| {
                    bad(path, format!("prompt {p}: want {} lists of token ids in \"top5_ids\"", input.len()))
                })?)
            }
        };
        Ok(Prompt {
            last_logits: floats("last_logits", vocabulary)?,
            margins: floats("greedy_margin", greedy.len())?,
            top,
            input,
            greedy,
        })
    };
    prompts.iter().enumerate().map(read).collect()
}

fn in_vocabulary(ids: &[u32], vocabulary: usize, path: &Path) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        Some(id) => Err(bad(path, format!("token {id}, but the model's vocabulary is {vocabulary}"))),
        None => Ok(()),
    }
}

/// Tensors beside a reference file: `reference-q8_0.safetensors` beside `reference-q8_0.json`, if it is there.
struct Tensors(Option<(Vec<u8>, Vec<ingle_tensor::TensorInfo>)>);

impl Tensors {
    fn beside(path: &Path) -> Result<Self> {
        let path = path.with_extension("safetensors");
        if !path.exists() {
            return Ok(Self(None));
        }
        let bytes = std::fs::read(&path).map_err(|e| bad(&path, e.to_string()))?;
        let infos = safetensors::parse(&bytes, 0)?;
        Ok(Self(Some((bytes, infos))))
    }

    fn get(&self, name: &str) -> Option<Vec<f32>> {
        let (bytes, infos) = self.0.as_ref()?;
        let info = infos.iter().find(|i| i.name == name)?;
        let mut out = vec![0.0; info.shape.iter().product()];
        let from = info.offset as usize;
        quant::decode_row(info.dtype, &bytes[from..from + info.bytes as usize], &mut out);
        Some(out)
    }
}

/// What has been found, and how far the work is.
struct Course<'a> {
    report: Report,
    /// Tokens compared, of all arms.
    done: u64,
    total: u64,
    watch: &'a mut dyn FnMut(u64, u64),
}

impl Course<'_> {
    /// `total` tokens are to be compared.
    fn begin(&mut self, total: usize) {
        self.total = total as u64;
        (self.watch)(0, self.total);
    }

    /// One more is.
    fn advance(&mut self) {
        self.done += 1;
        self.report.tokens += 1;
        (self.watch)(self.done, self.total);
    }
}

/// Makes every comparison that applies to this model and reference file.
///
/// `open` opens a device for each arm. `watch` is told how many tokens have been compared, and of how many.
///
/// # Errors
/// A file that cannot be read or understood; a device failure.
pub fn against(
    checkpoint: &Arc<Checkpoint>,
    path: &Path,
    open: &mut Open<'_>,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<Report> {
    let text = std::fs::read_to_string(path).map_err(|e| bad(path, e.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| bad(path, e.to_string()))?;
    let model = Arc::new(Model::open(checkpoint)?);
    let quantized = model.graph.weights.iter().any(|w| w.dtype.is_quantized());
    let items = json.get("items").and_then(Value::as_array);
    let prompts = json.get("prompts").and_then(Value::as_array);
    let mut course = Course { report: Report::default(), done: 0, total: 0, watch };
    let exact = PlanOptions {
        numerics: Numerics::Exact,
        activations: Activations::F32,
        kv: KvType::F32,
        ..PlanOptions::default()
    };
    let mut runner = |mut options: PlanOptions, context: usize| {
        let kv = kv_plan_of_all(&model.graph, context, 1);
        let buckets = buckets_of_all_rows(context);
        let backend = open(Plan { graph: &model.graph, options: &mut options, kv: &kv, buckets })?;
        Runner::new(backend, model.clone(), checkpoint.clone(), options, kv)
    };
    match (prompts, items) {
        (Some(prompts), _) => {
            let tensors = Tensors::beside(path)?;
            let prompts = &tiny_prompts(prompts, &model, path)?;
            let family = model.config.family;
            let arch = json.get("arch").filter(|arch| !arch.is_null()).map(|arch| {
                arch.as_str().ok_or_else(|| bad(path, format!("want a text in \"arch\", found {arch}")))
            });
            if let Some(arch) = arch.transpose()?.filter(|a| !ingle_models::answers_to(family, a)) {
                return Err(bad(path, format!("it is of {arch:?}, but the model is {family}")));
            }
            let context = prompts.iter().map(|p| p.input.len() + p.greedy.len()).max().unwrap_or(0) + 1;
            let fits = Limits { rms: 3e-5, max: 3e-4, misses: 0, margin: 0.0, overlap: None };
            let taps = PlanOptions { taps: true, ..exact.clone() };
            course.begin(3 * prompts.iter().map(|p| p.greedy.len()).sum::<usize>());
            tiny(&mut course, 'a', fits, &mut runner(taps, context)?, prompts, &tensors, path)?;
            let half = PlanOptions { kv: KvType::F16, ..exact };
            let limits = Limits { rms: 0.01, max: 0.1, ..fits };
            tiny(&mut course, 'b', limits, &mut runner(half, context)?, prompts, &tensors, path)?;
            let (arm, other, limits) = if quantized {
                course.report.skipped.push(('c', "the file has quantized weights"));
                (
                    'd',
                    None,
                    Limits { rms: 0.40, max: f64::INFINITY, misses: 8, margin: 1.0, overlap: Some(0.88) },
                )
            } else {
                let limits = Limits { rms: 0.12, max: f64::INFINITY, misses: 2, margin: 0.25, overlap: None };
                ('c', Some(('d', "the file has no quantized weights")), limits)
            };
            tiny(
                &mut course,
                arm,
                limits,
                &mut runner(PlanOptions::default(), context)?,
                prompts,
                &tensors,
                path,
            )?;
            course.report.skipped.extend(other);
        }
        (None, Some(items)) => {
            let len = |item: &Value, key: &str| item.get(key).and_then(Value::as_array).map_or(0, Vec::len);
            let longest = items.iter().map(|item| len(item, "prompt_ids") + len(item, "generated_ids"));
            let context = longest.max().unwrap_or(0) + 1;
            let generated: usize = items.iter().map(|item| len(item, "generated_ids")).sum();
            if items.is_empty() {
                return Err(bad(path, "\"items\" is empty: there is nothing to compare"));
            }
            let limits = RealLimits { top: Some(0.02), dlogprob: None, margin: 0.05 };
            course.begin(2 * generated);
            real(&mut course, 'a', limits, &mut runner(exact, context)?, items, path)?;
            let limits = RealLimits { top: None, dlogprob: Some(0.2), margin: 0.5 };
            let arm = if quantized { 'd' } else { 'c' };
            real(&mut course, arm, limits, &mut runner(PlanOptions::default(), context)?, items, path)?;
        }
        (None, None) => return Err(bad(path, "has neither \"prompts\" nor \"items\"")),
    }
    Ok(course.report)
}

/// A reference of the tiny models: logits of three prompts and 24 greedy tokens of each.
fn tiny(
    course: &mut Course<'_>,
    arm: char,
    limits: Limits,
    runner: &mut Runner,
    prompts: &[Prompt],
    tensors: &Tensors,
    path: &Path,
) -> Result<()> {
    let vocabulary = runner.model().config.vocabulary;
    let layers = runner.model().config.layers;
    let mut logits = Difference::default();
    let (mut overlap, mut positions) = (0.0, 0);
    let (mut tokens, mut misses, mut unexcused) = (0, 0, 0);
    let mut hidden: Vec<Difference> = (0..=layers).map(|_| Difference::default()).collect();
    for (p, prompt) in prompts.iter().enumerate() {
        let Prompt { input, last_logits, top, greedy, margins } = prompt;
        let n = input.len();
        let mut feed = Feed::new(runner, [input.as_slice(), greedy].concat());
        feed.run(0, n)?;
        let ours = feed.runner.output("logits")?.to_vec();
        match tensors.get(&format!("logits.{p}")) {
            Some(reference) if reference.len() != ours.len() => {
                let what =
                    format!("logits.{p} has {} values, the model gives {}", reference.len(), ours.len());
                return Err(bad(&path.with_extension("safetensors"), what));
            }
            Some(reference) => {
                ours.iter().zip(reference).for_each(|(&a, b)| logits.add(a, f64::from(b)));
            }
            None => {
                ours[(n - 1) * vocabulary..].iter().zip(last_logits).for_each(|(&a, &b)| logits.add(a, b));
            }
        }
        for (row, top) in ours.chunks_exact(vocabulary).zip(top.iter().flatten()) {
            let mut order: Vec<u32> = (0..vocabulary as u32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            let ours = &order[..5.min(vocabulary)];
            overlap += top.iter().filter(|t| ours.contains(t)).count() as f64 / top.len() as f64;
            positions += 1;
        }
        if runner_has_taps(feed.runner) {
            for (layer, difference) in hidden.iter_mut().enumerate() {
                if let Some(reference) = tensors.get(&format!("hidden.{p}.{layer}")) {
                    let ours = feed.runner.output(&format!("hidden.{layer}"))?;
                    ours.iter().zip(reference).for_each(|(&a, b)| difference.add(a, f64::from(b)));
                }
            }
        }
        let mut row = ours[(n - 1) * vocabulary..].to_vec();
        for (step, (&want, &margin)) in greedy.iter().zip(margins).enumerate() {
            tokens += 1;
            course.advance();
            let ours = argmax(&row);
            if ours != want {
                misses += 1;
                unexcused += usize::from(margin > limits.margin);
                course.report.misses.push(Miss { arm, at: (p, step), ours, reference: vec![want], margin });
            }
            if step + 1 < greedy.len() {
                feed.run(n + step, n + step + 1)?;
                row = feed.runner.output("logits")?.to_vec();
            }
        }
    }
    let report = &mut course.report;
    let mut check = |what: String, value: f64, limit: f64, at_least: bool| {
        report.checks.push(Check { arm, what, value, limit, at_least });
    };
    check(format!("rms of {} logits", logits.count), logits.rms(), limits.rms, false);
    if limits.max.is_finite() {
        check("largest difference of a logit".into(), logits.max, limits.max, false);
    }
    if let Some(limit) = limits.overlap {
        check(
            format!("top-5 overlap over {positions} positions"),
            overlap / f64::from(positions),
            limit,
            true,
        );
    }
    check(format!("tokens missed of {tokens}"), misses as f64, limits.misses as f64, false);
    if limits.misses > 0 {
        check(
            format!("of them at a margin above {}", limits.margin),
            f64::from(unexcused as u32),
            0.0,
            false,
        );
    }
    for (layer, difference) in hidden.iter().enumerate().filter(|(_, d)| d.count > 0) {
        let (value, limit) = (difference.rms(), difference.hidden_limit());
        let check =
            Check { arm, what: format!("rms of hidden state {layer}"), value, limit, at_least: false };
        if !check.passed() && report.first_layer.is_none() {
            report.first_layer = Some(format!("hidden state {layer} (the input of layer {layer})"));
        }
        report.checks.push(check);
    }
    Ok(())
}

fn runner_has_taps(runner: &Runner) -> bool {
    runner.options().taps
}

/// Limits of one arm on a real model.
#[derive(Clone, Copy)]
struct RealLimits {
    /// Largest difference of a top-5 logit.
    top: Option<f64>,
    /// Largest mean difference of a top-5 log probability.
    dlogprob: Option<f64>,
    margin: f64,
}

/// A reference of a real model: five likeliest tokens at every step of a few greedy replies.
fn real(
    course: &mut Course<'_>,
    arm: char,
    limits: RealLimits,
    runner: &mut Runner,
    items: &[Value],
    path: &Path,
) -> Result<()> {
    let (mut top, mut dlogprob) = (Difference::default(), (0.0, 0usize));
    let (mut tokens, mut unexcused) = (0, 0);
    for (i, item) in items.iter().enumerate() {
        let want = |k: &str| {
            item.get(k).and_then(ids).ok_or_else(|| bad(path, format!("item {i} has no list {k:?}")))
        };
        let (prompt, generated) = (want("prompt_ids")?, want("generated_ids")?);
        let steps = item.get("steps").and_then(Value::as_array);
        let steps = steps.ok_or_else(|| bad(path, format!("item {i} has no \"steps\"")))?;
        let n = prompt.len();
        let vocabulary = runner.model().config.vocabulary;
        in_vocabulary(&prompt, vocabulary, path)?;
        in_vocabulary(&generated, vocabulary, path)?;
        if n == 0 || steps.is_empty() || steps.len() != generated.len() {
            let what = format!("{n} prompt tokens, {} generated, {} steps", generated.len(), steps.len());
            return Err(bad(
                path,
                format!("item {i}: {what}: want some, and as many steps as generated tokens"),
            ));
        }
        let mut feed = Feed::new(runner, [prompt, generated.clone()].concat());
        for (s, (step, &want)) in steps.iter().zip(&generated).enumerate() {
            feed.run(if s == 0 { 0 } else { n + s - 1 }, n + s)?;
            let all = feed.runner.output("logits")?;
            let row = &all[all.len() - vocabulary..];
            let lse = step.get("lse").and_then(Value::as_f64);
            let reference: Option<Vec<(u32, f64)>> =
                step.get("top").and_then(Value::as_array).and_then(|top| {
                    top.iter().map(|t| Some((t.get(0)?.as_u64()? as u32, t.get(1)?.as_f64()?))).collect()
                });
            let (Some(lse), Some(reference)) = (lse, reference) else {
                return Err(bad(path, format!("item {i} step {s}: want \"lse\" and \"top\"")));
            };
            if let Some((id, _)) = reference.iter().find(|(id, _)| *id as usize >= vocabulary) {
                return Err(bad(
                    path,
                    format!("item {i} step {s}: token {id} of a vocabulary of {vocabulary}"),
                ));
            }
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
            let ours_lse = f64::from(max) + sum.ln();
            for &(id, logit) in &reference {
                let ours = row[id as usize];
                top.add(ours, logit);
                dlogprob.0 += ((f64::from(ours) - ours_lse) - (logit - lse)).abs();
                dlogprob.1 += 1;
            }
            tokens += 1;
            course.advance();
            let ours = argmax(row);
            if ours != want {
                let margin = reference.first().zip(reference.get(1)).map_or(0.0, |(a, b)| a.1 - b.1);
                unexcused += u32::from(margin > limits.margin);
                let reference = reference.iter().take(2).map(|t| t.0).collect();
                course.report.misses.push(Miss { arm, at: (i, s), ours, reference, margin });
            }
        }
    }
    let mut check = |what: String, value: f64, limit: f64| {
        course.report.checks.push(Check { arm, what, value, limit, at_least: false });
    };
    if let Some(limit) = limits.top {
        check(format!("largest difference of {} top-5 logits", top.count), top.max, limit);
    }
    if let Some(limit) = limits.dlogprob {
        check("mean difference of a top-5 log probability".into(), dlogprob.0 / dlogprob.1 as f64, limit);
    }
    check(
        format!("tokens missed of {tokens} at a margin above {}", limits.margin),
        f64::from(unexcused),
        0.0,
    );
    Ok(())
}
