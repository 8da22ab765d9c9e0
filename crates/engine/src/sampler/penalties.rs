//! What changes logits before a token is chosen: bias, repetition, frequency and presence penalties, DRY.

use super::params::{Dry, Params};

/// Whether [`apply`] would change anything.
pub(super) fn is_needed(params: &Params) -> bool {
    !params.logit_bias.is_empty() || counts_tokens(params) || params.dry.is_some()
}

fn counts_tokens(params: &Params) -> bool {
    params.repetition_penalty != 1.0 || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0
}

/// Changes `logits` in the fixed order: bias, repetition, frequency and presence, DRY. `tokens` is prompt and reply so
/// far; the prompt is its first `prompt` tokens.
pub(super) fn apply(logits: &mut [f32], params: &Params, tokens: &[u32], prompt: usize) {
    for &(token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    if counts_tokens(params) {
        let [seen, reply] = counted_tokens(params, tokens, prompt);
        for (token, _) in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                // Both ways round, so that a penalty above 1 always lowers.
                *logit = match *logit > 0.0 {
                    true => *logit / params.repetition_penalty,
                    false => *logit * params.repetition_penalty,
                };
            }
        }
        for (token, count) in reply {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= count as f32 * params.frequency_penalty;
                *logit -= params.presence_penalty;
            }
        }
    }
    if let Some(dry) = &params.dry {
        for (token, repeated) in repetitions(dry, tokens) {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= penalty(dry, repeated);
            }
        }
    }
}

/// The tokens to which the repetition penalty applies, and those to which frequency and presence penalties do: each once,
/// ascending, with how often it occurs. None where a penalty is off.
pub(super) fn counted_tokens(params: &Params, tokens: &[u32], prompt: usize) -> [Vec<(u32, usize)>; 2] {
    let window = tokens.len().saturating_sub(params.penalty_window);
    let of = |on: bool, from: usize| if on { counted(&tokens[from..]) } else { Vec::new() };
    let in_reply = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
    let reply = window.max(prompt).min(tokens.len());
    [of(params.repetition_penalty != 1.0, window), of(in_reply, reply)]
}

/// Each token once, ascending, with how often it occurs.
fn counted(tokens: &[u32]) -> Vec<(u32, usize)> {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

/// multiplier * base^(repeated - allowed_length), at most the largest finite number.
fn penalty(dry: &Dry, repeated: usize) -> f32 {
    let mut penalty = dry.multiplier;
    for _ in dry.allowed_length..repeated {
        if !(penalty * dry.base).is_finite() || penalty * dry.base == penalty {
            break;
        }
        penalty *= dry.base;
    }
    penalty
}

/// The tokens that would continue a repetition, each with the longest that it would continue: (token, tokens repeated
/// so far), only lengths of at least `allowed_length`.
fn repetitions(dry: &Dry, tokens: &[u32]) -> Vec<(u32, usize)> {
    let window = &tokens[tokens.len().saturating_sub(dry.window)..];
    let is_breaker = |token: &u32| dry.breakers.binary_search(token).is_ok();
    let reversed: Vec<u32> = window.iter().rev().copied().collect();
    // A repetition does not reach back over a breaker.
    let limit = reversed.iter().position(is_breaker).unwrap_or(reversed.len());
    let mut found: Vec<(u32, usize)> = common_prefixes(&reversed)
        .into_iter()
        .enumerate()
        .skip(1)
        .map(|(at, length)| (reversed[at - 1], length.min(limit)))
        .filter(|&(_, length)| length >= dry.allowed_length)
        .collect();
    // Of one token, the longest first, and only that.
    found.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    found.dedup_by_key(|&mut (token, _)| token);
    found
}

/// For each position, how many items from there on equal those at the start (the Z function, linear time).
fn common_prefixes(items: &[u32]) -> Vec<usize> {
    let mut z = vec![0; items.len()];
    let (mut left, mut right) = (0, 0);
    for at in 1..items.len() {
        let mut length = if at < right { z[at - left].min(right - at) } else { 0 };
        while at + length < items.len() && items[length] == items[at + length] {
            length += 1;
        }
        if at + length > right {
            (left, right) = (at, at + length);
        }
        z[at] = length;
    }
    z
}

#[cfg(test)]
mod tests {
    use super::super::params::Settings;
    use super::*;
    use serde_json::json;

    fn applied(settings: serde_json::Value, tokens: &[u32], prompt: usize) -> Vec<f32> {
        let settings: Settings = serde_json::from_value(settings).unwrap();
        let params = Params::resolve(&settings, &Settings::default(), 6).unwrap();
        let mut logits = vec![2.0, -2.0, 0.0, 1.0, f32::NEG_INFINITY, 4.0];
        assert!(is_needed(&params));
        apply(&mut logits, &params, tokens, prompt);
        logits
    }

    /// (settings, tokens, how many are prompt, logits after); before: 2, -2, 0, 1, -inf, 4.
    #[test]
    fn logits_after() {
        let inf = f32::NEG_INFINITY;
        for (settings, tokens, prompt, want) in [
            (json!({"logit_bias": [[0, 1.5], [5, -100.0]]}), &[][..], 0, [3.5, -2.0, 0.0, 1.0, inf, -96.0]),
            (json!({"repetition_penalty": 2.0}), &[0, 1, 1, 2, 4][..], 3, [1.0, -4.0, 0.0, 1.0, inf, 4.0]),
            (
                json!({"repetition_penalty": 2.0, "penalty_window": 2}),
                &[0, 1, 5][..],
                3,
                [2.0, -4.0, 0.0, 1.0, inf, 2.0],
            ),
            (json!({"frequency_penalty": 0.5}), &[5, 5, 0, 5, 5][..], 2, [1.5, -2.0, 0.0, 1.0, inf, 3.0]),
            (json!({"presence_penalty": 0.5}), &[5, 5, 0, 5, 5][..], 2, [1.5, -2.0, 0.0, 1.0, inf, 3.5]),
            (
                json!({"presence_penalty": 0.5, "penalty_window": 1}),
                &[0, 5][..],
                0,
                [2.0, -2.0, 0.0, 1.0, inf, 3.5],
            ),
            (
                json!({"presence_penalty": 0.5, "penalty_window": 0}),
                &[0, 5][..],
                0,
                [2.0, -2.0, 0.0, 1.0, inf, 4.0],
            ),
            // Bias, then repetition, then the rest: (2 + 2) / 2 - 0.5.
            (
                json!({"logit_bias": [[0, 2.0]], "repetition_penalty": 2.0, "frequency_penalty": 0.5}),
                &[0][..],
                0,
                [1.5, -2.0, 0.0, 1.0, inf, 4.0],
            ),
            // 1 2 3 ... 1 2: 3 would continue a repetition of two.
            (json!({"dry_multiplier": 1.0}), &[1, 2, 3, 0, 1, 2][..], 0, [2.0, -2.0, 0.0, 0.0, inf, 4.0]),
            // One longer, times the base; the shorter repetition before 0 does not add to it.
            (
                json!({"dry_multiplier": 1.0, "dry_base": 2.0}),
                &[5, 1, 2, 3, 5, 1, 2][..],
                0,
                [2.0, -2.0, 0.0, -1.0, inf, 4.0],
            ),
            (
                json!({"dry_multiplier": 1.0, "dry_breakers": [1]}),
                &[1, 2, 3, 0, 1, 2][..],
                0,
                [2.0, -2.0, 0.0, 1.0, inf, 4.0],
            ),
            (
                json!({"dry_multiplier": 1.0, "dry_window": 4}),
                &[1, 2, 3, 0, 1, 2][..],
                0,
                [2.0, -2.0, 0.0, 1.0, inf, 4.0],
            ),
            (
                json!({"dry_multiplier": 1.0, "dry_allowed_length": 3}),
                &[1, 2, 3, 0, 1, 2][..],
                0,
                [2.0, -2.0, 0.0, 1.0, inf, 4.0],
            ),
        ] {
            assert_eq!(applied(settings.clone(), tokens, prompt), want, "{settings} {tokens:?}");
        }
    }

    #[test]
    fn a_long_repetition_is_quick_and_finite() {
        let tokens = vec![3; 100_000];
        let logits = applied(json!({"dry_multiplier": 1.0}), &tokens, 0);
        assert!(logits[3] < -1e37 && logits[3].is_finite());
        assert_eq!(logits[0], 2.0);
    }

    #[test]
    fn common_prefixes_are_those_of_the_definition() {
        let items: Vec<u32> = (0..200_u32).map(|i| i.wrapping_mul(2_654_435_761) >> 30 & 1).collect();
        for (at, &length) in common_prefixes(&items).iter().enumerate().skip(1) {
            assert_eq!(length, items.iter().zip(&items[at..]).take_while(|(a, b)| a == b).count(), "{at}");
        }
    }
}
