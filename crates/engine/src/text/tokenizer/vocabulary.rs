//! Tokens by id and by bytes.

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, produced by the tokenizer's model.
    Text,
    /// A control token: never text, and never made from what a user writes.
    Special,
    /// Text that is always one token, wherever it stands.
    Added,
    /// One byte of a character that has no token.
    Byte,
}

/// The bytes and the kind of every token, and a hash table from the bytes of text tokens to ids.
#[derive(Debug, Clone, Default)]
pub(super) struct Vocabulary {
    /// All tokens' bytes, one after the other.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    /// Open addressing: a part of the hash, so that most misses end here, and the token; [`EMPTY`] where there is none.
    /// A power of two long.
    slots: Vec<(u32, u32)>,
    /// The longest text token in bytes.
    longest: usize,
}

const EMPTY: u32 = u32::MAX;

impl Vocabulary {
    /// An empty vocabulary with room for `tokens` tokens, all of which can be found by their bytes.
    pub(super) fn with_capacity(tokens: usize) -> Vocabulary {
        Vocabulary {
            bytes: Vec::with_capacity(8 * tokens),
            ends: Vec::with_capacity(tokens),
            kinds: Vec::with_capacity(tokens),
            slots: vec![(0, EMPTY); (2 * tokens).next_power_of_two()],
            longest: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Adds the next token. `write` appends its bytes.
    pub(super) fn push(&mut self, kind: Kind, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.bytes);
        self.ends.push(self.bytes.len() as u32);
        self.kinds.push(kind);
    }

    /// Lets the token be found by its bytes, unless an earlier one with the same bytes is.
    pub(super) fn index(&mut self, id: u32) {
        let hash = hash(self.bytes(id));
        let (slot, found) = self.probe(self.bytes(id), hash);
        if found.is_none() {
            self.longest = self.longest.max(self.bytes(id).len());
            self.slots[slot] = (tag(hash), id);
        }
    }

    /// The bytes that a token stands for; none for an id outside the vocabulary.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let at = id as usize;
        let Some(&end) = self.ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// An id outside the vocabulary counts as special: it has no text.
    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Special)
    }

    /// The indexed token with exactly these bytes.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest { None } else { self.probe(bytes, hash(bytes)).1 }
    }

    /// The slot where `bytes` are or would be, and the token in it.
    fn probe(&self, bytes: &[u8], hash: u64) -> (usize, Option<u32>) {
        let mask = self.slots.len() - 1;
        let mut slot = hash as usize & mask;
        loop {
            match self.slots[slot] {
                (_, EMPTY) => return (slot, None),
                (part, id) if part == tag(hash) && self.bytes(id) == bytes => return (slot, Some(id)),
                _ => slot = (slot + 1) & mask,
            }
        }
    }
}

fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// Multiply and fold, eight bytes at a time.
fn hash(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64;
    let mut mix = |word: u64| {
        let product = u128::from(hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        hash = (product >> 64) as u64 ^ product as u64;
    };
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        mix(u64::from_le_bytes(*word));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(u64::from_le_bytes(last));
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_by_their_bytes() {
        let words: Vec<String> = (0..5000).map(|i| "ab".repeat(i % 9) + &i.to_string()).collect();
        let mut vocabulary = Vocabulary::with_capacity(words.len() + 1);
        for word in &words {
            vocabulary.push(Kind::Text, |out| out.extend(word.bytes()));
        }
        vocabulary.push(Kind::Special, |out| out.extend(b"<s>"));
        for id in 0..5000 {
            vocabulary.index(id);
        }
        for (id, word) in words.iter().enumerate() {
            assert_eq!(vocabulary.find(word.as_bytes()), Some(id as u32));
            assert_eq!(vocabulary.bytes(id as u32), word.as_bytes());
        }
        assert_eq!(vocabulary.find(b"<s>"), None);
        assert_eq!(vocabulary.find(&[b'a'; 100]), None);
        assert_eq!((vocabulary.bytes(5000), vocabulary.kind(5000)), (&b"<s>"[..], Kind::Special));
        assert_eq!((vocabulary.bytes(9999), vocabulary.kind(9999)), (&b""[..], Kind::Special));
    }
}
