//! Philox 4x32-10: random numbers as a pure function of a key and a counter.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. There is no state to
//! carry, so a token's numbers depend on its seed, choice and position, and not on what else runs.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One block of four random words.
pub(super) fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [p0, p1] = [
            u64::from(MULTIPLIERS[0]) * u64::from(counter[0]),
            u64::from(MULTIPLIERS[1]) * u64::from(counter[2]),
        ];
        let high = |product: u64| (product >> 32) as u32;
        counter = [high(p1) ^ counter[1] ^ key[0], p1 as u32, high(p0) ^ counter[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The random numbers of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Draw {
    /// Uniform over all 64-bit numbers; picks the token.
    pub token: u64,
    /// Uniform over all 32-bit numbers; decides whether XTC acts.
    pub coin: u32,
}

impl Draw {
    /// The numbers for the token at `position` of choice `choice`.
    pub(super) fn new(seed: u64, choice: u32, position: u64) -> Draw {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let [low, high] = halves(position);
        let block = philox4x32([low, high, choice, 0], halves(seed));
        Draw { token: u64::from(block[1]) << 32 | u64::from(block[0]), coin: block[2] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (counter, key, block): the known-answer vectors of the Random123 distribution, philox 4x32, 10 rounds.
    #[test]
    fn known_answers() {
        for (counter, key, want) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), want, "{counter:x?} {key:x?}");
        }
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let base = Draw::new(1, 2, 3);
        for other in [
            Draw::new(2, 2, 3),
            Draw::new(1 + (1 << 32), 2, 3),
            Draw::new(1, 3, 3),
            Draw::new(1, 2, 4),
            Draw::new(1, 2, 3 + (1 << 32)),
        ] {
            assert_ne!(base, other);
        }
        assert_eq!(base, Draw::new(1, 2, 3));
    }
}
