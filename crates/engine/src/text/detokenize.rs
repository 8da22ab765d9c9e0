//! Ids back to text, as they come: whole characters only, and nothing that may turn out to be part of a stop string.

use super::tokenizer::Tokenizer;

/// Turns generated ids into text, one at a time. The pieces joined are the text of all ids at once, wherever characters
/// are split between tokens.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// The beginning of a character whose end has not come: at most three bytes.
    pending: Vec<u8>,
    /// The next text byte is dropped if it is a space: encoding put it there.
    strip_space: bool,
    shows_specials: bool,
}

impl Detokenizer {
    /// For a text on its own: special tokens are hidden, and a vocabulary that puts a space before every text loses it
    /// again.
    pub fn new(tokenizer: &Tokenizer) -> Detokenizer {
        Detokenizer { pending: Vec::new(), strip_space: tokenizer.strips_space(), shows_specials: false }
    }

    /// Special tokens appear by their spelling.
    pub fn showing_specials(mut self) -> Detokenizer {
        self.shows_specials = true;
        self
    }

    /// For a text that goes on from another, whose space at the start is its own.
    pub fn continuing(mut self) -> Detokenizer {
        self.strip_space = false;
        self
    }

    /// The text that is certain once `id` has come; perhaps none. Bytes that cannot be UTF-8 become U+FFFD by the WHATWG
    /// rules: one for each longest beginning of a character.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let mut bytes = tokenizer.token_bytes(id);
        if tokenizer.is_special(id) {
            if !self.shows_specials {
                return String::new();
            }
        } else if !bytes.is_empty() {
            if self.strip_space {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            self.strip_space = false;
        }
        self.pending.extend_from_slice(bytes);
        self.take_whole()
    }

    /// What is left when no more ids come: an unfinished character is one U+FFFD.
    pub fn finish(&mut self) -> String {
        match std::mem::take(&mut self.pending).is_empty() {
            true => String::new(),
            false => char::REPLACEMENT_CHARACTER.to_string(),
        }
    }

    fn take_whole(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = &self.pending[..];
        loop {
            match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    let Some(length) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[length..];
                }
            }
        }
        self.pending = rest.to_vec();
        text
    }
}

/// Finds stop strings in a text that comes in pieces, and holds back what may be the beginning of one.
///
/// The text ends before the stop string that is complete first; of several that end at the same place, before the
/// longest. So the result does not depend on how the text is cut into pieces.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher for these strings. An empty one would stop at once and is left out; callers that want to refuse it do so
    /// themselves.
    pub fn new(stops: Vec<String>) -> StopMatcher {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        StopMatcher { stops, held: String::new(), stopped: false }
    }

    /// The text that is certain now, and whether a stop string was found; after that, no text comes any more.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        if self.stopped {
            return (String::new(), true);
        }
        if self.stops.is_empty() {
            return (text.to_owned(), false);
        }
        let mut certain = 0; // bytes of `held` that no stop string can begin in
        for c in text.chars() {
            self.held.push(c);
            let held = &self.held[certain..];
            if let Some(longest) =
                self.stops.iter().filter(|stop| held.ends_with(*stop)).map(String::len).max()
            {
                self.held.truncate(self.held.len() - longest);
                self.stopped = true;
                return (std::mem::take(&mut self.held), true);
            }
            let may_begin = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&held[*at..]));
            let begin = held.char_indices().map(|(at, _)| at).find(may_begin);
            certain += begin.unwrap_or(held.len());
        }
        let rest = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::testing;

    /// antonellof/ferrox#124, kekzl/imp#1310, huggingface/tokenizers#1141, drumih/turbo-fieldfare#118: (tokens, pieces they
    /// come out in, then what `finish` gives after `+`). Tokens are bytes; `<s>` is special.
    #[test]
    fn tokenizers_1141_characters_come_out_whole() {
        let family = "👩\u{200d}👩";
        for (tokens, want) in [
            (vec![&b"a"[..], b"b"], "a|b|+"),
            (vec![&b"\xf0"[..], b"\x9f", b"\x99", b"\x82"], "|||🙂|+"),
            (vec![&b"\xe6\x9d"[..], b"\xb1a"], "|東a|+"),
            (vec![&b"\xf0\x9f"[..], b"\x99\x82\xc3", b"\xa9"], "|🙂|é|+"),
            (
                vec![&family.as_bytes()[..5], &family.as_bytes()[5..9], &family.as_bytes()[9..]],
                "👩|\u{200d}|👩|+",
            ),
            // Never valid: not waited for.
            (vec![&b"\xff"[..], b"a"], "\u{fffd}|a|+"),
            (vec![&b"\x80"[..], b"\x80"], "\u{fffd}|\u{fffd}|+"),
            // A beginning that does not go on is one replacement, what breaks it is read anew.
            (vec![&b"\xe6\x9d"[..], b"a"], "|\u{fffd}a|+"),
            (vec![&b"\xe6\x9d"[..], b"\xe6\x9d\xb1"], "|\u{fffd}東|+"),
            (vec![&b"\xf0\x80"[..]], "\u{fffd}\u{fffd}|+"),
            (vec![&b"\xed\xa0\x80"[..]], "\u{fffd}\u{fffd}\u{fffd}|+"),
            // Stopped in the middle of a character.
            (vec![&b"x"[..], b"\xf0\x9f"], "x||+\u{fffd}"),
            // A special token between the halves of a character is not seen.
            (vec![&b"\xc3"[..], b"<s>", b"\xa9"], "||é|+"),
            (vec![&b" of"[..], b" a", b"   ", b","], " of| a|   |,|+"),
        ] {
            let (tokenizer, ids) = testing::of_tokens(&tokens, false);
            let mut detokenizer = Detokenizer::new(&tokenizer);
            let mut got: String = ids.iter().map(|&id| detokenizer.push(&tokenizer, id) + "|").collect();
            got += "+";
            got += &detokenizer.finish();
            assert_eq!(got, want, "{tokens:?}");
            // However it is streamed, the text is the lossy reading of all bytes.
            let seen: Vec<&[u8]> = tokens.iter().copied().filter(|&token| token != b"<s>").collect();
            assert_eq!(got.replace(['|', '+'], ""), String::from_utf8_lossy(&seen.concat()));
        }
    }

    /// (tokens, how the detokenizer is set up, text) for a vocabulary that puts a space before every text.
    #[test]
    fn the_space_put_there_is_taken_away_once() {
        let tokens = [&b"<s>"[..], b" of", b" a", b"<s>", b" b"];
        let (tokenizer, ids) = testing::of_tokens(&tokens, true);
        let run = |mut detokenizer: Detokenizer| {
            ids.iter().map(|&id| detokenizer.push(&tokenizer, id)).collect::<String>()
        };
        assert_eq!(run(Detokenizer::new(&tokenizer)), "of a b");
        assert_eq!(run(Detokenizer::new(&tokenizer).continuing()), " of a b");
        assert_eq!(run(Detokenizer::new(&tokenizer).showing_specials()), "<s>of a<s> b");
    }

    /// (stop strings, pieces, text that comes out after each, whether it stopped, what `finish` gives).
    #[test]
    fn stop_strings() {
        for (stops, pieces, want, stopped, rest) in [
            (vec![], vec!["a", "b"], vec!["a", "b"], false, ""),
            (vec![""], vec!["a", "b"], vec!["a", "b"], false, ""),
            (vec!["ed cat"], vec![" r", "ed", " cat", "x"], vec![" r", "", "", ""], true, ""),
            (vec!["ed cat"], vec![" r", "ed", " car", "s"], vec![" r", "", "ed car", "s"], false, ""),
            (vec!["ed cat"], vec![" r", "ed", " ca"], vec![" r", "", ""], false, "ed ca"),
            (vec!["é😀"], vec!["aé", "😀b"], vec!["a", ""], true, ""),
            (vec!["é😀"], vec!["aé", "x"], vec!["a", "éx"], false, ""),
            (vec!["stop", "stopping"], vec!["no stopping"], vec!["no "], true, ""),
            (vec!["stopping", "op"], vec!["no sto", "pping"], vec!["no ", "st"], true, ""),
            (vec!["aab"], vec!["a", "a", "a", "b"], vec!["", "", "a", ""], true, ""),
            (vec!["b", "ab"], vec!["xa", "b"], vec!["x", ""], true, ""),
            (vec!["mid"], vec!["a mid b"], vec!["a "], true, ""),
            (vec!["\n\n"], vec!["a\n", "b\n", "\nc"], vec!["a", "\nb", ""], true, ""),
        ] {
            let stops: Vec<String> = stops.into_iter().map(str::to_owned).collect();
            let mut matcher = StopMatcher::new(stops.clone());
            let got: Vec<(String, bool)> = pieces.iter().map(|piece| matcher.push(piece)).collect();
            assert_eq!(got.iter().map(|(text, _)| text).collect::<Vec<_>>(), want, "{stops:?} {pieces:?}");
            assert_eq!(got.last().unwrap().1, stopped, "{stops:?} {pieces:?}");
            assert_eq!(matcher.finish(), rest, "{stops:?} {pieces:?}");
            // One piece or one character at a time: the same text.
            for whole in [vec![pieces.concat()], pieces.concat().chars().map(String::from).collect()] {
                let mut matcher = StopMatcher::new(stops.clone());
                let mut text: String = whole.iter().map(|piece| matcher.push(piece).0).collect();
                text += &matcher.finish();
                assert_eq!(text, want.concat() + rest, "{stops:?} {pieces:?}");
            }
        }
    }

    #[test]
    fn a_long_piece_is_quick() {
        let mut matcher = StopMatcher::new(vec!["a".repeat(50) + "b"]);
        let (text, stopped) = matcher.push(&"a".repeat(200_000));
        assert_eq!((text.len(), stopped), (200_000 - 50, false));
    }
}
