//! `quantize` as a whole process: what it writes is sound, runs, and is as near to its source as the type allows.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ingle_tensor::gguf::Writer;
use ingle_tensor::{Checkpoint, DType, Source, quant};
use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// `ingle` with nothing of this machine within reach but what the test gives it.
fn output(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
    command.env_clear().env("CUDA_VISIBLE_DEVICES", "").args(args).stdin(Stdio::null()).output().unwrap()
}

fn quantize(input: &Path, out: &Path, more: &[&str]) -> Output {
    output(&[&["quantize", input.to_str().unwrap(), out.to_str().unwrap()], more].concat())
}

/// What a failed run said, on one line.
fn refusal(output: Output) -> String {
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.require(name).unwrap();
    let mut values = vec![0.0; tensor.elements()];
    quant::decode_row(tensor.dtype, checkpoint.data(tensor), &mut values);
    values
}

/// Root mean square of the difference, as a share of that of the values.
fn loss(values: &[f32], of: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let lost = squares(&mut values.iter().zip(of).map(|(a, b)| a - b));
    (lost / squares(&mut of.iter().copied())).sqrt()
}

fn key(checkpoint: &Checkpoint, key: &str) -> u32 {
    let Source::Gguf(metadata) = checkpoint.source() else { panic!("not a GGUF file") };
    metadata.usize(key).unwrap() as u32
}

/// A pipe was waited for for ever, a `-` became a file of that name, and a limit on file sizes killed the process and left
/// what it had begun.
#[test]
fn pipes_and_limits() {
    let dir = TempDir::new().unwrap();
    let (model, out) = (fixture("gguf/llama-s1/model-q8_0.gguf"), dir.path().join("out.gguf"));
    let pipe = dir.path().join("pipe.gguf");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let said = refusal(quantize(&pipe, &out, &["q8_0"]));
    assert!(said.contains("pipe.gguf is a pipe; a model is a file or a folder"), "{said}");
    let said = refusal(quantize(&model, Path::new("-"), &["q8_0"]));
    assert!(said.contains("not standard output"), "{said}");
    // What cannot be begun is not announced.
    let nowhere = dir.path().join("no/such/out.gguf");
    let made = output(&["synth", "smollm2-135m-q4_0", nowhere.to_str().unwrap()]);
    for said in [refusal(quantize(&model, &nowhere, &["q8_0"])), refusal(made)] {
        assert!(said.starts_with("error: cannot create ") && said.lines().count() == 1, "{said}");
    }
    let limited = format!(
        "ulimit -f 8; exec {} quantize {} {} f32",
        env!("CARGO_BIN_EXE_ingle"),
        model.display(),
        out.display()
    );
    let said = refusal(Command::new("sh").args(["-c", &limited]).stdin(Stdio::null()).output().unwrap());
    assert!(said.contains("out.gguf"), "{said}");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, ["pipe.gguf"]);
}

/// That values were rounded before matters only where they are rounded again.
#[test]
fn floats_of_a_quantized_model_are_no_second_rounding() {
    let dir = TempDir::new().unwrap();
    for (mix, is_noted) in [("f32", false), ("f16", false), ("bf16", false), ("q4_0", true)] {
        let out = dir.path().join(format!("{mix}.gguf"));
        let made = quantize(&fixture("gguf/llama-s1/model-q8_0.gguf"), &out, &[mix]);
        assert!(made.status.success(), "{made:?}");
        assert_eq!(String::from_utf8_lossy(&made.stderr).contains("note: rounded before"), is_noted, "{mix}");
    }
}

/// Every type: sound, all norms f32, and each matrix as near as the type allows. Rows of 64 and 128 values are not tiled by
/// blocks of 256, and get the near type.
#[test]
fn every_type_is_written_sound_and_near() {
    let dir = TempDir::new().unwrap();
    let input = fixture("gguf/llama-s1/model-f16.gguf");
    let source = Checkpoint::open(&input).unwrap();
    let name = "blk.1.attn_q.weight";
    for (mix, dtype, file_type, allowed) in [
        ("F32", DType::F32, 0, 0.0),
        ("F16", DType::F16, 1, 0.0),
        ("BF16", DType::BF16, 32, 0.004),
        ("q8_0", DType::Q8_0, 7, 0.008),
        ("q4_0", DType::Q4_0, 2, 0.12),
        ("q4_1", DType::Q4_1, 3, 0.1),
        ("q5_0", DType::Q5_0, 8, 0.06),
        ("q5_1", DType::Q5_1, 9, 0.05),
        ("q4_k", DType::Q5_0, 14, 0.06),
        ("q5_k", DType::Q5_1, 16, 0.05),
        ("q6_k", DType::Q8_0, 18, 0.008),
        ("iq4_nl", DType::IQ4NL, 25, 0.1),
        ("iq4_xs", DType::IQ4NL, 30, 0.1),
        ("Q4_K_M", DType::Q5_0, 15, 0.06),
    ] {
        let out = dir.path().join(format!("{mix}.gguf"));
        let made = quantize(&input, &out, &[mix, "-t", "2"]);
        assert!(made.status.success(), "{mix}: {made:?}");
        assert_eq!(made.stdout, format!("{}\n", out.display()).into_bytes());
        let made = Checkpoint::open(&out).unwrap();
        assert_eq!(made.require(name).unwrap().dtype, dtype, "{mix}");
        assert_eq!(key(&made, "general.file_type"), file_type);
        assert_eq!(key(&made, "general.quantization_version"), 2);
        let lost = loss(&values(&made, name), &values(&source, name));
        assert!(lost <= allowed && (lost > allowed / 3.0 || !dtype.is_quantized()), "{mix}: {lost}");
        for tensor in source.tensors() {
            let is_vector = tensor.shape.len() == 1;
            let now = made.require(&tensor.name).unwrap();
            assert!(now.shape == tensor.shape && (!is_vector || now.dtype == DType::F32), "{}", tensor.name);
            assert!(!is_vector || values(&made, &tensor.name) == values(&source, &tensor.name));
        }
        let (Source::Gguf(before), Source::Gguf(after)) = (source.source(), made.source()) else {
            panic!("not GGUF files")
        };
        let kept = |key: &&str| !["general.file_type", "general.quantization_version"].contains(key);
        assert!(before.keys().filter(kept).eq(after.keys().filter(kept)));
        let report = output(&["check", "--json", out.to_str().unwrap()]);
        let report: Value = serde_json::from_slice(&report.stdout).unwrap();
        assert_eq!(report["problems"].as_array().unwrap().len(), 0, "{mix}: {report}");
        let run =
            output(&["run", "-m", out.to_str().unwrap(), "--json", "--raw", "--greedy", "-n", "3", "ab"]);
        let reply: Value = serde_json::from_slice(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
        assert_eq!(reply["generated_ids"].as_array().unwrap().len(), 3, "{mix}");
    }
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| name.to_str().unwrap().ends_with(".gguf")));
}

/// Q4_K_M gives more bits to the output matrix and, of three layers, to the sensitive matrices of the last. What has its
/// type already is copied, and the number of threads changes nothing.
#[test]
fn a_mix_of_a_mix_is_the_same_file() {
    let dir = TempDir::new().unwrap();
    let [one, two] = ["1.gguf", "2.gguf"].map(|name| dir.path().join(name));
    let noted = quantize(&fixture("gguf/llama-s1-wide/model-q4_k_m.gguf"), &one, &["Q4_K_M", "-t", "1"]);
    let said = String::from_utf8(noted.stderr).unwrap();
    let want = "q4_k_m: 891,712 bytes (870.8 KiB) from 911.3 KiB, 20 q4_k, 8 f32, 3 q6_k\n\
                note: rounded before and now again, which loses more: ";
    assert!(said.starts_with(want), "{said}");
    let made = Checkpoint::open(&one).unwrap();
    assert_eq!(made.total_bytes(), 891_712);
    let mut more: Vec<&str> =
        made.tensors().iter().filter(|t| t.dtype == DType::Q6K).map(|t| t.name.as_str()).collect();
    more.sort_unstable();
    assert_eq!(more, ["blk.2.attn_v.weight", "blk.2.ffn_down.weight", "output.weight"]);
    let again = quantize(&one, &two, &["q4_k_m", "-t", "3"]);
    assert!(again.status.success() && !String::from_utf8_lossy(&again.stderr).contains("note:"), "{again:?}");
    assert!(fs::read(&one).unwrap() == fs::read(&two).unwrap());
}

#[test]
fn nothing_is_overwritten_that_was_not_meant() {
    let dir = TempDir::new().unwrap();
    let (input, out, link) =
        (dir.path().join("in.gguf"), dir.path().join("out.gguf"), dir.path().join("l.gguf"));
    fs::copy(fixture("gguf/llama-s1/model-q8_0.gguf"), &input).unwrap();
    fs::hard_link(&input, &link).unwrap();
    let before = fs::read(&input).unwrap();
    for name in [&input, &link] {
        let said = refusal(quantize(&input, name, &["q4_0", "--force"]));
        assert!(said.contains("is a file of the model itself"), "{said}");
    }
    fs::write(&out, "mine").unwrap();
    let said = refusal(quantize(&input, &out, &["q4_0"]));
    assert!(said.contains("is there already: give another name, or --force"), "{said}");
    assert!(fs::read(&out).unwrap() == b"mine" && fs::read(&input).unwrap() == before);
    assert!(quantize(&input, &out, &["q4_0", "--force"]).status.success());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    let usage = quantize(&input, &out, &["q9_9"]);
    let said = String::from_utf8(usage.stderr).unwrap();
    assert!(usage.status.code() == Some(2) && said.contains("a type is one of q4_k_m, q8_0"), "{said}");
    let folder = refusal(quantize(&fixture("models/llama"), &dir.path().join("x.gguf"), &["q8_0"]));
    assert!(folder.contains("safetensors cannot be quantized yet"), "{folder}");
}

/// A value that is not finite, and one that the type cannot hold, end the work with the tensor's name and leave no file.
#[test]
fn values_that_cannot_be_rounded_are_named() {
    let dir = TempDir::new().unwrap();
    let (input, out) = (dir.path().join("in.gguf"), dir.path().join("out.gguf"));
    for (value, mix, want) in [
        (f32::NAN, "q8_0", "row 1, column 7: NaN cannot be rounded"),
        (f32::NEG_INFINITY, "f32", "row 1, column 7: -inf cannot be rounded"),
        (-1e9, "q8_0", "row 1, column 7: -1e9 is beyond what q8_0 can hold"),
        (1e6, "f16", "row 1, column 7: 1e6 is beyond what f16 can hold"),
    ] {
        let mut row = vec![0.5f32; 3 * 32];
        row[39] = value;
        let mut writer = Writer::new();
        writer.set("general.architecture", "llama").unwrap();
        let bytes: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.tensor("blk.0.ffn_up.weight", DType::F32, &[3, 32], bytes).unwrap();
        fs::write(&input, writer.to_bytes()).unwrap();
        let said = refusal(quantize(&input, &out, &[mix]));
        assert!(said.contains("tensor \"blk.0.ffn_up.weight\"") && said.contains(want), "{said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
