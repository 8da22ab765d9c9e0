//! A step plan becomes the step's inputs.

use ingle_graph::{Inputs, KvInputs, PAGE};

use crate::kv::Span;

/// What a batch needs to know of one sequence's share.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Tokens already computed.
    pub computed: usize,
    /// Tokens to compute now.
    pub n: usize,
    /// Pages of the sequence, by KV group: from the first one the first row sees, enough for `computed + n`.
    pub spans: &'a [Span],
    /// Whether every row's result is wanted; otherwise only that of the last known token.
    pub all_rows: bool,
}

/// Fills `inputs` (cleared first; nothing is allocated once it has grown) with page tables of `strides[g]` pages for group
/// `g`, and returns, for each part, how many wanted rows it has.
pub fn fill(inputs: &mut Inputs, parts: &[Part<'_>], strides: &[usize]) -> Vec<usize> {
    let Inputs { tokens, positions, sequences, kv, wanted, sampling, carried: _ } = inputs;
    sampling.clear();
    for list in [&mut *tokens, positions, sequences, wanted] {
        list.clear();
    }
    let mut wanted_of_parts = Vec::with_capacity(parts.len());
    for (s, part) in parts.iter().enumerate() {
        let before = wanted.len();
        for position in part.computed..part.computed + part.n {
            if part.all_rows || position + 1 == part.tokens.len() {
                wanted.push(tokens.len() as u32);
            }
            tokens.push(part.tokens[position]);
            positions.push(position as u32);
            sequences.push(s as u32);
        }
        wanted_of_parts.push(wanted.len() - before);
    }
    kv.resize_with(strides.len(), KvInputs::default);
    for (group, (kv, &stride)) in kv.iter_mut().zip(strides).enumerate() {
        kv.table_stride = stride;
        kv.cells.clear();
        kv.tables.clear();
        for part in parts {
            let span = &part.spans[group];
            kv.cells.extend(
                (part.computed..part.computed + part.n)
                    .map(|position| span.page(position) * PAGE as u32 + (position % PAGE) as u32),
            );
            let table = kv.tables.len();
            kv.tables.resize(table + stride, 0);
            for (i, &page) in span.pages.iter().enumerate() {
                kv.tables[table + (span.first + i) % stride] = page;
            }
        }
    }
    wanted_of_parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first: usize, pages: &[u32]) -> Span {
        Span { first, pages: pages.iter().copied().collect() }
    }

    #[test]
    fn rows_of_two_sequences() {
        let tokens: Vec<u32> = (100..200).collect();
        let long = [span(0, &[4, 9, 5]), span(1, &[6, 8])];
        let short = [span(0, &[7]), span(0, &[2])];
        let parts = [
            Part { tokens: &tokens[..70], computed: 63, n: 2, spans: &long, all_rows: false },
            Part { tokens: &tokens[..3], computed: 2, n: 1, spans: &short, all_rows: false },
        ];
        let mut inputs = Inputs::default();
        // A second time changes nothing.
        for _ in 0..2 {
            assert_eq!(fill(&mut inputs, &parts, &[3, 2]), [0, 1]);
            assert_eq!(inputs.tokens, [163, 164, 102]);
            assert_eq!(inputs.positions, [63, 64, 2]);
            assert_eq!(inputs.sequences, [0, 0, 1]);
            assert_eq!(inputs.wanted, [2]);
            let [all, window] = &inputs.kv[..] else { panic!("two groups") };
            assert_eq!(all.cells, [9 * 32 + 31, 5 * 32, 7 * 32 + 2]);
            assert_eq!(all.tables, [4, 9, 5, 7, 0, 0]);
            assert_eq!(window.cells, [6 * 32 + 31, 8 * 32, 2 * 32 + 2]);
            assert_eq!(window.tables, [8, 6, 2, 0], "page 2 is entry 0 of a ring of 2");
        }
    }
}
