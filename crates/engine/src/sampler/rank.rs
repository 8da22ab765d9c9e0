//! The order of tokens: value descending, then id ascending; NaN last; -0 equals +0.

/// A token's place in the order as one number: smaller is likelier. Holds value and id.
pub(super) fn key(value: f32, id: usize) -> u64 {
    let descending = match value.is_nan() {
        true => u32::MAX,
        false => {
            // Adding +0 makes -0 +0; then flipping sign or all bits makes the bits ascend with the value.
            let bits = (value + 0.0).to_bits();
            !(if bits >> 31 == 1 { !bits } else { bits | 1 << 31 })
        }
    };
    u64::from(descending) << 32 | id as u64
}

/// The id in a key.
pub(super) fn id(key: u64) -> u32 {
    key as u32
}

/// The value in a key; +0 where -0 went in.
pub(super) fn value(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending ^ 1 << 31 } else { !ascending })
}

/// The largest value, NaN left out, or negative infinity if there is no other; and whether any is NaN.
pub(super) fn max(values: &[f32]) -> (f32, bool) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let any_nan = |values: &[f32]| values.iter().fold(false, |any, value| any | value.is_nan());
    let mut lanes = [f32::NEG_INFINITY; 32];
    let (chunks, rest) = values.as_chunks::<32>();
    let mut has_nan = any_nan(rest);
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
        has_nan |= any_nan(chunk);
    }
    (lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger), has_nan)
}

/// Keys that are put in order only as far as they are looked at. What is seen equals a full sort.
pub(super) struct Ranking {
    keys: Vec<u64>,
    /// The first so many keys are in their final place.
    sorted: usize,
}

impl Ranking {
    pub(super) fn new(keys: Vec<u64>) -> Ranking {
        Ranking { keys, sorted: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// All keys; only those looked at are in order.
    pub(super) fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// The key at `rank`.
    pub(super) fn get(&mut self, rank: usize) -> Option<u64> {
        if rank >= self.sorted {
            // Blocks double, so a walk to the end costs no more than a few sorts.
            self.sort_first((rank + 1).max(2 * self.sorted).max(64));
        }
        self.keys.get(rank).copied()
    }

    /// Keeps the `count` first keys.
    pub(super) fn truncate(&mut self, count: usize) {
        self.sort_first(count);
        self.keys.truncate(count);
        self.sorted = self.sorted.min(count);
    }

    fn sort_first(&mut self, count: usize) {
        let count = count.min(self.keys.len());
        if count > self.sorted {
            let rest = &mut self.keys[self.sorted..];
            let wanted = count - self.sorted;
            if wanted < rest.len() {
                rest.select_nth_unstable(wanted);
            }
            rest[..wanted].sort_unstable();
            self.sorted = count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_as_the_contract_says() {
        let values = [
            f32::NAN,
            -0.0,
            0.0,
            1.5,
            f32::NEG_INFINITY,
            f32::INFINITY,
            -2.0,
            1.5,
            -f32::NAN,
            f32::MIN_POSITIVE,
        ];
        let mut keys: Vec<u64> = values.iter().enumerate().map(|(i, &v)| key(v, i)).collect();
        keys.sort_unstable();
        assert_eq!(keys.iter().map(|&k| id(k)).collect::<Vec<_>>(), [5, 3, 7, 9, 1, 2, 6, 4, 0, 8]);
        for &k in &keys[..8] {
            assert_eq!(value(k), values[id(k) as usize]);
        }
    }

    #[test]
    fn a_ranking_seen_in_parts_is_a_full_sort() {
        let keys: Vec<u64> = (0..1000_u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40).collect();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        for step in [1, 7, 64, 999] {
            let mut ranking = Ranking::new(keys.clone());
            for rank in (0..1000).step_by(step) {
                assert_eq!(ranking.get(rank), Some(sorted[rank]));
            }
            assert_eq!(ranking.get(1000), None);
        }
        for count in [0, 1, 500, 1000, 2000] {
            let mut ranking = Ranking::new(keys.clone());
            ranking.truncate(count);
            assert_eq!(ranking.keys(), &sorted[..count.min(1000)]);
        }
    }

    #[test]
    fn max_leaves_nan_out_and_sees_it() {
        let mut values = vec![f32::NAN; 100];
        assert_eq!(max(&values), (f32::NEG_INFINITY, true));
        values[70] = -3.0;
        assert_eq!(max(&values), (-3.0, true));
        values[99] = 2.0;
        assert_eq!(max(&values), (2.0, true));
        assert_eq!(max(&[]), (f32::NEG_INFINITY, false));
        // One of them, anywhere.
        for at in 0..100 {
            let mut values = [f32::NEG_INFINITY; 100];
            values[99 - at] = f32::INFINITY;
            assert_eq!(max(&values), (f32::INFINITY, false));
            values[at] = f32::NAN;
            assert!(max(&values).1, "{at}");
        }
    }
}
