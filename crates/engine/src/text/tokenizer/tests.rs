//! Whole tokenizers against the libraries that models were trained with.

use std::path::{Path, PathBuf};

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
