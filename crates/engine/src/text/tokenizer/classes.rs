//! Unicode properties of characters, as regular expressions mean them.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub(super) const LETTER: u8 = 1;
/// `\p{N}`
pub(super) const NUMBER: u8 = 2;
/// `\p{M}`
pub(super) const MARK: u8 = 4;
/// `\s`
pub(super) const SPACE: u8 = 8;

/// `\p{P}`
pub(super) const PUNCTUATION: u8 = 16;
/// `\p{Mn}`
pub(super) const NONSPACING: u8 = 32;
/// `[\p{Cc}\p{Cf}\p{Co}]`: control and format characters, private use.
pub(super) const OTHER: u8 = 64;

/// One byte of flags per code point.
static FLAGS: LazyLock<Box<[u8]>> = LazyLock::new(|| {
    let mut flags = vec![0; char::MAX as usize + 1].into_boxed_slice();
    for (pattern, flag) in [
        (r"\p{L}", LETTER),
        (r"\p{N}", NUMBER),
        (r"\p{M}", MARK),
        (r"\s", SPACE),
        (r"\p{P}", PUNCTUATION),
        (r"\p{Mn}", NONSPACING),
        (r"[\p{Cc}\p{Cf}\p{Co}]", OTHER),
    ] {
        let class = regex_syntax::parse(pattern).map(|hir| hir.into_kind());
        let Ok(HirKind::Class(Class::Unicode(class))) = class else { continue };
        for range in class.ranges() {
            for flags in &mut flags[range.start() as usize..=range.end() as usize] {
                *flags |= flag;
            }
        }
    }
    flags
});

/// The table, to be held during a scan.
#[derive(Clone, Copy)]
pub(super) struct Classes(&'static [u8]);

impl Classes {
    pub(super) fn get() -> Classes {
        Classes(&FLAGS)
    }

    /// Whether `c` has any of the properties in `flags`.
    pub(super) fn is(self, c: char, flags: u8) -> bool {
        self.0[c as usize] & flags != 0
    }
}
