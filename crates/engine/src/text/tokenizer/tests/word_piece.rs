//! WordPiece: plain form, cutting, pieces, framing.

use super::*;

/// A tokenizer of a few pieces, written as in GGUF files.
fn small(with: impl FnOnce(&mut Writer<'_>) -> ingle_tensor::Result<()>) -> Tokenizer {
    let pieces = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁a", "b", "▁!", "▁東", "▁京", "▁ss", "i",
        "▁[", "▁]", "▁cls", "▁i", "▁ᄀ", "ᅡ", "▁und", "d",
    ];
    let types: Vec<i32> = (0..pieces.len()).map(|id| if id < 4 { 3 } else { 1 }).collect();
    let tokenizer = changed(
        "bert-bge",
        &[
            "tokens",
            "token_type",
            "unknown_token_id",
            "cls_token_id",
            "seperator_token_id",
            "padding_token_id",
            "mask_token_id",
        ],
        |writer| {
            writer.set("tokenizer.ggml.tokens", &pieces)?;
            writer.set("tokenizer.ggml.token_type", &types[..])?;
            writer.set("tokenizer.ggml.unknown_token_id", &1_u32)?;
            writer.set("tokenizer.ggml.cls_token_id", &2_u32)?;
            writer.set("tokenizer.ggml.seperator_token_id", &3_u32)?;
            with(writer)
        },
    );
    tokenizer.unwrap()
}

/// (text, its pieces, `#` for the unknown token).
#[test]
fn words_are_taken_apart_from_the_left() {
    let tokenizer = small(|_| Ok(()));
    let long = "a".to_owned() + &"b".repeat(99);
    let pieces = " a|".to_owned() + &"b|".repeat(99);
    for (text, want) in [
        ("", ""),
        (" \n\t", ""),
        ("unaffable", " un|aff|able"),
        ("Ünàffable!!", " un|aff|able| !| !"),
        ("undd und", " und|d| und"), // the longest piece first
        ("unaffabl a", "#| a"),      // what does not go on is unknown as a whole
        ("affable", "#"),            // no piece that begins a word
        ("a\u{0}b\u{200d}\u{fffd}\u{ad}b", " a|b|b"),
        ("a\u{a0}a\u{3000}a\u{2028}a", " a| a| a| a"),
        ("東京a!", " 東| 京| a| !"),
        ("\u{f900}", "#"), // decomposed to U+8C48, which has no piece
        ("İ ß", " i|#"),   // the dot above is dropped
        ("가", " ᄀ|ᅡ"),
        ("[CLS]", " [| cls| ]"),
        (long.as_str(), pieces.trim_end_matches('|')),
        (&(long.clone() + "b"), "#"),
    ] {
        let ids = tokenizer.encode(text, Specials::AsText).unwrap();
        let got: Vec<String> = ids
            .iter()
            .map(|&id| if id == 1 { "#".to_owned() } else { tokenizer.spelling(Some(id)) })
            .collect();
        assert_eq!(got.join("|"), want, "{text:?}");
    }
}

/// Begin and end tokens frame a prompt, each unless the file says otherwise; decoded, the text is in its plain form.
#[test]
fn prompts_are_framed() {
    let plain = [4, 5, 6, 9];
    for (bos, sep, want) in [
        (None, None, vec![2, 4, 5, 6, 9, 3]),
        (Some(false), None, vec![4, 5, 6, 9, 3]),
        (None, Some(false), vec![2, 4, 5, 6, 9]),
    ] {
        let tokenizer = small(|writer| {
            bos.map_or(Ok(()), |flag: bool| writer.set("tokenizer.ggml.add_bos_token", &flag))?;
            sep.map_or(Ok(()), |flag: bool| writer.set("tokenizer.ggml.add_sep_token", &flag))
        });
        assert_eq!(tokenizer.encode("Unaffable!", Specials::Parse).unwrap(), plain);
        assert_eq!(tokenizer.encode_prompt("Unaffable!", Specials::Parse).unwrap(), want);
        assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &want), "unaffable !");
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(2), Some(3)));
    }
}

/// The same vocabulary as a `tokenizer.json`, by the library and as a plain kind: the same ids and text.
#[test]
fn folders_give_the_same_ids() {
    let gguf = Tokenizer::from_gguf(&open("bert-bge").metadata).unwrap();
    let mut vocab = serde_json::Map::new();
    let mut added = Vec::new();
    for id in 0..gguf.vocab_len() as u32 {
        let text = gguf.spelling(Some(id));
        let text = match text.strip_prefix(' ') {
            Some(begin) => begin.to_owned(),
            None if gguf.is_special(id) => {
                let flags = serde_json::json!({"id": id, "content": text, "special": true, "normalized": false,
                    "lstrip": false, "rstrip": false, "single_word": false});
                added.push(flags);
                text
            }
            None => format!("##{text}"),
        };
        vocab.insert(text, id.into());
    }
    let file = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "post_processor": null,
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let folder = Tokenizer::from_dir(folder.path()).unwrap();
    assert!(matches!(folder.model, Model::WordPieces(_)));
    let loaded = library::Library::load(file.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap();
    let alphabet: Vec<char> =
        "aAbé\u{301}İßΣς 東～\u{f900}\u{200d}\u{fffd}\u{a0}\u{85}\u{ad}\u{e000}!-[]'3½🙂가កា"
            .chars()
            .chain("Hello world".chars())
            .collect();
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut texts: Vec<String> =
        (0..2000).map(|at| (0..at % 25).map(|_| alphabet[random(alphabet.len())]).collect()).collect();
    let cases = read(&fixture("gguf").join("bert-bge.json"));
    texts.extend(cases.as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap().to_owned()));
    for text in texts {
        let ids = gguf.encode(&text, Specials::AsText).unwrap();
        assert_eq!(loaded.library.encode(&text, |_| false).unwrap(), ids, "{text:?}");
        assert_eq!(folder.encode(&text, Specials::AsText).unwrap(), ids, "{text:?}");
        let decoded = decode(&gguf, Detokenizer::new(&gguf), &ids);
        assert_eq!(decode(&folder, Detokenizer::new(&folder), &ids), decoded, "{text:?}");
    }
}
