//! Files of plain kinds give the ids that the `tokenizers` crate gives for them.

use super::*;

/// Random strings under a `tokenizer.json` of a plain kind: the ids that the crate's own model gives. Each file as it is
/// and with other settings that are plain.
#[test]
fn plain_kinds_are_as_the_library() {
    let alphabet: Vec<char> =
        "aabcdDeE''sStTlL   \t\n\r\u{a0}\u{3000}0123²Ⅷ.,!?<|>/=ée\u{301}東京🙂🚀_-\"Lu".chars().collect();
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut texts: Vec<String> =
        (0..1000).map(|at| (0..at % 40).map(|_| alphabet[random(alphabet.len())]).collect()).collect();
    texts.extend(["a", "Hello", " ", "\n", "東", "12"].map(|part| part.repeat(100)));
    texts.extend(["<|im_start|>user\nhi<|im_end|> </s>".to_owned(), "the DecimalContext return ".repeat(9)]);
    let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let digits = serde_json::json!({"type": "Digits", "individual_digits": true});
    let both = serde_json::json!({"type": "Sequence", "pretokenizers": [digits, byte_level]});
    for name in ["llama3style", "qwen2style"] {
        let path = fixture(name).join("tokenizer.json");
        for (field, value) in [
            ("version", Json::from("1.0")),
            ("normalizer", serde_json::json!({"type": "NFC"})),
            ("normalizer", Json::Null),
            ("pre_tokenizer", byte_level.clone()),
            ("pre_tokenizer", both.clone()),
            ("model", Json::from(true)), // ignore_merges
        ] {
            let mut file = read(&path);
            match field {
                "model" => file["model"]["ignore_merges"] = value,
                field => file[field] = value,
            }
            let loaded = library::Library::load(file.to_string().as_bytes(), &path).unwrap();
            let library::Loaded { library, plain, vocabulary, added, .. } = loaded;
            let tokenizer = Tokenizer::from_parts(Parts {
                model: plain.expect("a plain kind"),
                vocabulary,
                added,
                prefix: Vec::new(),
                suffix: Vec::new(),
                bos: None,
                eos: None,
                ends: Vec::new(),
                strips_space: false,
            });
            for text in &texts {
                let ids = tokenizer.encode(text, Specials::Parse).unwrap();
                assert_eq!(ids, library.encode(text, |_| true).unwrap(), "{name} {field} {text:?}");
            }
        }
        for (field, value) in [
            ("normalizer", serde_json::json!({"type": "NFKC"})),
            (
                "pre_tokenizer",
                serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            ),
        ] {
            let mut file = read(&path);
            file[field] = value;
            let loaded = library::Library::load(file.to_string().as_bytes(), &path).unwrap();
            assert!(loaded.plain.is_none(), "{field}");
        }
    }
}

/// A SentencePiece vocabulary as converters write it, with each rule for the space before a text: the ids that the crate's
/// own model gives.
#[test]
fn converted_pieces_are_as_the_library() {
    let gguf = open("llama-spm");
    let tokens = gguf.metadata.strings("tokenizer.ggml.tokens").unwrap();
    let scores = gguf.metadata.f32s("tokenizer.ggml.scores").unwrap();
    let special = |id: usize| {
        serde_json::json!({"id": id, "content": tokens[id], "special": true, "normalized": false,
        "lstrip": false, "rstrip": false, "single_word": false})
    };
    let vocab: serde_json::Map<String, Json> =
        tokens.iter().enumerate().map(|(id, &token)| (token.to_owned(), id.into())).collect();
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().skip(3).filter(|(_, token)| byte_token(token).is_none()) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if vocab.contains_key(left) && vocab.contains_key(right) {
                merges.push((-scores[id], id, format!("{left} {right}")));
            }
        }
    }
    merges.sort_by(|a, b| a.partial_cmp(b).unwrap());
    assert!(merges.len() > 200);
    let merges: Vec<String> = merges.into_iter().map(|(_, _, merge)| merge).collect();
    let replace = serde_json::json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = serde_json::json!({"type": "Prepend", "prepend": "▁"});
    let both = serde_json::json!({"type": "Sequence", "normalizers": [prepend, replace]});
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let alphabet: Vec<char> = "aeHlowrdtn    \n▁éक東🙂.,'13".chars().collect();
    let cases = read(&fixture("gguf").join("llama-spm.json"));
    let mut texts: Vec<String> =
        cases.as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap().to_owned()).collect();
    texts.extend(
        (0..1000).map(|at| (0..at % 60).map(|_| alphabet[random(alphabet.len())]).collect::<String>()),
    );
    texts.extend(["<s>Hello</s> Hello<s>", "  <s>", "<s> a"].map(str::to_owned));
    for normalizer in [both, replace] {
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "pre_tokenizer": null,
            "added_tokens": [special(0), special(1), special(2)], "normalizer": normalizer,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "vocab": vocab, "merges": merges},
        });
        let loaded =
            library::Library::load(file.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
        assert!(matches!(tokenizer.model, Model::SentencePieces(_)));
        for text in &texts {
            let ids = tokenizer.encode(text, Specials::Parse).unwrap();
            assert_eq!(ids, loaded.library.encode(text, |_| true).unwrap(), "{text:?}");
        }
    }
}
