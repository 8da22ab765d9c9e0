//! `synth` and `check` as whole processes: files made, and files damaged in every way that can be told.
#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ingle_tensor::gguf::Writer;
use ingle_tensor::{Checkpoint, DType, Source};
use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// `ingle` with nothing of this machine within reach but what the test gives it.
fn ingle(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
    command
        .env_clear()
        .env("CUDA_VISIBLE_DEVICES", "")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(args: &[&str]) -> Output {
    ingle(args).output().unwrap()
}

/// The report of a check, and its exit code.
fn check(path: &Path) -> (Value, Option<i32>) {
    let output = output(&["check", "--json", path.to_str().unwrap()]);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (report, output.status.code())
}

/// The findings of one kind, as `where: what`.
fn list(report: &Value, kind: &str) -> Vec<String> {
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_string();
    let findings = report[kind].as_array().unwrap().iter();
    findings.map(|finding| format!("{}: {}", text(finding, "where"), text(finding, "what"))).collect()
}

/// A tensor on its way to a changed file.
struct Tensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// What is changed of a sound file.
struct Damage {
    /// Keys that are left out.
    without: &'static [&'static str],
    /// Keys that are added.
    keys: fn(&mut Writer<'_>),
    tensors: fn(&mut Vec<Tensor>),
}

const NONE: Damage = Damage { without: &[], keys: |_| (), tensors: |_| () };

/// Writes a small llama with some damage.
fn write_damaged(path: &Path, damage: &Damage) {
    let checkpoint = Checkpoint::open(&fixture("gguf/llama-s1/model-legacy.gguf")).unwrap();
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("it is GGUF") };
    let tensor = |t: &ingle_tensor::TensorInfo| Tensor {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        bytes: checkpoint.data(t).to_vec(),
    };
    let mut tensors = checkpoint.tensors().iter().map(tensor).collect();
    (damage.tensors)(&mut tensors);
    let mut writer = Writer::new();
    writer.copy(metadata, damage.without).unwrap();
    (damage.keys)(&mut writer);
    for Tensor { name, dtype, shape, bytes } in tensors {
        writer.tensor(&name, dtype, &shape, bytes).unwrap();
    }
    fs::write(path, writer.to_bytes()).unwrap();
}

fn tensor<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn what_is_well_is_sound() {
    for model in [
        "gguf/llama-s1/model-f16.gguf",
        "gguf/llama-s1/model-legacy.gguf",
        "gguf/llama-s1-wide/model-q4_k_m.gguf",
        "gguf/qwen2-s1/model-q8_0.gguf",
        "gguf/qwen3-s1/model-q8_0.gguf",
        "gguf/gemma3_text-s1/model-q8_0.gguf",
    ] {
        let (report, code) = check(&fixture(model));
        assert_eq!(
            (list(&report, "problems"), &report["ok"], code),
            (vec![], &Value::from(true), Some(0)),
            "{model}"
        );
    }
    let text = output(&["check", fixture("gguf/llama-s1/model-f16.gguf").to_str().unwrap()]);
    let said = String::from_utf8(text.stdout).unwrap();
    assert!(
        said.contains("sound ") && said.contains("bytes, 31 tensors") && text.stderr.is_empty(),
        "{said}"
    );
}

/// (damage, problems, notes): each is a whole report; what is listed has to be in it in this order.
#[test]
fn every_planted_fault_is_told() {
    let rows: &[(Damage, &[&str], &[&str])] = &[
        (NONE, &[], &[]),
        (
            Damage {
                tensors: |t| {
                    let norm = tensor(t, "blk.1.attn_norm.weight");
                    norm.bytes[4 * 5..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
                    norm.bytes[4 * 63..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
                },
                ..NONE
            },
            &[
                "tensor blk.1.attn_norm.weight: 2 of its 64 values are not finite, the first in row 0, column 5",
            ],
            &[],
        ),
        (
            // The scale of the second block of row 1.
            Damage {
                tensors: |t| {
                    let table = tensor(t, "token_embd.weight");
                    assert_eq!(table.dtype, DType::Q8_0);
                    table.bytes[34 * 3..][..2].copy_from_slice(&[0, 0x7c]);
                    table.bytes[34 * 3 + 2..][..32].fill(1);
                },
                ..NONE
            },
            &[
                "tensor token_embd.weight: 32 of its 32768 values are not finite, the first in row 1, column 32",
            ],
            &[],
        ),
        (
            Damage { tensors: |t| tensor(t, "blk.0.ffn_norm.weight").bytes.fill(0), ..NONE },
            &[],
            &["tensor blk.0.ffn_norm.weight: all its values are zero"],
        ),
        (
            Damage { tensors: |t| tensor(t, "blk.0.attn_q.weight").bytes.fill(0), ..NONE },
            &["tensor blk.0.attn_q.weight: it holds only zeros"],
            &[],
        ),
        (
            // A download whose middle never came.
            Damage {
                tensors: |t| {
                    t.iter_mut().filter(|t| t.name.starts_with("blk.1.")).for_each(|t| t.bytes.fill(0))
                },
                ..NONE
            },
            &["tensors: 9 tensors, ", " in all, hold only zeros: blk.1.attn_k.weight to blk.1.ffn_up.weight"],
            &[],
        ),
        (
            Damage {
                tensors: |t| {
                    let used = tensor(t, "blk.0.ffn_norm.weight").bytes.clone();
                    for i in [10, 2, 1, 0, 3, 4, 5] {
                        let (name, shape) = (format!("extra.{i}"), vec![used.len() / 4]);
                        t.push(Tensor { name, dtype: DType::F32, shape, bytes: used.clone() });
                    }
                },
                ..NONE
            },
            &[],
            &[
                "tensor extra.0: ",
                "tensor extra.1: ",
                "tensor extra.2: ",
                "tensor extra.3: ",
                "tensor extra.4: the model does not use it",
                "tensors: and 2 more that the model does not use",
            ],
        ),
        (
            Damage {
                without: &["tokenizer.ggml.pre"],
                keys: |w| w.set("tokenizer.ggml.pre", "nobody").unwrap(),
                ..NONE
            },
            &["tokenizer: tokenizer.ggml.pre \"nobody\" is not supported; supported: llama3, "],
            &[],
        ),
        (
            Damage { without: &["tokenizer.ggml.pre"], ..NONE },
            &[],
            &["tokenizer: tokenizer.ggml.pre, which says how text is cut into words, is missing"],
        ),
        (
            Damage {
                tensors: |t| {
                    tensor(t, "blk.0.attn_q.weight").name = "blk.0.attn_p.weight".into();
                    t.retain(|t| t.name != "output_norm.weight");
                    let norm = tensor(t, "blk.2.ffn_norm.weight");
                    (norm.shape, norm.bytes) = (vec![32], norm.bytes[..128].to_vec());
                },
                ..NONE
            },
            &[
                "tensors: ",
                "blk.0.attn_q.weight",
                "is missing",
                "blk.2.ffn_norm.weight",
                "shape [32], but the model's settings ask for [64]",
                "output_norm.weight",
                "is missing",
            ],
            &["tensor blk.0.attn_p.weight: the model does not use it"],
        ),
        (
            Damage {
                without: &["general.architecture"],
                keys: |w| w.set("general.architecture", "lambs").unwrap(),
                ..NONE
            },
            &["settings: architecture \"lambs\" is not supported"],
            &[],
        ),
        (
            Damage { without: &["llama.attention.head_count"], ..NONE },
            &["settings: setting llama.attention.head_count: is missing"],
            &[],
        ),
        (
            Damage {
                without: &["tokenizer.ggml.eos_token_id"],
                keys: |w| {
                    w.set("tokenizer.ggml.eos_token_id", &512u32).unwrap();
                    w.set("tokenizer.ggml.seperator_token_id", &100_000u32).unwrap();
                    w.set("tokenizer.ggml.mask_token_id", "[MASK]").unwrap();
                },
                ..NONE
            },
            &[
                "tokenizer: tokenizer.ggml.eos_token_id is 512, but the vocabulary has 512 tokens",
                "tokenizer: tokenizer.ggml.seperator_token_id is 100000, but",
                "tokenizer: metadata key \"tokenizer.ggml.mask_token_id\" is a string, wanted u32",
            ],
            &[],
        ),
        (
            Damage {
                without: &["tokenizer.ggml.merges"],
                keys: |w| w.set("tokenizer.ggml.merges", &["a zebra"]).unwrap(),
                ..NONE
            },
            &["tokenizer: tokenizer.ggml.merges, entry 0 (\"a zebra\"): there is no token \"zebra\""],
            &[],
        ),
        (
            Damage {
                without: &["tokenizer.ggml.token_type"],
                keys: |w| w.set("tokenizer.ggml.token_type", &[1i32; 500]).unwrap(),
                ..NONE
            },
            &["tokenizer: tokenizer.ggml.token_type has 500 entries, but there are 512 tokens"],
            &[],
        ),
        (
            Damage { without: &["tokenizer.ggml.model"], ..NONE },
            &["tokenizer: metadata key \"tokenizer.ggml.model\" is missing"],
            &[],
        ),
        (
            Damage {
                without: &["tokenizer.chat_template"],
                keys: |w| w.set("tokenizer.chat_template", "{% for %}").unwrap(),
                ..NONE
            },
            &["chat template: chat_template does not compile"],
            &[],
        ),
        (
            Damage {
                without: &["tokenizer.chat_template"],
                keys: |w| w.set("tokenizer.chat_template", "{{ raise_exception('not today') }}").unwrap(),
                ..NONE
            },
            &["chat template: the model's chat template refuses this conversation: not today"],
            &[],
        ),
        (
            Damage { without: &["tokenizer.chat_template"], ..NONE },
            &[],
            &["chat template: this model has no chat template (a base model)"],
        ),
        (
            Damage {
                without: &["general.type"],
                keys: |w| w.set("general.type", "imatrix").unwrap(),
                ..NONE
            },
            &["structure: ", "it is an importance matrix"],
            &[],
        ),
        // All at once: nothing hides another.
        (
            Damage {
                without: &["tokenizer.ggml.eos_token_id"],
                keys: |w| w.set("tokenizer.ggml.eos_token_id", &900u32).unwrap(),
                tensors: |t| {
                    tensor(t, "blk.0.attn_norm.weight").bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
                    t.retain(|t| t.name != "blk.2.attn_k.weight");
                },
            },
            &[
                "tensors: ",
                "blk.2.attn_k.weight",
                "is missing",
                "tokenizer: tokenizer.ggml.eos_token_id is 900",
                "tensor blk.0.attn_norm.weight: 1 of its 64 values are not finite",
            ],
            &[],
        ),
    ];
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    for (i, (damage, problems, notes)) in rows.iter().enumerate() {
        write_damaged(&path, damage);
        let (report, code) = check(&path);
        assert_eq!(code, Some(i32::from(!problems.is_empty())), "row {i}: {report}");
        for (kind, wanted) in [("problems", problems), ("notes", notes)] {
            let found = list(&report, kind).join("\n");
            let mut rest = found.as_str();
            for part in *wanted {
                let at =
                    rest.find(part).unwrap_or_else(|| panic!("row {i}: {kind} lack {part:?} in {found}"));
                rest = &rest[at + part.len()..];
            }
            // Nothing is told twice, and nothing that is not there.
            let lines = wanted.iter().filter(|part| part.contains(": ") || part.starts_with("blk")).count();
            assert!(found.lines().count() <= lines.max(wanted.len()), "row {i}: {kind} {found}");
        }
    }
}

#[test]
fn a_fault_of_structure_is_the_only_one() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let sound = fs::read(fixture("gguf/llama-s1/model-legacy.gguf")).unwrap();
    let after = |name: &str, at: usize| {
        sound.windows(name.len()).position(|w| w == name.as_bytes()).unwrap() + name.len() + at
    };
    let mut broken = Vec::new();
    let mut change = |at: usize, bytes: &[u8], want: &'static str| {
        let mut changed = sound.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        broken.push((changed, want));
    };
    change(0, b"GGML", "not a GGUF");
    change(4, &[1], "GGUF version 1 is not supported");
    change(8, &[255], "names");
    // Behind a matrix's name: dimension count, two dimensions, type, offset.
    let offset = after("blk.0.attn_k.weight", 4 + 16 + 4);
    change(offset, &1u64.to_le_bytes(), "is not a multiple of the alignment 32");
    change(offset, &0u64.to_le_bytes(), "inside tensor");
    change(offset, &(1u64 << 40).to_le_bytes(), "remain in the file");
    change(after("blk.0.attn_k.weight", 0), &[9], "it has 9 dimensions");
    change(after("blk.0.attn_k.weight", 20), &[200], "element type 200");
    broken.push((sound[..sound.len() - 1000].to_vec(), "remain in the file"));
    broken.push((Vec::new(), "the file is empty: fetch it again"));
    for (bytes, want) in &broken[..] {
        fs::write(&path, bytes).unwrap();
        let (report, code) = check(&path);
        let problems = list(&report, "problems");
        assert_eq!((problems.len(), code), (1, Some(1)), "{want}: {problems:?}");
        assert!(
            *want == "names" || problems[0].starts_with("structure: ") && problems[0].contains(want),
            "{want}: {problems:?}"
        );
        assert_eq!(report["bytes"], Value::Null);
        let says = |word: &str| problems[0].contains(word);
        let in_what = says("convert the model again")
            || says("known types are")
            || says("name a .gguf")
            || says("fetch");
        // One advice, from one place.
        assert_ne!(report["problems"][0]["do"].is_string(), in_what, "{report}");
    }
    // As lines: one for the problem, one for the end.
    let output = output(&["check", path.to_str().unwrap()]);
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(out.starts_with("problem structure: ") && out.lines().count() == 1, "{out}");
    assert_eq!(err, "error: 1 problem was found\n");
}

#[test]
fn bytes_between_tensors_and_after_them() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let mut bytes = fs::read(fixture("gguf/llama-s1/model-legacy.gguf")).unwrap();
    let checkpoint = Checkpoint::open(&fixture("gguf/llama-s1/model-legacy.gguf")).unwrap();
    let last = checkpoint.tensors().iter().max_by_key(|t| t.offset).unwrap();
    // The last tensor begins 64 bytes later, and 100 bytes follow.
    let name =
        bytes.windows(last.name.len()).position(|w| w == last.name.as_bytes()).unwrap() + last.name.len();
    let field = name + 4 + 8 * last.shape.len() + 4;
    let offset = u64::from_le_bytes(bytes[field..field + 8].try_into().unwrap()) + 64;
    bytes[field..field + 8].copy_from_slice(&offset.to_le_bytes());
    let at = last.offset as usize;
    bytes.splice(at..at, [0; 64]);
    bytes.extend([0; 100]);
    fs::write(&path, bytes).unwrap();
    let (report, code) = check(&path);
    let (problems, notes) = (list(&report, "problems"), list(&report, "notes"));
    assert_eq!((problems.len(), notes.len(), code), (1, 1, Some(1)), "{report}");
    assert!(
        problems[0].starts_with(&format!("tensor {}: ", last.name))
            && problems[0].contains("belong to no tensor")
    );
    assert!(notes[0].contains("after the last tensor, are not used"), "{notes:?}");
}

#[test]
fn folders_are_checked_too() {
    let (report, code) = check(&fixture("models/llama"));
    let problems = list(&report, "problems");
    assert_eq!((problems.len(), code), (1, Some(1)));
    assert!(problems[0].starts_with("tokenizer: ") && problems[0].contains("tokenizer.json"), "{problems:?}");
    assert_eq!(report["problems"][0]["do"], Value::Null, "what to do is in what was found");
    for path in ["/", env!("CARGO_MANIFEST_DIR"), concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
        let (report, _) = check(Path::new(path));
        let problems = list(&report, "problems");
        assert!(problems[0].contains("name a .gguf file, or a folder"), "{problems:?}");
        assert_eq!(report["problems"][0]["do"], Value::Null);
    }
    let model = fixture("gguf/llama-s1/model-f16.gguf").display().to_string();
    let several = output(&["check", &model, fixture("models/llama").to_str().unwrap(), &model]);
    let said = String::from_utf8(several.stdout).unwrap();
    let starts = |word: &str| said.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!(
        (starts("file "), starts("sound "), starts("problem "), several.status.code()),
        (3, 2, 1, Some(1))
    );
    // One that is not there keeps none of the others from being checked.
    let several = output(&["check", "/no/such/model", &model]);
    let said = String::from_utf8(several.stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0] == "file /no/such/model" && lines[1].starts_with("problem file: "), "{said}");
    assert!(lines.last().unwrap().starts_with("sound ") && several.status.code() == Some(1), "{said}");
    let several = output(&["check", "--json", "/no/such/model", &model]);
    let reports = serde_json::Deserializer::from_slice(&several.stdout).into_iter::<Value>();
    let sound: Vec<bool> = reports.map(|report| report.unwrap()["ok"].as_bool().unwrap()).collect();
    assert_eq!((sound, several.status.code()), (vec![false, true], Some(1)));
    let absent = output(&["check", "/no/such/model"]);
    assert_eq!((absent.status.code(), absent.stdout.len()), (Some(1), 0));
    assert_eq!(output(&["check"]).status.code(), Some(2));
}

/// The llama fixture as a folder with this change of its settings, and its matrices said to be of FP8.
fn folder_of(dir: &Path, change: fn(&mut Value)) -> PathBuf {
    let source = fixture("models/llama");
    let mut config = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let whole = fs::read(source.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let mut data = Vec::new();
    for (_, tensor) in header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__")
    {
        let place = |i: usize| 8 + length + tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let mut bytes = whole[place(0)..place(1)].to_vec();
        let shape: Vec<u64> =
            tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        if shape.len() == 2 {
            bytes.truncate(shape.iter().product::<u64>() as usize);
            tensor["dtype"] = "F8_E4M3".into();
        }
        tensor["data_offsets"] = serde_json::json!([data.len(), data.len() + bytes.len()]);
        data.extend(bytes);
    }
    let header = header.to_string().into_bytes();
    let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &data];
    fs::write(dir.join("model.safetensors"), parts.concat()).unwrap();
    dir.to_path_buf()
}

/// What is sound and does not run in this version is not to be converted again.
#[test]
fn what_does_not_run_is_told_with_what_to_do() {
    let dir = TempDir::new().unwrap();
    let folder = folder_of(dir.path(), |_| ());
    let (report, _) = check(&folder);
    let problems = list(&report, "problems");
    // All matrices in one line, and the tokenizer that is not there.
    assert_eq!(problems.len(), 2, "{problems:?}");
    let of_type = " of element type F8_E4M3, which is not read: ";
    assert!(problems[0].starts_with("tensors: ") && problems[0].contains(of_type), "{problems:?}");
    assert!(problems[0].contains("model.layers.0.") && problems[0].contains(" more"), "{problems:?}");
    assert_eq!(report["problems"][0]["do"], "take the release in bf16");
    let elsewhere = "run it with another program, or a later version of this one";
    let folder = folder_of(dir.path(), |config| {
        config["model_type"] = "gemma3".into();
        config["text_config"] = serde_json::json!({});
    });
    let (report, _) = check(&folder);
    let want =
        "architecture \"gemma3\" is not supported, being the multimodal form: only text models run; known: ";
    let problem = &list(&report, "problems")[0];
    assert!(problem.contains(want) && problem.ends_with(", gemma3_text"), "{problem}");
    assert_eq!(report["problems"][0]["do"], elsewhere);
    let folder = folder_of(dir.path(), |config| config["num_experts"] = 8.into());
    let (report, _) = check(&folder);
    let problem = &list(&report, "problems")[0];
    assert!(
        problem.ends_with("setting num_experts: 8 experts: this version runs dense models only"),
        "{problem}"
    );
    assert_eq!(report["problems"][0]["do"], elsewhere);
}

#[test]
fn synth_says_the_size_and_writes_nothing() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.gguf").display().to_string();
    let dry = output(&["synth", "llama8b-q4_k_m", &out, "--dry-run"]);
    let said = String::from_utf8(dry.stdout).unwrap();
    assert!(said.starts_with("llama8b-q4_k_m: 4,91") && said.contains("GiB), 292 tensors, seed 0"), "{said}");
    let dry = output(&["synth", "qwen3_30b_a3b-q4_k_m", &out, "--dry-run"]);
    let said = String::from_utf8(dry.stderr).unwrap();
    assert!(said.contains("note: qwen3_30b_a3b is to inspect and check only"), "{said}");
    fs::write(&out, "mine").unwrap();
    let refused = output(&["synth", "smollm2-135m-q4_0", &out]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is there already"), "{refused:?}");
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    for args in [
        &["synth"][..],
        &["synth", "llama8b", &out],
        &["synth", "llama8b-q9", &out],
        &["synth", "gpt-f16", &out],
    ] {
        let usage = output(args);
        assert_eq!(usage.status.code(), Some(2), "{args:?}");
        let names = String::from_utf8_lossy(&usage.stderr).contains("qwen3_30b_a3b, with -TYPE");
        assert_eq!(names, args.len() == 3, "{usage:?}");
    }
}

/// The smallest preset, whole: it is made, it is sound, it runs, and the seed decides.
#[test]
fn a_synthesized_model_is_sound_and_runs() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let out = path.display().to_string();
    let synth = |seed: &str, threads: &str| {
        let made = output(&["synth", "smollm2-135m-q4_0", &out, "--force", "--seed", seed, "-t", threads]);
        assert_eq!(String::from_utf8(made.stdout).unwrap(), format!("{out}\n"));
        let said = String::from_utf8(made.stderr).unwrap();
        let line = format!("smollm2-135m-q4_0: 77,093,568 bytes (73.5 MiB), 272 tensors, seed {seed}\n");
        assert_eq!((said, made.status.code()), (line, Some(0)));
        fs::read(&path).unwrap()
    };
    let other = synth("1", "1");
    let bytes = synth("0", "1");
    assert!(bytes == synth("0", "2") && bytes != other);
    let stream = ["synth", "smollm2-135m-q4_0", "-"];
    let streamed = ingle(&stream).current_dir(dir.path()).output().unwrap();
    assert!(streamed.status.success() && streamed.stdout == bytes, "{:?}", streamed.stderr);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a file called '-'");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let full = ingle(&stream).stdout(full).output().unwrap();
    let (full, said) = (full.status.code(), String::from_utf8(full.stderr).unwrap());
    assert!(full == Some(1) && said.contains("error: standard input or output: No space left"), "{said}");
    let (report, code) = check(&path);
    assert_eq!((list(&report, "problems"), list(&report, "notes"), code), (vec![], vec![], Some(0)));
    let run = output(&["run", "-m", &out, "--json", "-n", "3", "--greedy", "Name a river."]);
    let reply: Value = serde_json::from_slice(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
    assert_eq!(reply["generated_ids"].as_array().unwrap().len(), 3);
}

/// A `synth` of `preset` that has begun its file `out`, the first in its folder.
fn begun_synth(preset: &str, out: &Path) -> Child {
    begun(&mut ingle(&["synth", preset, out.to_str().unwrap(), "-t", "1"]), out)
}

fn begun(synth: &mut Command, out: &Path) -> Child {
    let child = synth.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The file is begun before the first weight is made.
    let start = Instant::now();
    while fs::read_dir(out.parent().unwrap()).unwrap().count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(120), "nothing was begun");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

#[test]
fn of_two_files_with_one_name_the_first_stays() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.gguf");
    // Where the machine was so busy that the other file was whole first, again.
    let begin = |_| {
        let mut child = begun_synth("smollm2-135m-q4_0", &out);
        let Ok(mut mine) = fs::File::create_new(&out) else {
            child.wait().unwrap();
            fs::remove_file(&out).unwrap();
            return None;
        };
        mine.write_all(b"mine").unwrap();
        Some(child)
    };
    let child = (0..10).find_map(begin).expect("77 MB take longer than a look at a folder");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), fs::read(&out).unwrap()), (Some(1), b"mine".to_vec()), "{said}");
    let line = said.lines().last().unwrap();
    for part in ["error: ", "m.gguf came to be there while it was written, and stays as it is", "--force"] {
        assert!(line.contains(part), "{said}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file is left");
}

#[test]
fn an_interrupted_synth_leaves_nothing() {
    for (signal, code, by) in [("-INT", 130, ""), ("-TERM", 143, " by SIGTERM"), ("-HUP", 129, " by SIGHUP")]
    {
        let dir = TempDir::new().unwrap();
        let child = begun_synth("smollm2-135m-f32", &dir.path().join("m.gguf"));
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), fs::read_dir(dir.path()).unwrap().count()),
            (Some(code), 0),
            "{said}"
        );
        assert!(said.ends_with(&format!("error: interrupted{by}; nothing is left of the file\n")), "{said}");
    }
}

/// Under nohup a hangup is ignored, and stays so.
#[test]
fn a_synth_outlives_its_terminal_where_it_is_asked_to() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("m.gguf");
    let script = format!(
        "trap '' HUP; exec {} synth smollm2-135m-q4_0 {} -t 1",
        env!("CARGO_BIN_EXE_ingle"),
        out.display()
    );
    let child = begun(Command::new("/bin/sh").args(["-c", &script]), &out);
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && out.exists(), "{output:?}");
}

/// Standard output is full, so the file is not got on with.
#[test]
fn a_second_signal_ends_a_process_that_waits() {
    let mut child = ingle(&["synth", "smollm2-135m-q4_0", "-", "-t", "1"]).spawn().unwrap();
    let mut begun = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut begun).unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it goes on");
        // The first may come before it waits, and then ends it as well.
        Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        std::thread::sleep(Duration::from_millis(300));
    };
    assert_eq!(status.code(), Some(143));
}

#[test]
fn a_file_gets_whole_though_nobody_reads_what_is_said_of_it() {
    let dir = TempDir::new().unwrap();
    let (input, out) = (fixture("gguf/llama-s1/model-legacy.gguf"), dir.path().join("m.gguf"));
    let (reader, nobody) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = ingle(&["quantize", input.to_str().unwrap(), out.to_str().unwrap(), "q8_0"]);
    let status = command.stderr(nobody).status().unwrap();
    assert!(status.success() && out.exists(), "{status:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file is left");
}

#[test]
fn raw_needs_no_template_that_compiles() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let damage = Damage {
        without: &["tokenizer.chat_template"],
        keys: |w| w.set("tokenizer.chat_template", "{% for %}").unwrap(),
        ..NONE
    };
    write_damaged(&path, &damage);
    let model = path.to_str().unwrap();
    let raw = output(&["run", "-m", model, "--raw", "--greedy", "-n", "2", "ab"]);
    assert!(raw.status.success(), "{raw:?}");
    for args in [&["run", "-m", model, "ab"][..], &["chat", "-m", model]] {
        let refused = output(args);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(1) && said.contains("does not compile"), "{said}");
    }
}
