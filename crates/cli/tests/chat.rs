//! `ingle chat` as a whole process, told what to do by a script.
#![cfg(unix)]

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

fn start(home: &Path, args: &[&str]) -> Child {
    let model: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/llama-s1/model-legacy.gguf");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ingle"));
    command.env_clear().env("HOME", home).env("CUDA_VISIBLE_DEVICES", "").arg("chat");
    if !args.contains(&"-m") {
        command.arg("-m").arg(model);
    }
    command.args(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs a chat that reads these lines.
fn chat(home: &Path, args: &[&str], lines: &[&str]) -> Output {
    let output = end(home, args, lines);
    assert!(output.status.success(), "{output:?}");
    output
}

/// Runs a chat in which so many of these lines fail, and returns what standard error said before the last line, which
/// counts them.
fn failing_chat(home: &Path, args: &[&str], lines: &[&str], failed: usize) -> String {
    let output = end(home, args, lines);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    without_count(&output, failed)
}

fn without_count(output: &Output, failed: usize) -> String {
    let said = text(&output.stderr);
    let plural = if failed == 1 { "" } else { "s" };
    let count = format!("error: {failed} line{plural} of the script failed\n");
    said.strip_suffix(&count).unwrap_or_else(|| panic!("{said}")).to_string()
}

fn end(home: &Path, args: &[&str], lines: &[&str]) -> Output {
    let mut child = start(home, args);
    child.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The messages that `/save` wrote, as (role, content).
fn messages(file: &Path) -> Vec<(String, String)> {
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let part = |m: &Value, key: &str| m[key].as_str().unwrap().to_string();
    saved["messages"].as_array().unwrap().iter().map(|m| (part(m, "role"), part(m, "content"))).collect()
}

/// Sends Ctrl-C.
fn interrupt(child: &Child) {
    let kill = Command::new("sh").arg("-c").arg(format!("kill -INT {}", child.id())).status();
    assert!(kill.unwrap().success());
}

/// Waits until a process catches Ctrl-C, which it does while it answers.
fn wait_until_it_answers(child: &Child) {
    if !cfg!(target_os = "linux") {
        // Nobody tells; this is far longer than it takes.
        return std::thread::sleep(Duration::from_secs(5));
    }
    let start = Instant::now();
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        // Signal 2 is the second bit.
        if u64::from_str_radix(caught.trim(), 16).unwrap() & 2 != 0 {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no answer was begun: {status}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_scripted_conversation() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let (save, load) = (format!("/save! {}", file.display()), format!("/load {}", file.display()));
    let args = ["-c", "2000", "-n", "8", "--seed", "5", "--temp", "1"];

    let output = chat(home.path(), &args, &["Hello", "", "And then?", &save, "/exit", "never read"]);
    let talk = messages(&file);
    let roles: Vec<&str> = talk.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!((talk[0].1.as_str(), talk[2].1.as_str()), ("Hello", "And then?"));
    assert_eq!(text(&output.stdout), format!("{}\n{}\n", talk[1].1, talk[3].1));

    // A loaded conversation goes on: another answer in place of the last, from other random numbers.
    chat(home.path(), &args, &[&load, "/regen", &save]);
    let again = messages(&file);
    assert_eq!(again[..3], talk[..3]);
    assert_ne!(again[3], talk[3]);

    // The system message is kept by /clear, and removed by /system alone.
    chat(home.path(), &args, &["Hello", "/system You count sheep.", "/clear", "Hello", &save]);
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(saved["system"], "You count sheep.");
    let with_system = messages(&file);
    assert_eq!(with_system.len(), 2);
    assert_ne!(with_system[1], talk[1]);
    chat(home.path(), &args, &["/system You count sheep.", "/system", "Hello", &save]);
    assert_eq!(messages(&file)[1], talk[1]);
}

#[test]
fn a_turn_appended_equals_the_conversation_read_anew() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let save = format!("/save! {}", file.display());
    let args = ["-c", "2000", "-n", "40", "--greedy"];
    let lines = ["Tell me of the sea.", "Tell me more of the sea.", "And of ships?", &save];
    chat(home.path(), &args, &lines);
    let talk = messages(&file);
    // The same up to the last question, without a cache: loaded in a new process.
    let whole: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let mut cut = whole.clone();
    cut["messages"].as_array_mut().unwrap().truncate(4);
    let cold = home.path().join("cold.json");
    std::fs::write(&cold, cut.to_string()).unwrap();
    chat(home.path(), &args, &[&format!("/load {}", cold.display()), lines[2], &save]);
    assert_eq!(messages(&file), talk);
}

#[test]
fn settings_change_the_answer_and_are_checked() {
    let home = TempDir::new().unwrap();
    let script = ["/set max_tokens 3", "/set temp 0", "Hello", "/set", "/help"];
    let output = chat(home.path(), &["-c", "500"], &script);
    let said = text(&output.stdout);
    let listed =
        ["max_tokens = 3", "temperature = 0", "top_p = 0.95 (default)", "mirostat = (off)", "seed = (drawn)"];
    for part in listed.iter().chain(&["/regen", "Ctrl-C"]) {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(
        text(&output.stderr).lines().skip(1).take(2).collect::<Vec<_>>(),
        ["(max_tokens = 3)", "(temperature = 0)"]
    );
    let wrong = [
        ("/set temp -1", "temperature is -1; it must be"),
        ("/set temp warm", "temperature cannot be 'warm'"),
        ("/set colour 1", "there is no setting 'colour'"),
        ("/set temp", "/set NAME VALUE"),
        ("/set max_tokens many", "max_tokens is 'many'"),
        ("/dance", "there is no command /dance"),
        ("/regen", "there is no message to answer again"),
        ("/load /no/such/file", "/no/such/file"),
        ("/load /dev/zero", "/dev/zero: it is a device; want a file"),
        ("/save", "/save needs the name of a file"),
        ("/save -", "/save takes no '-'"),
        ("/clear all", "/clear takes nothing after it"),
    ];
    let lines: Vec<&str> = wrong.iter().map(|(line, _)| *line).collect();
    let errors = failing_chat(home.path(), &[], &lines, wrong.len());
    let errors: Vec<&str> = errors.lines().collect();
    assert_eq!(errors.len(), wrong.len(), "{errors:?}");
    for ((line, want), said) in wrong.iter().zip(errors) {
        assert!(said.starts_with("error: ") && said.contains(want), "{line}: {said}");
    }
}

#[test]
fn a_message_that_does_not_fit_is_taken_back() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let (long, save) = ("word ".repeat(300), format!("/save {}", file.display()));
    let said = failing_chat(home.path(), &["-n", "4", "--greedy"], &[&long, &long, "Hi", &long, &save], 3);
    let full: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(full.len(), 3, "{said}");
    // What to do is said once, and again after there was room.
    for (line, is_told) in full.iter().zip([true, false, true]) {
        assert!(line.starts_with("error: with this message the conversation has "), "{said}");
        let advice = ": send a shorter one, /clear forgets the conversation, and -c makes the context longer";
        assert_eq!(line.ends_with(&format!(" tokens, but the context is 256{advice}")), is_told, "{said}");
        assert_eq!(line.ends_with(" tokens, but the context is 256"), !is_told, "{said}");
    }
    let talk = messages(&file);
    assert_eq!((talk.len(), talk[0].1.as_str()), (2, "Hi"));
}

#[test]
fn ctrl_c_stops_the_answer_and_keeps_the_chat() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let mut child = start(home.path(), &["-c", "200000", "-n", "190000", "--greedy"]);
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // Without the tokens that end a reply, the answer would go on for minutes.
    writeln!(stdin, "/set logit_bias [[2, -100], [4, -100]]\nHello").unwrap();
    let mut first = [0; 1];
    stdout.read_exact(&mut first).unwrap();
    interrupt(&child);
    writeln!(stdin, "/set max_tokens 3\nAnd now?\n/save {}\n/exit", file.display()).unwrap();
    drop(stdin);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("(stopped)"), "{output:?}");
    let talk = messages(&file);
    assert_eq!(talk.len(), 4, "{talk:?}");
    assert_eq!(talk[2].1, "And now?");
    let seen = [&first[..], &rest].concat();
    assert_eq!(text(&seen), format!("{}\n{}\n", talk[1].1, talk[3].1));
}

#[test]
fn the_end_of_the_input_leaves() {
    let home = TempDir::new().unwrap();
    let output = chat(home.path(), &[], &[]);
    assert_eq!((text(&output.stdout), text(&output.stderr)), (String::new(), String::new()));
}

#[test]
fn a_full_context_is_said_to_be_the_reason() {
    let home = TempDir::new().unwrap();
    let endless = "/set logit_bias [[2, -100], [4, -100]]";
    let lines = [endless, "Hi", "And now?", "And now?", "/clear", "/set max_tokens 3", "Hi"];
    let said = failing_chat(home.path(), &["-n", "1000", "--greedy"], &lines, 2);
    let lines: Vec<&str> = said.lines().collect();
    let lines: Vec<&str> = lines.into_iter().filter(|line| !line.contains(" = ")).collect();
    assert_eq!(lines.len(), 5, "{said}");
    assert_eq!(lines[3], "(the conversation is forgotten)");
    assert_eq!(lines[0], "(cut: the context of 256 tokens is full; /clear forgets the conversation)");
    assert!(lines[1].contains("but the context is 256: /clear forgets the conversation, and -c"), "{said}");
    assert!(lines[2].ends_with("but the context is 256"), "{said}");
    assert_eq!(lines[4], "(cut after 3 tokens: /set max_tokens N)");
    let output = chat(home.path(), &["-n", "3", "--greedy"], &[endless, "Hi"]);
    assert!(text(&output.stderr).ends_with(")\n(cut after 3 tokens: /set max_tokens N)\n"), "{output:?}");
}

#[test]
fn a_line_that_is_no_text_is_left_out() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let mut child = start(home.path(), &["-n", "3", "--greedy"]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"caf\xe9\nHi\n").unwrap();
    writeln!(stdin, "/save {}", file.display()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(without_count(&output, 1).starts_with("error: the line is not UTF-8 and is left out\n"));
    let talk = messages(&file);
    assert_eq!((talk.len(), talk[0].1.as_str()), (2, "Hi"));
}

#[test]
fn a_line_without_an_end_is_an_error() {
    let home = TempDir::new().unwrap();
    let mut child = start(home.path(), &[]);
    // The chat leaves before all of it is written.
    let _ = child.stdin.take().unwrap().write_all(&vec![b'a'; (16 << 20) + 1]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(text(&output.stderr), "error: a line of standard input is longer than 16.0 MiB\n");
}

#[test]
fn an_answer_stopped_before_it_began_leaves_no_turn() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json");
    let mut child = start(home.path(), &["-c", "200000", "-n", "3", "--greedy", "-t", "1"]);
    let mut stdin = child.stdin.take().unwrap();
    // A prefill of minutes.
    writeln!(stdin, "{}", "word ".repeat(60_000)).unwrap();
    wait_until_it_answers(&child);
    interrupt(&child);
    writeln!(stdin, "/save {}\n/exit", file.display()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(without_count(&output, 1).contains("stopped before the answer began"), "{output:?}");
    assert_eq!(messages(&file), []);
}

#[test]
fn commands_say_what_they_did_and_no_file_is_replaced_unasked() {
    let home = TempDir::new().unwrap();
    let file = home.path().join("talk.json").display().to_string();
    let [save, again, load] = ["/save", "/save!", "/load"].map(|command| format!("{command} {file}"));
    let lines = ["/system Be brief.", &save, "/system", &save, &load, &again, "/clear"];
    let said = failing_chat(home.path(), &["-n", "3", "--greedy"], &lines, 1);
    let want = [
        "(system message set)".to_string(),
        format!("(saved in {file}: 0 messages)"),
        "(no system message)".into(),
        format!("error: {file} is there already: give another name, or /save! {file} to replace it"),
        format!("(loaded {file}: 0 messages)"),
        format!("(saved in {file}: 0 messages)"),
        "(the conversation is forgotten)".into(),
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), want);
}

#[test]
fn a_saved_chat_never_replaces_the_model() {
    let home = TempDir::new().unwrap();
    let model =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/llama-s1/model-legacy.gguf");
    let copy = home.path().join("m.gguf");
    std::fs::copy(model, &copy).unwrap();
    let save = format!("/save {}", copy.display());
    let said = failing_chat(home.path(), &["-m", &copy.display().to_string()], &[&save], 1);
    assert!(said.contains("is a file of the model itself"), "{said}");
    assert!(std::fs::read(&copy).unwrap().starts_with(b"GGUF"));
}
