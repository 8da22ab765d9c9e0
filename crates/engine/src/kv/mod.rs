//! Where keys and values live: pages with reference counts, and the cache that lets sequences share them.
//!
//! Each group of layers ([`KvGroup`]) has pages of its own numbering. What a sequence holds in a group depends on how
//! many tokens are computed and on nothing else: the pages from the first one that its next row sees up to the last one
//! written. So a layer with a window holds a bounded number of pages, however long the sequence is.

mod pages;
mod prefix;

use std::collections::VecDeque;

use ingle_graph::{KvGroup, KvPlan, PAGE};

pub use pages::Pages;
pub use prefix::{Hit, PrefixCache, PrefixKey};

/// Pages of a sequence in one group, one after another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// Number of the first page in its sequence: that of positions from `first * PAGE` on.
    pub first: usize,
    /// Pages in the group's pool.
    pub pages: VecDeque<u32>,
}

impl Span {
    /// Every page of each pool, for one sequence that lets nothing go.
    pub fn whole(plan: &KvPlan) -> Vec<Self> {
        plan.pages.iter().map(|&pages| Span { first: 0, pages: (1..pages as u32).collect() }).collect()
    }

    /// One past the last page, as a number in the sequence.
    pub fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// The pool's page that holds `position`, which must be in the span.
    pub fn page(&self, position: usize) -> u32 {
        self.pages[position / PAGE - self.first]
    }
}

/// What a sequence holds: a span in each group, and how much of it the prefix cache has been told of.
#[derive(Debug)]
pub struct Held {
    /// By group.
    pub spans: Vec<Span>,
    /// Key of the prefix in the sequence's first `hashed` pages.
    key: PrefixKey,
    hashed: usize,
}

/// Pools of all groups, and the prefix cache over them.
#[derive(Debug)]
pub struct Kv {
    groups: Vec<KvGroup>,
    pools: Vec<Pages>,
    /// `None` when finished prefixes are not kept.
    prefixes: Option<PrefixCache>,
}

impl Kv {
    /// Pools of `pages[g]` pages, page 0 included, for each group.
    pub fn new(groups: Vec<KvGroup>, pages: &[usize], prefix_cache: bool) -> Self {
        let prefixes = prefix_cache.then(|| PrefixCache::new(groups.clone()));
        Self { groups, pools: pages.iter().map(|&n| Pages::new(n)).collect(), prefixes }
    }

    /// Groups in order.
    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// Pages that can be taken, by group.
    pub fn available(&self) -> Vec<usize> {
        self.pools.iter().map(Pages::available).collect()
    }

    /// Pages of each group that can be handed out at all.
    pub fn capacity(&self) -> Vec<usize> {
        self.pools.iter().map(Pages::capacity).collect()
    }

    /// Pages somebody holds, of all groups together.
    pub fn held(&self) -> usize {
        self.pools.iter().map(Pages::held).sum()
    }

    /// Prefixes the cache remembers, links without a page included.
    pub fn remembered(&self) -> usize {
        self.prefixes.as_ref().map_or(0, PrefixCache::len)
    }

    /// Nothing, for a sequence whose prefixes start at `root`.
    pub fn nothing(&self, root: PrefixKey) -> Held {
        Held { spans: vec![Span::default(); self.groups.len()], key: root, hashed: 0 }
    }

    /// Gives a sequence that holds nothing the pages of the longest prefix of `tokens` that is known and of which every
    /// group still has what the next row sees; returns how many tokens that are.
    pub fn adopt(&mut self, held: &mut Held, tokens: &[u32]) -> usize {
        let Some(prefixes) = &self.prefixes else { return 0 };
        let hit = prefixes.lookup(held.key, tokens);
        for ((span, pool), pages) in held.spans.iter_mut().zip(&mut self.pools).zip(hit.groups) {
            pages.iter().for_each(|&page| pool.share(page));
            *span = Span { first: hit.pages - pages.len(), pages: pages.into() };
        }
        held.key = hit.key;
        held.hashed = hit.pages;
        hit.pages * PAGE
    }

    /// Takes pages for the positions below `tokens` in every group; where a pool has too few, nothing is taken in any and
    /// the answer is false.
    pub fn grow(&mut self, held: &mut Held, tokens: usize) -> bool {
        let end = tokens.div_ceil(PAGE);
        let missing = |span: &Span| end.saturating_sub(span.end());
        if held.spans.iter().zip(&self.pools).any(|(span, pool)| missing(span) > pool.available()) {
            return false;
        }
        for (group, (span, pool)) in held.spans.iter_mut().zip(&mut self.pools).enumerate() {
            for _ in 0..missing(span) {
                let forget = |page| {
                    if let Some(prefixes) = &mut self.prefixes {
                        prefixes.forget(group, page);
                    }
                };
                // There are enough: counted above.
                span.pages.extend(pool.take(forget));
            }
        }
        true
    }

    /// After the first `computed` of `tokens` are computed: pages that became full are remembered, and those that no later
    /// row sees are let go.
    pub fn commit(&mut self, held: &mut Held, tokens: &[u32], computed: usize) {
        if let Some(prefixes) = &mut self.prefixes {
            while (held.hashed + 1) * PAGE <= computed {
                let page = held.hashed;
                let pages = held.spans.iter().map(|span| {
                    let at = page.checked_sub(span.first)?;
                    span.pages.get(at).copied()
                });
                held.key = prefixes.insert(held.key, &tokens[page * PAGE..(page + 1) * PAGE], pages);
                held.hashed += 1;
            }
        }
        self.settle(held, computed);
    }

    /// Lets go of what a sequence with `computed` tokens has no need of: pages before the first one that its next row sees,
    /// and pages taken for a step that did not happen.
    pub fn settle(&mut self, held: &mut Held, computed: usize) {
        for (g, group) in self.groups.iter().enumerate() {
            let (span, pool) = (&mut held.spans[g], &mut self.pools[g]);
            let known = |page| self.prefixes.as_ref().is_some_and(|prefixes| prefixes.knows(g, page));
            let wanted = group.first_visible(computed) / PAGE..computed.div_ceil(PAGE);
            while span.end() > wanted.end.max(span.first) {
                if let Some(page) = span.pages.pop_back() {
                    pool.release(page, known(page));
                }
            }
            while span.first < wanted.start {
                if let Some(page) = span.pages.pop_front() {
                    pool.release(page, known(page));
                }
                span.first += 1;
            }
        }
    }

    /// Lets go of everything: the sequence is finished, or starts over from `root`.
    pub fn release(&mut self, held: &mut Held, root: PrefixKey) {
        for (g, (span, pool)) in held.spans.iter_mut().zip(&mut self.pools).enumerate() {
            // The last page first, so that the ends of prefixes are given up before their beginnings.
            while let Some(page) = span.pages.pop_back() {
                pool.release(page, self.prefixes.as_ref().is_some_and(|prefixes| prefixes.knows(g, page)));
            }
            span.first = 0;
        }
        held.key = root;
        held.hashed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{DefaultHasher, Hash, Hasher};

    const FULL: KvGroup = KvGroup { window: None };

    fn window(positions: usize) -> KvGroup {
        KvGroup { window: Some(positions) }
    }

    /// Numbers from a counter.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % n
        }
    }

    #[test]
    fn spans_follow_the_window() {
        let mut kv = Kv::new(vec![FULL, window(40)], &[20, 20], true);
        let root = PrefixKey::new(0);
        let tokens: Vec<u32> = (0..300).collect();
        let mut held = kv.nothing(root);
        let mut computed = 0;
        for (n, full, windowed) in
            [(10, 0..1, 0..1), (60, 0..3, 0..3), (100, 0..6, 4..6), (22, 0..6, 4..6), (1, 0..7, 4..7)]
        {
            assert!(kv.grow(&mut held, computed + n));
            computed += n;
            kv.commit(&mut held, &tokens, computed);
            for (span, want) in held.spans.iter().zip([full, windowed]) {
                assert_eq!(span.first..span.end(), want, "{computed} tokens");
            }
        }
        assert_eq!((kv.held(), kv.available()), (7 + 3, vec![12, 16]));
        // A step that did not happen leaves nothing behind.
        let before = held.spans.clone();
        assert!(kv.grow(&mut held, 290) && held.spans != before);
        kv.settle(&mut held, computed);
        assert_eq!((&held.spans, kv.available()), (&before, vec![12, 16]));
        assert!(!kv.grow(&mut held, 32 * 20), "19 pages are all there are");
        assert_eq!((&held.spans, kv.available()), (&before, vec![12, 16]), "and none of them was taken");
        kv.release(&mut held, root);
        assert_eq!((kv.held(), kv.available()), (0, vec![19, 19]));
        // The next turn finds what both groups have.
        assert_eq!(kv.adopt(&mut held, &tokens), 192);
        assert_eq!(held.spans.iter().map(|s| s.first..s.end()).collect::<Vec<_>>(), [0..6, 4..6]);
    }

    /// Sequences of common beginnings come, go, and start over on pools that are far too small to remember them all. What
    /// lies in a page is the hash of all tokens up to each position; every row must find its own.
    #[test]
    fn every_row_finds_its_own_past() {
        for (groups, pages) in [
            (vec![FULL], vec![24]),
            (vec![FULL, window(40)], vec![24, 14]),
            (vec![window(40)], vec![14]),
            (vec![window(1), FULL, window(100), window(33)], vec![9, 24, 20, 14]),
        ] {
            walk(groups, &pages);
        }
    }

    fn walk(groups: Vec<KvGroup>, pages: &[usize]) {
        struct Sequence {
            tokens: Vec<u32>,
            /// Of all tokens up to each.
            hashes: Vec<u64>,
            computed: usize,
            held: Held,
        }
        let root = PrefixKey::new(0);
        let mut numbers = Numbers(1);
        let mut kv = Kv::new(groups.clone(), pages, true);
        let mut contents: Vec<Vec<u64>> = pages.iter().map(|pages| vec![0; pages * PAGE]).collect();
        let mut open: Vec<Sequence> = Vec::new();
        let (mut hits, mut most) = (0, 0);
        for _ in 0..4000 {
            if open.len() < 3 {
                // Three prompts, of which the end differs from time to time.
                let (prompt, len) = (numbers.below(3), 30 + numbers.below(250));
                let changed = numbers.below(4) * 70;
                let token =
                    |i: usize| (prompt * 1000 + i + if changed > 0 && i > changed { 500 } else { 0 }) as u32;
                let tokens: Vec<u32> = (0..len).map(token).collect();
                let mut hasher = DefaultHasher::new();
                let hash = |token: &u32| {
                    token.hash(&mut hasher);
                    hasher.finish()
                };
                let hashes = tokens.iter().map(hash).collect();
                open.push(Sequence { tokens, hashes, computed: 0, held: kv.nothing(root) });
            }
            let at = numbers.below(open.len());
            let s = &mut open[at];
            if s.computed == 0 {
                s.computed = kv.adopt(&mut s.held, &s.tokens);
                hits += s.computed;
            }
            let n = (1 + numbers.below(40)).min(s.tokens.len() - s.computed);
            if numbers.below(50) == 0 || !kv.grow(&mut s.held, s.computed + n) {
                // Starts over later.
                kv.release(&mut s.held, root);
                s.computed = 0;
                continue;
            }
            for (g, group) in groups.iter().enumerate() {
                let cell = |position: usize| s.held.spans[g].page(position) as usize * PAGE + position % PAGE;
                for position in s.computed..s.computed + n {
                    contents[g][cell(position)] = s.hashes[position];
                }
                for position in group.first_visible(s.computed)..s.computed {
                    let found = contents[g][cell(position)];
                    assert_eq!(found, s.hashes[position], "{group:?}, position {position}");
                }
            }
            s.computed += n;
            kv.commit(&mut s.held, &s.tokens, s.computed);
            if s.computed == s.tokens.len() {
                kv.release(&mut s.held, root);
                open.remove(at);
            }
            most = most.max(kv.remembered());
        }
        open.iter_mut().for_each(|s| kv.release(&mut s.held, root));
        assert_eq!((kv.held(), kv.available()), (0, kv.capacity()), "every page came back, once");
        assert!(hits > 10_000, "{groups:?}: only {hits} tokens were found again");
        // No more than a chain of the longest prompt for each page.
        let bound = pages.iter().max().unwrap() * (280 / PAGE);
        assert!((1..=bound).contains(&most), "{groups:?}: {most} entries");
    }
}
