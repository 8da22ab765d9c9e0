//! Pre-tokenizers: how each family cuts text into words before merging.
//!
//! A pre-tokenizer is a list of stages; each cuts every part that the one before it left. The two patterns that most
//! families use are scanners written out here, everything else is a regular expression without look-around, which runs
//! in linear time.

use tokenizers::utils::SysRegex;

use super::classes::{Classes, LETTER, MARK, NUMBER, SPACE};

/// One cut of a text.
pub(super) enum Stage {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    Llama3 {
        /// Longest run of digits in one word.
        digits: usize,
        /// Whether `\p{M}` counts as letter: `[\p{L}\p{M}]+` and `[^\s\p{L}\p{M}\p{N}]+`.
        marks: bool,
    },
    /// Cuts out every match.
    Pattern {
        regex: SysRegex,
        /// The pattern ends in `|\s+` where the family has `|\s+(?!\S)|\s+`: of white space without a line break that
        /// something follows, the last character is left to what follows.
        leaves_space: bool,
    },
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Stage::Gpt2 => "Gpt2",
            Stage::Llama3 { .. } => "Llama3",
            Stage::Pattern { .. } => "Pattern",
        })
    }
}

/// What a family's name in `tokenizer.ggml.pre` stands for.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) stages: Vec<Stage>,
    /// A word that is a token as a whole is not merged.
    pub(super) ignore_merges: bool,
    /// Text is put in Unicode's composed form first.
    pub(super) nfc: bool,
    /// The begin token is added where the file does not say.
    pub(super) adds_bos: bool,
}

impl Stage {
    /// The stage that cuts out every match of `pattern`, a regular expression of a `tokenizer.json`. The patterns of the
    /// scanners are known by their text. `None` for one that is no regular expression.
    pub(super) fn of_pattern(pattern: &str) -> Option<Stage> {
        let llama3 = |digits: &str| LLAMA3.replace("DIGITS", digits);
        let scanners = [
            (GPT2.to_owned(), Stage::Gpt2),
            (llama3(r"\p{N}{1,3}"), Stage::Llama3 { digits: 3, marks: false }),
            (llama3(r"\p{N}"), Stage::Llama3 { digits: 1, marks: false }),
        ];
        match scanners.into_iter().find(|(known, _)| known == pattern) {
            Some((_, scanner)) => Some(scanner),
            None => SysRegex::new(pattern).ok().map(|regex| Stage::Pattern { regex, leaves_space: false }),
        }
    }
}

/// GPT-2's pattern.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The pattern of Llama 3 and Qwen 2, which differ in their numbers.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Cased letters, as the maker of the DeepSeek tokenizers lists them. By number, because several are changed by editors
/// that normalize.
const DEEPSEEK_LETTERS: &str = "[\
    A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\
    \u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\
    \u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\
    \u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\
    \u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\
    \u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\
    \u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\
    \u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\
    \u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\
    \u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\
    \u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\
    \u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\
    \u{118A0}-\u{118DF}\u{1E900}-\u{1E943}\
    ]";
const CASED_WORD: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTION|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTION";
const CASED_REST: &str = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+";

impl Family {
    /// Every name that [`Family::named`] knows, and it knows no other.
    #[rustfmt::skip]
    pub(super) const NAMES: [&str; 45] = [
        "llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "midm-2.0", "dbrx", "smaug-bpe",
        "chatglm-bpe", "glm4", "qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open",
        "grok-2", "qwen35", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "jina-es",
        "jina-de", "gigachat", "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone",
        "minerva-7b", "falcon", "default", "deepseek-llm", "deepseek-coder", "deepseek-v3",
        "hunyuan-dense", "gpt-4o", "llama4", "minimax-m2", "tekken",
    ];

    /// The family called `name`; `None` for a name that is not known.
    pub(super) fn named(name: &str) -> Option<Family> {
        let name = Self::NAMES.into_iter().find(|known| *known == name)?;
        let pattern =
            |text: &str| SysRegex::new(text).ok().map(|regex| Stage::Pattern { regex, leaves_space: false });
        let spaced =
            |text: &str| SysRegex::new(text).ok().map(|regex| Stage::Pattern { regex, leaves_space: true });
        let patterns = |texts: &[&str]| texts.iter().map(|text| pattern(text)).collect::<Option<Vec<_>>>();
        let cased = |contraction: &str, numbers: &str| {
            let words = CASED_WORD.replace("CONTRACTION", contraction);
            spaced(&format!("{words}|{numbers}{CASED_REST}"))
        };
        let llama3 = |digits| Stage::Llama3 { digits, marks: false };
        let mut family = Family { stages: Vec::new(), ignore_merges: false, nfc: false, adds_bos: false };
        family.stages = match name {
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "lfm2" | "midm-2.0" => {
                (family.ignore_merges, family.adds_bos) = (true, true);
                vec![llama3(3)]
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" => vec![llama3(3)],
            "qwen2" | "stablelm2" | "deepseek-r1-qwen" => {
                family.nfc = true;
                vec![llama3(1)]
            }
            "hunyuan" | "megrez" | "solar-open" | "grok-2" => vec![llama3(1)],
            "qwen35" => {
                family.nfc = true;
                vec![Stage::Llama3 { digits: 1, marks: true }]
            }
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "roberta-bpe" | "jina-es"
            | "jina-de" | "gigachat" => vec![Stage::Gpt2],
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" => {
                vec![pattern(r"\p{N}")?, Stage::Gpt2]
            }
            "falcon" => {
                vec![pattern(r"[\p{P}\$\+<=>\^~\|`]+")?, Stage::Gpt2, pattern("[0-9][0-9][0-9]")?]
            }
            "default" => {
                vec![
                    pattern(r"[\p{P}\$\+<=>\^~\|]+")?,
                    Stage::Gpt2,
                    pattern(r"\p{N}+")?,
                    pattern("[0-9][0-9][0-9]")?,
                ]
            }
            "deepseek-llm" => patterns(&[
                r"[\r\n]",
                &format!(r"\s?{DEEPSEEK_LETTERS}+"),
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            ])?,
            "deepseek-coder" => {
                patterns(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"])?
            }
            "deepseek-v3" | "hunyuan-dense" => vec![
                pattern(r"\p{N}{1,3}")?,
                pattern("[一-龥぀-ゟ゠-ヿ]+")?,
                spaced(
                    r#"[!"\#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"#,
                )?,
            ],
            "gpt-4o" | "llama4" | "minimax-m2" => {
                vec![cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")?]
            }
            "tekken" => {
                (family.ignore_merges, family.adds_bos) = (true, true);
                vec![cased("", r"\p{N}")?]
            }
            _ => return None,
        };
        Some(family)
    }

    /// Hands each word of `text` to `each`, in order.
    pub(super) fn split<'t>(&self, text: &'t str, each: &mut impl FnMut(&'t str)) {
        cut(&self.stages, text, each);
    }
}

/// Cuts `text` by the first stage and each part by the others.
fn cut<'t>(stages: &[Stage], text: &'t str, each: &mut impl FnMut(&'t str)) {
    let Some((stage, rest)) = stages.split_first() else { return each(text) };
    let mut part = |from: usize, to: usize| {
        if from < to {
            cut(rest, &text[from..to], each);
        }
    };
    match stage {
        Stage::Gpt2 => scan(text, part, |scanner, at| scanner.gpt2(at)),
        Stage::Llama3 { digits, marks } => {
            scan(text, part, |scanner, at| scanner.llama3(at, *digits, *marks))
        }
        Stage::Pattern { regex, leaves_space } => {
            let (mut done, mut from) = (0, 0);
            while from < text.len() {
                let mut next = text.len();
                for (start, end) in regex.find_iter(&text[from..]) {
                    let (start, mut end) = (from + start, from + end);
                    part(done, start);
                    let leaves = *leaves_space && end < text.len();
                    if let Some(shorter) = leaves.then(|| without_last_space(&text[start..end])).flatten() {
                        end = start + shorter;
                        next = end;
                    }
                    part(start, end);
                    done = end;
                    if next < text.len() {
                        break; // the match was cut short: go on from its end
                    }
                }
                from = next;
            }
            part(done, text.len());
        }
    }
}

/// The length of white space of two characters or more, without line breaks, less its last character.
fn without_last_space(matched: &str) -> Option<usize> {
    let only_spaces = matched.chars().all(|c| c.is_whitespace() && c != '\r' && c != '\n');
    let (last, _) = matched.char_indices().next_back()?;
    (only_spaces && last > 0).then_some(last)
}

/// Cuts `text` into words, each as long as `word` says for its start.
fn scan(text: &str, mut part: impl FnMut(usize, usize), word: impl Fn(&Scanner<'_>, usize) -> usize) {
    let scanner = Scanner { text, classes: Classes::get() };
    let mut at = 0;
    while at < text.len() {
        let end = word(&scanner, at);
        part(at, end);
        at = end;
    }
}

/// Finds ends of words; offsets are in bytes.
struct Scanner<'t> {
    text: &'t str,
    classes: Classes,
}

impl Scanner<'_> {
    fn char_at(&self, at: usize) -> Option<char> {
        let &byte = self.text.as_bytes().get(at)?;
        if byte.is_ascii() { Some(char::from(byte)) } else { self.text[at..].chars().next() }
    }

    /// The end of the run of characters from `at` on for which `holds`.
    fn run(&self, mut at: usize, holds: impl Fn(char) -> bool) -> usize {
        while let Some(c) = self.char_at(at)
            && holds(c)
        {
            at += c.len_utf8();
        }
        at
    }

    fn is(&self, c: Option<char>, flags: u8) -> bool {
        c.is_some_and(|c| self.classes.is(c, flags))
    }

    /// The end of a contraction that starts at `at`, which holds an apostrophe.
    fn contraction(&self, at: usize, any_case: bool) -> Option<usize> {
        let mut letters = self.text[at + 1..].chars().map(|c| match c {
            // Without regard to case, the long s is an s.
            'ſ' if any_case => 's',
            c if any_case => c.to_ascii_lowercase(),
            c => c,
        });
        let length = match (letters.next()?, letters.next()) {
            ('s' | 't' | 'm' | 'd', _) => self.char_at(at + 1)?.len_utf8(),
            ('r', Some('e')) | ('v', Some('e')) | ('l', Some('l')) => 2,
            _ => return None,
        };
        Some(at + 1 + length)
    }

    /// `\s+(?!\S)|\s+` for white space from `at` to `end`.
    fn trailing_space(&self, at: usize, end: usize) -> usize {
        match self.text[at..end].char_indices().next_back() {
            Some((last, _)) if end < self.text.len() && last > 0 => at + last,
            _ => end,
        }
    }

    fn gpt2(&self, at: usize) -> usize {
        let Some(c) = self.char_at(at) else { return at };
        if c == '\''
            && let Some(end) = self.contraction(at, false)
        {
            return end;
        }
        let start = at + usize::from(c == ' ');
        let first = self.char_at(start);
        for class in [LETTER, NUMBER] {
            if self.is(first, class) {
                return self.run(start, |c| self.classes.is(c, class));
            }
        }
        if first.is_some() && !self.is(first, SPACE) {
            return self.run(start, |c| !self.classes.is(c, SPACE | LETTER | NUMBER));
        }
        self.trailing_space(at, self.run(at, |c| self.classes.is(c, SPACE)))
    }

    fn llama3(&self, at: usize, digits: usize, marks: bool) -> usize {
        let Some(c) = self.char_at(at) else { return at };
        let letter = if marks { LETTER | MARK } else { LETTER };
        if c == '\''
            && let Some(end) = self.contraction(at, true)
        {
            return end;
        }
        let is_break = |c: char| c == '\r' || c == '\n';
        let after = at + c.len_utf8();
        let leads =
            !is_break(c) && !self.classes.is(c, LETTER | NUMBER) && self.is(self.char_at(after), letter);
        if leads || self.classes.is(c, letter) {
            return self.run(after, |c| self.classes.is(c, letter));
        }
        if self.classes.is(c, NUMBER) {
            let numbers = self.text[at..].chars().take(digits).take_while(|&c| self.classes.is(c, NUMBER));
            return at + numbers.map(char::len_utf8).sum::<usize>();
        }
        let start = at + usize::from(c == ' ');
        let is_other = |c: char| !self.classes.is(c, SPACE | letter | NUMBER);
        if self.char_at(start).is_some_and(is_other) {
            return self.run(self.run(start, is_other), is_break);
        }
        let end = self.run(at, |c| self.classes.is(c, SPACE));
        match self.text[at..end].rfind(is_break) {
            Some(last) => at + last + 1,
            None => self.trailing_space(at, end),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(family: &Family, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        family.split(text, &mut |word| words.push(word));
        words
    }

    /// The reference: each pattern with its look-ahead, by a backtracking engine, cutting what the one before left.
    fn reference<'t>(patterns: &[SysRegex], text: &'t str) -> Vec<&'t str> {
        let mut parts = vec![text];
        for regex in patterns {
            let cut = |part: &'t str| {
                let mut cut = Vec::new();
                let mut done = 0;
                for (start, end) in regex.find_iter(part) {
                    cut.extend([&part[done..start], &part[start..end]]);
                    done = end;
                }
                cut.push(&part[done..]);
                cut.into_iter().filter(|part| !part.is_empty())
            };
            parts = parts.into_iter().flat_map(cut).collect();
        }
        parts
    }

    const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const DEEPSEEK3: &str = r#"[!"\#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"#;

    /// ggml-org/llama.cpp#6809, kekzl/imp#660: random strings of characters that the patterns tell apart, and strings on
    /// which families were confused before.
    #[test]
    fn llama_cpp_6809_words_are_those_of_the_patterns() {
        let alphabet: Vec<char> =
            "aabcdDeEfF''sSſtTlLmMvVrR    \t\n\r\u{a0}\u{3000}\u{85}0123٣²Ⅷ.,!?<|>/=éÉ\u{301}東京ぁेक्🙂🚀_-\"Lu\u{1c5}ªʰßK"
                .chars()
                .collect();
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) as usize % below
        };
        let mut texts: Vec<String> =
            (0..4000).map(|i| (0..i % 30).map(|_| alphabet[random(alphabet.len())]).collect()).collect();
        texts.extend(
            [
                "\n\n",
                "\n\na",
                "\n\n\n\n",
                "=>",
                "f(y){\n",
                "90210",
                "it's IT'S 'LL'",
                "a   b",
                "\t\t\tx",
                "\r\n\r\n",
                "3.14",
                "e\u{301}",
            ]
            .map(str::to_owned),
        );
        for (name, patterns) in [
            ("gpt-2", &[GPT2][..]),
            ("smollm", &[r"\p{N}", GPT2]),
            ("falcon", &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            ("llama-bpe", &[&LLAMA3.replace("DIGITS", r"\p{N}{1,3}")]),
            ("qwen2", &[&LLAMA3.replace("DIGITS", r"\p{N}")]),
            ("qwen35", &[QWEN35]),
            ("gpt-4o", &[O200K]),
            ("tekken", &[&O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")]),
            ("deepseek-v3", &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3]),
        ] {
            let family = Family::named(name).unwrap();
            let patterns: Vec<SysRegex> = patterns.iter().map(|text| SysRegex::new(text).unwrap()).collect();
            for text in &texts {
                assert_eq!(words(&family, text), reference(&patterns, text), "{name} {text:?}");
            }
        }
    }

    #[test]
    fn every_family_compiles() {
        for name in Family::NAMES {
            let text = "Hello, wörld 123\n\n 東京 !?";
            assert_eq!(words(&Family::named(name).unwrap(), text).concat(), text, "{name}");
        }
        assert!(Family::named("nobody").is_none());
    }
}
