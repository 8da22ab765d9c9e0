//! Choosing tokens inside a program: what [`Op::Sample`](crate::Op::Sample) does with a row of logits. The host's sampler
//! (`sampler/mod.rs` of the engine) says the order of all that a request may ask for; this is the part of it that devices do
//! too, and both choose the same token from the same logits.
//!
//! A token's weight is an integer in units of 2^-43 of the likeliest, so that sums of weights are exact in any order.

use crate::math;

/// The weight of the likeliest token. A vocabulary of 2^20 equal tokens sums to 2^63.
pub const ONE: u64 = 1 << 43;

/// Tokens whose logits a row may change, at most.
pub const CHANGES: usize = 1024;

/// The weight of a token: exp((logit - largest) / temperature) in units of 2^-43, of which less than one half is 0. Not for
/// NaN.
pub fn weight(logit: f32, largest: f32, temperature: f32) -> u64 {
    if logit == largest {
        return ONE; // also where both are infinite
    }
    // Subtracting first keeps tiny temperatures from overflowing.
    (math::exp((logit - largest) / temperature) * ONE as f32).round_ties_even() as u64
}

/// Philox 4x32-10: random numbers as a pure function of a key and a counter. There is no state to carry, so a token's
/// numbers depend on its seed, choice and position, and not on what else runs.
///
/// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    const ROUNDS: usize = 10;
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
pub struct Draw {
    /// Uniform over all 64-bit numbers; picks the token.
    pub token: u64,
    /// Uniform over all 32-bit numbers; decides whether XTC acts.
    pub coin: u32,
}

impl Draw {
    /// The numbers for the token at `position` of choice `choice`.
    pub fn new(seed: u64, choice: u32, position: u64) -> Draw {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let [low, high] = halves(position);
        let block = philox4x32([low, high, choice, 0], halves(seed));
        Draw { token: u64::from(block[1]) << 32 | u64::from(block[0]), coin: block[2] }
    }
}

/// What happens to one token's logit before a token is chosen, in this order: the bias is added; if the token was seen, a
/// positive logit is divided by the repetition penalty, and another multiplied; the frequency penalty is subtracted `count`
/// times at once, and then, if that is not 0, the presence penalty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// The token.
    pub token: u32,
    /// Added.
    pub bias: f32,
    /// The repetition penalty applies.
    pub seen: bool,
    /// Times the token is in the reply.
    pub count: u32,
}

/// How the token of one row is chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token, and nothing below but the changes counts.
    pub temperature: f32,
    /// So many of the likeliest tokens are kept; 0 for all.
    pub top_k: u32,
    /// The likeliest that together have this share are kept; 1 for all.
    pub top_p: f32,
    /// Those that have this share of the likeliest are kept; 0 for all.
    pub min_p: f32,
    /// Of tokens seen.
    pub repetition_penalty: f32,
    /// For each time in the reply.
    pub frequency_penalty: f32,
    /// If in the reply.
    pub presence_penalty: f32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Number of the reply among those of one prompt.
    pub choice: u32,
    /// Position of the token that is chosen.
    pub position: u64,
    /// Logits that are changed, at most [`CHANGES`], by token ascending, each token once.
    pub changes: Vec<Change>,
}

impl Sampling {
    /// The likeliest token.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            choice: 0,
            position: 0,
            changes: Vec::new(),
        }
    }

    /// A changed logit.
    fn changed(&self, logit: f32, change: &Change) -> f32 {
        let mut logit = logit + change.bias;
        if change.seen {
            // Both ways round, so that a penalty above 1 always lowers.
            logit = match logit > 0.0 {
                true => logit / self.repetition_penalty,
                false => logit * self.repetition_penalty,
            };
        }
        if change.count > 0 {
            logit -= change.count as f32 * self.frequency_penalty;
            logit -= self.presence_penalty;
        }
        logit
    }

    /// What of it no device could do, in words.
    pub(crate) fn problem(&self, vocabulary: usize) -> Option<String> {
        let numbers =
            [self.temperature, self.repetition_penalty, self.frequency_penalty, self.presence_penalty];
        let shares = [self.top_p, self.min_p];
        if numbers.iter().any(|x| !x.is_finite())
            || self.temperature < 0.0
            || shares.iter().any(|x| !(0.0..=1.0).contains(x))
        {
            return Some(format!("numbers out of range in {self:?}"));
        }
        if self.changes.len() > CHANGES || !self.changes.is_sorted_by(|a, b| a.token < b.token) {
            return Some(format!("{} changes, not {CHANGES} at most by token ascending", self.changes.len()));
        }
        let last = self.changes.last()?;
        let beyond = last.token as usize >= vocabulary;
        beyond.then(|| format!("a change of token {} of a vocabulary of {vocabulary}", last.token))
    }
}

/// What became of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// Its token.
    Token(u32),
    /// Nobody asked: the host chooses.
    Unasked,
    /// Some logits are NaN, which the host counts.
    NaN,
    /// All logits are negative infinity, which the host tells.
    Nothing,
}

impl Chosen {
    /// As an element of the op's output: tokens are numbers, exact up to 2^24; the rest is below 0.
    pub fn number(self) -> f32 {
        match self {
            Chosen::Token(token) => token as f32,
            Chosen::Unasked => -1.0,
            Chosen::NaN => -2.0,
            Chosen::Nothing => -3.0,
        }
    }

    /// What an element of the op's output says; `None` where it is no such number.
    pub fn of(number: f32) -> Option<Self> {
        let others = [Chosen::Unasked, Chosen::NaN, Chosen::Nothing];
        match number {
            token if (0.0..16_777_216.0).contains(&token) && token.fract() == 0.0 => {
                Some(Chosen::Token(token as u32))
            }
            other => others.into_iter().find(|chosen| chosen.number() == other),
        }
    }
}

/// The definition: a full sort, with nothing saved.
pub fn choose(logits: &[f32], sampling: Option<&Sampling>) -> Chosen {
    let Some(sampling) = sampling else { return Chosen::Unasked };
    if logits.iter().any(|logit| logit.is_nan()) {
        return Chosen::NaN;
    }
    let mut logits = logits.to_vec();
    for change in &sampling.changes {
        let logit = &mut logits[change.token as usize];
        *logit = sampling.changed(*logit, change);
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |id: u32| logits[id as usize];
    // Adding +0 makes -0 equal to +0 in a total order.
    order.sort_by(|&a, &b| (logit(b) + 0.0).total_cmp(&(logit(a) + 0.0)).then(a.cmp(&b)));
    let largest = logit(order[0]);
    if largest == f32::NEG_INFINITY {
        return Chosen::Nothing;
    }
    if sampling.temperature == 0.0 {
        return Chosen::Token(order[0]);
    }
    let weigh = |id: u32| (id, weight(logit(id), largest, sampling.temperature));
    let mut tokens: Vec<(u32, u64)> = order.into_iter().map(weigh).collect();
    tokens.retain(|t| t.1 as f64 >= f64::from(sampling.min_p) * ONE as f64);
    if sampling.top_k > 0 {
        tokens.truncate(sampling.top_k as usize);
    }
    let sum = |tokens: &[(u32, u64)]| tokens.iter().map(|t| t.1).sum::<u64>();
    if sampling.top_p < 1.0 {
        let goal = f64::from(sampling.top_p) * sum(&tokens) as f64;
        let mut reached = 0;
        let last = tokens.iter().position(|t| {
            reached += t.1;
            reached as f64 >= goal
        });
        tokens.truncate(last.map_or(tokens.len(), |last| last + 1));
    }
    let draw = Draw::new(sampling.seed, sampling.choice, sampling.position);
    let mut point = ((u128::from(draw.token) * u128::from(sum(&tokens))) >> 64) as u64;
    for (id, weight) in tokens {
        if point < weight {
            return Chosen::Token(id);
        }
        point -= weight;
    }
    Chosen::Nothing
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

    #[test]
    fn outcomes_are_numbers_and_back() {
        for chosen in
            [Chosen::Token(0), Chosen::Token(262_143), Chosen::Unasked, Chosen::NaN, Chosen::Nothing]
        {
            assert_eq!(Chosen::of(chosen.number()), Some(chosen));
        }
        for number in [f32::NAN, -4.0, 0.5, 16_777_216.0, f32::INFINITY] {
            assert_eq!(Chosen::of(number), None, "{number}");
        }
    }

    #[test]
    fn sampling_that_does_not_fit_is_told() {
        let greedy = Sampling::greedy();
        assert_eq!(greedy.problem(10), None);
        let change = |token| Change { token, bias: 0.0, seen: true, count: 0 };
        for (what, sampling) in [
            ("range", Sampling { temperature: f32::NAN, ..greedy.clone() }),
            ("range", Sampling { temperature: -1.0, ..greedy.clone() }),
            ("range", Sampling { top_p: 1.5, ..greedy.clone() }),
            ("2 changes", Sampling { changes: vec![change(3), change(3)], ..greedy.clone() }),
            ("1025 changes", Sampling { changes: (0..1025).map(change).collect(), ..greedy.clone() }),
            ("token 10 of", Sampling { changes: vec![change(3), change(10)], ..greedy.clone() }),
        ] {
            let problem = sampling.problem(10).expect("a problem");
            assert!(problem.contains(what), "{problem}");
        }
    }
}
