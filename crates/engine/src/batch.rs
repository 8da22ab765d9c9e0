//! A step plan becomes the step's inputs.

use ingle_graph::{Inputs, PAGE};

/// What a batch needs to know of one sequence's share.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// All known tokens.
    pub tokens: &'a [u32],
    /// Tokens already computed.
    pub computed: usize,
    /// Tokens to compute now.
    pub n: usize,
    /// Pages of the sequence, enough for `computed + n`.
    pub pages: &'a [u32],
    /// Whether every row's result is wanted; otherwise only that of the last known token.
    pub all_rows: bool,
}

/// Fills `inputs` (cleared first; nothing is allocated once it has grown) and returns, for each part, how many wanted
/// rows it has.
pub fn fill(inputs: &mut Inputs, parts: &[Part<'_>], table_stride: usize) -> Vec<usize> {
    for list in [
        &mut inputs.tokens,
        &mut inputs.positions,
        &mut inputs.cells,
        &mut inputs.sequences,
        &mut inputs.tables,
        &mut inputs.wanted,
    ] {
        list.clear();
    }
    inputs.table_stride = table_stride;
    let mut wanted = Vec::with_capacity(parts.len());
    for (s, part) in parts.iter().enumerate() {
        let before = inputs.wanted.len();
        for position in part.computed..part.computed + part.n {
            if part.all_rows || position + 1 == part.tokens.len() {
                inputs.wanted.push(inputs.tokens.len() as u32);
            }
            inputs.tokens.push(part.tokens[position]);
            inputs.positions.push(position as u32);
            inputs.cells.push(part.pages[position / PAGE] * PAGE as u32 + (position % PAGE) as u32);
            inputs.sequences.push(s as u32);
        }
        let padding = table_stride - part.pages.len();
        inputs.tables.extend(part.pages.iter().copied().chain(std::iter::repeat_n(0, padding)));
        wanted.push(inputs.wanted.len() - before);
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_two_sequences() {
        let tokens: Vec<u32> = (100..140).collect();
        let parts = [
            Part { tokens: &tokens, computed: 31, n: 2, pages: &[4, 9], all_rows: false },
            Part { tokens: &tokens[..3], computed: 2, n: 1, pages: &[7], all_rows: false },
        ];
        let mut inputs = Inputs::default();
        assert_eq!(fill(&mut inputs, &parts, 2), [0, 1]);
        assert_eq!(inputs.tokens, [131, 132, 102]);
        assert_eq!(inputs.positions, [31, 32, 2]);
        assert_eq!(inputs.cells, [4 * 32 + 31, 9 * 32, 7 * 32 + 2]);
        assert_eq!(inputs.sequences, [0, 0, 1]);
        assert_eq!(inputs.tables, [4, 9, 7, 0]);
        assert_eq!(inputs.wanted, [2]);
    }
}
