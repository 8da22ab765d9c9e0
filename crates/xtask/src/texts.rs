//! Tokenizers and chat templates against their references, over whole folders: what the fixtures hold in part.

use std::error::Error;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ingle_engine::text::{
    ChatTemplate, CivilTime, Conversation, Detokenizer, Guard, Specials, TemplateError, Tokenizer,
};
use ingle_tensor::Bytes;
use ingle_tensor::gguf::Gguf;
use serde_json::Value as Json;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Compares every vocabulary, reference tokenizer and template in the three folders and prints what is equal; for each
/// vocabulary, and for further GGUF files, it times words of 100,000 characters. Fails on a difference.
pub fn run(args: &[String]) -> ExitCode {
    let [vocabularies, references, templates, models @ ..] = args else {
        eprintln!("texts: three folders are wanted: vocabularies, reference tokenizers, templates");
        return ExitCode::from(2);
    };
    match compare(vocabularies.as_ref(), references.as_ref(), templates.as_ref(), models) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("texts: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(vocabularies: &Path, references: &Path, templates: &Path, models: &[String]) -> Result<bool> {
    let (mut same, mut all) = (0, 0);
    let mut line = |what: &str, name: &str, (equal, of): (usize, usize), rest: &str| {
        println!("{what:<10} {name:<50} {equal:>4}/{of:<4} {rest}");
        (same, all) = (same + equal, all + of);
    };
    for path in listed(vocabularies, ".gguf")? {
        let tokenizer = open(&path)?;
        line("strings", &stem(&path), vocabulary(&tokenizer, &path)?, &slowest(&tokenizer)?);
    }
    for folder in listed(references, "")? {
        let tokenizer = Tokenizer::from_dir(&folder)?;
        line("reference", &stem(&folder), reference(&tokenizer, &folder)?, &slowest(&tokenizer)?);
    }
    for model in models {
        line("model", &stem(Path::new(model)), (0, 0), &slowest(&open(Path::new(model))?)?);
    }
    let expected = Expected::read()?;
    for path in listed(templates, ".jinja")? {
        line("renders", &stem(&path), expected.compare(&path)?, "");
    }
    println!("{same} of {all} equal");
    Ok(same == all)
}

/// The entries of `folder` whose names end in `end`, sorted; there must be one.
fn listed(folder: &Path, end: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.retain(|path| path.to_string_lossy().ends_with(end));
    paths.sort();
    if paths.is_empty() { Err(format!("{}: no *{end} in it", folder.display()).into()) } else { Ok(paths) }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn read(path: &Path) -> Result<String> {
    Ok(fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?)
}

fn open(path: &Path) -> Result<Tokenizer> {
    let bytes = Bytes::map(path)?;
    Ok(Tokenizer::from_gguf(&Gguf::parse(&bytes)?.metadata)?)
}

/// Strings of `PATH.inp` whose ids are those in `PATH.out`, and how many there are.
fn vocabulary(tokenizer: &Tokenizer, path: &Path) -> Result<(usize, usize)> {
    let beside = |end: &str| read(Path::new(&format!("{}.{end}", path.display())));
    let (inputs, outputs) = (beside("inp")?, beside("out")?);
    const END: &str = "\n__ggml_vocab_test__\n";
    let texts: Vec<&str> = inputs.strip_suffix(END).unwrap_or(&inputs).split(END).collect();
    let lists: Vec<&str> = outputs.lines().collect();
    if texts.len() != lists.len() {
        return Err(
            format!("{}: {} strings, {} lists of ids", path.display(), texts.len(), lists.len()).into()
        );
    }
    let mut equal = 0;
    for (text, list) in texts.iter().zip(&lists) {
        let want = list.split_whitespace().map(str::parse).collect::<std::result::Result<Vec<u32>, _>>()?;
        equal += same(&format!("{} {text:?}", stem(path)), &tokenizer.encode(text, Specials::AsText)?, &want);
    }
    Ok((equal, texts.len()))
}

/// 1 where both are equal; else 0, and the difference is printed.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, want: &T) -> usize {
    if got != want {
        println!("{what}:\n  is   {got:?}\n  want {want:?}");
    }
    usize::from(got == want)
}

/// Comparisons with `tokenizer_reference.json` that are equal, and how many there are.
fn reference(tokenizer: &Tokenizer, folder: &Path) -> Result<(usize, usize)> {
    let file: Json = serde_json::from_str(&read(&folder.join("tokenizer_reference.json"))?)?;
    let ids = |list: &Json| -> Vec<u32> {
        list.as_array().into_iter().flatten().filter_map(Json::as_u64).map(|id| id as u32).collect()
    };
    let decode = |ids: &[u32], mut detokenizer: Detokenizer| {
        let text: String = ids.iter().map(|&id| detokenizer.push(tokenizer, id)).collect();
        text + &detokenizer.finish()
    };
    let (mut equal, mut all) = (0, 0);
    let mut count = |one: usize| (equal, all) = (equal + one, all + 1);
    for case in file["cases"].as_array().ok_or("no cases")? {
        let text = case["text"].as_str().ok_or("a case without text")?;
        let what = |field: &str| format!("{} {field} of {text:?}", stem(folder));
        let want = ids(&case["ids"]);
        let shown = |text: String| Json::String(text);
        if case.get("pieces").is_some() {
            // SentencePiece itself: control tokens are no part of a text.
            count(same(&what("ids"), &tokenizer.encode(text, Specials::AsText)?, &want));
            let decoded = shown(decode(&want, Detokenizer::new(tokenizer)));
            count(same(&what("decode"), &decoded, &case["decode"]));
            continue;
        }
        count(same(&what("ids"), &tokenizer.encode_prompt(text, Specials::Parse)?, &want));
        let bare = tokenizer.encode(text, Specials::Parse)?;
        count(same(&what("ids_no_special"), &bare, &ids(&case["ids_no_special"])));
        let hidden = Detokenizer::new(tokenizer);
        let decoded = shown(decode(&want, hidden.clone()));
        count(same(&what("decode_skip_special"), &decoded, &case["decode_skip_special"]));
        let decoded = shown(decode(&want, hidden.showing_specials()));
        count(same(&what("decode_keep_special"), &decoded, &case["decode_keep_special"]));
    }
    let Some(chats) = file["chat"].as_array() else { return Ok((equal, all)) };
    let spelling = |id| tokenizer.spelling(id);
    let source = read(&folder.join("chat_template.jinja"))?;
    let template = ChatTemplate::new(&source, &spelling(tokenizer.bos()), &spelling(tokenizer.eos()))?;
    for case in chats {
        let mut conversation = Conversation::new(case["messages"].as_array().cloned().unwrap_or_default());
        conversation.add_generation_prompt = case["add_generation_prompt"] == true;
        let rendered = template.render(&conversation, tokenizer.guard())?;
        let what = format!("{} chat", stem(folder));
        count(same(&what, &Json::String(rendered.text()), &case["text"]));
        count(same(&what, &tokenizer.encode_chat(&rendered)?, &ids(&case["ids"])));
    }
    Ok((equal, all))
}

/// What this thread has run for, without the time that it waited for a processor; where the system does not say, the
/// time of day.
fn clock(start: Instant) -> Duration {
    let ran = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ran = ran.and_then(|text| text.split(' ').next()?.parse().ok());
    ran.map_or_else(|| start.elapsed(), Duration::from_nanos)
}

/// Words without a place to cut: the one that takes longest, with its time (the best of three).
fn slowest(tokenizer: &Tokenizer) -> Result<String> {
    let random: String = (0..100_000_u64)
        .scan(1_u64, |state, _| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            Some(char::from(
                b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[(*state >> 58) as usize],
            ))
        })
        .collect();
    let digits = "1234567890".repeat(10_000);
    let day = Instant::now();
    let mut worst = (Duration::ZERO, "");
    for (name, part) in [
        ("a", "a"),
        ("_", "_"),
        ("space", " "),
        ("line break", "\n"),
        ("東", "東"),
        ("🙂", "🙂"),
        ("ab", "ab"),
        ("base64", &random),
        ("digits", &digits),
    ] {
        let text: String = part.chars().cycle().take(100_000).collect();
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let start = clock(day);
            tokenizer.encode(&text, Specials::AsText)?;
            best = best.min(clock(day) - start);
        }
        worst = worst.max((best, name));
    }
    Ok(format!("100,000 characters in {:.1} ms at most ({})", worst.0.as_secs_f64() * 1e3, worst.1))
}

/// What Python renders; made once, see the fixtures' README.
struct Expected {
    conversation: Json,
    renders: Json,
}

impl Expected {
    fn read() -> Result<Expected> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/templates/public.zip");
        let mut archive = zip::ZipArchive::new(fs::File::open(path)?)?;
        let mut read = |name: &str| -> Result<Json> {
            let mut text = String::new();
            archive.by_name(name)?.read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        };
        Ok(Expected { conversation: read("conversation.json")?, renders: read("expected.json")? })
    }

    /// Renders without and with tools that are what Python makes of the template at `path`, and how many there are.
    fn compare(&self, path: &Path) -> Result<(usize, usize)> {
        let name = stem(path);
        let wants =
            self.renders[&name].as_array().ok_or_else(|| format!("{name}: nothing is expected of it"))?;
        let template = ChatTemplate::new(&read(path)?, "<s>", "</s>")?;
        let mut equal = 0;
        for (want, has_tools) in wants.iter().zip([false, true]) {
            let messages = self.conversation["messages"].as_array().cloned().unwrap_or_default();
            let mut conversation = Conversation::new(messages);
            conversation.tools = self.conversation["tools"].as_array().filter(|_| has_tools).cloned();
            conversation.now = CivilTime::from_unix(1_741_356_309); // 2025-03-07 14:05:09
            let got = template.render(&conversation, &Guard::default());
            let what = format!("{name}, tools {has_tools}");
            equal += match (got, want["error"].as_str()) {
                (Ok(got), None) => same(&what, &Json::String(got.text()), &want["text"]),
                // The template's own words; where Python itself fails, an error here in other words.
                (Err(TemplateError::Refused(got)), Some(want)) => {
                    same(&what, &format!("TemplateError: {got}"), &want.to_owned())
                }
                (Err(TemplateError::Render { .. }), Some(want)) if !want.starts_with("TemplateError") => 1,
                (got, _) => {
                    println!("{what}:\n  is   {got:?}\n  want {want}");
                    0
                }
            };
        }
        Ok((equal, wants.len()))
    }
}
