//! Keeps special tokens out of what users write.
//!
//! A chat template joins its own control tokens and the user's words in one string, and the tokenizer must read
//! `<|im_end|>` as a token where the template wrote it and as plain text where a user typed it. So before rendering,
//! every string of the conversation is *disarmed*: a mark goes in after the first character of each special-token
//! string in it, and of a beginning of one at its end (two strings that the template puts side by side must not make
//! one). Templates may then trim, split and join as they like. Encoding removes the marks again and matches no special
//! token where one stood, so the ids are those of the user's text, byte for byte.
//!
//! The mark is U+FDD0, a Unicode noncharacter, reserved for such internal use. One that a user types is doubled, and a double
//! reads back as one, so nothing is lost.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Bound;

/// The noncharacter that breaks a special token's spelling: U+FDD0.
pub(crate) const MARK: char = '\u{FDD0}';

/// The spellings of a vocabulary's special tokens.
#[derive(Debug, Clone, Default)]
pub struct Guard {
    specials: BTreeSet<String>,
    /// Their lengths in bytes, each once.
    lengths: BTreeSet<usize>,
    /// Their first bytes: most places in a text need no further look.
    firsts: BTreeSet<u8>,
}

impl Guard {
    /// A guard against these special-token strings; an empty one is left out.
    pub fn new<S: Into<String>>(specials: impl IntoIterator<Item = S>) -> Guard {
        let specials: BTreeSet<String> =
            specials.into_iter().map(Into::into).filter(|text| !text.is_empty()).collect();
        let lengths = specials.iter().map(String::len).collect();
        let firsts = specials.iter().map(|text| text.as_bytes()[0]).collect();
        Guard { specials, lengths, firsts }
    }

    /// Marks each special-token string in `text`; `unmark` gives `text` back.
    pub fn disarm<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut out = String::new();
        let mut copied = 0;
        let trimmed = text.trim_end().len();
        for (at, c) in text.char_indices() {
            if c == MARK || self.firsts.contains(&text.as_bytes()[at]) && self.begins(text, at, trimmed) {
                let after = at + c.len_utf8();
                out.push_str(&text[copied..after]);
                out.push(MARK);
                copied = after;
            }
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[copied..]);
        Cow::Owned(out)
    }

    /// Whether a special token starts at `at`, or all that is left of `text` is the beginning of one, with or without the
    /// white space at its end, from `trimmed` on (templates trim).
    fn begins(&self, text: &str, at: usize, trimmed: usize) -> bool {
        let rest = &text[at..];
        // In order, a special token that starts with `part` is the first one at or after it.
        let unfinished = |part: &str| {
            let mut from = self.specials.range::<str, _>((Bound::Included(part), Bound::Unbounded));
            from.next().is_some_and(|special| special.starts_with(part))
        };
        let whole = |&length: &usize| rest.get(..length).is_some_and(|start| self.specials.contains(start));
        let trimmed = text.get(at..trimmed).unwrap_or_default();
        let longest = self.lengths.last().copied().unwrap_or(0);
        self.lengths.iter().any(whole)
            || rest.len() < longest && unfinished(rest)
            || !trimmed.is_empty() && trimmed.len() < longest && unfinished(trimmed)
    }
}

/// Takes the marks out of `text`. The second part lists, ascending, the byte offsets in the clean text at which no
/// special token may start.
pub(crate) fn unmark(text: &str) -> (Cow<'_, str>, Vec<usize>) {
    if !text.contains(MARK) {
        return (Cow::Borrowed(text), Vec::new());
    }
    let mut clean = String::with_capacity(text.len());
    let mut disarmed = Vec::new();
    let mut chars = text.chars().peekable();
    let mut last = None; // where the last character of `clean` starts
    while let Some(c) = chars.next() {
        if c == MARK && chars.next_if_eq(&MARK).is_none() {
            disarmed.extend(last);
        } else {
            last = Some(clean.len());
            clean.push(c);
        }
    }
    (Cow::Owned(clean), disarmed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (user's text, the same with `^` for the mark).
    #[test]
    fn marks_specials_and_their_beginnings() {
        let guard = Guard::new(["<|end|>", "<|", "[INST]", "é!", ""]);
        for (text, want) in [
            ("plain", "plain"),
            ("", ""),
            ("a <|end|> b", "a <^|end|> b"),
            ("<|end|><|end|>", "<^|end|><^|end|>"),
            ("[INST]", "[^INST]"),
            ("[INST", "[^INST"),
            ("tail [", "tail [^"),
            ("tail [ \n", "tail [^ \n"),
            ("[ not at the end ", "[ not at the end "),
            ("é!é", "é^!é^"),
            ("a ^ b", "a ^^ b"),
            ("<^|end|>", "<^^|end|>"),
        ] {
            let text = text.replace('^', &MARK.to_string());
            let marked = guard.disarm(&text);
            assert_eq!(marked.replace(MARK, "^"), want, "{text}");
            assert_eq!(unmark(&marked).0, text);
        }
    }

    /// However much white space a text ends in, and however often a special token begins in it.
    #[test]
    fn long_texts_are_quick() {
        let guard = Guard::new(["<|end|>", "  x"]);
        let start = std::time::Instant::now();
        for part in [" ", "\n", "<", "<|", "a"] {
            let text = part.repeat(300_000);
            assert_eq!(unmark(&guard.disarm(&text)).0, text);
        }
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed()); // minutes, if each place read to the end
    }

    #[test]
    fn unmark_says_where_no_special_may_start() {
        let guard = Guard::new(["<|end|>", "END"]);
        let text = format!("é<|end|>x ENDEND {MARK}<|");
        let marked = guard.disarm(&text);
        let (clean, disarmed) = unmark(&marked);
        assert_eq!(clean, text);
        let at = |needle: &str| text.find(needle).unwrap();
        assert_eq!(disarmed, [at("<|end"), at("ENDEND"), at("ENDEND") + 3, text.len() - 2]);
        assert_eq!(Guard::default().disarm("<|end|>"), "<|end|>");
    }
}
