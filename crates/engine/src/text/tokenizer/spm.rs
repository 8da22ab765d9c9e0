//! SentencePiece BPE: pieces with scores, joined best score first over the whole text, with single bytes for characters
//! that have no piece (Llama 2, Phi-3, Gemma).
//!
//! SentencePiece writes a space as `▁`; here pieces are stored with the space itself, and a `▁` in a text is read as a
//! space, as SentencePiece does.

use std::borrow::Cow;
use std::collections::HashSet;

use super::bpe::PairTable;
use super::merge::{Merger, NO_TOKEN, Pairs, Scratch, Symbol};
use super::vocabulary::{Kind, Vocabulary};

/// How SentencePiece writes a space.
pub(super) const SPACE: &str = "▁";

/// Where a space is put that no text has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    /// Nowhere.
    Never,
    /// Before the whole text, as SentencePiece does; but not before a control token, which SentencePiece never sees.
    Start,
    /// Before the text and before what follows an added token, as models are run whose tokenizer was converted: each
    /// part between added tokens is a text of its own there.
    Parts,
}

/// Which pieces join, and which of them first.
#[derive(Debug)]
enum Order {
    /// Any two that make a piece; for each token, its score turned into an order: smaller joins first.
    Scores(Vec<u32>),
    /// Those listed, in this order.
    Ranks(PairTable),
}

/// The pieces of a SentencePiece vocabulary.
#[derive(Debug)]
pub(super) struct SentencePieces {
    order: Order,
    /// The token of each byte, or `unknown`.
    bytes: [u32; 256],
    prefix: SpacePrefix,
    /// Characters that stand before a space inside some piece. No merge crosses from any other character to a space, so
    /// the text can be cut there.
    before_space: HashSet<char>,
}

impl SentencePieces {
    /// `vocabulary` has its text pieces indexed; `unknown` stands for a byte without a token.
    pub(super) fn scored(
        vocabulary: &Vocabulary,
        scores: &[f32],
        unknown: Option<u32>,
        prefix: SpacePrefix,
    ) -> SentencePieces {
        // Flipping sign or all bits makes the bits ascend with the value; the complement descends.
        let descending = |score: f32| !match score.to_bits() {
            bits if bits >> 31 == 1 => !bits,
            bits => bits | 1 << 31,
        };
        let priorities = scores.iter().map(|&score| descending(score)).collect();
        SentencePieces::new(vocabulary, Order::Scores(priorities), unknown, prefix)
    }

    /// The same with a list of merges instead of scores, as converted vocabularies have it.
    pub(super) fn ranked(vocabulary: &Vocabulary, merges: PairTable, prefix: SpacePrefix) -> SentencePieces {
        SentencePieces::new(vocabulary, Order::Ranks(merges), None, prefix)
    }

    fn new(
        vocabulary: &Vocabulary,
        order: Order,
        unknown: Option<u32>,
        prefix: SpacePrefix,
    ) -> SentencePieces {
        let mut bytes = [unknown.unwrap_or(NO_TOKEN); 256];
        let mut before_space = HashSet::new();
        for id in 0..vocabulary.len() as u32 {
            let token = vocabulary.bytes(id);
            match vocabulary.kind(id) {
                Kind::Byte => bytes[usize::from(token[0])] = id,
                Kind::Text if token.len() > 1 && token[1..].contains(&b' ') => {
                    let text = String::from_utf8_lossy(token);
                    let pairs = text.chars().zip(text.chars().skip(1));
                    before_space.extend(pairs.filter(|&(a, b)| a != ' ' && b == ' ').map(|(a, _)| a));
                }
                _ => {}
            }
        }
        SentencePieces { order, bytes, prefix, before_space }
    }

    /// Appends the ids of `text`, which holds no added tokens. It may be empty where the whole text starts with an added
    /// token.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        is_start: bool,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        let mut text =
            if text.contains(SPACE) { Cow::Owned(text.replace(SPACE, " ")) } else { Cow::Borrowed(text) };
        let prefixed = match self.prefix {
            SpacePrefix::Never => false,
            SpacePrefix::Start => is_start,
            SpacePrefix::Parts => !text.is_empty(),
        };
        if prefixed {
            text.to_mut().insert(0, ' ');
        }
        let Scratch { merger, repeats } = scratch;
        let mut cut = |part| repeats.encode(part, ids, |ids| self.merge(vocabulary, part, merger, ids));
        let mut start = 0;
        let mut last = ' ';
        for (at, c) in text.char_indices() {
            if c == ' ' && last != ' ' && !self.before_space.contains(&last) {
                cut(&text[start..at]);
                start = at;
            }
            last = c;
        }
        if start < text.len() {
            cut(&text[start..]);
        }
    }

    fn merge(&self, vocabulary: &Vocabulary, part: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        for (at, c) in part.char_indices() {
            let len = c.len_utf8();
            let id = vocabulary.find(&part.as_bytes()[at..at + len]);
            merger.push(at, len, id.unwrap_or(NO_TOKEN));
        }
        let pairs = Scored { pieces: self, vocabulary, text: part.as_bytes() };
        merger.run(&pairs, |symbol| match symbol.id {
            NO_TOKEN => {
                let bytes = &part.as_bytes()[symbol.start as usize..][..symbol.len as usize];
                let tokens = bytes.iter().map(|&byte| self.bytes[usize::from(byte)]);
                ids.extend(tokens.filter(|&id| id != NO_TOKEN));
            }
            id => ids.push(id),
        });
    }
}

struct Scored<'a> {
    pieces: &'a SentencePieces,
    vocabulary: &'a Vocabulary,
    text: &'a [u8],
}

impl Pairs for Scored<'_> {
    fn join(&self, left: &Symbol, right: &Symbol) -> Option<(u32, u32)> {
        match &self.pieces.order {
            Order::Scores(priorities) => {
                let both = &self.text[left.start as usize..(right.start + right.len) as usize];
                let id = self.vocabulary.find(both)?;
                Some((priorities[id as usize], id))
            }
            Order::Ranks(merges) => merges.join(left, right),
        }
    }
}
