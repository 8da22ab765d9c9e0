//! Which pages hold which prefix: full pages chained by hash, each entry checked against its tokens, so that two
//! prefixes are never taken for each other.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

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
    page: u32,
    parent: PrefixKey,
    tokens: Box<[u32]>,
}

/// Full pages by the prefix they end.
#[derive(Debug, Default)]
pub struct PrefixCache {
    entries: HashMap<PrefixKey, Entry>,
    by_page: HashMap<u32, PrefixKey>,
}

impl PrefixCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// The pages that hold the longest known prefix of `tokens`, in order. Never all of `tokens`: at least one token is
    /// left to compute.
    pub fn lookup(&self, root: PrefixKey, tokens: &[u32], page_len: usize) -> Vec<u32> {
        let mut pages = Vec::new();
        let mut parent = root;
        for chunk in tokens[..tokens.len().saturating_sub(1)].chunks_exact(page_len) {
            let key = parent.then(chunk);
            match self.entries.get(&key) {
                Some(e) if e.parent == parent && *e.tokens == *chunk => pages.push(e.page),
                _ => break,
            }
            parent = key;
        }
        pages
    }

    /// Remembers that `page` holds `tokens` after the prefix with the key `parent`, and returns the key of the longer
    /// prefix. A prefix that is already known keeps its page.
    pub fn insert_after(&mut self, parent: PrefixKey, tokens: &[u32], page: u32) -> PrefixKey {
        let key = parent.then(tokens);
        if !self.entries.contains_key(&key) && !self.by_page.contains_key(&page) {
            self.entries.insert(key, Entry { page, parent, tokens: tokens.into() });
            self.by_page.insert(page, key);
        }
        key
    }

    /// Key of the prefix `tokens`, whose length is a whole number of pages.
    pub fn key(&self, root: PrefixKey, tokens: &[u32], page_len: usize) -> PrefixKey {
        tokens.chunks_exact(page_len).fold(root, |key, chunk| key.then(chunk))
    }

    /// Whether the page's contents are known.
    pub fn knows(&self, page: u32) -> bool {
        self.by_page.contains_key(&page)
    }

    /// Forgets a page.
    pub fn forget(&mut self, page: u32) {
        if let Some(key) = self.by_page.remove(&page) {
            self.entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Remembers that `page` is the last of the full pages of `tokens`.
    fn insert(cache: &mut PrefixCache, root: PrefixKey, tokens: &[u32], page_len: usize, page: u32) {
        let (prefix, last) = tokens.split_at(tokens.len() - page_len);
        let parent = cache.key(root, prefix, page_len);
        cache.insert_after(parent, last, page);
    }

    #[test]
    fn the_longest_known_prefix_but_never_all() {
        let root = PrefixKey::new("model");
        let mut cache = PrefixCache::new();
        let tokens: Vec<u32> = (0..12).collect();
        insert(&mut cache, root, &tokens[..4], 4, 7);
        insert(&mut cache, root, &tokens[..8], 4, 8);
        assert_eq!(cache.lookup(root, &tokens, 4), [7, 8]);
        assert_eq!(cache.lookup(root, &tokens[..8], 4), [7], "one token is left to compute");
        assert_eq!(cache.lookup(root, &tokens[..9], 4), [7, 8]);
        let mut other = tokens.clone();
        other[5] = 99;
        assert_eq!(cache.lookup(root, &other, 4), [7]);
        assert!(cache.lookup(root.salted(1), &tokens, 4).is_empty());
        assert!(cache.lookup(PrefixKey::new("other model"), &tokens, 4).is_empty());
        cache.forget(7);
        assert!(cache.lookup(root, &tokens, 4).is_empty(), "a chain with a missing link ends there");
        assert!(cache.knows(8) && !cache.knows(7));
    }

    #[test]
    fn the_same_tokens_after_another_prefix_are_another_page() {
        let root = PrefixKey::new(0);
        let mut cache = PrefixCache::new();
        insert(&mut cache, root, &[1, 1, 2, 2], 2, 5);
        assert!(cache.lookup(root, &[9, 9, 2, 2, 0], 2).is_empty());
        assert!(cache.lookup(root, &[2, 2, 0], 2).is_empty());
    }
}
