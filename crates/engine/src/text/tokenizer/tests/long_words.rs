//! Words without a place to cut take time in proportion to their length.

use std::time::{Duration, Instant};

use super::*;

/// What this thread has run for; where the system does not say, the time of day.
fn clock(start: Instant) -> Duration {
    let ran = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ran = ran.and_then(|text| text.split(' ').next()?.parse().ok());
    ran.map_or_else(|| start.elapsed(), Duration::from_nanos)
}

/// The best of three.
fn time(tokenizer: &Tokenizer, text: &str) -> Duration {
    let day = Instant::now();
    let once = |_| {
        let start = clock(day);
        tokenizer.encode(text, Specials::AsText).unwrap();
        clock(day) - start
    };
    (0..3).map(once).min().unwrap()
}

/// ggml-org/llama.cpp#8029, huggingface/tokenizers#1449, coder/ai-tokenizer#6: ten times the characters take about ten
/// times as long; a hundred times, if merging were quadratic. (`xtask texts` prints times with full vocabularies.)
#[test]
fn llama_cpp_8029_a_long_word_is_quick() {
    let base64 = {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            char::from(
                b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[(state >> 58) as usize],
            )
        };
        (0..100_000).map(|_| next()).collect::<String>()
    };
    for (name, tokenizer) in one_of_each_kind() {
        for part in ["a", "_", " ", "\n", "東", "🙂", "ab", "1234567890", &base64] {
            let word = |length: usize| part.chars().cycle().take(length).collect::<String>();
            let long = word(100_000);
            let ids = tokenizer.encode(&long, Specials::AsText).unwrap();
            if name != "bert-bge" {
                assert_eq!(decode(&tokenizer, Detokenizer::new(&tokenizer), &ids), long);
            }
            let tenth = word(10_000);
            let times = || (time(&tokenizer, &tenth), time(&tokenizer, &long));
            // Less is noise: the system counts in steps of up to 4 ms.
            let is_linear =
                |(tenth, whole): &(Duration, Duration)| *whole < 25 * (*tenth).max(Duration::from_millis(4));
            // What slows a processor down for a while is no finding: too long is what is so each time.
            let tries: Vec<_> = (0..4).map(|_| times()).take_while(|times| !is_linear(times)).collect();
            let start = part.chars().next();
            assert!(
                tries.len() < 4,
                "{name} {start:?}: times for 10,000 and for 100,000 characters {tries:?}"
            );
        }
    }
}
