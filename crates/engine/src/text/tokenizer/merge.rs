//! Byte-pair merging: join neighbours, the pair of smallest priority first and of equal ones the leftmost, until no pair
//! joins. O(n log n) in the length of a word, so that a long one without a split point cannot hold up a request.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

/// The id of a symbol that is no token.
pub(super) const NO_TOKEN: u32 = u32::MAX;
const NONE: usize = usize::MAX;

/// Words of at most so many symbols are merged by looking at all pairs each time, which is quicker than a queue.
const SHORT: usize = 32;

/// Longer words, in bytes, are not expected again.
const REPEATED: usize = 64;

/// A part of a word: `len` bytes at `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) start: u32,
    pub(super) len: u32,
    /// Its token, or [`NO_TOKEN`].
    pub(super) id: u32,
}

/// Which neighbours join: the priority (smaller first) and the token that they make.
pub(super) trait Pairs {
    fn join(&self, left: &Symbol, right: &Symbol) -> Option<(u32, u32)>;
}

/// A pair that joins, in order of application.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    priority: u32,
    left: usize,
    right: usize,
    /// Bytes of both when the candidate was made; if either has grown since, it is stale.
    len: u32,
    id: u32,
}

/// One word at a time; keeps its memory between words.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    /// For a short word: what each symbol and the next make.
    joins: Vec<Option<(u32, u32)>>,
    /// For a long word: where each symbol's neighbours are.
    links: Vec<(usize, usize)>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Appends the word's next symbol.
    pub(super) fn push(&mut self, start: usize, len: usize, id: u32) {
        self.symbols.push(Symbol { start: start as u32, len: len as u32, id });
    }

    /// Merges the word and hands its symbols to `each` in order; empties the merger.
    pub(super) fn run(&mut self, pairs: &impl Pairs, each: impl FnMut(&Symbol)) {
        if self.symbols.len() <= SHORT {
            self.merge_short(pairs);
        } else {
            self.merge_long(pairs);
        }
        self.symbols.iter().for_each(each);
        self.symbols.clear();
    }

    fn merge_short(&mut self, pairs: &impl Pairs) {
        let Merger { symbols, joins, .. } = self;
        joins.clear();
        joins.extend(symbols.windows(2).map(|pair| pairs.join(&pair[0], &pair[1])));
        loop {
            let first =
                |(at, join): (usize, &Option<(u32, u32)>)| join.map(|(priority, id)| (priority, at, id));
            let Some((_, at, id)) = joins.iter().enumerate().filter_map(first).min() else { break };
            symbols[at].len += symbols[at + 1].len;
            symbols[at].id = id;
            symbols.remove(at + 1);
            joins.remove(at);
            if let Some(join) = joins.get_mut(at) {
                *join = pairs.join(&symbols[at], &symbols[at + 1]);
            }
            if at > 0 {
                joins[at - 1] = pairs.join(&symbols[at - 1], &symbols[at]);
            }
        }
    }

    fn merge_long(&mut self, pairs: &impl Pairs) {
        let count = self.symbols.len();
        self.links.clear();
        self.links
            .extend((0..count).map(|at| (at.wrapping_sub(1), if at + 1 < count { at + 1 } else { NONE })));
        for right in 1..count {
            self.consider(right - 1, right, pairs);
        }
        while let Some(Reverse(Candidate { left, right, len, id, .. })) = self.queue.pop() {
            // A symbol that was joined to its left neighbour is left with no bytes.
            let (l, r) = (self.symbols[left], self.symbols[right]);
            if l.len == 0 || self.links[left].1 != right || l.len + r.len != len {
                continue;
            }
            (self.symbols[left].len, self.symbols[left].id) = (len, id);
            self.symbols[right].len = 0;
            let (before, after) = (self.links[left].0, self.links[right].1);
            self.links[left].1 = after;
            if after != NONE {
                self.links[after].0 = left;
                self.consider(left, after, pairs);
            }
            if before != NONE {
                self.consider(before, left, pairs);
            }
        }
        self.symbols.retain(|symbol| symbol.len > 0);
    }

    fn consider(&mut self, left: usize, right: usize, pairs: &impl Pairs) {
        let (l, r) = (&self.symbols[left], &self.symbols[right]);
        if let Some((priority, id)) = pairs.join(l, r) {
            self.queue.push(Reverse(Candidate { priority, left, right, len: l.len + r.len, id }));
        }
    }
}

/// The words of one text that were encoded already, and where their ids are: most words of a text are repeats.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    seen: HashMap<Box<str>, Range<usize>>,
}

impl Repeats {
    /// Appends the ids of `word`: a copy of those that are in `ids`, or what `encode` appends. `ids` is always the same
    /// list.
    pub(super) fn encode(&mut self, word: &str, ids: &mut Vec<u32>, encode: impl FnOnce(&mut Vec<u32>)) {
        match self.seen.get(word) {
            Some(range) => ids.extend_from_within(range.clone()),
            None => {
                let start = ids.len();
                encode(ids);
                if word.len() <= REPEATED {
                    self.seen.insert(word.into(), start..ids.len());
                }
            }
        }
    }
}

/// What encoding one text needs besides the vocabulary.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) merger: Merger,
    pub(super) repeats: Repeats,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins by a hash of both ids: most pairs do, many with equal priority.
    struct Scrambled;

    impl Pairs for Scrambled {
        fn join(&self, left: &Symbol, right: &Symbol) -> Option<(u32, u32)> {
            let id = (left.id.wrapping_mul(31) ^ right.id).wrapping_mul(2_654_435_761) >> 20;
            (!id.is_multiple_of(3)).then_some((id % 11, id))
        }
    }

    #[test]
    fn short_and_long_words_merge_alike() {
        for seed in 0..500_u32 {
            let fill = |merger: &mut Merger| {
                for at in 0..seed % 90 {
                    merger.push(at as usize, 1, (seed.wrapping_mul(97) ^ at).wrapping_mul(40_503) >> 7 & 7);
                }
            };
            let (mut short, mut long) = (Merger::default(), Merger::default());
            fill(&mut short);
            fill(&mut long);
            short.merge_short(&Scrambled);
            long.merge_long(&Scrambled);
            assert_eq!(short.symbols, long.symbols, "seed {seed}");
        }
    }
}
