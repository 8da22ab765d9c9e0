//! Graphs of decode steps: captured once, proved against eager execution, then replayed.
//!
//! A program's launches refer to nothing that moves: arena, pools and the step's data keep their addresses, and what changes
//! from step to step is in that data. So a graph of them is a step, whatever its inputs are. That is not believed but
//! shown, when the program is prepared: three steps of different lengths and slots run eagerly and as the graph, with
//! everything they write poisoned before each, and all they wrote is compared. A replay that did nothing, or that went to a
//! place of another time, leaves poison.
//!
//! Rows of a proof write to page 0, which no sequence owns.

use ingle_graph::sample::{Change, Sampling};
use ingle_graph::{Bucket, Inputs, KvInputs, PAGE};

use crate::Result;
use crate::backend::{Model, Ready};
use crate::driver::{Graph, Reservation, Span, Stream};

/// What scratch and outputs are filled with before a step: NaN as f32.
pub const POISON: u8 = 0xFF;

/// What page 0 is filled with: small numbers in every KV type, since steps read there too.
const PATTERN: u8 = 0x2C;

/// Positions of the first row in the steps of a proof, as far as the context reaches: the first token, one across a chunk's
/// border, and one far on.
const POSITIONS: [usize; 3] = [0, 255, 4095];

/// Rows that find a slot of their own in page 0; more write nowhere in a proof.
const SLOTS: usize = PAGE;

/// Replays after which one is compared with eager execution again.
pub const SAMPLE: u64 = 4096;

/// What became of a program's graph.
pub enum State {
    /// It runs eagerly, and why.
    Eager(String),
    /// It is replayed.
    Trusted {
        /// The graph.
        graph: Graph,
        /// Replays so far.
        replays: u64,
    },
}

/// Whether steps of a bucket are captured: those that add one token to each sequence. A prompt runs once.
fn is_captured(bucket: &Bucket) -> bool {
    bucket.t == bucket.s && bucket.t == bucket.r
}

/// All that a program's steps write.
struct Writes<'a> {
    scratch: [Span<'a>; 2],
    outputs: Vec<Span<'a>>,
    pages: Vec<Span<'a>>,
}

impl<'a> Writes<'a> {
    fn new(
        ready: &'a Ready,
        model: &'a Model,
        arena: &'a Reservation,
        spare: &'a Reservation,
    ) -> Result<Self> {
        let outputs = ready.outputs.iter().map(|output| output.all()).collect();
        let mut pages = Vec::new();
        for pool in &model.pools {
            let page = pool.page_bytes(model.kv_type);
            pages.extend([pool.keys.span(0, page)?, pool.values.span(0, page)?]);
        }
        let scratch = [arena.span(0, arena.backed_bytes())?, spare.span(0, spare.backed_bytes())?];
        Ok(Self { scratch, outputs, pages })
    }

    /// Poisons everything; whether outputs and pages then hold it.
    fn poison(&self, stream: &Stream) -> Result<bool> {
        self.scratch.iter().chain(&self.outputs).try_for_each(|&span| stream.fill(span, POISON))?;
        self.pages.iter().try_for_each(|&span| stream.fill(span, PATTERN))?;
        let all = self.read(stream)?;
        let (outputs, pages) = all.split_at(self.outputs.len());
        let full = |spans: &[Vec<u8>], of: u8| spans.iter().flatten().all(|&byte| byte == of);
        Ok(full(outputs, POISON) && full(pages, PATTERN))
    }

    /// The bytes of outputs and pages.
    fn read(&self, stream: &Stream) -> Result<Vec<Vec<u8>>> {
        let read = |span: &Span<'a>| {
            let mut bytes = vec![0; span.bytes()];
            stream.read(&mut bytes, *span)?;
            Ok(bytes)
        };
        self.outputs.iter().chain(&self.pages).map(read).collect()
    }
}

/// Numbers between -1 and 1, others in each step of a proof.
fn pattern(size: usize, first: usize) -> Vec<f32> {
    (0..size).map(|i| ((i * 37 + first * 11) % 201) as f32 / 100.0 - 1.0).collect()
}

/// Positions and cells of `rows` rows from position `first` on, or as far on as the context has room for all. No two rows have
/// the same slot, or which of them a step leaves there would be a matter of chance: rows beyond the slots write nowhere.
fn places(rows: usize, first: usize, context: usize) -> (Vec<u32>, Vec<u32>) {
    let first = first.min(context.saturating_sub(rows));
    let place = |row: usize| {
        let position = (first + row).min(context - 1) as u32;
        let own = row < SLOTS && first + row < context;
        (position, if own { position % PAGE as u32 } else { u32::MAX })
    };
    (0..rows).map(place).unzip()
}

/// How the token of a row of a proof is chosen: the likeliest, or one that is drawn, with some logits changed.
fn sampling(row: usize, first: usize) -> Sampling {
    let changes = (0..row as u32 % 2).map(|token| Change { token, bias: 0.5, seen: true, count: 1 });
    Sampling {
        temperature: [0.0, 1.0, 0.5][(row + first) % 3],
        top_k: [0, 20][row % 2],
        top_p: [1.0, 0.9][row / 2 % 2],
        repetition_penalty: 1.1,
        seed: first as u64,
        position: row as u64,
        changes: changes.collect(),
        ..Sampling::greedy()
    }
}

/// A step of the proof: each row is a sequence of its own, whose pages are all page 0.
fn inputs(ready: &Ready, groups: usize, first: usize, context: usize) -> Inputs {
    let bucket = &ready.program.key.bucket;
    let rows = bucket.t;
    let (positions, cells) = places(rows, first, context);
    let kv = KvInputs { cells, tables: vec![0; rows], table_stride: 1 };
    Inputs {
        tokens: (0..rows).map(|row| row as u32 % 2).collect(),
        positions,
        sequences: (0..rows as u32).collect(),
        kv: vec![kv; groups],
        wanted: (0..rows as u32).collect(),
        sampling: (0..rows).map(|row| Some(sampling(row, first))).collect(),
        carried: ready.carried_sizes(bucket).map(|size| pattern(size, first)).collect(),
    }
}

/// Captures a program and proves the graph.
///
/// # Errors
/// A call of the driver that failed outside the window. What speaks against the graph is its state.
pub fn prove(
    ready: &mut Ready,
    model: &Model,
    stream: &Stream,
    arena: &Reservation,
    spare: &Reservation,
) -> Result<State> {
    let bucket = ready.program.key.bucket;
    if !is_captured(&bucket) {
        return Ok(State::Eager("a prompt runs once".into()));
    }
    let tally = stream.context().ledger().tally();
    let graph = match stream.capture(|| ready.issue(stream)) {
        Ok(graph) => graph,
        Err(error) => return Ok(State::Eager(error.to_string())),
    };
    let after = stream.context().ledger().tally();
    if after.live_bytes != tally.live_bytes {
        return Ok(State::Eager(format!(
            "the window allocated {} bytes",
            after.live_bytes.saturating_sub(tally.live_bytes)
        )));
    }
    for first in POSITIONS {
        let inputs = inputs(ready, model.kv.pages.len(), first, model.kv.context);
        if let Some(why) = compare(ready, model, stream, arena, spare, &inputs, &graph)? {
            return Ok(State::Eager(why));
        }
    }
    Ok(State::Trusted { graph, replays: 0 })
}

/// Runs a step eagerly and as the graph; says what speaks against the graph.
fn compare(
    ready: &mut Ready,
    model: &Model,
    stream: &Stream,
    arena: &Reservation,
    spare: &Reservation,
    inputs: &Inputs,
    graph: &Graph,
) -> Result<Option<String>> {
    ready.upload(model, stream, inputs)?;
    stream.synchronize()?;
    let writes = Writes::new(ready, model, arena, spare)?;
    let unpoisoned = || Ok(Some("what a step writes could not be poisoned".into()));
    if !writes.poison(stream)? {
        return unpoisoned();
    }
    ready.issue(stream)?;
    let eager = writes.read(stream)?;
    // Where eager execution leaves nothing but poison, a replay that did nothing would agree.
    let finite = |bytes: &[u8]| bytes.chunks_exact(4).any(|x| x[3] & 0x7F != 0x7F || x[2] & 0x80 == 0);
    if let Some(at) = (0..writes.outputs.len()).find(|&at| !finite(&eager[at])) {
        let name = &ready.program.outputs[at].name;
        return Ok(Some(format!("eager execution leaves no finite number in {name}")));
    }
    if !writes.poison(stream)? {
        return unpoisoned();
    }
    graph.launch(stream)?;
    let replayed = writes.read(stream)?;
    let outputs = ready.program.outputs.iter().map(|output| output.name.clone());
    let layers = (0..model.pools.len())
        .flat_map(|layer| ["keys", "values"].map(|what| format!("{what} of layer {layer}")));
    let mut names = outputs.chain(layers);
    let at = eager.iter().zip(&replayed).position(|(a, b)| a != b);
    let name = at.map(|at| names.nth(at).unwrap_or_default());
    Ok(name.map(|name| format!("replay differs from eager execution in {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At every length of the context, not only at whole pages.
    #[test]
    fn rows_of_a_proof_write_to_slots_of_their_own() {
        for (rows, context) in (1..=64).flat_map(|rows| (1..=130).map(move |context| (rows, context))) {
            for first in POSITIONS {
                let (positions, cells) = places(rows, first, context);
                let mut written: Vec<u32> = cells.into_iter().filter(|&cell| cell != u32::MAX).collect();
                assert_eq!(written.len(), rows.min(SLOTS).min(context), "{rows} {context} {first}");
                written.sort_unstable();
                written.dedup();
                assert_eq!(written.len(), rows.min(SLOTS).min(context), "{rows} {context} {first}");
                assert!(positions.iter().all(|&position| (position as usize) < context));
            }
        }
    }
}
