//! Tokens that are matched in the text itself, before anything else splits it.

use std::collections::HashMap;
use std::ops::Range;

/// One such token, with the flags of `tokenizer.json`.
#[derive(Debug, Clone, Default)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    pub(super) text: String,
    /// A control token, matched only where the template wrote it.
    pub(super) special: bool,
    /// Takes the white space before it.
    pub(super) lstrip: bool,
    /// Takes the white space after it.
    pub(super) rstrip: bool,
    /// Matched only between word boundaries.
    pub(super) single_word: bool,
}

/// A part of a text: an added token, or what lies between two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) range: Range<usize>,
    pub(super) token: Option<u32>,
}

/// A set of added tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct AddedTokens {
    tokens: Vec<AddedToken>,
    by_text: HashMap<String, usize>,
    /// For each first byte, the lengths of the tokens that start with it, longest first.
    lengths: Vec<Vec<usize>>,
    /// Whether a token begins with these two bytes, so that most places in a text need no look-up.
    beginnings: Vec<bool>,
}

impl AddedTokens {
    /// Of tokens with the same text the first counts; empty ones are left out.
    pub(super) fn new(tokens: impl IntoIterator<Item = AddedToken>) -> AddedTokens {
        let mut set = AddedTokens {
            lengths: vec![Vec::new(); 256],
            beginnings: vec![false; 1 << 16],
            ..AddedTokens::default()
        };
        for token in tokens {
            let Some(&first) = token.text.as_bytes().first() else { continue };
            let lengths = &mut set.lengths[usize::from(first)];
            if let Err(at) = lengths.binary_search_by(|length| token.text.len().cmp(length)) {
                lengths.insert(at, token.text.len());
            }
            if let Some(&second) = token.text.as_bytes().get(1) {
                set.beginnings[two(first, second)] = true;
            }
            set.by_text.entry(token.text.clone()).or_insert(set.tokens.len());
            set.tokens.push(token);
        }
        set
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Splits `text` at its added tokens: leftmost first, and of those the longest. A special token is taken only where
    /// `armed` holds for its place and id.
    pub(super) fn split(&self, text: &str, armed: impl Fn(Range<usize>, u32) -> bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let (mut done, mut at) = (0, 0);
        while at < text.len() {
            let Some((token, end)) = self.longest_at(text, at, &armed) else {
                at += 1;
                continue;
            };
            let (mut start, mut stop) = (at, end);
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                stop = text.len() - text[stop..].trim_start().len();
            }
            if done < start {
                pieces.push(Piece { range: done..start, token: None });
            }
            pieces.push(Piece { range: start..stop, token: Some(token.id) });
            (done, at) = (stop, stop);
        }
        if done < text.len() {
            pieces.push(Piece { range: done..text.len(), token: None });
        }
        pieces
    }

    fn longest_at(
        &self,
        text: &str,
        at: usize,
        armed: impl Fn(Range<usize>, u32) -> bool,
    ) -> Option<(&AddedToken, usize)> {
        let first = text.as_bytes()[at];
        let mut lengths = &self.lengths.get(usize::from(first))?[..];
        let begins = |&second| self.beginnings[two(first, second)];
        if !text.as_bytes().get(at + 1).is_some_and(begins) {
            // Only a token of one byte can be here.
            lengths = &lengths[lengths.partition_point(|&length| length > 1)..];
        }
        lengths.iter().find_map(|&length| {
            let end = at + length;
            let token = &self.tokens[*self.by_text.get(text.get(at..end)?)?];
            let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            let inside_word = token.single_word
                && (is_word(text[..at].chars().next_back()) || is_word(text[end..].chars().next()));
            (!inside_word && (!token.special || armed(at..end, token.id))).then_some((token, end))
        })
    }
}

fn two(first: u8, second: u8) -> usize {
    usize::from(first) << 8 | usize::from(second)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (text, parts: a token's id or the text between).
    #[test]
    fn texts_are_split_at_added_tokens() {
        let token = |id, text: &str| AddedToken { id, text: text.to_owned(), ..AddedToken::default() };
        let set = AddedTokens::new([
            AddedToken { special: true, ..token(0, "<s>") },
            token(1, "<sp>"),
            AddedToken { lstrip: true, ..token(2, "<left>") },
            AddedToken { rstrip: true, ..token(3, "<right>") },
            AddedToken { single_word: true, ..token(4, "word") },
            token(5, "  "),
            token(6, "    "),
            token(7, ""),
            token(8, "é"),
        ]);
        for (text, want) in [
            ("", ""),
            ("plain", "plain"),
            ("a<s>b", "a|0|b"),
            ("<s><sp>", "0|1"),
            ("<s", "<s"),
            ("a \n<left> b", "a|2| b"),
            ("<right> <left>x", "3|2|x"),
            ("a <right>\n b", "a |3|b"),
            ("word words sword word", "4| words sword |4"),
            ("x       y", "x|6|5| y"),
            ("éaé", "8|a|8"),
        ] {
            let parts: Vec<String> = set
                .split(text, |_, _| true)
                .into_iter()
                .map(|piece| piece.token.map_or_else(|| text[piece.range].to_owned(), |id| id.to_string()))
                .collect();
            assert_eq!(parts.join("|"), want, "{text:?}");
        }
        let disarmed = set.split("<s><sp><s>", |at, _| at.start != 0);
        assert_eq!(disarmed.iter().map(|piece| piece.token).collect::<Vec<_>>(), [None, Some(1), Some(0)]);
    }
}
