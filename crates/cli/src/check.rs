//! `ingle check`: everything that is wrong with a model file, and what to do about it.
//!
//! A fault of structure is the only one that is told: nothing behind it can be trusted. All others are collected: bytes
//! between tensors, values that are not finite, tensors that are missing or misshapen, a tokenizer or a chat template
//! that does not work. What is merely odd is a note.

mod text;
mod values;

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::io::{Write, stdout};
use std::path::Path;

use ingle_models::{Model, Survey};
use ingle_tensor::Checkpoint;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::flags::Check;
use crate::term::{Paint, plain, thousands};
use crate::{session, source};

/// One thing that was found.
#[derive(Debug)]
struct Finding {
    /// Where: "structure", "settings", "tokenizer", or a tensor by name.
    place: String,
    what: String,
    /// What to do; empty for a note, and where `what` says it.
    advice: &'static str,
}

/// Everything that was found.
#[derive(Debug, Default)]
struct Findings {
    problems: Vec<Finding>,
    notes: Vec<Finding>,
}

const FETCH: &str = "fetch the file again";
const CONVERT: &str = "convert the model again from its source";
const ELSEWHERE: &str = "run it with another program, or a later version of this one";
/// Tensors that are told by name where many have the same.
const TOLD: usize = 5;

impl Findings {
    fn problem(&mut self, place: &str, what: impl ToString, advice: &'static str) {
        self.problems.push(Finding { place: place.into(), what: what.to_string(), advice });
    }

    /// Whether this is among the problems.
    fn has_problem(&self, what: &str) -> bool {
        self.problems.iter().any(|problem| problem.what == what)
    }

    /// A note on each of these tensors, or on the first few and then on how many `more` there are of the kind.
    fn note_tensors(&mut self, mut names: Vec<&str>, what: impl ToString, more: &str) {
        names.sort_by(|a, b| in_order(a, b));
        for name in names.iter().take(TOLD) {
            self.note(&of_tensor(name), what.to_string());
        }
        if names.len() > TOLD {
            self.note("tensors", format!("and {} more {more}", names.len() - TOLD));
        }
    }

    fn note(&mut self, place: &str, what: impl ToString) {
        self.notes.push(Finding { place: place.into(), what: what.to_string(), advice: "" });
    }
}

/// Checks files and folders, one after the other, and prints what was found.
///
/// # Errors
/// [`Error::Unsound`] when anything is wrong with any of them, which of several may be that it is not there; that there is no
/// such file, where it is the only one; a signal while one is fetched.
pub fn check(flags: &Check) -> Result<()> {
    let is_one = flags.models.len() + flags.named.len() == 1;
    let head = |name: &dyn Display| match flags.json || is_one {
        true => Ok(()),
        false => writeln!(stdout(), "{} {name}", Paint::stdout().bold("file")),
    };
    let mut problems = 0;
    for model in flags.models.iter().chain(&flags.named) {
        problems += match session::resolve(Some(model)) {
            Ok(path) => {
                head(&path.display())?;
                one(&path, flags.json)?
            }
            Err(error @ Error::Source(source::Error::Interrupted { .. })) => return Err(error),
            Err(error) if is_one => return Err(error),
            Err(error) => {
                head(model)?;
                absent(&model.to_string(), &error, flags.json)?
            }
        };
    }
    match problems {
        0 => Ok(()),
        problems => Err(Error::Unsound { problems }),
    }
}

/// Reports a model that cannot be had; how many problems that is.
fn absent(name: &str, error: &Error, as_json: bool) -> Result<usize> {
    let mut findings = Findings::default();
    findings.problem("file", error, "");
    match as_json {
        true => print_json(name, None, &findings)?,
        false => print_problems(&findings.problems)?,
    }
    Ok(findings.problems.len())
}

/// Checks one model; how many problems there are. As text, what needs no reading of all values is told before they are.
fn one(path: &Path, as_json: bool) -> Result<usize> {
    let mut findings = Findings::default();
    let checkpoint = Checkpoint::open(path);
    match &checkpoint {
        Err(error) => findings.problem("structure", error, advice(error)),
        Ok(checkpoint) => {
            match checkpoint.require_model() {
                // What is no model needs no tokenizer either.
                Err(error) => findings.problem("structure", error, ""),
                Ok(()) => {
                    let rows = model(checkpoint, &mut findings);
                    text::check(checkpoint, rows, &mut findings);
                }
            }
            gaps(checkpoint, &mut findings);
        }
    }
    let mut told = 0;
    if let Ok(checkpoint) = &checkpoint {
        if !as_json {
            print_problems(&findings.problems)?;
            told = findings.problems.len();
        }
        values::check(checkpoint, &mut findings);
    }
    if as_json {
        print_json(&path.to_string_lossy(), checkpoint.as_ref().ok(), &findings)?;
        return Ok(findings.problems.len());
    }
    let Findings { problems, notes } = &findings;
    print_problems(&problems[told..])?;
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    for Finding { place, what, .. } in notes {
        writeln!(out, "{} {}: {}", paint.dim("note"), plain(place), one_line(what))?;
    }
    if let (Ok(checkpoint), true) = (&checkpoint, problems.is_empty()) {
        let (total, tensors) = (thousands(checkpoint.total_bytes()), checkpoint.tensors().len());
        writeln!(out, "{} {}: {total} bytes, {tensors} tensors", paint.good("sound"), path.display())?;
    }
    Ok(problems.len())
}

fn print_json(path: &str, checkpoint: Option<&Checkpoint>, findings: &Findings) -> Result<()> {
    let list = |found: &[Finding]| found.iter().map(json).collect::<Vec<_>>();
    let Findings { problems, notes } = findings;
    let report = json!({ "path": path, "ok": problems.is_empty(), "bytes": checkpoint.map(Checkpoint::total_bytes),
        "tensors": checkpoint.map(|c| c.tensors().len()), "problems": list(problems), "notes": list(notes) });
    Ok(writeln!(stdout(), "{report:#}")?)
}

fn print_problems(problems: &[Finding]) -> Result<()> {
    let paint = Paint::stdout();
    let mut out = stdout().lock();
    for Finding { place, what, advice } in problems {
        let advice = if advice.is_empty() { String::new() } else { format!(": {advice}") };
        writeln!(out, "{} {}: {}{advice}", paint.bad("problem"), plain(place), one_line(what))?;
    }
    Ok(out.flush()?)
}

/// What to do about a file that does not open, where its error does not say it.
fn advice(error: &ingle_tensor::Error) -> &'static str {
    if error.says_what_to_do() { "" } else { FETCH }
}

/// Names as people count: `blk.2` before `blk.10`.
fn in_order(a: &str, b: &str) -> Ordering {
    let parts = |name: &str| -> Vec<(u64, String)> {
        name.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part.to_string())).collect()
    };
    parts(a).cmp(&parts(b))
}

fn json(finding: &Finding) -> Value {
    match finding.advice {
        "" => json!({ "where": finding.place, "what": finding.what }),
        advice => json!({ "where": finding.place, "what": finding.what, "do": advice }),
    }
}

fn one_line(text: &str) -> String {
    plain(&text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// A tensor as a place.
fn of_tensor(name: &str) -> String {
    format!("tensor {name}")
}

/// Bytes that belong to no tensor. Readers that want tensors one after the other refuse those between two; those at the
/// end hurt nobody.
fn gaps(checkpoint: &Checkpoint, findings: &mut Findings) {
    for gap in checkpoint.gaps() {
        let count = thousands(gap.bytes.end - gap.bytes.start);
        let at = format!("at byte {} of file {}", gap.bytes.start, gap.file + 1);
        match gap.before {
            Some(next) => findings.problem(
                &of_tensor(next),
                format!("{count} bytes before it, {at}, belong to no tensor"),
                "write the file again",
            ),
            None => {
                findings.note("structure", format!("{count} bytes {at}, after the last tensor, are not used"))
            }
        }
    }
}

/// Tensors of element types that are not read, type by type: those that the model wants are a problem, which its release in
/// floats has not.
fn unread(checkpoint: &Checkpoint, wanted: &HashSet<&str>, findings: &mut Findings) {
    let mut kinds: BTreeMap<&str, [Vec<&str>; 2]> = BTreeMap::new();
    for (name, element) in checkpoint.unread() {
        kinds.entry(element).or_default()[usize::from(wanted.contains(name))].push(name);
    }
    for (element, [unused, mut used]) in kinds {
        if !used.is_empty() {
            used.sort_by(|a, b| in_order(a, b));
            let mut names = used[..used.len().min(TOLD)].join(", ");
            if used.len() > TOLD {
                names += &format!(" and {} more", used.len() - TOLD);
            }
            let what = format!("{} of element type {element}, which is not read: {names}", used.len());
            findings.problem("tensors", what, "take the release in bf16");
        }
        let more = format!("of element type {element}");
        findings.note_tensors(unused, format!("its element type {element} is not read"), &more);
    }
}

/// The tensor whose element type is not read, where that is the fault.
fn unread_by(fault: &ingle_models::Error) -> Option<&str> {
    fn tensor<'a>(error: &'a ingle_tensor::Error, name: Option<&'a str>) -> Option<&'a str> {
        match error {
            ingle_tensor::Error::InFile { reason, .. } => tensor(reason, name),
            ingle_tensor::Error::InTensor { name, reason, .. } => tensor(reason, Some(name)),
            ingle_tensor::Error::UnknownType { .. } => name,
            _ => None,
        }
    }
    match fault {
        ingle_models::Error::Tensor(error)
        | ingle_models::Error::Graph(ingle_graph::Error::Tensor(error)) => tensor(error, None),
        ingle_models::Error::InFile { reason, .. } => unread_by(reason),
        _ => None,
    }
}

/// Family, settings and tensors. Returns the size of the vocabulary, where the settings can be read.
fn model(checkpoint: &Checkpoint, findings: &mut Findings) -> Option<usize> {
    let Survey { config, faults, tensors } = match Model::survey(checkpoint) {
        Ok(survey) => survey,
        Err(error) => {
            // Of tensors that settings are taken from: nothing tells then which others are wanted.
            if unread_by(&error).is_some() {
                unread(checkpoint, &checkpoint.unread().map(|(name, _)| name).collect(), findings);
                return None;
            }
            let advice = if error.is_unsupported() { ELSEWHERE } else { CONVERT };
            findings.problem("settings", error, advice);
            unread(checkpoint, &HashSet::new(), findings);
            return None;
        }
    };
    // What holds between tensors is looked at only where each is in order.
    if let (true, Err(error)) = (faults.is_empty(), Model::open(checkpoint)) {
        findings.problem("settings", error, CONVERT);
    }
    unread(checkpoint, &faults.iter().filter_map(unread_by).collect(), findings);
    // A tensor that a model reads twice is missing once.
    let mut told = HashSet::new();
    let faults = faults.iter().filter(|fault| unread_by(fault).is_none()).map(ToString::to_string);
    for fault in faults.filter(|fault| told.insert(fault.clone())) {
        findings.problem("tensors", fault, CONVERT);
    }
    // What is read while a model is set up (tables of a family, factors of matrices), and buffers that old converters kept.
    let is_known = |name: &str| {
        name.starts_with("rope_") || name.ends_with(".scale") || name.ends_with(".rotary_emb.inv_freq")
    };
    let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
    let unused = names.filter(|name| !tensors.contains(*name) && !is_known(name)).collect();
    findings.note_tensors(unused, "the model does not use it", "that the model does not use");
    Some(config.vocabulary)
}
