//! The `tokenizer.json` files of plain kinds: byte-level BPE cut by regular expressions, converted SentencePiece BPE, and
//! BERT's WordPiece. The models of this room give the same ids for them as the `tokenizers` crate, in a fraction of the
//! time.

use serde_json::Value as Json;

use super::Model;
use super::bpe::{BytePairs, PairTable};
use super::gguf::push_spaced;
use super::split::{Family, Stage};
use super::spm::{SPACE, SentencePieces, SpacePrefix};
use super::vocabulary::{Kind, Vocabulary};
use super::wordpiece::WordPieces;

/// The model that `file` describes, if it is of a plain kind; its pieces can then be found in `vocabulary`.
pub(super) fn model(file: &Json, vocabulary: &mut Vocabulary) -> Option<Model> {
    // Added tokens that are matched after normalization need it to be done in two steps.
    let mut added = file["added_tokens"].as_array().into_iter().flatten();
    if added.any(|token| token["normalized"] != false) {
        return None;
    }
    match file["model"]["type"].as_str() {
        Some("BPE") if file["model"]["byte_fallback"] == true => {
            sentence_pieces(file, vocabulary).map(Model::SentencePieces)
        }
        Some("BPE") => byte_pairs(file, vocabulary).map(Model::BytePairs),
        Some("WordPiece") => word_pieces(file, vocabulary).map(Model::WordPieces),
        _ => None,
    }
}

/// Whether a setting is not there or says nothing.
fn is_unset(value: &Json) -> bool {
    value.is_null() || value == false || value == ""
}

fn byte_pairs(file: &Json, vocabulary: &mut Vocabulary) -> Option<BytePairs> {
    let model = &file["model"];
    let plain = [
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
    ];
    if !plain.iter().all(|&name| is_unset(&model[name])) {
        return None;
    }
    let nfc = match file["normalizer"]["type"].as_str() {
        None if file["normalizer"].is_null() => false,
        Some("NFC") => true,
        _ => return None,
    };
    let stages = stages(&file["pre_tokenizer"])?;
    let merges = merges(model)?;
    index(vocabulary);
    let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
    let ignore_merges = model["ignore_merges"] == true;
    BytePairs::new(Family { stages, ignore_merges, nfc, adds_bos: false }, vocabulary, &merges).ok()
}

/// The merges as "left right", from either form of the list.
fn merges(model: &Json) -> Option<Vec<String>> {
    let one = |merge: &Json| match merge.as_array().map(Vec::as_slice) {
        None => merge.as_str().map(str::to_owned),
        Some([left, right]) => Some(format!("{} {}", left.as_str()?, right.as_str()?)),
        Some(_) => None,
    };
    model["merges"].as_array()?.iter().map(one).collect()
}

/// SentencePiece BPE as converters write it: a space becomes `▁`, and one may go before each part of a text.
fn sentence_pieces(file: &Json, vocabulary: &mut Vocabulary) -> Option<SentencePieces> {
    let (model, normalizer, cut) = (&file["model"], &file["normalizer"], &file["pre_tokenizer"]);
    let plain = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"];
    // There are no spaces any more where the text could be cut.
    let is_uncut = cut.is_null() || cut["type"] == "Split" && cut["pattern"]["String"] == " ";
    let has_spaces = model["vocab"].as_object()?.keys().any(|piece| piece.contains(' '));
    let bytes = (0..vocabulary.len() as u32).filter(|&id| vocabulary.kind(id) == Kind::Byte).count();
    if !plain.iter().all(|&name| is_unset(&model[name])) || !is_uncut || has_spaces || bytes != 256 {
        return None;
    }
    let is_replace = |part: &Json| {
        part["type"] == "Replace" && part["pattern"]["String"] == " " && part["content"] == SPACE
    };
    let is_prepend = |part: &Json| part["type"] == "Prepend" && part["prepend"] == SPACE;
    let parts = match normalizer["type"].as_str()? {
        "Sequence" => normalizer["normalizers"].as_array()?,
        _ => std::slice::from_ref(normalizer),
    };
    let prefix = match parts {
        [replace] if is_replace(replace) => SpacePrefix::Never,
        [prepend, replace] if is_prepend(prepend) && is_replace(replace) => SpacePrefix::Parts,
        _ => return None,
    };
    let merges = merges(model)?;
    index(vocabulary);
    let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
    let merges = PairTable::new(vocabulary, &merges, push_spaced).ok()?;
    Some(SentencePieces::ranked(vocabulary, merges, prefix))
}

/// The cuts of a pre-tokenizer that ends by spelling bytes in GPT-2's alphabet.
fn stages(pre_tokenizer: &Json) -> Option<Vec<Stage>> {
    let one = std::slice::from_ref(pre_tokenizer);
    let parts = match pre_tokenizer["type"].as_str()? {
        "Sequence" => pre_tokenizer["pretokenizers"].as_array()?,
        _ => one,
    };
    let (last, cuts) = parts.split_last()?;
    if last["type"] != "ByteLevel" || !is_unset(&last["add_prefix_space"]) {
        return None;
    }
    let cut = |part: &Json| match part["type"].as_str()? {
        "Split" if part["behavior"] == "Isolated" && is_unset(&part["invert"]) => {
            Stage::of_pattern(part["pattern"]["Regex"].as_str()?)
        }
        "Digits" => Stage::of_pattern(if part["individual_digits"] == true { r"\p{N}" } else { r"\p{N}+" }),
        _ => None,
    };
    let mut stages: Vec<Stage> = cuts.iter().map(cut).collect::<Option<_>>()?;
    // The default is to cut.
    if last["use_regex"] != false {
        stages.push(Stage::Gpt2);
    }
    Some(stages)
}

fn word_pieces(file: &Json, vocabulary: &mut Vocabulary) -> Option<WordPieces> {
    let (model, normalizer) = (&file["model"], &file["normalizer"]);
    let all_set = |names: &[&str]| names.iter().all(|&name| normalizer[name] == true);
    let is_plain = normalizer["type"] == "BertNormalizer"
        && all_set(&["clean_text", "handle_chinese_chars", "lowercase"])
        && normalizer["strip_accents"] != false
        && file["pre_tokenizer"]["type"] == "BertPreTokenizer"
        && model["continuing_subword_prefix"] == "##"
        && file["decoder"]["prefix"] == "##"
        && model["max_input_chars_per_word"] == 100;
    let unknown = model["vocab"][model["unk_token"].as_str()?].as_u64()?;
    if !is_plain {
        return None;
    }
    index(vocabulary);
    Some(WordPieces::new(u32::try_from(unknown).ok()))
}

/// Lets all text tokens be found.
fn index(vocabulary: &mut Vocabulary) {
    for id in 0..vocabulary.len() as u32 {
        if vocabulary.kind(id) == Kind::Text {
            vocabulary.index(id);
        }
    }
}
