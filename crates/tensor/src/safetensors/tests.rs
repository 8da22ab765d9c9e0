//! Folders of every layout, and headers that disagree with themselves or with the file.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::Checkpoint;

/// A file with this header and `data` bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

fn f32_header(name: &str) -> String {
    format!(r#"{{"{name}":{{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}}}"#)
}

#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    says(&parse(bytes, 0).expect_err("the file must be refused"), words);
}

#[track_caller]
fn says(error: &Error, words: &[&str]) {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} lacks {word:?}");
    }
}

#[test]
fn tensors_come_in_order_of_offset() {
    // The order of names in the JSON is free, and so is white space after it.
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[5,17]},"#,
        r#""e":{"dtype":"F32","shape":[0],"data_offsets":[5,5]},"#,
        r#""a":{"dtype":"I8","shape":[5],"data_offsets":[0,5]},"s":{"dtype":"F16","shape":[],"data_offsets":[17,19]}}   "#
    );
    let tensors = parse(&file(header, 19), 3).unwrap();
    let names: Vec<_> = tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "e", "b", "s"]);
    let start = 8 + header.len() as u64;
    assert_eq!(
        tensors[2],
        TensorInfo {
            name: "b".into(),
            dtype: DType::BF16,
            shape: vec![2, 3],
            file: 3,
            offset: start + 5,
            bytes: 12
        }
    );
}

/// ztxz16/fastllm#712, ml-explore/mlx#3409 and #3363, ollama/ollama#17149, antirez/h3.c#48.
#[test]
fn headers_that_disagree() {
    let entry = |rest: &str| format!(r#"{{"w":{{"dtype":"F32",{rest}}}}}"#);
    let with = |rest: &str, data| file(&entry(rest), data);
    let tensor = "tensor \"w\"";
    refused(
        &with(r#""shape":[16,4],"data_offsets":[0,4096]"#, 4096),
        &[tensor, "takes 256 bytes", "[0, 4096]"],
    );
    refused(
        &with(r#""shape":[1000,1000],"data_offsets":[0,4]"#, 4),
        &[tensor, "takes 4000000 bytes", "[0, 4]"],
    );
    refused(&with(r#""shape":[2],"data_offsets":[8,0]"#, 8), &[tensor, "[8, 0]"]);
    refused(&with(r#""shape":[2],"data_offsets":[-4,4]"#, 8), &["\"w\"", "-4"]);
    refused(&with(r#""shape":[2],"data_offsets":[]"#, 8), &["\"w\"", "line 1"]);
    refused(&with(r#""shape":[2],"data_offsets":[0]"#, 8), &["\"w\"", "line 1"]);
    refused(&with(r#""shape":[-2],"data_offsets":[0,8]"#, 8), &["\"w\"", "-2"]);
    refused(&with(r#""shape":[2]"#, 8), &["\"w\"", "data_offsets"]);
    refused(&with(r#""shape":[2],"shape":[2],"data_offsets":[0,8]"#, 8), &["\"w\"", "duplicate field"]);
    refused(&with(r#""shape":[4294967296,4294967296],"data_offsets":[0,8]"#, 8), &[tensor, "63 bits"]);
    let far = r#""shape":[2],"data_offsets":[18446744073709551600,18446744073709551608]"#;
    refused(&with(far, 8), &[tensor, "overflow"]);
    refused(&with(r#""shape":[2],"data_offsets":[0,8]"#, 7), &[tensor, "needs 8 bytes", "but 7 remain"]);
    refused(&with(r#""shape":[2],"data_offsets":[0,8]"#, 24), &["last 16 bytes"]);
    refused(&with(r#""shape":[2],"data_offsets":[4,12]"#, 12), &[tensor, "4 bytes before it"]);
    let unknown = r#"{"w":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#;
    refused(&file(unknown, 8), &[tensor, "\"C64\""]);
}

#[test]
fn headers_that_are_none() {
    refused(b"1234567", &["the header", "needs 8", "but 7 remain"]);
    refused(&u64::MAX.to_le_bytes(), &["the header", "18446744073709551615"]);
    refused(&file("", 0), &["the header", "EOF"]);
    refused(&[&2u64.to_le_bytes()[..], b"{"].concat(), &["the header", "needs 2", "but 1 remain"]);
    refused(&file("[]", 0), &["an object of tensors"]);
    refused(&file("{} x", 0), &["the header", "trailing"]);
    refused(&file(r#"{"__metadata__":7}"#, 0), &["__metadata__"]);
    refused(&file(&"[".repeat(10_000), 0), &["the header"]);
    refused(&file(&format!(r#"{{"w":{}"#, "[".repeat(10_000)), 0), &["\"w\""]);
    assert!(parse(&file("{}", 0), 0).unwrap().is_empty());
}

#[test]
fn names_and_ranges_that_are_there_twice() {
    let two = |a: &str, b: &str, offsets: &str| {
        format!(
            r#"{{"{a}":{{"dtype":"I8","shape":[4],"data_offsets":[0,4]}},"{b}":{{"dtype":"I8","shape":[4],"data_offsets":{offsets}}}}}"#
        )
    };
    refused(&file(&two("w", "w", "[4,8]"), 8), &["tensor \"w\"", "twice"]);
    refused(&file(&two("v", "w", "[0,4]"), 4), &["inside tensor"]);
    refused(&file(&two("v", "w", "[2,6]"), 6), &["tensor \"w\"", "inside tensor \"v\""]);
}

fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn config_of(checkpoint: &Checkpoint) -> &str {
    let Source::SafeTensors { config, .. } = checkpoint.source() else { panic!("it is safetensors") };
    config["model_type"].as_str().unwrap()
}

fn config(model_type: &str) -> Vec<u8> {
    format!(r#"{{"model_type":"{model_type}"}}"#).into_bytes()
}

#[test]
fn a_folder_opens_with_the_config_that_is_asked_for() {
    let weights = file(&f32_header("w"), 8);
    let dir = folder(&[
        (SINGLE, weights.clone()),
        (CONFIG, config("new")),
        (LEGACY_CONFIG, config("old")),
        ("other.safetensors", file(&f32_header("o"), 8)),
    ]);
    let open = |name: &str| Checkpoint::open(&dir.path().join(name)).unwrap();
    for (path, model_type, tensor) in [
        ("", "new", "w"),
        (SINGLE, "new", "w"),
        (LEGACY_CONFIG, "old", "w"),
        ("other.safetensors", "new", "o"),
    ] {
        let checkpoint = open(path);
        assert_eq!(config_of(&checkpoint), model_type, "{path}");
        let info = checkpoint.require(tensor).unwrap();
        assert_eq!(checkpoint.data(info), [0, 1, 2, 3, 4, 5, 6, 7]);
        let Source::SafeTensors { dir: found, .. } = checkpoint.source() else { panic!("it is safetensors") };
        assert_eq!(found.join(CONFIG), dir.path().join(CONFIG));
    }
    let dir = folder(&[(SINGLE, weights), (LEGACY_CONFIG, config("old"))]);
    let legacy = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(config_of(&legacy), "old");
    let Source::SafeTensors { config_path, .. } = legacy.source() else { panic!("it is safetensors") };
    assert_eq!(*config_path, dir.path().join(LEGACY_CONFIG));
}

#[test]
fn one_shard_opens_all_or_says_that_it_is_one() {
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = format!(r#"{{"weight_map":{{"a":"{}","b":"{}"}}}}"#, shards[0], shards[1]);
    let dir = folder(&[
        (shards[0], file(&f32_header("a"), 8)),
        (shards[1], file(&f32_header("b"), 8)),
        (CONFIG, config("new")),
        (INDEX, index.into_bytes()),
    ]);
    for shard in shards {
        let checkpoint = Checkpoint::open(&dir.path().join(shard)).unwrap();
        assert!(checkpoint.require("a").is_ok() && checkpoint.require("b").is_ok(), "{shard}");
    }
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    let said = Checkpoint::open(&dir.path().join(shards[1])).unwrap_err().to_string();
    assert!(said.contains("this is shard 2 of 2") && said.contains(INDEX), "{said}");
}

#[test]
fn shards_open_through_their_index() {
    let index = br#"{"metadata":{"total_size":16},"weight_map":{"b":"2.safetensors","a":"1.safetensors"}}"#;
    let dir = folder(&[
        (INDEX, index.to_vec()),
        ("1.safetensors", file(&f32_header("a"), 8)),
        ("2.safetensors", file(&f32_header("b"), 8)),
        (CONFIG, config("llama")),
    ]);
    for path in ["", INDEX] {
        let checkpoint = Checkpoint::open(&dir.path().join(path)).unwrap();
        let found: Vec<_> = checkpoint.tensors().iter().map(|t| (t.name.as_str(), t.file)).collect();
        assert_eq!(found, [("a", 0), ("b", 1)]);
    }
}

/// (index, what the refusal says) over two shards that hold the tensors `a` and `c`, and `a` and `u`.
#[test]
fn an_index_that_disagrees() {
    let two = |a: &str, b: &str, of: &str| {
        format!(
            r#"{{"{a}":{{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}},"{b}":{{"dtype":"{of}","shape":[2],"data_offsets":[8,10]}}}}"#
        )
    };
    let plain = "plain file name";
    let rows: &[(&str, &[&str])] = &[
        (r#"{"weight_map":{"b":"1.safetensors"}}"#, &["index.json", "tensor \"a\"", "does not list it"]),
        (
            r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"1.safetensors"}}"#,
            &["index.json", "tensor \"b\"", "in 1.safetensors, where it is not"],
        ),
        (
            r#"{"weight_map":{"a":"2.safetensors","c":"2.safetensors","u":"2.safetensors"}}"#,
            &["tensor \"c\"", "in 2.safetensors, where it is not"],
        ),
        (r#"{"weight_map":{"a":"2.safetensors"}}"#, &["tensor \"u\"", "does not list it"]),
        (
            r#"{"weight_map":{"a":"3.safetensors"}}"#,
            &["3.safetensors", "the index names this file", "fetch it"],
        ),
        (
            r#"{"weight_map":{"a":"1.safetensors","c":"1.safetensors","u":"2.safetensors"}}"#,
            &["tensor \"a\"", "twice", "1.safetensors", "2.safetensors"],
        ),
        (
            r#"{"weight_map":{"a":"1.safetensors","a":"2.safetensors"}}"#,
            &["tensor \"a\"", "the index lists it twice"],
        ),
        (r#"{"weight_map":{"a":"../1.safetensors"}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":{"a":".."}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":{"a":"sub/1.safetensors"}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":{"a":"/etc/passwd"}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":{"a":""}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":{"a":7}}"#, &["tensor \"a\"", plain]),
        (r#"{"weight_map":[]}"#, &["index.json", "an object of tensors"]),
        ("{}", &["index.json", "weight_map"]),
        ("[]", &["index.json", "not the index"]),
        ("{", &["index.json", "EOF"]),
    ];
    for (index, words) in rows {
        let dir = folder(&[
            (INDEX, index.as_bytes().to_vec()),
            ("1.safetensors", file(&two("a", "c", "I8"), 10)),
            ("2.safetensors", file(&two("a", "u", "U8"), 10)),
            (CONFIG, config("llama")),
        ]);
        says(&Checkpoint::open(dir.path()).expect_err(index), words);
    }
}

/// Tensors that are not read keep nothing from loading but what asks for them, by name.
#[test]
fn element_types_that_are_not_read() {
    for (element, size) in [
        ("F8_E4M3", 1),
        ("F8_E5M2", 1),
        ("F8_E8M0", 1),
        ("BOOL", 1),
        ("U8", 1),
        ("U16", 2),
        ("U32", 4),
        ("U64", 8),
    ] {
        let end = 8 + 6 * size;
        let header = format!(
            r#"{{"a":{{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}},"q":{{"dtype":"{element}","shape":[2,3],"data_offsets":[8,{end}]}}}}"#
        );
        let dir = folder(&[(SINGLE, file(&header, end)), (CONFIG, config("llama"))]);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.tensors().len(), 1);
        assert_eq!(checkpoint.unread().collect::<Vec<_>>(), [("q", element)]);
        assert!(checkpoint.has("q") && checkpoint.get("q").is_none() && !checkpoint.has("r"));
        says(&checkpoint.require("q").unwrap_err(), &["tensor \"q\"", element, "is not supported"]);
        // Their sizes are checked like all others.
        let long = header.replace("[2,3]", "[2,4]");
        refused(&file(&long, end), &["tensor \"q\"", element, &format!("takes {} bytes", 8 * size)]);
    }
}

#[test]
fn a_folder_without_a_usable_config() {
    let dir = folder(&[(SINGLE, file(&f32_header("w"), 8))]);
    says(&Checkpoint::open(dir.path()).unwrap_err(), &["config.json"]);
    fs::write(dir.path().join(CONFIG), "[1]").unwrap();
    says(&Checkpoint::open(dir.path()).unwrap_err(), &["config.json", "not an object"]);
    fs::write(dir.path().join(CONFIG), "{,").unwrap();
    says(&Checkpoint::open(dir.path()).unwrap_err(), &["config.json", "not JSON"]);
    says(&Checkpoint::open(&dir.path().join("absent.safetensors")).unwrap_err(), &["config.json"]);
    fs::write(dir.path().join(CONFIG), "{}").unwrap();
    says(&Checkpoint::open(&dir.path().join("absent.safetensors")).unwrap_err(), &["cannot open", "absent"]);
    says(&Checkpoint::open(&dir.path().join("absent.json")).unwrap_err(), &["cannot read", "absent.json"]);
}
