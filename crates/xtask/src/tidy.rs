//! Checks the compiler does not make: who may depend on whom, where unsafe code may live, marks of unfinished work,
//! links in the documents, and the size of what is tracked.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Crate -> crates of the workspace it may depend on. No other edges.
const EDGES: &[(&str, &[&str])] = &[
    ("tensor", &[]),
    ("graph", &["tensor"]),
    ("models", &["graph", "tensor"]),
    ("cpu", &["graph", "tensor"]),
    ("cuda", &["graph", "tensor"]),
    ("engine", &["models", "graph", "tensor"]),
    ("cli", &["engine", "models", "graph", "tensor", "cpu", "cuda"]),
    ("tests", &["tensor", "graph", "models", "cpu", "cuda", "engine"]),
    ("xtask", &["tensor", "graph", "models", "cpu", "cuda", "engine", "tests"]),
];

/// Files and folders in which unsafe code may live; everywhere else it is an error.
const UNSAFE: &[&str] = &[
    "crates/cpu/",
    "crates/cuda/src/driver",
    "crates/tensor/src/bytes.rs",
    "crates/tensor/tests/hostile.rs",
    "crates/tests/attack/watch.rs",
    "crates/cli/src/bench/limits.rs",
    "crates/cli/src/sys.rs",
];

/// Largest sum of tracked fixtures, in bytes.
const FIXTURE_BYTES: u64 = 12_000_000;

/// Runs all checks and prints what they found.
pub fn run() -> ExitCode {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = tracked(&root);
    let mut found = Vec::new();
    edges(&root, &mut found);
    members(&root, &mut found);
    for file in &files {
        let path = root.join(file);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if file.ends_with(".rs") {
            rust(file, &text, &mut found);
        }
        if file.ends_with(".md") {
            links(&root, file, &text, &mut found);
        }
        marks(file, &text, &mut found);
    }
    let fixtures = files.iter().filter(|f| f.starts_with("crates/tests/fixtures/"));
    let bytes: u64 = fixtures.filter_map(|f| fs::metadata(root.join(f)).ok()).map(|m| m.len()).sum();
    if bytes > FIXTURE_BYTES {
        found.push(format!("fixtures: {bytes} bytes tracked, the limit is {FIXTURE_BYTES}"));
    }
    for problem in &found {
        eprintln!("{problem}");
    }
    println!("tidy: {} files, {bytes} bytes of fixtures, {} problems", files.len(), found.len());
    if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn tracked(root: &Path) -> Vec<String> {
    let out = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let out = out.expect("git lists the tracked files");
    String::from_utf8_lossy(&out.stdout).split('\0').filter(|f| !f.is_empty()).map(String::from).collect()
}

/// Names of the workspace's own crates that a manifest's line depends on.
fn own_dependency(line: &str) -> Option<&str> {
    let name = line.trim().split(['.', ' ', '=']).next()?;
    name.strip_prefix("ingle-")
}

fn edges(root: &Path, found: &mut Vec<String>) {
    let mut seen = BTreeSet::new();
    let crates = fs::read_dir(root.join("crates")).expect("crates/ is there");
    for folder in crates.filter_map(Result::ok).map(|e| e.file_name().to_string_lossy().into_owned()) {
        let manifest = fs::read_to_string(root.join("crates").join(&folder).join("Cargo.toml"));
        let Ok(manifest) = manifest else { continue };
        let Some((_, allowed)) = EDGES.iter().find(|(name, _)| *name == folder) else {
            found.push(format!(
                "crates/{folder}: not a room of ARCHITECTURE.md; add it there and to tidy's EDGES"
            ));
            continue;
        };
        seen.insert(folder.clone());
        let dependencies = manifest.split("dependencies]").skip(1).flat_map(str::lines);
        for dependency in dependencies.filter_map(own_dependency) {
            // A crate may name itself: with the features that its own tests want.
            if dependency != folder && !allowed.contains(&dependency) {
                found.push(format!(
                    "crates/{folder}: depends on {dependency}; allowed: {}",
                    allowed.join(", ")
                ));
            }
        }
    }
    for (name, _) in EDGES.iter().filter(|(name, _)| !seen.contains(*name)) {
        found.push(format!("crates/{name}: in tidy's EDGES but not on disk"));
    }
}

/// Every crate is a default member: one set of features for every command, so that no crate is compiled twice.
fn members(root: &Path, found: &mut Vec<String>) {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap_or_default();
    if manifest.lines().any(|l| l.starts_with("default-members")) {
        found.push("Cargo.toml: default-members splits the features of one build from another's".into());
    }
}

fn rust(file: &str, text: &str, found: &mut Vec<String>) {
    if !text.starts_with("//!") {
        found.push(format!("{file}: does not begin with //! and what the file is for"));
    }
    let may = UNSAFE.iter().any(|place| file.starts_with(place)) || file.starts_with("crates/xtask/");
    for (n, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let uses = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|u| code.contains(u));
        if uses && !may {
            found.push(format!("{file}:{}: unsafe code outside its rooms", n + 1));
        }
    }
}

/// Marks of unfinished work and paths of one machine, in everything that is text. Spelled in halves, so that this file
/// does not find itself.
fn marks(file: &str, text: &str, found: &mut Vec<String>) {
    if file.starts_with("crates/tests/fixtures/") || file == "Cargo.lock" || file.starts_with("LICENSE") {
        return;
    }
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X "),
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("#[ig", "nore"),
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("art", "ifactory"),
    ];
    for (n, line) in text.lines().enumerate() {
        if let Some(mark) = marks.iter().find(|m| line.contains(*m)) {
            found.push(format!("{file}:{}: {mark}", n + 1));
        }
    }
}

/// Relative links of a document lead to files that are there.
fn links(root: &Path, file: &str, text: &str, found: &mut Vec<String>) {
    let folder = root.join(file).parent().map(Path::to_path_buf).unwrap_or_default();
    for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let path = target.split('#').next().unwrap_or_default();
        if !path.is_empty() && !path.contains("://") && !folder.join(path).exists() {
            found.push(format!("{file}: link to {target}, which is not there"));
        }
    }
}
