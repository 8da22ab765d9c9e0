//! Requests to tokens: scheduling, paged KV, sampling, text.
