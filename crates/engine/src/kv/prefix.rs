//! Which pages hold which prefix: full pages chained by hash, each entry checked against its tokens, so that two
//! prefixes are never taken for each other.
//!
//! An entry is one page of tokens after a prefix, with the pages that hold its keys and values: one of each group, as long
//! as that group's pool has no other use for it. An entry that has lost all of them stays as a link while another hangs on
//! it, since a window asks for the last pages of a prefix but not for the first.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ingle_graph::{KvGroup, PAGE};

/// Everything that changes the values in a page besides its tokens: model, KV type, activations, arithmetic names,
/// contract version, and the caller's salt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrefixKey(u64);

impl PrefixKey {
    /// The key for these properties.
    pub fn new(properties: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        properties.hash(&mut hasher);
        Self(hasher.finish())
    }

    /// The key under another salt: requests with different salts never share pages.
    pub fn salted(self, salt: u64) -> Self {
        Self::new((self.0, salt))
    }

    /// The chain's next link: this prefix followed by one more page of tokens.
    fn then(self, tokens: &[u32]) -> Self {
        Self::new((self.0, tokens))
    }
}

#[derive(Debug)]
struct Entry {
    parent: PrefixKey,
    tokens: Box<[u32]>,
    /// By group.
    pages: Box<[Option<u32>]>,
}

/// A known prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hit {
    /// Pages of tokens.
    pub pages: usize,
    /// For each group the pool's pages that the row after the prefix sees: the last ones of the prefix, in order.
    pub groups: Vec<Vec<u32>>,
    /// Key of the prefix.
    pub key: PrefixKey,
}

/// Full pages by the prefix they end.
#[derive(Debug)]
pub struct PrefixCache {
    groups: Vec<KvGroup>,
    entries: HashMap<PrefixKey, Entry>,
    /// Entries that hang on a key, whether or not it has an entry itself.
    children: HashMap<PrefixKey, usize>,
    /// By group: the entry of each known page.
    by_page: Vec<HashMap<u32, PrefixKey>>,
}

impl PrefixCache {
    /// An empty cache for pages of these groups.
    pub fn new(groups: Vec<KvGroup>) -> Self {
        let by_page = vec![HashMap::new(); groups.len()];
        Self { groups, entries: HashMap::new(), children: HashMap::new(), by_page }
    }

    /// Entries, links without a page included.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The longest known prefix of `tokens` of which every group still has what the next row sees. Never all of `tokens`:
    /// at least one token is left to compute.
    pub fn lookup(&self, root: PrefixKey, tokens: &[u32]) -> Hit {
        let mut chain: Vec<&Entry> = Vec::new();
        // By group: pages at the chain's end that are there without a gap.
        let mut unbroken = vec![0; self.groups.len()];
        let (mut key, mut best) = (root, (0, root));
        for chunk in tokens[..tokens.len().saturating_sub(1)].chunks_exact(PAGE) {
            let parent = key;
            key = parent.then(chunk);
            match self.entries.get(&key) {
                Some(entry) if entry.parent == parent && *entry.tokens == *chunk => chain.push(entry),
                _ => break,
            }
            let n = chain.len();
            for (unbroken, page) in unbroken.iter_mut().zip(&chain[n - 1].pages) {
                *unbroken = if page.is_some() { *unbroken + 1 } else { 0 };
            }
            if self.groups.iter().zip(&unbroken).all(|(group, &unbroken)| unbroken >= seen(group, n)) {
                best = (n, key);
            }
        }
        let (pages, key) = best;
        let of_group = |(g, group): (usize, &KvGroup)| {
            chain[pages - seen(group, pages)..pages].iter().filter_map(|entry| entry.pages[g]).collect()
        };
        Hit { pages, groups: self.groups.iter().enumerate().map(of_group).collect(), key }
    }

    /// Remembers that `pages` (by group, as far as there is one) hold `tokens` after the prefix with the key `parent`, and
    /// returns the key of the longer prefix. A prefix keeps the pages it is already known to be in.
    pub fn insert(
        &mut self,
        parent: PrefixKey,
        tokens: &[u32],
        pages: impl Iterator<Item = Option<u32>>,
    ) -> PrefixKey {
        let key = parent.then(tokens);
        let is_new = !self.entries.contains_key(&key);
        let entry = self.entries.entry(key).or_insert_with(|| Entry {
            parent,
            tokens: tokens.into(),
            pages: vec![None; self.groups.len()].into(),
        });
        // Another prefix of the same hash keeps its entry.
        if entry.parent == parent && *entry.tokens == *tokens {
            for ((slot, page), by_page) in entry.pages.iter_mut().zip(pages).zip(&mut self.by_page) {
                if let (None, Some(page)) = (&slot, page)
                    && !by_page.contains_key(&page)
                {
                    *slot = Some(page);
                    by_page.insert(page, key);
                }
            }
        }
        if is_new {
            *self.children.entry(parent).or_default() += 1;
            self.prune(key);
        }
        key
    }

    /// Whether the page's contents are known.
    pub fn knows(&self, group: usize, page: u32) -> bool {
        self.by_page[group].contains_key(&page)
    }

    /// Forgets what a page of one group holds.
    pub fn forget(&mut self, group: usize, page: u32) {
        if let Some(key) = self.by_page[group].remove(&page) {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.pages[group] = None;
            }
            self.prune(key);
        }
    }

    /// Removes an entry without pages on which nothing hangs, and then those before it of which the same is true.
    fn prune(&mut self, mut key: PrefixKey) {
        while !self.children.contains_key(&key)
            && self.entries.get(&key).is_some_and(|entry| entry.pages.iter().all(Option::is_none))
            && let Some(entry) = self.entries.remove(&key)
        {
            key = entry.parent;
            if let Some(children) = self.children.get_mut(&key) {
                *children -= 1;
                if *children == 0 {
                    self.children.remove(&key);
                }
            }
        }
    }
}

/// How many of the last of `pages` pages the row after them sees.
fn seen(group: &KvGroup, pages: usize) -> usize {
    pages - (group.first_visible(pages * PAGE) / PAGE).min(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: KvGroup = KvGroup { window: None };

    /// `n` pages of tokens, of which the one at `changed` differs.
    fn tokens(n: usize, changed: Option<usize>) -> Vec<u32> {
        (0..n * PAGE).map(|i| i as u32 + if changed == Some(i / PAGE) { 1000 } else { 0 }).collect()
    }

    /// Remembers all of `tokens`: page `i` of group `g` is `pages(g, i)`.
    fn insert(
        cache: &mut PrefixCache,
        root: PrefixKey,
        tokens: &[u32],
        pages: impl Fn(usize, usize) -> Option<u32>,
    ) -> PrefixKey {
        let groups = cache.groups.len();
        let chunks = tokens.chunks_exact(PAGE).enumerate();
        chunks.fold(root, |key, (i, chunk)| cache.insert(key, chunk, (0..groups).map(|g| pages(g, i))))
    }

    /// Pages of the prefix found, and the first group's.
    fn found(cache: &PrefixCache, root: PrefixKey, tokens: &[u32]) -> (usize, Vec<u32>) {
        let hit = cache.lookup(root, tokens);
        (hit.pages, hit.groups[0].clone())
    }

    #[test]
    fn the_longest_known_prefix_but_never_all() {
        let root = PrefixKey::new("model");
        let mut cache = PrefixCache::new(vec![FULL]);
        let all = tokens(3, None);
        let key = insert(&mut cache, root, &all[..2 * PAGE], |_, i| Some(7 + i as u32));
        assert_eq!(cache.lookup(root, &all), Hit { pages: 2, groups: vec![vec![7, 8]], key });
        assert_eq!(found(&cache, root, &all[..2 * PAGE]), (1, vec![7]), "one token is left to compute");
        assert_eq!(found(&cache, root, &all[..2 * PAGE + 1]), (2, vec![7, 8]));
        assert_eq!(found(&cache, root, &tokens(3, Some(1))), (1, vec![7]));
        for other in [root.salted(1), PrefixKey::new("other model")] {
            assert_eq!(cache.lookup(other, &all), Hit { pages: 0, groups: vec![vec![]], key: other });
        }
        cache.forget(0, 7);
        assert_eq!(found(&cache, root, &all), (0, vec![]), "a chain with a missing link ends there");
        assert!(cache.knows(0, 8) && !cache.knows(0, 7));
    }

    #[test]
    fn the_same_tokens_after_another_prefix_are_another_page() {
        let root = PrefixKey::new(0);
        let mut cache = PrefixCache::new(vec![FULL]);
        let all = tokens(2, None);
        insert(&mut cache, root, &all, |_, i| Some(5 + i as u32));
        assert_eq!(found(&cache, root, &[&tokens(1, Some(0)), &all[PAGE..], &[0]].concat()).0, 0);
        assert_eq!(found(&cache, root, &[&all[PAGE..], &[0][..]].concat()).0, 0);
    }

    /// Pages that no window reaches any more do not count; a hit is as long as every group allows.
    #[test]
    fn a_window_asks_for_the_last_pages_alone() {
        let root = PrefixKey::new(0);
        let prompt = tokens(5, None);
        // After each forgotten (group, page number): how long the hit is.
        type Row = (&'static str, Vec<KvGroup>, Vec<((usize, usize), usize)>);
        let window = |n| KvGroup { window: Some(n) };
        let rows: [Row; 5] = [
            ("early pages of a window", vec![FULL, window(40)], vec![((1, 0), 4), ((1, 1), 4)]),
            (
                "the last page of a window",
                vec![FULL, window(40)],
                vec![((1, 3), 3), ((1, 1), 1), ((1, 0), 0)],
            ),
            ("a page of all positions", vec![FULL, window(40)], vec![((0, 2), 2), ((0, 0), 0)]),
            (
                "only windows",
                vec![window(40), window(1)],
                vec![((0, 0), 4), ((1, 3), 4), ((0, 3), 3), ((0, 1), 0)],
            ),
            ("a window that sees nothing before itself", vec![window(1)], vec![((0, 0), 4), ((0, 2), 4)]),
        ];
        for (what, groups, forgotten) in rows {
            let mut cache = PrefixCache::new(groups);
            let id = |g: usize, i: usize| (10 * g + i + 1) as u32;
            insert(&mut cache, root, &prompt[..4 * PAGE], |g, i| Some(id(g, i)));
            let hit = cache.lookup(root, &prompt);
            assert_eq!(hit.pages, 4);
            for (g, pages) in hit.groups.iter().enumerate() {
                let first = 4 - seen(&cache.groups[g], 4);
                assert_eq!(*pages, (first..4).map(|i| id(g, i)).collect::<Vec<_>>(), "{what}");
            }
            for ((g, i), pages) in forgotten {
                cache.forget(g, id(g, i));
                assert_eq!(cache.lookup(root, &prompt).pages, pages, "{what}, without page {i} of group {g}");
            }
        }
    }

    /// Links stay while something hangs on them, and go with it; a forgotten slot is filled again.
    #[test]
    fn an_entry_without_a_page_is_a_link_or_gone() {
        let root = PrefixKey::new(0);
        let mut cache = PrefixCache::new(vec![KvGroup { window: Some(2) }]);
        let (one, other) = (tokens(4, None), tokens(4, Some(2)));
        insert(&mut cache, root, &one, |_, i| Some(1 + i as u32));
        insert(&mut cache, root, &other, |_, i| (i > 1).then_some(11 + i as u32));
        assert_eq!(cache.len(), 6, "two pages are shared");
        for page in [1, 2, 3] {
            cache.forget(0, page);
        }
        assert_eq!(cache.len(), 6);
        assert_eq!(found(&cache, root, &[&one[..], &[0]].concat()), (4, vec![4]), "over three links");
        cache.forget(0, 4);
        assert_eq!(cache.len(), 4, "the end and the link that only it needed");
        assert_eq!(found(&cache, root, &[&other[..], &[0]].concat()), (4, vec![14]));
        insert(&mut cache, root, &other[..2 * PAGE], |_, i| Some(21 + i as u32));
        assert_eq!(found(&cache, root, &other[..2 * PAGE + 1]), (2, vec![22]));
        for page in [14, 13, 22, 21] {
            cache.forget(0, page);
        }
        assert!(cache.is_empty() && cache.children.is_empty() && cache.by_page[0].is_empty());
        // An orphan: what it hangs on was forgotten before it came.
        let key = insert(&mut PrefixCache::new(cache.groups.clone()), root, &one[..PAGE], |_, _| Some(1));
        cache.insert(key, &one[PAGE..2 * PAGE], [Some(2)].into_iter());
        assert_eq!(found(&cache, root, &one), (0, vec![]));
        cache.insert(root, &one[..PAGE], [None].into_iter());
        assert_eq!(found(&cache, root, &one), (2, vec![2]), "its link came back");
        cache.forget(0, 2);
        assert!(cache.is_empty() && cache.children.is_empty());
    }
}
