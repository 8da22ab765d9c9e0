//! Pages of the KV pool, by number, with reference counts. A page is free, held (count above zero), or cached: nobody
//! holds it but its contents are known and may be used again until the page is needed.

use std::collections::VecDeque;

/// The pool's bookkeeping. Page 0 takes the writes of padding rows and is never handed out.
#[derive(Debug)]
pub struct Pages {
    counts: Vec<u32>,
    free: Vec<u32>,
    /// Pages nobody holds whose contents are known, least recently let go first.
    cached: VecDeque<u32>,
    is_cached: Vec<bool>,
}

impl Pages {
    /// A pool of `pages` pages, page 0 included.
    pub fn new(pages: usize) -> Self {
        Self {
            counts: vec![0; pages],
            free: (1..pages as u32).rev().collect(),
            cached: VecDeque::new(),
            is_cached: vec![false; pages],
        }
    }

    /// Pages that can be taken: free ones and cached ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Pages that can be handed out at all.
    pub fn capacity(&self) -> usize {
        self.counts.len() - 1
    }

    /// Pages somebody holds.
    pub fn held(&self) -> usize {
        self.capacity() - self.available()
    }

    /// Takes a page for writing; a cached page's contents are then forgotten and its number is passed to `forget`.
    pub fn take(&mut self, forget: impl FnOnce(u32)) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let page = self.cached.pop_front()?;
                self.is_cached[page as usize] = false;
                forget(page);
                page
            }
        };
        self.counts[page as usize] = 1;
        Some(page)
    }

    /// Holds a page once more; a cached page leaves the cache's queue with its contents intact.
    pub fn share(&mut self, page: u32) {
        if self.is_cached[page as usize] {
            self.is_cached[page as usize] = false;
            self.cached.retain(|&p| p != page);
        }
        self.counts[page as usize] += 1;
    }

    /// Lets a page go; when nobody holds it any more it becomes cached if its contents are `known`, else free.
    pub fn release(&mut self, page: u32, known: bool) {
        let count = &mut self.counts[page as usize];
        debug_assert!(*count > 0, "page {page} released more often than held");
        *count -= 1;
        if *count == 0 {
            if known {
                self.is_cached[page as usize] = true;
                self.cached.push_back(page);
            } else {
                self.free.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_from_free_to_held_to_cached_and_back() {
        let mut pages = Pages::new(4);
        assert_eq!((pages.available(), pages.capacity()), (3, 3));
        let never = |p| panic!("page {p} had no contents");
        let (a, b) = (pages.take(never).unwrap(), pages.take(never).unwrap());
        assert!(a != 0 && b != 0 && a != b);
        pages.share(a);
        pages.release(a, true);
        assert_eq!(pages.available(), 1, "still held once");
        pages.release(a, true);
        pages.release(b, false);
        assert_eq!((pages.available(), pages.held()), (3, 0));
        pages.share(a);
        assert_eq!(pages.available(), 2, "a cached page can be held again");
        pages.release(a, true);
        let mut forgotten = Vec::new();
        let taken: Vec<_> = (0..3).map(|_| pages.take(|p| forgotten.push(p)).unwrap()).collect();
        assert_eq!(forgotten, [a], "known contents are given up last");
        assert_eq!(taken.last(), Some(&a));
        assert_eq!(pages.take(|_| ()), None);
    }
}
