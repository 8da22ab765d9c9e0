//! WordPiece (BERT and its heirs): text is put in a plain form, cut at white space, punctuation and Chinese characters,
//! and each word is taken apart from the left, the longest piece first.
//!
//! A piece that begins a word is stored with a space before it, as GGUF files write it (`▁hello`), and one that goes on
//! without (`ing`, elsewhere written `##ing`). So the pieces joined are the text again, in its plain form.

use super::classes::{Classes, NONSPACING, OTHER, PUNCTUATION};
use super::merge::Scratch;
use super::vocabulary::Vocabulary;

/// Words of more characters are unknown as a whole, as in the reference library.
const LONGEST_WORD: usize = 100;

/// What a WordPiece vocabulary needs besides its pieces.
#[derive(Debug)]
pub(super) struct WordPieces {
    /// The token of a word that cannot be put together from pieces.
    unknown: Option<u32>,
}

impl WordPieces {
    /// `unknown` stands for a word that cannot be put together from pieces; without it such a word is left out.
    pub(super) fn new(unknown: Option<u32>) -> WordPieces {
        WordPieces { unknown }
    }

    /// Appends the ids of `text`, which holds no added tokens.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) {
        let mut each = |word: &str| {
            scratch.repeats.encode(word, ids, |ids| self.take_apart(vocabulary, word, ids));
        };
        // The word so far, after the space that marks its beginning.
        let mut word = String::from(" ");
        let mut end = |word: &mut String| {
            if word.len() > 1 {
                each(word);
                word.truncate(1);
            }
        };
        let classes = Classes::get();
        for_each_plain(text, |c| {
            if c.is_whitespace() {
                end(&mut word);
            } else if c.is_ascii_punctuation() || classes.is(c, PUNCTUATION) || is_chinese(c) {
                end(&mut word);
                word.push(c);
                end(&mut word);
            } else {
                word.push(c);
            }
        });
        end(&mut word);
    }

    /// Appends the pieces of `word`, which starts with the space that marks its beginning.
    fn take_apart(&self, vocabulary: &Vocabulary, word: &str, ids: &mut Vec<u32>) {
        let first = ids.len();
        let mut rest = word;
        if word.chars().nth(LONGEST_WORD + 1).is_none() {
            while !rest.is_empty() {
                let ends = rest.char_indices().rev().map(|(at, c)| at + c.len_utf8());
                // The space is no piece of its own.
                let shortest = if rest.len() == word.len() { 2 } else { 1 };
                let found = ends
                    .take_while(|&end| end >= shortest)
                    .find_map(|end| Some((vocabulary.find(&rest.as_bytes()[..end])?, end)));
                let Some((id, end)) = found else { break };
                ids.push(id);
                rest = &rest[end..];
            }
        }
        if !rest.is_empty() {
            ids.truncate(first);
            ids.extend(self.unknown);
        }
    }
}

/// Hands the characters of `text` in their plain form to `each`: decomposed, lower case, without accents and control
/// characters.
fn for_each_plain(text: &str, mut each: impl FnMut(char)) {
    // Characters that the plain form keeps, but for the case of ASCII, and that take no part in any other's.
    let is_inert = |c| c < '\u{80}' || matches!(c, '\u{4E00}'..='\u{9FFF}' | '\u{1F300}'..='\u{1FAFF}');
    let classes = Classes::get();
    let mut others = String::new();
    let flush = |others: &mut String, each: &mut dyn FnMut(char)| {
        if !others.is_empty() {
            let mut decomposed = tokenizers::NormalizedString::from(others.as_str());
            decomposed.nfd();
            let bare = decomposed.get().chars().filter(|&c| !classes.is(c, NONSPACING));
            bare.flat_map(char::to_lowercase).for_each(each);
            others.clear();
        }
    };
    for c in text.chars() {
        match c {
            '\t' | '\n' | '\r' => {
                flush(&mut others, &mut each);
                each(' ');
            }
            '\0' | char::REPLACEMENT_CHARACTER => {}
            c if classes.is(c, OTHER) => {}
            c if is_inert(c) => {
                flush(&mut others, &mut each);
                each(c.to_ascii_lowercase());
            }
            c => others.push(c),
        }
    }
    flush(&mut others, &mut each);
}

/// Characters of scripts that are written without spaces, by the ranges of the original BERT.
fn is_chinese(c: char) -> bool {
    matches!(c, '\u{4E00}'..='\u{9FFF}' | '\u{3400}'..='\u{4DBF}' | '\u{20000}'..='\u{2A6DF}'
        | '\u{2A700}'..='\u{2B73F}' | '\u{2B740}'..='\u{2B81F}' | '\u{2B920}'..='\u{2CEAF}'
        | '\u{F900}'..='\u{FAFF}' | '\u{2F800}'..='\u{2FA1F}')
}
