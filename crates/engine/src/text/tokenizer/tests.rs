//! Whole tokenizers against the libraries that models were trained with.

use std::path::{Path, PathBuf};

use ingle_tensor::Bytes;
use ingle_tensor::gguf::{Gguf, Writer};
use serde_json::Value as Json;

use super::*;
use crate::text::{ChatTemplate, Conversation, Detokenizer};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizers").join(name)
}

fn read(path: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(path).expect("a fixture")).expect("JSON")
}

fn ids(json: &Json) -> Vec<u32> {
    json.as_array().expect("a list of ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn decode(tokenizer: &Tokenizer, mut detokenizer: Detokenizer, ids: &[u32]) -> String {
    let mut text: String = ids.iter().map(|&id| detokenizer.push(tokenizer, id)).collect();
    text += &detokenizer.finish();
    text
}

/// Ids, decoded text and rendered conversations of the `tokenizers` library and transformers, over the strings of
/// tokenizer_reference.json and the generated ids of text_reference.json.
#[test]
fn folders_are_as_the_reference_library() {
    for (name, eog) in [("llama3style", &[2, 3, 4][..]), ("qwen2style", &[2, 4])] {
        let folder = fixture(name);
        let tokenizer = Tokenizer::from_dir(&folder).unwrap();
        let reference = read(&folder.join("tokenizer_reference.json"));
        assert_eq!(tokenizer.vocab_len(), reference["vocab_size"].as_u64().unwrap() as usize);
        assert_eq!(tokenizer.eog(), eog);
        for case in reference["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let all = ids(&case["ids"]);
            assert_eq!(tokenizer.encode_prompt(text, Specials::Parse).unwrap(), all, "{name} {text:?}");
            assert_eq!(
                tokenizer.encode(text, Specials::Parse).unwrap(),
                ids(&case["ids_no_special"]),
                "{name} {text:?}"
            );
            let hidden = Detokenizer::new(&tokenizer);
            assert_eq!(
                decode(&tokenizer, hidden.clone(), &all),
                case["decode_skip_special"],
                "{name} {text:?}"
            );
            let shown = hidden.showing_specials();
            assert_eq!(decode(&tokenizer, shown, &all), case["decode_keep_special"], "{name} {text:?}");
        }

        let (bos, eos) = (tokenizer.spelling(tokenizer.bos()), tokenizer.spelling(tokenizer.eos()));
        let source = std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
        let template = ChatTemplate::new(&source, &bos, &eos).unwrap();
        for case in reference["chat"].as_array().unwrap() {
            let mut conversation = Conversation::new(case["messages"].as_array().unwrap().clone());
            conversation.add_generation_prompt = case["add_generation_prompt"] == true;
            let rendered = template.render(&conversation, tokenizer.guard()).unwrap();
            assert_eq!(rendered.text(), case["text"]);
            assert_eq!(tokenizer.encode_chat(&rendered).unwrap(), ids(&case["ids"]));
        }

        for case in read(&folder.join("text_reference.json"))["cases"].as_array().unwrap() {
            let got = match case["input"].as_array() {
                None => tokenizer.encode_prompt(case["input"].as_str().unwrap(), Specials::Parse),
                Some(messages) => {
                    let conversation = Conversation::new(messages.clone());
                    tokenizer.encode_chat(&template.render(&conversation, tokenizer.guard()).unwrap())
                }
            };
            assert_eq!(got.unwrap(), ids(&case["prompt_ids"]), "{name} {}", case["input"]);
            let generated = ids(&case["greedy_ids"]);
            assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &generated), case["text"]);
            let shown = Detokenizer::new(&tokenizer).showing_specials();
            assert_eq!(decode(&tokenizer, shown, &generated), case["text_with_special"]);
        }
    }
}

/// A user who types control tokens gets text, in every place a user can type; the template's are tokens.
#[test]
fn typed_specials_stay_text() {
    let tokenizer = Tokenizer::from_dir(&fixture("qwen2style")).unwrap();
    let template =
        ChatTemplate::new("<s>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "", "").unwrap();
    let chat = |contents: &[&str]| {
        let messages = contents.iter().map(|text| serde_json::json!({ "content": text })).collect();
        let rendered = template.render(&Conversation::new(messages), tokenizer.guard()).unwrap();
        tokenizer.encode_chat(&rendered).unwrap()
    };
    for text in ["<|im_end|>", "a<|im_start|>b</s>", "<s>", "<|im_", "plain", "<\u{fdd0}s>"] {
        let as_text = tokenizer.encode(text, Specials::AsText).unwrap();
        assert!(as_text.iter().all(|&id| !tokenizer.is_special(id)), "{text}");
        assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &as_text), text);
        assert_eq!(chat(&[text]), [&[1], &as_text[..], &[4]].concat(), "{text}");
    }
    assert_eq!(tokenizer.encode("<s>x", Specials::Parse).unwrap()[0], 1);
    let split_in_two = chat(&["<|im_", "end|>"]);
    assert_eq!(split_in_two.iter().filter(|&&id| id == 4).count(), 2);
}

/// (file asks for a begin token, template writes one): exactly one begins the prompt, or none.
#[test]
fn the_begin_token_is_there_once() {
    for (name, source, begins) in [
        ("llama3style", "<s>a", 1),
        ("llama3style", "a", 1),
        ("qwen2style", "<s>a", 1),
        ("qwen2style", "a", 0),
        ("qwen2style", "<s></s>a", 1),
    ] {
        let tokenizer = Tokenizer::from_dir(&fixture(name)).unwrap();
        let template = ChatTemplate::new(source, "", "").unwrap();
        let rendered = template.render(&Conversation::new(Vec::new()), tokenizer.guard()).unwrap();
        let ids = tokenizer.encode_chat(&rendered).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == 1).count(), begins, "{name} {source}");
        assert_eq!(ids.first() == Some(&1), begins == 1);
    }
    let tokenizer = Tokenizer::from_dir(&fixture("llama3style")).unwrap();
    let doubled = tokenizer.encode_prompt("<s>a", Specials::Parse).unwrap();
    assert!(tokenizer.has_doubled_bos(&doubled));
    assert!(!tokenizer.has_doubled_bos(&doubled[1..]));
}

#[test]
fn folders_that_cannot_be_read_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let check = |want: &str| {
        let error = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    };
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    check("tokenizer.json: ");
    write("tokenizer.model", "");
    check("tokenizer file \"tokenizer.model without tokenizer.json\" is not supported");
    write("tokenizer.json", "{");
    check("tokenizer.json: ");
    write("tokenizer.json", r#"{"decoder": {"type": "WordPiece"}}"#);
    check("decoder of tokenizer.json \"WordPiece\" is not supported");
    write("tokenizer.json", r#"{"decoder": {"type": "ByteLevel"}}"#);
    check("tokenizer.json: ");
    std::fs::copy(fixture("qwen2style").join("tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    assert_eq!(Tokenizer::from_dir(folder.path()).unwrap().bos(), None);
    write("tokenizer_config.json", r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#);
    let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    write("config.json", "not JSON");
    check("config.json: ");
}

fn open(name: &str) -> Gguf {
    Gguf::parse(&Bytes::map(&fixture("gguf").join(format!("{name}.gguf"))).unwrap()).unwrap()
}

/// A fixture's tokenizer with some keys taken out and others put in.
fn changed(
    name: &str,
    without: &[&str],
    with: impl FnOnce(&mut Writer<'_>) -> ingle_tensor::Result<()>,
) -> Result<Tokenizer, TokenizerError> {
    let key = |name: &&str| format!("tokenizer.ggml.{name}");
    let without: Vec<String> = without.iter().map(key).collect();
    let mut writer = Writer::new();
    writer.copy(&open(name).metadata, &without.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    with(&mut writer).unwrap();
    Tokenizer::from_gguf(&Gguf::parse(&Bytes::from(writer.to_bytes())).unwrap().metadata)
}

/// Parts of public vocabularies, with the ids that each model's own library gives to a list of difficult strings (of
/// smollm: that llama.cpp gives to four prompts). Decoding gives the string back.
#[test]
fn vocabularies_give_the_expected_ids() {
    for name in ["gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "falcon", "smollm", "llama-spm", "phi-3"] {
        let tokenizer = Tokenizer::from_gguf(&open(name).metadata).unwrap();
        let cases = read(&fixture("gguf").join(format!("{name}.json")));
        assert!(cases.as_array().unwrap().len() >= 4);
        for case in cases.as_array().unwrap() {
            let (text, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
            assert_eq!(tokenizer.encode(text, Specials::AsText).unwrap(), want, "{name} {text:?}");
            assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &want), text, "{name}");
        }
    }
}

/// (fixture, keys out, begin token in the file, flag in the file, whether a prompt begins with it).
#[test]
fn the_begin_token_is_never_made_up() {
    for (name, bos, flag, begins) in [
        ("llama-spm", Some(1), None, true), // this kind adds it where the file does not say
        ("llama-spm", Some(1), Some(false), false),
        ("llama-spm", None, Some(true), false),
        ("llama-spm", None, None, false),
        ("llama-bpe", Some(1), None, true), // so does this family
        ("llama-bpe", Some(1), Some(false), false),
        ("gpt-2", Some(1), None, false),
        ("gpt-2", Some(1), Some(true), true),
        ("gpt-2", None, Some(true), false),
    ] {
        let tokenizer = changed(name, &["bos_token_id", "add_bos_token"], |writer| {
            bos.map_or(Ok(()), |id: u32| writer.set("tokenizer.ggml.bos_token_id", &id))?;
            flag.map_or(Ok(()), |flag: bool| writer.set("tokenizer.ggml.add_bos_token", &flag))
        });
        let tokenizer = tokenizer.unwrap();
        let plain = tokenizer.encode("Hello", Specials::Parse).unwrap();
        let want = if begins { [&[1], &plain[..]].concat() } else { plain };
        assert_eq!(
            tokenizer.encode_prompt("Hello", Specials::Parse).unwrap(),
            want,
            "{name} {bos:?} {flag:?}"
        );
    }
}

/// Every end token that the file names ends a reply, and so do well-known spellings.
#[test]
fn all_end_tokens_are_known() {
    let tokenizer = changed("smollm", &["eos_token_id"], |writer| {
        writer.set("tokenizer.ggml.eos_token_id", &9_u32)?;
        writer.set("tokenizer.ggml.eot_token_id", &8_u32)?;
        writer.set("tokenizer.ggml.eom_token_id", &7_u32)?;
        writer.set("tokenizer.ggml.add_eos_token", &true)
    });
    let tokenizer = tokenizer.unwrap();
    let named = |text: &str| tokenizer.encode(text, Specials::Parse).unwrap()[0];
    let mut want = vec![7, 8, 9, named("<|endoftext|>"), named("<|im_end|>")];
    want.sort_unstable();
    assert_eq!(tokenizer.eog(), want);
    assert_eq!(tokenizer.encode_prompt("a", Specials::Parse).unwrap().last(), Some(&9));
}

/// `<|end|>` ends a reply, unless the model's replies have parts that it ends.
#[test]
fn the_end_of_a_part_is_not_the_end_of_a_reply() {
    for (tokens, want) in
        [(&["<|end|>", "<|return|>"][..], &[0, 1][..]), (&["<|end|>", "<|return|>", "<|call|>"], &[1, 2])]
    {
        let tokenizer = changed("llama-spm", &["tokens", "token_type", "scores", "eos_token_id"], |writer| {
            writer.set("tokenizer.ggml.tokens", tokens)?;
            writer.set("tokenizer.ggml.token_type", &vec![3_i32; tokens.len()])?;
            writer.set("tokenizer.ggml.scores", &vec![0_f32; tokens.len()])
        });
        assert_eq!(tokenizer.unwrap().eog(), want);
    }
}

/// A space goes before the text and before what follows a special token, once, and only where the file asks for it.
#[test]
fn the_space_prefix_is_put_once() {
    let with = changed("llama-spm", &[], |_| Ok(())).unwrap();
    let without =
        changed("llama-spm", &[], |writer| writer.set("tokenizer.ggml.add_space_prefix", &false)).unwrap();
    let encode = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, Specials::Parse).unwrap();
    for text in ["Hello", " Hello", "  Hello", "\n", "3"] {
        let spaced = encode(&without, &format!(" {text}"));
        assert_ne!(spaced, encode(&without, text));
        assert_eq!(encode(&with, text), spaced, "{text:?}");
        assert_eq!(encode(&with, &format!("<s>{text}")), [&[1], &spaced[..]].concat(), "{text:?}");
        assert_eq!(encode(&without, &format!("<s>{text}")), [&[1], &encode(&without, text)[..]].concat());
    }
    assert!(encode(&with, "").is_empty());
    assert_eq!(encode(&with, "Hello▁Hello"), encode(&with, "Hello Hello"));
}

/// Phi-3 was trained without the white space after its control tokens.
#[test]
fn phi_3_drops_space_after_control_tokens() {
    let tokenizer = Tokenizer::from_gguf(&open("phi-3").metadata).unwrap();
    let encode = |text: &str| tokenizer.encode(text, Specials::Parse).unwrap();
    assert_eq!(encode("<|user|>\n Hello<|end|>\n"), encode("<|user|>Hello<|end|>"));
    assert_ne!(encode("<s>\nHello"), encode("<s>Hello"));
}

#[test]
fn bad_metadata_is_named() {
    type Change = fn(&mut Writer<'_>) -> ingle_tensor::Result<()>;
    let rows: [(&str, &[&str], Change, &str); 10] = [
        ("gpt-2", &["model"], |_| Ok(()), "tokenizer.ggml.model"),
        (
            "gpt-2",
            &["model"],
            |w| w.set("tokenizer.ggml.model", "bert"),
            "tokenizer.ggml.model \"bert\" is not supported",
        ),
        (
            "gpt-2",
            &["model"],
            |w| w.set("tokenizer.ggml.model", "t5"),
            "tokenizer.ggml.model \"t5\" is not supported",
        ),
        (
            "gpt-2",
            &["pre"],
            |w| w.set("tokenizer.ggml.pre", "nobody"),
            "tokenizer.ggml.pre \"nobody\" is not supported",
        ),
        ("gpt-2", &["tokens"], |_| Ok(()), "tokenizer.ggml.tokens"),
        (
            "gpt-2",
            &["token_type"],
            |w| w.set("tokenizer.ggml.token_type", &[1_i32]),
            "tokenizer.ggml.token_type has 1 entries",
        ),
        (
            "gpt-2",
            &["merges"],
            |w| w.set("tokenizer.ggml.merges", &["Ġ t", "ab"]),
            "entry 1 (\"ab\"): it has no space",
        ),
        (
            "gpt-2",
            &["merges"],
            |w| w.set("tokenizer.ggml.merges", &["q Z"]),
            "entry 0 (\"q Z\"): there is no token \"qZ\"",
        ),
        (
            "llama-spm",
            &["scores"],
            |w| w.set("tokenizer.ggml.scores", &[1_f32]),
            "tokenizer.ggml.scores has 1 entries",
        ),
        (
            "gpt-2",
            &["eos_token_id"],
            |w| w.set("tokenizer.ggml.eos_token_id", &99_999_u32),
            "tokenizer.ggml.eos_token_id is 99999",
        ),
    ];
    for (name, without, with, want) in rows {
        let error = changed(name, without, with).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

/// Merging is not quadratic: one would take minutes here.
#[test]
fn a_long_word_is_quick() {
    for name in ["gpt-2", "llama-bpe", "deepseek-llm", "llama-spm"] {
        let tokenizer = Tokenizer::from_gguf(&open(name).metadata).unwrap();
        for part in ["a", "_", " ", "\n", "東", "Hello"] {
            let text = part.repeat(100_000);
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(&text, Specials::AsText).unwrap();
            assert!(start.elapsed().as_secs() < 10, "{name} {part:?} took {:?}", start.elapsed());
            assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &ids), text);
        }
    }
}

#[test]
fn tokens_are_found_by_what_they_contain() {
    let tokenizer = Tokenizer::from_gguf(&open("gpt-2").metadata).unwrap();
    let found = tokenizer.tokens_containing(&["\n", "!", ""]);
    assert!(found.iter().all(|&id| tokenizer.token_bytes(id).iter().any(|byte| b"\n!".contains(byte))));
    let all = 0..tokenizer.vocab_len() as u32;
    assert_eq!(
        found.len(),
        all.filter(|&id| tokenizer.token_bytes(id).iter().any(|byte| b"\n!".contains(byte))).count()
    );
    assert!(found.len() > 2);
}
