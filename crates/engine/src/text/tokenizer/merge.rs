//! Byte-pair merging: join neighbours, the pair of smallest priority first and of equal ones the leftmost, until no pair
//! joins. In the length of a word this takes O(n log n) at worst and mostly O(n), so that a long one without a split point
//! cannot hold up a request.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;

/// The id of a symbol that is no token.
pub(super) const NO_TOKEN: u32 = u32::MAX;
const NONE: u32 = u32::MAX;

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

/// A pair that joins: where its left symbol is, how many bytes both have, the token that they make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    left: u32,
    len: u32,
    id: u32,
}

/// Candidates of one priority, the leftmost first. They are found from left to right, nearly always, and so need no
/// sorting.
#[derive(Debug, Default)]
struct Bucket {
    ascending: VecDeque<Candidate>,
    others: BinaryHeap<Reverse<Candidate>>,
}

impl Bucket {
    fn is_empty(&self) -> bool {
        self.ascending.is_empty() && self.others.is_empty()
    }

    fn push(&mut self, candidate: Candidate) {
        match self.ascending.back() {
            Some(last) if last.left >= candidate.left => self.others.push(Reverse(candidate)),
            _ => self.ascending.push_back(candidate),
        }
    }

    fn pop(&mut self) -> Option<Candidate> {
        match (self.ascending.front(), self.others.peek()) {
            (Some(first), Some(Reverse(other))) if other < first => self.others.pop().map(|Reverse(c)| c),
            (Some(_), _) => self.ascending.pop_front(),
            (None, _) => self.others.pop().map(|Reverse(candidate)| candidate),
        }
    }
}

/// Candidates in order of application. A long word has few different priorities, so the queue is one of buckets.
#[derive(Debug, Default)]
struct Queue {
    buckets: Vec<Bucket>,
    /// For each priority of this word, its bucket.
    of_priority: HashMap<u32, u32, Multiplicative>,
    /// Priorities, with their buckets, that are not empty.
    filled: BinaryHeap<Reverse<(u32, u32)>>,
}

impl Queue {
    fn push(&mut self, priority: u32, candidate: Candidate) {
        let next = self.of_priority.len() as u32;
        let at = *self.of_priority.entry(priority).or_insert(next);
        if at as usize == self.buckets.len() {
            self.buckets.push(Bucket::default());
        }
        let bucket = &mut self.buckets[at as usize];
        if bucket.is_empty() {
            self.filled.push(Reverse((priority, at)));
        }
        bucket.push(candidate);
    }

    fn pop(&mut self) -> Option<Candidate> {
        let &Reverse((_, at)) = self.filled.peek()?;
        let bucket = &mut self.buckets[at as usize];
        let candidate = bucket.pop();
        if bucket.is_empty() {
            self.filled.pop();
        }
        candidate
    }

    /// Forgets the priorities of a word whose candidates were all taken.
    fn clear(&mut self) {
        self.of_priority.clear();
    }
}

/// Priorities are small numbers, all different: one multiplication spreads them.
#[derive(Debug, Default, Clone, Copy)]
struct Multiplicative(u64);

impl BuildHasher for Multiplicative {
    type Hasher = Multiplicative;

    fn build_hasher(&self) -> Multiplicative {
        Multiplicative(0)
    }
}

impl Hasher for Multiplicative {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

/// One word at a time; keeps its memory between words.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    /// For a short word: what each symbol and the next make.
    joins: Vec<Option<(u32, u32)>>,
    /// For a long word: where each symbol's neighbours are.
    links: Vec<(u32, u32)>,
    queue: Queue,
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
        let Merger { symbols, links, queue, .. } = self;
        let count = symbols.len() as u32;
        links.clear();
        links.extend((0..count).map(|at| (at.wrapping_sub(1), if at + 1 < count { at + 1 } else { NONE })));
        let consider = |symbols: &[Symbol], left: u32, right: u32, queue: &mut Queue| {
            let (l, r) = (&symbols[left as usize], &symbols[right as usize]);
            if let Some((priority, id)) = pairs.join(l, r) {
                queue.push(priority, Candidate { left, len: l.len + r.len, id });
            }
        };
        (1..count).for_each(|right| consider(symbols, right - 1, right, queue));
        while let Some(Candidate { left, len, id }) = queue.pop() {
            let (before, right) = links[left as usize];
            let l = symbols[left as usize];
            // Symbols only grow, so a pair of another length is not the one that the candidate was made of. A symbol that
            // was joined to its left neighbour is left with no bytes.
            if right == NONE || l.len == 0 || l.len + symbols[right as usize].len != len {
                continue;
            }
            symbols[left as usize] = Symbol { len, id, ..l };
            symbols[right as usize].len = 0;
            let after = links[right as usize].1;
            links[left as usize].1 = after;
            if before != NONE {
                consider(symbols, before, left, queue);
            }
            if after != NONE {
                links[after as usize].0 = left;
                consider(symbols, left, after, queue);
            }
        }
        queue.clear();
        symbols.retain(|symbol| symbol.len > 0);
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
