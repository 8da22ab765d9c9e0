//! Opening paths of every kind, split files, and what a checkpoint answers.

use tempfile::TempDir;

use super::*;
use crate::gguf::Writer;

/// A tensor of one row of four f32, all `value`.
fn row(value: f32) -> Vec<u8> {
    [value; 4].map(f32::to_le_bytes).concat()
}

fn write_gguf(path: &Path, build: impl FnOnce(&mut Writer<'_>)) {
    let mut writer = Writer::new();
    build(&mut writer);
    std::fs::write(path, writer.to_bytes()).unwrap();
}

/// A model in three parts; the output matrix is in the last one.
fn write_split(dir: &Path) {
    for (part, tensors) in
        [&["token_embd.weight", "a"][..], &["b"], &["output.weight"]].into_iter().enumerate()
    {
        write_gguf(&dir.join(format!("tiny-{:05}-of-00003.gguf", part + 1)), |w| {
            if part == 0 {
                w.set("general.architecture", "llama").unwrap();
            }
            w.set("split.no", &(part as u16)).unwrap();
            w.set("split.count", &3u16).unwrap();
            w.set("split.tensors.count", &4i32).unwrap();
            for name in tensors {
                w.tensor(name, DType::F32, &[1, 4], row(part as f32)).unwrap();
            }
        });
    }
}

#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let message = Checkpoint::open(path).expect_err("it must be refused").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

#[test]
fn a_gguf_file_answers_by_name() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    write_gguf(&path, |w| {
        w.set("general.architecture", "llama").unwrap();
        w.tensor("b", DType::F32, &[2, 4], [row(1.0), row(2.0)].concat()).unwrap();
        w.tensor("a", DType::Q8_0, &[32], vec![1; 34]).unwrap();
    });
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.path(), path);
    assert_eq!(checkpoint.total_bytes(), std::fs::metadata(&path).unwrap().len());
    let names: Vec<_> = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
    let b = checkpoint.require("b").unwrap();
    assert_eq!((b.rows(), b.cols(), b.dtype), (2, 4, DType::F32));
    assert_eq!(checkpoint.data(b), [row(1.0), row(2.0)].concat());
    checkpoint.release(b);
    assert_eq!(checkpoint.data(b), [row(1.0), row(2.0)].concat());
    assert_eq!(checkpoint.data(checkpoint.get("a").unwrap()), [1; 34]);
    assert!(checkpoint.get("c").is_none());
    let message = checkpoint.require("c").unwrap_err().to_string();
    assert!(message.contains("m.gguf: tensor \"c\" is missing; the file has 2"), "{message}");
    let Source::Gguf(keys) = checkpoint.source() else { panic!("it is GGUF") };
    assert_eq!(keys.str("general.architecture").unwrap(), "llama");
}

#[test]
fn a_checkpoint_crosses_threads() {
    fn check<T: Send + Sync>() {}
    check::<Checkpoint>();
}

/// Michael-A-Kuykendall/shimmy#170, sgl-project/sglang#28209.
#[test]
fn any_part_opens_the_split_model() {
    let dir = TempDir::new().unwrap();
    write_split(dir.path());
    let mut fingerprints = Vec::new();
    for part in 1..=3 {
        let checkpoint = Checkpoint::open(&dir.path().join(format!("tiny-{part:05}-of-00003.gguf"))).unwrap();
        let Source::Gguf(keys) = checkpoint.source() else { panic!("it is GGUF") };
        assert_eq!(keys.str("general.architecture").unwrap(), "llama");
        assert_eq!((checkpoint.tensors().len(), checkpoint.gaps().len()), (4, 0));
        let output = checkpoint.require("output.weight").unwrap();
        assert_eq!((output.file, checkpoint.data(output)), (2, &row(2.0)[..]));
        fingerprints.push(checkpoint.fingerprint());
    }
    assert!(fingerprints.iter().all(|f| *f == fingerprints[0]));
}

/// A part of the model that [`write_split`] writes, with other keys and tensors.
fn write_part(path: &Path, no: u16, count: u16, tensors: &[&str]) {
    write_gguf(path, |w| {
        w.set("split.no", &no).unwrap();
        w.set("split.count", &count).unwrap();
        for name in tensors {
            w.tensor(name, DType::F32, &[1, 4], row(0.0)).unwrap();
        }
    });
}

/// FlashML-org/FreeToken#154, vllm-project/vllm-gguf-plugin#54, ggml-org/llama.cpp#6836: (damage, the name opened,
/// what the refusal says).
#[test]
fn split_models_that_are_not_whole() {
    type Damage = fn(&dyn Fn(usize) -> PathBuf);
    const PART_1: &str = "tiny-00001-of-00003.gguf";
    let rows: &[(Damage, &str, &[&str])] = &[
        (
            |part| std::fs::remove_file(part(2)).unwrap(),
            "tiny-00003-of-00003.gguf",
            &["tiny-00002-of-00003.gguf", "part 2 of 3", "is missing", "fetch it"],
        ),
        (
            |part| std::fs::remove_file(part(1)).unwrap(),
            "tiny-00003-of-00003.gguf",
            &["tiny-00001-of-00003.gguf", "part 1 of 3", "is missing"],
        ),
        (
            |part| std::fs::rename(part(1), part(1).with_file_name("model.gguf")).unwrap(),
            "model.gguf",
            &["part 1 of 3", "does not end in -00001-of-00003.gguf", "restore the names"],
        ),
        (
            |part| std::fs::rename(part(3), part(3).with_file_name("tiny-00004-of-00003.gguf")).unwrap(),
            PART_1,
            &["tiny-00003-of-00003.gguf", "part 3 of 3", "restore its name"],
        ),
        (
            |part| std::fs::rename(part(3), part(3).with_file_name("tiny-00004-of-00003.gguf")).unwrap(),
            "tiny-00004-of-00003.gguf",
            &["part 3 of 3", "does not end in -00003-of-00003.gguf"],
        ),
        // The key counts from 0, the name from 1: a part whose key counts from 1 is another part.
        (
            |part| write_part(&part(2), 2, 3, &["b"]),
            PART_1,
            &["tiny-00002-of-00003.gguf", "split.no", "2 of 3 parts, where 1 of 3"],
        ),
        (
            |part| write_part(&part(2), 1, 4, &["b"]),
            PART_1,
            &["tiny-00002-of-00003.gguf", "split.no", "1 of 4 parts, where 1 of 3"],
        ),
        (
            |part| write_part(&part(3), 3, 3, &["output.weight"]),
            "tiny-00003-of-00003.gguf",
            &["part 4 of 3", "does not end in its number"],
        ),
        (
            |part| write_gguf(&part(2), |w| w.tensor("b", DType::F32, &[1, 4], row(0.0)).unwrap()),
            PART_1,
            &["tiny-00002-of-00003.gguf", "split.no", "missing"],
        ),
        (|part| write_part(&part(2), 1, 3, &["a"]), PART_1, &["tensor \"a\"", "twice, in parts 1 and 2"]),
        // The count is of all parts together.
        (
            |part| write_part(&part(2), 1, 3, &["z", "b"]),
            PART_1,
            &["split.tensors.count", "it is 4, but the 3 parts hold 5"],
        ),
        (
            |part| std::fs::write(part(2), &std::fs::read(part(2)).unwrap()[..100]).unwrap(),
            PART_1,
            &["tiny-00002-of-00003.gguf", "remain in the file"],
        ),
    ];
    for (damage, opened, words) in rows {
        let dir = TempDir::new().unwrap();
        write_split(dir.path());
        damage(&|n| dir.path().join(format!("tiny-{n:05}-of-00003.gguf")));
        refused(&dir.path().join(opened), words);
    }
}

/// GGUF files that open, but are no model: they say what they are.
#[test]
fn gguf_files_of_other_kinds() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    for (kind, architecture, tensors, want) in [
        (Some("imatrix"), None, 1, Some("an importance matrix")),
        (Some("adapter"), Some("llama"), 1, Some("an adapter (LoRA)")),
        (Some("mmproj"), Some("clip"), 1, Some("a projector")),
        (None, Some("clip"), 1, Some("a projector")),
        (None, Some("controlvector"), 1, Some("a control vector")),
        (Some("dataset"), Some("llama"), 1, Some("of the type \"dataset\"")),
        (None, None, 1, Some("does not name an architecture")),
        (Some("model"), Some("llama"), 0, Some("a vocabulary and no tensors")),
        (Some("model"), Some("llama"), 1, None),
        (None, Some("llama"), 1, None),
    ] {
        write_gguf(&path, |w| {
            kind.iter().for_each(|kind| w.set("general.type", *kind).unwrap());
            architecture.iter().for_each(|name| w.set("general.architecture", *name).unwrap());
            (0..tensors).for_each(|_| w.tensor("w", DType::F32, &[4], row(1.0)).unwrap());
        });
        let said = Checkpoint::open(&path).unwrap().require_model().err().map(|error| error.to_string());
        match (&said, want) {
            (None, None) => {}
            (Some(said), Some(want)) => {
                assert!(said.contains("m.gguf: it ") && said.contains(want), "{said:?} lacks {want:?}");
            }
            _ => panic!("{kind:?} {architecture:?}: {said:?}, want {want:?}"),
        }
    }
}

#[test]
fn files_that_are_no_models() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.bin");
    for (content, words) in [
        (&b""[..], &["m.bin", "empty"]),
        (b"PK\x03\x04zip", &["m.bin", "pickle"]),
        (b"version https://git-lfs.github.com/spec/v1", &["m.bin", "LFS"]),
        (b"hello", &["\"hello\"", ".gguf"]),
        (b"GGU", &["m.bin", "\"GGU\""]),
    ] {
        std::fs::write(&path, content).unwrap();
        refused(&path, words);
    }
    refused(&dir.path().join("absent.gguf"), &["cannot open", "absent.gguf"]);
    refused(dir.path(), &["neither model.safetensors nor model.safetensors.index.json"]);
    write_gguf(&dir.path().join("there.gguf"), |_| ());
    refused(dir.path(), &["name a file to open it", "there.gguf"]);
}

/// A cache keyed by the fingerprint must not serve another training, quantization or naming of a model.
#[test]
fn fingerprints_follow_the_content() {
    let dir = TempDir::new().unwrap();
    let fingerprint = |file: &str, name: &str, value: f32, key: u32| {
        let path = dir.path().join(file);
        write_gguf(&path, |w| {
            w.set("k", &key).unwrap();
            w.tensor(name, DType::F32, &[4], row(value)).unwrap();
        });
        Checkpoint::open(&path).unwrap().fingerprint()
    };
    let base = fingerprint("a.gguf", "w", 1.0, 1);
    assert_eq!(fingerprint("b.gguf", "w", 1.0, 1), base);
    assert_ne!(fingerprint("c.gguf", "w", 1.000_000_1, 1), base);
    assert_ne!(fingerprint("d.gguf", "v", 1.0, 1), base);
    assert_ne!(fingerprint("e.gguf", "w", 1.0, 2), base);
}
