//! `ingle check`: everything that is wrong with a model file, and what to do about it.
//!
//! A fault of structure is the only one that is told: nothing behind it can be trusted. All others are collected: bytes
//! between tensors, values that are not finite, tensors that are missing or misshapen, a tokenizer or a chat template
//! that does not work. What is merely odd is a note.

mod text;
mod values;

use std::cmp::Ordering;
use std::collections::HashSet;
use std::io::{Write, stdout};
use std::path::Path;

use ingle_models::{Model, Survey};
use ingle_tensor::Checkpoint;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::flags::Check;
use crate::session;
use crate::term::{Paint, plain, thousands};

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
        const TOLD: usize = 5;
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
/// [`Error::Unsound`] when anything is wrong with any of them; no such file, and then nothing is checked.
pub fn check(flags: &Check) -> Result<()> {
    let paths = flags.models.iter().map(|model| session::resolve(Some(model)));
    let paths = paths.collect::<Result<Vec<_>>>()?;
    let mut problems = 0;
    for path in &paths {
        if !flags.json && paths.len() > 1 {
            writeln!(stdout(), "{} {}", Paint::stdout().bold("file"), path.display())?;
        }
        problems += one(path, flags.json)?;
    }
    match problems {
        0 => Ok(()),
        problems => Err(Error::Unsound { problems }),
    }
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
    let Findings { problems, notes } = &findings;
    if as_json {
        let list = |found: &[Finding]| found.iter().map(json).collect::<Vec<_>>();
        let size = checkpoint.as_ref().ok().map(|c| (c.total_bytes(), c.tensors().len()));
        let report = json!({ "path": path.to_string_lossy(), "ok": problems.is_empty(), "bytes": size.map(|s| s.0),
            "tensors": size.map(|s| s.1), "problems": list(problems), "notes": list(notes) });
        writeln!(stdout(), "{report:#}")?;
        return Ok(problems.len());
    }
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
    for (name, element) in checkpoint.unread() {
        findings.note(&of_tensor(name), format!("its element type {element} is not read"));
    }
}

/// Family, settings and tensors. Returns the size of the vocabulary, where the settings can be read.
fn model(checkpoint: &Checkpoint, findings: &mut Findings) -> Option<usize> {
    let Survey { config, faults, tensors } = match Model::survey(checkpoint) {
        Ok(survey) => survey,
        Err(error) => {
            let advice = match error {
                ingle_models::Error::UnknownFamily { .. } => {
                    "run it with another program, or a later version of this one"
                }
                _ => CONVERT,
            };
            findings.problem("settings", error, advice);
            return None;
        }
    };
    // What holds between tensors is looked at only where each is in order.
    if let (true, Err(error)) = (faults.is_empty(), Model::open(checkpoint)) {
        findings.problem("settings", error, CONVERT);
    }
    // A tensor that a model reads twice is missing once.
    let mut told = HashSet::new();
    for fault in faults.iter().map(ToString::to_string).filter(|fault| told.insert(fault.clone())) {
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
