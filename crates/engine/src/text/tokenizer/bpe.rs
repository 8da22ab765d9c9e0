//! Byte-level BPE: every byte is a token, and ranked merges join them (GPT-2 and its many heirs).

use std::borrow::Cow;

use super::TokenizerError;
use super::merge::{NO_TOKEN, Pairs, Scratch, Symbol};
use super::split::Family;
use super::vocabulary::Vocabulary;

/// The merges of a byte-level vocabulary and how it cuts text into words.
#[derive(Debug)]
pub(super) struct BytePairs {
    family: Family,
    /// The token of each byte; [`NO_TOKEN`] for bytes that no UTF-8 text holds and that have none.
    bytes: [u32; 256],
    merges: PairTable,
}

impl BytePairs {
    /// `merges` are "left right" in the byte alphabet, best first; `vocabulary` has its text tokens indexed.
    pub(super) fn new(
        family: Family,
        vocabulary: &Vocabulary,
        merges: &[&str],
    ) -> Result<BytePairs, TokenizerError> {
        let merges = PairTable::new(vocabulary, merges, from_byte_alphabet)?;
        let bytes = std::array::from_fn(|byte| vocabulary.find(&[byte as u8]).unwrap_or(NO_TOKEN));
        Ok(BytePairs { family, bytes, merges })
    }

    /// Appends the ids of `text`, which holds no added tokens.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        let text = if self.family.nfc { composed(text) } else { Cow::Borrowed(text) };
        let Scratch { merger, repeats } = scratch;
        self.family.split(&text, &mut |word| {
            if self.family.ignore_merges
                && let Some(id) = vocabulary.find(word.as_bytes())
            {
                return ids.push(id);
            }
            repeats.encode(word, ids, |ids| {
                for (at, &byte) in word.as_bytes().iter().enumerate() {
                    // A byte without a token is left out, as in the reference library.
                    let id = self.bytes[usize::from(byte)];
                    if id != NO_TOKEN {
                        merger.push(at, 1, id);
                    }
                }
                merger.run(&self.merges, |symbol| ids.push(symbol.id));
            });
        });
    }
}

/// Text in Unicode's normalization form C, line by line: a line break takes no part in any composition.
fn composed(text: &str) -> Cow<'_, str> {
    // Ranges without characters that form C changes or joins to the one before: what most text consists of.
    let is_inert = |c| {
        matches!(c, '\0'..='\u{2FF}' | '\u{400}'..='\u{482}' | '\u{2010}'..='\u{205E}' | '\u{3001}'..='\u{3029}'
            | '\u{3041}'..='\u{3096}' | '\u{309B}'..='\u{30FF}' | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}'
            | '\u{FF01}'..='\u{FF5E}' | '\u{1F300}'..='\u{1FAFF}')
    };
    if text.chars().all(is_inert) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match line.chars().all(is_inert) {
            true => out.push_str(line),
            false => out.push_str(tokenizers::NormalizedString::from(line).nfc().get()),
        }
    }
    Cow::Owned(out)
}

/// (left token, right token) to (rank, joined token): open addressing, a power of two long.
#[derive(Debug)]
pub(super) struct PairTable {
    slots: Vec<(u64, u32, u32)>,
}

const EMPTY: u64 = u64::MAX;

impl PairTable {
    /// `merges` are "left right", best first; `spell` appends the bytes of either. `vocabulary` has its text tokens
    /// indexed.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        merges: &[&str],
        spell: impl Fn(&str, &mut Vec<u8>),
    ) -> Result<PairTable, TokenizerError> {
        let mut table = PairTable::with_capacity(merges.len());
        let mut joined = Vec::new();
        for (rank, merge) in merges.iter().enumerate() {
            let bad = |what: String| TokenizerError::Merge { rank, merge: (*merge).to_owned(), what };
            // A token is never written with a space, so the one there is parts the two.
            let (left, right) = merge.split_once(' ').ok_or_else(|| bad("it has no space".to_owned()))?;
            joined.clear();
            spell(left, &mut joined);
            let middle = joined.len();
            spell(right, &mut joined);
            let find = |bytes: &[u8]| {
                let token = || String::from_utf8_lossy(bytes).into_owned();
                vocabulary.find(bytes).ok_or_else(|| bad(format!("there is no token {:?}", token())))
            };
            table.insert(find(&joined[..middle])?, find(&joined[middle..])?, rank as u32, find(&joined)?);
        }
        Ok(table)
    }

    fn with_capacity(pairs: usize) -> PairTable {
        PairTable { slots: vec![(EMPTY, 0, 0); (2 * pairs).next_power_of_two().max(2)] }
    }

    /// The first of equal pairs counts.
    fn insert(&mut self, left: u32, right: u32, rank: u32, joined: u32) {
        let slot = self.probe(left, right);
        if self.slots[slot].0 == EMPTY {
            self.slots[slot] = (key(left, right), rank, joined);
        }
    }

    fn probe(&self, left: u32, right: u32) -> usize {
        let (key, mask) = (key(left, right), self.slots.len() - 1);
        let mut slot = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & mask;
        while self.slots[slot].0 != key && self.slots[slot].0 != EMPTY {
            slot = (slot + 1) & mask;
        }
        slot
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Pairs for PairTable {
    fn join(&self, left: &Symbol, right: &Symbol) -> Option<(u32, u32)> {
        let (key, rank, joined) = self.slots[self.probe(left.id, right.id)];
        (key != EMPTY).then_some((rank, joined))
    }
}

/// The byte that `c` stands for in GPT-2's byte alphabet: printable Latin-1 stands for itself, the other 68 bytes are,
/// in order, U+0100 and up.
fn alphabet_byte(c: char) -> Option<u8> {
    match c as u32 {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8), // 0x00 to 0x20
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8), // 0x7F to 0xA0
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Appends the bytes that `token` spells; a token with other characters than the alphabet's is text as it is.
pub(super) fn from_byte_alphabet(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match alphabet_byte(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_spells_every_byte_once() {
        let mut seen = [0; 256];
        for code in 0..0x1000 {
            if let Some(byte) = char::from_u32(code).and_then(alphabet_byte) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        for (token, want) in
            [("Ġthe", &b" the"[..]), ("Ċ", b"\n"), ("Ã©", "é".as_bytes()), ("東京", "東京".as_bytes())]
        {
            let mut out = b"-".to_vec();
            from_byte_alphabet(token, &mut out);
            assert_eq!(out[1..], *want, "{token}");
        }
    }
}
