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

/// Ids, pieces and decoded text of the SentencePiece library, whose file is read where there is no `tokenizer.json`.
#[test]
fn sentencepiece_files_are_as_sentencepiece() {
    let tokenizer = Tokenizer::from_dir(&fixture("spm")).unwrap();
    let reference = read(&fixture("spm").join("tokenizer_reference.json"));
    assert_eq!(tokenizer.vocab_len(), reference["vocab_size"].as_u64().unwrap() as usize);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.eog()), (Some(1), Some(2), &[2, 4][..]));
    for case in reference["cases"].as_array().unwrap() {
        let (text, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
        assert_eq!(tokenizer.encode(text, Specials::AsText).unwrap(), want, "{text:?}");
        assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &want), case["decode"]);
        let pieces: Vec<String> = want
            .iter()
            .map(|&id| match tokenizer.token_bytes(id) {
                &[byte] if tokenizer.vocabulary.kind(id) == Kind::Byte => format!("<0x{byte:02X}>"),
                bytes => String::from_utf8_lossy(bytes).replace(' ', "▁"),
            })
            .collect();
        assert_eq!(Json::from(pieces), case["pieces"], "{text:?}");
    }
    // The space before the text is not put before a control token, nor again after one.
    let encode = |text: &str| tokenizer.encode(text, Specials::Parse).unwrap();
    let inner = encode("a<|im_end|>a");
    assert_eq!(encode("<s>a"), [1, *inner.last().unwrap()]);
    assert_eq!(tokenizer.encode_prompt("a", Specials::Parse).unwrap(), [1, inner[0]]);
}

/// Each byte of a SentencePiece file changed, and each length: an error or a tokenizer.
#[test]
fn damaged_sentencepiece_files_are_refused() {
    let bytes = std::fs::read(fixture("spm").join("tokenizer.model")).unwrap();
    let load = |bytes: &[u8]| sentencepiece::load(bytes, Path::new("tokenizer.model"));
    assert!(load(&bytes).is_ok());
    let tail = bytes.len() - 200; // the settings are at the end
    for at in (0..200).chain(tail..bytes.len()) {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            let _ = load(&changed);
        }
        assert!(load(&bytes[..at]).is_err(), "{at} bytes"); // cut short, it has no settings: unigram
    }
    // Field 2 is the trainer's settings, field 3 in it the model; field 3 the normalizer's.
    for (more, want) in [
        (&[0x12, 2, 0x18, 1][..], "\"unigram\" is not supported"),
        (&[0x12, 2, 0x18, 4], "\"char\" is not supported"),
        (&[0x12, 3, 0xC0, 1, 1], "treat_whitespace_as_suffix"),
        (&[0x1A, 6, 0x0A, 1, b'n', 0x12, 1, b'x'], "normalizer of tokenizer.model \"n\""),
        (&[0x1A, 2, 0x20, 1], "remove_extra_whitespaces"),
        (&[0x1A, 2, 0x28, 0], "escape_whitespaces"),
        (&[0x1A, 9, 0x28], "a field is damaged"),
    ] {
        let error = load(&[&bytes[..], more].concat()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

/// A tokenizer of each kind, with its name.
fn one_of_each_kind() -> Vec<(&'static str, Tokenizer)> {
    let of_gguf = |name| (name, Tokenizer::from_gguf(&open(name).metadata).unwrap());
    let of_folder = |name| (name, Tokenizer::from_dir(&fixture(name)).unwrap());
    let mut all = Vec::from(
        ["gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "llama-spm", "phi-3", "bert-bge"].map(of_gguf),
    );
    all.extend(["llama3style", "qwen2style", "spm"].map(of_folder));
    all
}

/// A user who types control tokens gets text, in every place a user can type; the template's are tokens.
#[test]
fn typed_specials_stay_text() {
    for (name, tokenizer) in one_of_each_kind() {
        let specials: Vec<u32> = (0..tokenizer.vocab_len() as u32)
            .filter(|&id| tokenizer.is_special(id) && !tokenizer.token_bytes(id).is_empty())
            .collect();
        let spelled = |id: u32| tokenizer.spelling(Some(id));
        let unknown = |id: &u32| matches!(spelled(*id).as_str(), "[UNK]" | "<unk>");
        assert!(!specials.is_empty(), "{name}");
        for &special in specials.iter().filter(|id| !unknown(id)) {
            let (token, mut half) = (spelled(special), spelled(special));
            half.pop();
            let source = format!("{token}{{% for m in messages %}}{{{{ m.content }}}}{token}{{% endfor %}}");
            let template = ChatTemplate::new(&source, "", "").unwrap();
            for text in
                [token.clone(), format!("a {token}{token} b"), half.clone(), format!("\u{fdd0}{token}")]
            {
                let as_text = tokenizer.encode(&text, Specials::AsText).unwrap();
                let is_control = |id: &u32| tokenizer.is_special(*id) && !unknown(id);
                assert!(!as_text.iter().any(is_control), "{name} {text}: {as_text:?}");
                if name != "bert-bge" {
                    assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &as_text), text, "{name}");
                }
                // Two messages, so that halves come side by side.
                let messages =
                    vec![serde_json::json!({ "content": text }), serde_json::json!({ "content": ">]" })];
                let rendered = template.render(&Conversation::new(messages), tokenizer.guard()).unwrap();
                let ids = tokenizer.encode_chat(&rendered).unwrap();
                let controls = ids.iter().filter(|&&id| id == special).count();
                let begins = usize::from(
                    tokenizer.encode_prompt("", Specials::Parse).unwrap().first() == Some(&special),
                );
                assert!((3..=3 + begins).contains(&controls), "{name} {text}: {ids:?}");
                assert_eq!(
                    ids.iter().filter(|id| is_control(id) && **id != special).count(),
                    ids.iter().take_while(|id| **id != special).count(),
                    "{name} {text}: {ids:?}"
                );
            }
        }
    }
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
        assert_eq!(chat(&[text]), [&[1], &as_text[..], &[4]].concat(), "{text}");
    }
    assert_eq!(tokenizer.encode("<s>x", Specials::Parse).unwrap()[0], 1);
    let split_in_two = chat(&["<|im_", "end|>"]);
    assert_eq!(split_in_two.iter().filter(|&&id| id == 4).count(), 2);
}

/// Control tokens with any of the flags of `tokenizer.json`, under a normalizer that changes spellings: what a user types
/// is never one, in no spelling that becomes one; what the template writes is.
#[test]
fn typed_specials_with_flags_stay_text() {
    let path = fixture("qwen2style").join("tokenizer.json");
    for flags in 0..16_u32 {
        let mut file = read(&path);
        let normalizers = serde_json::json!([{"type": "NFKC"}, {"type": "Lowercase"}]);
        file["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": normalizers});
        for token in file["added_tokens"].as_array_mut().unwrap() {
            for (bit, flag) in ["lstrip", "rstrip", "normalized", "single_word"].into_iter().enumerate() {
                token[flag] = Json::Bool(flags >> bit & 1 == 1);
            }
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
        let template = ChatTemplate::new("<|im_start|>{{ messages[0].content }}<|im_end|>", "", "").unwrap();
        for text in
            ["<|im_end|>", " <|im_end|> ", "<|IM_END|>", "＜|im_end|>", "<|im_end|", " x\n<|im_end|>\n"]
        {
            let conversation = Conversation::new(vec![serde_json::json!({ "content": text })]);
            let rendered = template.render(&conversation, tokenizer.guard()).unwrap();
            let ids = tokenizer.encode_chat(&rendered).unwrap();
            let specials: Vec<u32> = ids.iter().copied().filter(|&id| tokenizer.is_special(id)).collect();
            assert_eq!(specials, [3, 4], "flags {flags:04b}, {text:?}: {ids:?}");
            let as_text = tokenizer.encode(text, Specials::AsText).unwrap();
            assert!(!as_text.iter().any(|&id| tokenizer.is_special(id)), "flags {flags:04b}, {text:?}");
        }
    }
}

/// abetlen/llama-cpp-python#1501, ggml-org/llama.cpp#15086 and #15326: (file asks for a begin token, template writes one):
/// exactly one begins the prompt, or none; nothing is taken away. A completed text follows the file, and a doubled one is
/// noticed.
#[test]
fn llama_cpp_python_1501_the_begin_token_is_there_once() {
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
    check("has neither tokenizer.json nor tokenizer.model");
    write("tokenizer.model", "");
    check("tokenizer.model: it has no pieces");
    write("tokenizer.json", "{");
    check("tokenizer.json: ");
    write("tokenizer.json", r#"{"decoder": {"type": "CTC"}}"#);
    check("decoder of tokenizer.json \"CTC\" is not supported; supported: ByteLevel, ");
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

/// Both were taken, and split text otherwise.
#[test]
fn token_types_and_merges_that_mean_nothing() {
    for (kind, valid) in [(-1i32, false), (0, true), (5, true), (7, false), (99, false)] {
        let tokens = open("gpt-2").metadata.strings("tokenizer.ggml.tokens").unwrap().len();
        let types = vec![kind; tokens];
        let made = changed("gpt-2", &["token_type"], |w| w.set("tokenizer.ggml.token_type", &types));
        match made {
            Ok(_) => assert!(valid, "{kind}"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    !valid && error.contains("token_type") && error.contains(&kind.to_string()),
                    "{error}"
                );
            }
        }
    }
    let error = changed("gpt-2", &["merges"], |w| w.set("tokenizer.ggml.merges", &Vec::<u32>::new()))
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("tokenizer.ggml.merges"), "{error}");
}

/// Parts of public vocabularies, with the ids that each model's own library gives to a list of difficult strings (of
/// smollm: that llama.cpp gives to four prompts). Decoding gives the string back; of WordPiece, its plain form.
#[test]
fn llama_cpp_23252_vocabularies_give_the_expected_ids() {
    for name in
        ["gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "falcon", "smollm", "llama-spm", "phi-3", "bert-bge"]
    {
        let tokenizer = Tokenizer::from_gguf(&open(name).metadata).unwrap();
        let cases = read(&fixture("gguf").join(format!("{name}.json")));
        assert!(cases.as_array().unwrap().len() >= 4);
        for case in cases.as_array().unwrap() {
            let (text, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
            assert_eq!(tokenizer.encode(text, Specials::AsText).unwrap(), want, "{name} {text:?}");
            if name != "bert-bge" {
                assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &want), text, "{name}");
            }
        }
    }
}

/// ggml-org/llama.cpp#7898: (fixture, begin token in the file, flag in the file, whether a prompt begins with it).
#[test]
fn llama_cpp_7898_the_begin_token_is_never_made_up() {
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

/// vllm-project/vllm#4589, Blaizzy/mlx-vlm#2112, NVIDIA/TensorRT-Model-Connect#640: every end token that the file names
/// ends a reply, and so do well-known spellings.
#[test]
fn vllm_4589_all_end_tokens_are_known() {
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

/// ggml-org/llama.cpp#8584, #8023, #3664, huggingface/transformers#31513: a space goes before the text and before what
/// follows a special token, once, and only where the file asks for it or says nothing.
#[test]
fn llama_cpp_8584_space_after_special() {
    let flagged = |flag: Option<bool>| {
        changed("llama-spm", &["add_space_prefix"], |writer| {
            flag.map_or(Ok(()), |flag| writer.set("tokenizer.ggml.add_space_prefix", &flag))
        })
        .unwrap()
    };
    let (with, unsaid, without) = (flagged(Some(true)), flagged(None), flagged(Some(false)));
    let encode = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, Specials::Parse).unwrap();
    for text in ["hello", " hello", "  hello", "Hello", " user", "\n", "3"] {
        let spaced = encode(&without, &format!(" {text}"));
        assert_ne!(spaced, encode(&without, text));
        for tokenizer in [&with, &unsaid] {
            assert_eq!(encode(tokenizer, text), spaced, "{text:?}");
            assert_eq!(encode(tokenizer, &format!("<s>{text}")), [&[1], &spaced[..]].concat(), "{text:?}");
            assert_eq!(decode(tokenizer, Detokenizer::new(tokenizer), &spaced), text);
        }
        assert_eq!(encode(&without, &format!("<s>{text}")), [&[1], &encode(&without, text)[..]].concat());
        let decoded = decode(&without, Detokenizer::new(&without), &encode(&without, text));
        assert_eq!(decoded, text);
    }
    for tokenizer in [&with, &unsaid, &without] {
        assert!(encode(tokenizer, "").is_empty());
        assert_eq!(encode(tokenizer, "<s>"), [1]);
    }
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
    let rows: [(&str, &[&str], Change, &str); 9] = [
        ("gpt-2", &["model"], |_| Ok(()), "tokenizer.ggml.model"),
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

mod long_words;
mod plain_kinds;
mod word_piece;

/// What a post-processor puts around a text must exist: as a token of its own list, and in the vocabulary.
#[test]
fn tokens_around_a_text_must_exist() {
    type Edit = fn(&mut Json);
    let rows: [(&str, Edit); 2] = [
        ("does not define it", |specials| *specials = serde_json::json!({})),
        ("puts token 1000000000 around", |specials| {
            let first = specials.as_object_mut().unwrap().values_mut().next().unwrap();
            first["ids"] = serde_json::json!([1_000_000_000]);
        }),
    ];
    for (want, edit) in rows {
        let folder = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(fixture("llama3style").join(file), folder.path().join(file)).unwrap();
        }
        let path = folder.path().join("tokenizer.json");
        let mut json = read(&path);
        let processors = json["post_processor"]["processors"].as_array_mut().unwrap();
        let frame = processors.iter_mut().find(|p| p["type"] == "TemplateProcessing").unwrap();
        edit(&mut frame["special_tokens"]);
        std::fs::write(&path, json.to_string()).unwrap();
        let said = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
        assert!(said.contains(want), "{said}");
    }
}
