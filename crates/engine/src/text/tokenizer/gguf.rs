//! A tokenizer from the `tokenizer.ggml.*` keys of a GGUF file.

use ingle_tensor::gguf::Metadata;

use super::added::AddedToken;
use super::bpe::{BytePairs, from_byte_alphabet};
use super::split::Family;
use super::spm::{SPACE, SentencePieces, SpacePrefix};
use super::vocabulary::{Kind, Vocabulary};
use super::wordpiece::WordPieces;
use super::{Model, Parts, Tokenizer, TokenizerError, byte_token};

// Values of `tokenizer.ggml.token_type`; 0 (undefined), 1 and 5 (unused) are text.
const UNDEFINED: i32 = 0;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

impl Tokenizer {
    /// The tokenizer that a GGUF file describes.
    ///
    /// Byte-level BPE (`gpt2`), SentencePiece BPE (`llama`) and WordPiece (`bert`) are known. For byte-level BPE the key
    /// `tokenizer.ggml.add_space_prefix` is not read: converters write it for vocabularies that do not use it.
    ///
    /// # Errors
    /// A key that is missing or of the wrong type, a list of the wrong length, a merge of unknown tokens; another kind of
    /// tokenizer or an unknown pre-tokenizer, by name.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        match metadata.str("tokenizer.ggml.model")? {
            "gpt2" => byte_level(metadata),
            "llama" => sentence_piece(metadata),
            "bert" => word_piece(metadata),
            other => Err(TokenizerError::Unsupported {
                what: "tokenizer.ggml.model",
                name: other.to_owned(),
                known: "gpt2, llama, bert".to_owned(),
            }),
        }
    }
}

fn byte_level(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let name = metadata.str_opt("tokenizer.ggml.pre")?.unwrap_or("default");
    let family = Family::named(name).ok_or_else(|| TokenizerError::Unsupported {
        what: "tokenizer.ggml.pre",
        name: name.to_owned(),
        known: Family::NAMES.join(", "),
    })?;
    let (tokens, types) = tokens(metadata)?;
    let mut vocabulary = Vocabulary::with_capacity(tokens.len());
    for (token, &kind) in tokens.iter().zip(&types) {
        match kind_of(kind) {
            Kind::Text => vocabulary.push(Kind::Text, |out| from_byte_alphabet(token, out)),
            // Spelled as text, not in the byte alphabet.
            kind => vocabulary.push(kind, |out| out.extend_from_slice(token.as_bytes())),
        }
    }
    // Text tokens first: an added token may have the bytes of one.
    for wanted in [Kind::Text, Kind::Added] {
        for id in 0..vocabulary.len() as u32 {
            if vocabulary.kind(id) == wanted {
                vocabulary.index(id);
            }
        }
    }
    let adds_bos = family.adds_bos;
    let merges = metadata.strings("tokenizer.ggml.merges")?;
    if merges.is_empty() {
        let problem = "it is empty, and a byte-level vocabulary is nothing without its merges";
        return Err(ingle_tensor::Error::key("tokenizer.ggml.merges", problem).into());
    }
    let model = Model::BytePairs(BytePairs::new(family, &vocabulary, &merges)?);
    finish(metadata, model, vocabulary, adds_bos, false)
}

fn sentence_piece(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let (tokens, types) = tokens(metadata)?;
    let scores = metadata.f32s("tokenizer.ggml.scores")?;
    same_length("tokenizer.ggml.scores", scores.len(), tokens.len())?;
    let vocabulary = pieces(&tokens, &types);
    let space_prefix = metadata.bool_opt("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let unknown = token_id(metadata, "unknown", tokens.len())?;
    let prefix = if space_prefix { SpacePrefix::Parts } else { SpacePrefix::Never };
    let model = Model::SentencePieces(SentencePieces::scored(&vocabulary, &scores, unknown, prefix));
    finish(metadata, model, vocabulary, true, space_prefix)
}

/// The vocabulary of SentencePiece's pieces, whose types GGUF shares.
pub(super) fn pieces(tokens: &[&str], types: &[i32]) -> Vocabulary {
    let mut vocabulary = Vocabulary::with_capacity(tokens.len());
    for (id, (token, &kind)) in tokens.iter().zip(types).enumerate() {
        match (kind_of(kind), byte_token(token)) {
            (Kind::Byte, Some(byte)) => vocabulary.push(Kind::Byte, |out| out.push(byte)),
            (Kind::Special, _) => {
                vocabulary.push(Kind::Special, |out| out.extend_from_slice(token.as_bytes()))
            }
            (Kind::Added, _) => {
                vocabulary.push(Kind::Added, |out| out.extend(token.replace(SPACE, " ").bytes()))
            }
            (Kind::Text | Kind::Byte, _) => {
                vocabulary.push(Kind::Text, |out| push_spaced(token, out));
                // A raw space is never matched: the text's are all `▁` to SentencePiece.
                if !token.contains(' ') {
                    vocabulary.index(id as u32);
                }
            }
        }
    }
    vocabulary
}

/// A vocabulary without the flags that its own tokenizer has: text is put in lower case without accents, as all of this
/// kind are run that GGUF files hold. A text is framed by `[CLS]` and `[SEP]`, unless the file says otherwise.
fn word_piece(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    let (tokens, types) = tokens(metadata)?;
    let mut vocabulary = Vocabulary::with_capacity(tokens.len());
    for (id, (token, &kind)) in tokens.iter().zip(&types).enumerate() {
        match kind_of(kind) {
            Kind::Text | Kind::Byte => {
                vocabulary.push(Kind::Text, |out| push_spaced(token, out));
                vocabulary.index(id as u32);
            }
            kind => vocabulary.push(kind, |out| out.extend_from_slice(token.as_bytes())),
        }
    }
    let id = |name| token_id(metadata, name, tokens.len());
    // The second name is misspelled in files, and in the format.
    let (cls, sep) = (id("cls")?, id("separator")?.or(id("seperator")?));
    let unknown = id("unknown")?;
    let flag = |name: &str| metadata.bool_opt(&format!("tokenizer.ggml.{name}"));
    let adds_cls = flag("add_bos_token")?.unwrap_or(true);
    let adds_sep = flag("add_sep_token")?.or(flag("add_eos_token")?).unwrap_or(true);
    Ok(Tokenizer::from_parts(Parts {
        added: added_tokens(&vocabulary, |_| false),
        prefix: id("bos")?.or(cls).filter(|_| adds_cls).into_iter().collect(),
        suffix: sep.filter(|_| adds_sep).into_iter().collect(),
        bos: id("bos")?.or(cls),
        eos: id("eos")?.or(sep),
        ends: Vec::new(),
        model: Model::WordPieces(WordPieces::new(unknown)),
        vocabulary,
        strips_space: true,
    }))
}

/// Appends a piece with spaces for SentencePiece's `▁`.
pub(super) fn push_spaced(piece: &str, out: &mut Vec<u8>) {
    let mut parts = piece.split(SPACE);
    out.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
    for part in parts {
        out.push(b' ');
        out.extend_from_slice(part.as_bytes());
    }
}

/// The tokens as they are spelled in the file, and their types.
fn tokens(metadata: &Metadata) -> Result<(Vec<&str>, Vec<i32>), TokenizerError> {
    let tokens = metadata.strings("tokenizer.ggml.tokens")?;
    let types = metadata.i32s_opt("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![1; tokens.len()]);
    same_length("tokenizer.ggml.token_type", types.len(), tokens.len())?;
    if let Some(id) = types.iter().position(|kind| !(UNDEFINED..=BYTE).contains(kind)) {
        let problem = format!("entry {id} is {}; token types are {UNDEFINED} to {BYTE}", types[id]);
        return Err(ingle_tensor::Error::key("tokenizer.ggml.token_type", problem).into());
    }
    Ok((tokens, types))
}

fn same_length(key: &'static str, found: usize, tokens: usize) -> Result<(), TokenizerError> {
    if found == tokens { Ok(()) } else { Err(TokenizerError::Length { key, found, tokens }) }
}

fn kind_of(token_type: i32) -> Kind {
    match token_type {
        UNKNOWN | CONTROL => Kind::Special,
        USER_DEFINED => Kind::Added,
        BYTE => Kind::Byte,
        _ => Kind::Text,
    }
}

/// The id at `tokenizer.ggml.<name>_token_id`.
fn token_id(metadata: &Metadata, name: &str, tokens: usize) -> Result<Option<u32>, TokenizerError> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.u32_opt(&key)? {
        Some(id) if id as usize >= tokens => Err(TokenizerError::TokenId { key, id, tokens }),
        id => Ok(id),
    }
}

/// What both kinds have in common. `adds_bos` holds where the file does not say; a begin token that the file does not
/// name is never made up.
fn finish(
    metadata: &Metadata,
    model: Model,
    vocabulary: Vocabulary,
    adds_bos: bool,
    strips_space: bool,
) -> Result<Tokenizer, TokenizerError> {
    let id = |name| token_id(metadata, name, vocabulary.len());
    let (bos, eos) = (id("bos")?, id("eos")?);
    let adds_bos = metadata.bool_opt("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let adds_eos = metadata.bool_opt("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    // Phi-3's own tokenizer drops white space after its control tokens; the format has no field for it.
    let strips_after = metadata.str_opt("general.architecture")? == Some("phi3") && strips_space;
    let keeps_after = ["<unk>", "<s>", "<|endoftext|>"];
    Ok(Tokenizer::from_parts(Parts {
        added: added_tokens(&vocabulary, |text| strips_after && !keeps_after.contains(&text)),
        prefix: bos.filter(|_| adds_bos).into_iter().collect(),
        suffix: eos.filter(|_| adds_eos).into_iter().collect(),
        ends: [id("eot")?, id("eom")?].into_iter().flatten().collect(),
        model,
        vocabulary,
        bos,
        eos,
        strips_space,
    }))
}

/// The tokens that are matched in the text itself; `rstrip` says which take the white space after them.
pub(super) fn added_tokens(vocabulary: &Vocabulary, rstrip: impl Fn(&str) -> bool) -> Vec<AddedToken> {
    let ids =
        (0..vocabulary.len() as u32).filter(|&id| matches!(vocabulary.kind(id), Kind::Special | Kind::Added));
    let token = |id| {
        let text = String::from_utf8_lossy(vocabulary.bytes(id)).into_owned();
        let special = vocabulary.kind(id) == Kind::Special;
        AddedToken { id, special, rstrip: rstrip(&text), text, ..AddedToken::default() }
    };
    ids.map(token).collect()
}
