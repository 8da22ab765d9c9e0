//! Layers split between GPU and CPU, as a user sees it: whole processes, which take the stand-in for driver and NVRTC.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ingle_cuda::stand_in::StandIn;
use serde_json::Value;
use tempfile::TempDir;

fn model(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(path).display().to_string()
}

const LLAMA: &str = "gguf/llama-s1/model-legacy.gguf";

/// `ingle` on a machine with the stand-in for a GPU.
struct Machine {
    folder: TempDir,
    gpu: Option<PathBuf>,
}

impl Machine {
    fn new(device: Option<&StandIn>) -> Self {
        let folder = TempDir::new().unwrap();
        let gpu = device.map(|device| {
            std::fs::copy(device.file(), folder.path().join("libcuda.so.1")).unwrap();
            folder.path().join("libcuda.so.1")
        });
        Self { folder, gpu }
    }

    fn output(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
        command.env_clear().env("INGLE_CACHE", self.folder.path()).env("PATH", "").stdin(Stdio::null());
        if self.gpu.is_none() {
            command.env("CUDA_VISIBLE_DEVICES", "");
        }
        if let Some(gpu) = &self.gpu {
            command.env("INGLE_NVRTC", gpu).env("LD_LIBRARY_PATH", self.folder.path());
        }
        command.args(args).output().unwrap()
    }

    /// What it says on standard output and standard error, when all is well.
    fn said(&self, args: &[&str]) -> (String, String) {
        let output = self.output(args);
        assert!(output.status.success(), "{args:?}: {output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    fn json(&self, args: &[&str]) -> Value {
        let (out, _) = self.said(args);
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// The one line on standard error of a command that fails.
    fn failure(&self, args: &[&str]) -> String {
        let output = self.output(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{args:?}: {said}");
        said
    }
}

/// The same answer, in exact mode, from the CPU, the GPU, and both: with the bytes that the whole takes all is on the GPU, with fewer
/// layer after layer goes to the CPU, and with less than the first one takes it is an error with the numbers.
#[test]
fn an_answer_does_not_depend_on_where_layers_are() {
    let Some(device) = StandIn::new("layers split by --gpu-memory") else { return };
    let machine = Machine::new(Some(&device));
    let model = model(LLAMA);
    let run = |more: &[&str]| {
        let args = ["run", "-m", &model, "--greedy", "-n", "40", "-c", "128", "--json", "-t", "1", "--raw"];
        machine.json(&[&args[..], more, &["--numerics", "exact", "Hello there"]].concat())
    };
    let want = run(&["--device", "cpu"]);
    assert!(want.get("layout").is_none(), "{want}");
    let number =
        |reply: &Value, key: &str| reply["layout"][key].as_u64().unwrap_or_else(|| panic!("{key}: {reply}"));
    let mut reply = run(&["--device", "cuda"]);
    let layers = number(&reply, "layers");
    let whole = number(&reply, "gpu_bytes");
    assert_eq!((number(&reply, "gpu_layers"), &reply["layout"]["output_on_gpu"]), (layers, &true.into()));
    assert_eq!(number(&reply, "cpu_bytes"), 0);
    let mut bytes = whole;
    for held in (1..=layers).rev() {
        assert_eq!(reply["generated_ids"], want["generated_ids"], "{reply}");
        reply = run(&["--device", "cuda", "--gpu-memory", &(bytes - 1).to_string()]);
        assert_eq!((number(&reply, "gpu_layers"), &reply["layout"]["output_on_gpu"]), (held, &false.into()));
        assert_eq!(
            (number(&reply, "gpu_limit_bytes"), number(&reply, "gpu_bytes_of_all")),
            (bytes - 1, whole)
        );
        assert!(reply["device"].as_str().unwrap().starts_with("cuda ("), "{reply}");
        assert!(reply["device"].as_str().unwrap().contains(") and cpu ("), "{reply}");
        bytes = number(&reply, "gpu_bytes");
    }
    assert_eq!(reply["generated_ids"], want["generated_ids"], "{reply}");
    let limit = (bytes - 1).to_string();
    let args = ["run", "-m", &model, "-c", "128", "--device", "cuda", "--gpu-memory", &limit, "hi"];
    let said = machine.failure(&args);
    for part in [
        &format!("the first of {layers} layers takes {bytes} bytes: weights "),
        "--gpu-memory allows ",
        " are the driver's",
        "give a shorter context (-c), --kv q8_0, or --device cpu",
    ] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
}

/// Where nobody chooses, a GPU that is there is used; where it has no room for a layer, a note says so and the CPU answers.
#[test]
fn auto_is_the_gpu_where_there_is_one() {
    let Some(device) = StandIn::new("--device auto") else { return };
    let model = model(LLAMA);
    let run = |machine: &Machine, more: &[&str]| {
        let args = ["run", "-m", &model, "--greedy", "-n", "8", "-c", "64", "-t", "1", "--json", "--raw"];
        let (out, said) = machine.said(&[&args[..], more, &["--numerics", "exact", "Hello"]].concat());
        let reply: Value = serde_json::from_str(&out).unwrap();
        (reply["device"].as_str().unwrap().to_string(), reply["generated_ids"].clone(), said)
    };
    let (with, without) = (Machine::new(Some(&device)), Machine::new(None));
    let (host, want, said) = run(&without, &[]);
    assert!(host.starts_with("cpu (") && said.is_empty(), "{host}: {said}");
    let (gpu, ids, said) = run(&with, &[]);
    assert!(gpu.starts_with("cuda (") && said.is_empty(), "{gpu}: {said}");
    assert_eq!(ids, want);
    let (host, ids, said) = run(&with, &["--gpu-memory", "1K"]);
    assert!(host.starts_with("cpu ("), "{host}");
    assert!(said.starts_with("note: all layers are on the CPU: device cuda (stand-in"), "{said}");
    assert!(said.contains("but 1024 are there") && said.lines().count() == 1, "{said}");
    assert_eq!(ids, want);
    let (host, ids, _) = run(&with, &["--device", "cpu"]);
    assert!(host.starts_with("cpu (") && ids == want, "{host}");
}

/// One line says what is where; `--stats` says it too, with each GPU segment's graph.
#[test]
fn a_split_is_said_and_its_graphs_are_counted() {
    let Some(device) = StandIn::new("a split and its graphs") else { return };
    let machine = Machine::new(Some(&device));
    let model = model(LLAMA);
    let args = ["-m", &model, "--greedy", "-n", "20", "-c", "128", "-t", "1", "--raw", "--device", "cuda"];
    let run = |more: &[&str]| machine.said(&[&["run"], &args[..], more, &["Hello there"]].concat());
    let (_, whole) = run(&["--stats"]);
    assert!(!whole.contains("note: "), "{whole}");
    assert!(whole.contains("all 3 layers are on the GPU ("), "{whole}");
    for part in ["graph.t1s1r1 x 19", "attention.mma.cuda x "] {
        assert!(whole.contains(part), "{part:?}: {whole}");
    }
    let layout =
        machine.json(&["inspect", &model, "-c", "128", "--device", "cuda", "--json"])["layout"].clone();
    let limit = (layout["gpu_bytes"].as_u64().unwrap() * 7 / 10).to_string();
    let (out, said) = run(&["--gpu-memory", &limit, "--stats"]);
    assert_eq!(run(&["--gpu-memory", &limit]).0, out);
    let notes: Vec<&str> = said.lines().filter(|line| line.starts_with("note: ")).collect();
    assert_eq!(notes.len(), 1, "{said}");
    assert!(notes[0].contains(" of 3 layers are on the GPU ("), "{said}");
    assert!(notes[0].contains("and the output are on the CPU ("), "{said}");
    assert!(notes[0].ends_with("; attention is f32x32 on both"), "{said}");
    for part in ["layers       ", "graph.t1s1r1.segment0 x 19", "attention.f32x32.cuda x ", "linear."] {
        assert!(said.contains(part), "{part:?}: {said}");
    }
}

/// The GPU and the CPU together have the bits of the CPU alone, and replays those of eager execution.
#[test]
fn verify_compares_a_split_model() {
    let Some(device) = StandIn::new("verify of a split model") else { return };
    let machine = Machine::new(Some(&device));
    let model = model("gguf/gemma3_text-s1/model-q8_0.gguf");
    let verify = |limit: &str, more: &[&str]| {
        let args = ["verify", &model, "--device", "cuda", "--gpu-memory", limit, "-t", "1", "--json"];
        machine.output(&[&args[..], more].concat())
    };
    // What one layer takes is said where it is not there.
    let refused = String::from_utf8(verify("1K", &[]).stderr).unwrap();
    let limit =
        refused.split(" layers takes ").nth(1).and_then(|rest| rest.split(' ').next()).expect(&refused);
    for more in [&["-n", "4"][..], &["--replay", "-n", "4"]] {
        let output = verify(limit, more);
        let said = String::from_utf8(output.stderr).unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).expect(&said);
        assert_eq!((&report["ok"], &report["first"]), (&true.into(), &Value::Null), "{report}");
        assert!(report["values"].as_u64().unwrap() > 10_000, "{report}");
        assert_eq!(report["replays"].as_u64().unwrap(), 4, "{report}");
        assert!(said.contains("note: 1 of 6 layers are on the GPU ("), "{said}");
    }
}

/// A plan for a GPU of some size needs no GPU.
#[test]
fn inspect_plans_for_a_gpu_that_is_not_there() {
    let machine = Machine::new(None);
    let model = model("gguf/gemma3_text-s1/model-q8_0.gguf");
    let inspect =
        |limit: &str| machine.json(&["inspect", &model, "-c", "512", "--gpu-memory", limit, "--json"]);
    let all = inspect("1G");
    let layers = all["model"]["layers"].as_u64().unwrap();
    let bytes = all["layout"]["gpu_bytes"].as_u64().unwrap();
    let parts = ["weights", "kv", "rope", "step", "scratch", "rounding"];
    let part = |part: &&str| all["layout"][format!("gpu_{part}_bytes")].as_u64().unwrap();
    assert_eq!(parts.iter().map(part).sum::<u64>(), bytes, "{all}");
    assert_eq!(all["layout"]["gpu_layers"], layers);
    assert_eq!(all["memory"]["total_bytes"], 0, "nothing is left for the CPU: {all}");
    let some = inspect(&(bytes - 1).to_string());
    assert!(
        some["layout"]["gpu_layers"].as_u64().unwrap() <= layers && some["layout"]["output_on_gpu"] == false
    );
    assert!(some["memory"]["weights_bytes"].as_u64().unwrap() > 0, "{some}");
    let limit = (bytes - 1).to_string();
    let (plan, _) = machine.said(&["inspect", &model, "-c", "512", "--gpu-memory", &limit, "--plan"]);
    for part in
        [" layers are on the GPU (", "segment 0 device 0 arena ", "segment 1 device 1 arena ", " copy "]
    {
        assert!(plan.contains(part), "{part:?}: {plan}");
    }
    let (text, _) = machine.said(&["inspect", &model, "-c", "512", "--gpu-memory", &limit]);
    assert!(text.contains("; of the GPU's bytes\n    weights "), "{text}");
    let said = machine.failure(&["inspect", &model, "-c", "512", "--gpu-memory", "64K"]);
    assert!(said.contains("layers takes ") && said.contains("but 65536 are there"), "{said}");
}
