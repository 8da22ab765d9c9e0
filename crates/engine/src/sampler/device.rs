//! What of a request's sampling a program can do itself ([`ingle_graph::sample`]), and why it cannot do the rest.

use ingle_graph::sample::{CHANGES, Change, Sampling};

use super::Sampler;
use super::penalties;

impl Sampler {
    /// How the device chooses the token after `tokens`, the one that [`Sampler::sample`] would choose.
    ///
    /// # Errors
    /// Why it is left to the host.
    pub fn on_device(
        &self,
        tokens: &[u32],
        vocabulary: usize,
        logprobs: Option<usize>,
    ) -> Result<Sampling, &'static str> {
        let params = &self.params;
        let left = [
            ("log-probabilities are wanted", logprobs.is_some()),
            ("DRY", params.dry.is_some()),
            ("typical-p", params.typical_p < 1.0 && !params.is_greedy()),
            ("XTC", params.xtc.is_some() && !params.is_greedy()),
            ("Mirostat", params.mirostat.is_some() && !params.is_greedy()),
        ];
        if let Some((why, _)) = left.into_iter().find(|(_, is)| *is) {
            return Err(why);
        }
        Ok(Sampling {
            temperature: params.temperature,
            top_k: params.top_k.try_into().unwrap_or(u32::MAX),
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
            seed: params.seed,
            choice: self.choice,
            position: tokens.len() as u64,
            changes: self.changes(tokens, vocabulary)?,
        })
    }

    /// What [`penalties::apply`] would do, by token.
    fn changes(&self, tokens: &[u32], vocabulary: usize) -> Result<Vec<Change>, &'static str> {
        if !penalties::is_needed(&self.params) {
            return Ok(Vec::new());
        }
        let change = |token| Change { token, bias: 0.0, seen: false, count: 0 };
        let [seen, reply] = penalties::counted_tokens(&self.params, tokens, self.prompt);
        let mut all: Vec<Change> =
            self.params.logit_bias.iter().map(|&(token, bias)| Change { bias, ..change(token) }).collect();
        all.sort_unstable_by_key(|change| change.token);
        if all.windows(2).any(|pair| pair[0].token == pair[1].token) {
            // Two sums are not one.
            return Err("a token has two biases");
        }
        all.extend(seen.iter().map(|&(token, _)| Change { seen: true, ..change(token) }));
        all.extend(reply.iter().map(|&(token, count)| Change { count: count as u32, ..change(token) }));
        all.retain(|change| (change.token as usize) < vocabulary);
        all.sort_by_key(|change| change.token);
        all.dedup_by(|next, kept| {
            let is_same = next.token == kept.token;
            if is_same {
                kept.bias += next.bias;
                kept.seen |= next.seen;
                kept.count += next.count;
            }
            is_same
        });
        match all.len() > CHANGES {
            true => Err("more logits change than there is room for"),
            false => Ok(all),
        }
    }
}
