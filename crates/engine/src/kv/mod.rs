//! Where keys and values live: pages with reference counts, and the cache that lets sequences share them.

mod pages;
mod prefix;

pub use pages::Pages;
pub use prefix::{PrefixCache, PrefixKey};
