//! `tokenizer.model`: SentencePiece's own file, a Protocol Buffers message.
//!
//! Read are the pieces and the few settings that change ids. What the file can ask for and is not implemented is refused
//! by name: unigram, word and character models, and normalizers other than `identity`.
//!
//! Source of the field numbers: `sentencepiece_model.proto` of google/sentencepiece.

use std::path::Path;

use super::TokenizerError;
use super::gguf::pieces;
use super::spm::{SentencePieces, SpacePrefix};
use super::vocabulary::Vocabulary;

/// What a `tokenizer.model` holds.
pub(super) struct Loaded {
    pub(super) model: SentencePieces,
    pub(super) vocabulary: Vocabulary,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) strips_space: bool,
}

/// Names of `TrainerSpec.ModelType`.
const MODELS: [&str; 4] = ["unigram", "bpe", "word", "char"];
const BPE: u64 = 2;

/// Reads the file at `path`, which holds `bytes`.
pub(super) fn load(bytes: &[u8], path: &Path) -> Result<Loaded, TokenizerError> {
    let bad = |what: &str| TokenizerError::Json { path: path.to_owned(), what: what.to_owned() };
    let damaged = || bad("it is not a SentencePiece model: a field is damaged or cut short");
    let unsupported = |what, name: &str, known: &str| TokenizerError::Unsupported {
        what,
        name: name.to_owned(),
        known: known.to_owned(),
    };

    let (mut tokens, mut scores, mut types) = (Vec::new(), Vec::new(), Vec::new());
    // Values where the file does not say.
    let (mut model_type, mut unknown, mut bos, mut eos) = (1, 0_i32, 1_i32, 2_i32);
    let (mut dummy_prefix, mut removes_spaces, mut escapes, mut suffix) = (true, true, true, false);
    let (mut normalizer, mut has_map) = (String::new(), false);
    for field in Fields(bytes) {
        match field.ok_or_else(damaged)? {
            (1, Field::Bytes(piece)) => {
                let (mut text, mut score, mut kind) = ("", 0.0, 1);
                for field in Fields(piece) {
                    match field.ok_or_else(damaged)? {
                        (1, Field::Bytes(bytes)) => text = str::from_utf8(bytes).map_err(|_| damaged())?,
                        (2, Field::Fixed32(bits)) => score = f32::from_bits(bits),
                        (3, Field::Varint(value)) => kind = value as i32,
                        _ => {}
                    }
                }
                tokens.push(text);
                scores.push(score);
                types.push(kind);
            }
            (2, Field::Bytes(trainer)) => {
                for field in Fields(trainer) {
                    match field.ok_or_else(damaged)? {
                        (3, Field::Varint(value)) => model_type = value,
                        (24, Field::Varint(value)) => suffix = value != 0,
                        // Negative for a token that is not there.
                        (40, Field::Varint(value)) => unknown = value as i32,
                        (41, Field::Varint(value)) => bos = value as i32,
                        (42, Field::Varint(value)) => eos = value as i32,
                        _ => {}
                    }
                }
            }
            (3, Field::Bytes(spec)) => {
                for field in Fields(spec) {
                    match field.ok_or_else(damaged)? {
                        (1, Field::Bytes(name)) => normalizer = String::from_utf8_lossy(name).into_owned(),
                        (2, Field::Bytes(map)) => has_map = !map.is_empty(),
                        (3, Field::Varint(value)) => dummy_prefix = value != 0,
                        (4, Field::Varint(value)) => removes_spaces = value != 0,
                        (5, Field::Varint(value)) => escapes = value != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if tokens.is_empty() {
        return Err(bad("it has no pieces"));
    }
    if model_type != BPE {
        let at = usize::try_from(model_type).ok().and_then(|at| at.checked_sub(1));
        let name = at.and_then(|at| MODELS.get(at)).unwrap_or(&"unknown");
        return Err(unsupported("model type of tokenizer.model", name, "bpe"));
    }
    if has_map {
        return Err(unsupported("normalizer of tokenizer.model", &normalizer, "files without one"));
    }
    for (found, wanted, name) in [
        (removes_spaces, false, "remove_extra_whitespaces"),
        (escapes, true, "escape_whitespaces: false"),
        (suffix, false, "treat_whitespace_as_suffix"),
    ] {
        if found != wanted {
            return Err(unsupported("setting of tokenizer.model", name, "files without it"));
        }
    }
    let id = |id: i32| u32::try_from(id).ok().filter(|&id| (id as usize) < tokens.len());
    let prefix = if dummy_prefix { SpacePrefix::Start } else { SpacePrefix::Never };
    let vocabulary = pieces(&tokens, &types);
    Ok(Loaded {
        model: SentencePieces::scored(&vocabulary, &scores, id(unknown), prefix),
        vocabulary,
        bos: id(bos),
        eos: id(eos),
        strips_space: dummy_prefix,
    })
}

/// A field's value; 64-bit ones are passed over.
enum Field<'b> {
    Varint(u64),
    Bytes(&'b [u8]),
    Fixed32(u32),
    Fixed64,
}

/// The fields of a message, with their numbers; `None` for one that is damaged, which is the last.
struct Fields<'b>(&'b [u8]);

impl<'b> Iterator for Fields<'b> {
    type Item = Option<(u64, Field<'b>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

impl<'b> Fields<'b> {
    fn field(&mut self) -> Option<(u64, Field<'b>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Field::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Field::Fixed64
            }
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => Field::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for (shift, &byte) in (0..64).step_by(7).zip(self.0) {
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                self.0 = &self.0[shift / 7 + 1..];
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'b [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}
