//! Products of several rows of activations with integer weights, on tensor cores: how a launch cuts them, into tiles of few
//! rows (`tile.cuh`) or panels of many (`panel.cuh`).

use ingle_graph::Rows;

use super::Issue;
use super::linear::{Part, arguments, source};
use crate::driver::{Launch, Span};
use crate::weights::{Form, Matrix};

/// Threads that are the contract's accumulators, a warp for each: those of a panel, half of those of a large tile.
const THREADS: u32 = 256;

/// Columns of a stage.
const STAGE_COLS: u32 = 2048;

/// Most stages in shared memory.
const SLOTS_MAX: u32 = 4;

/// What a block takes of shared memory besides what it asks for.
const OTHER: u32 = 1024 + 128;

/// Rows of the matrix in a panel, columns and number of its stages.
const PANEL_ROWS: u32 = 128;
const PANEL_COLS: u32 = 512;
const PANEL_SLOTS: u32 = 2;

/// Whether products with this form have tiles.
pub(super) fn serves(form: Form) -> bool {
    form.unit().is_some() && !matches!(form, Form::Wide { .. })
}

/// How a launch is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cut {
    /// Rows of activations in a tile.
    n: u32,
    /// Sixteens of a matrix's rows in it.
    halves: u32,
    /// Stages in shared memory.
    slots: u32,
    /// Whether all activations lie there, too.
    stay: bool,
    /// Blocks that a multiprocessor holds.
    blocks: u32,
}

impl Cut {
    /// For `cols` columns, on a device with so much shared memory for a block.
    fn new(form: Form, digits: u32, room: u32, cols: u32, most: u32) -> Self {
        let [few, many] = [(8, 1), (32 / digits, 2)];
        let cut = |(n, halves), blocks, stay, least| {
            // Blocks of a multiprocessor together have as much more as one alone needs besides.
            let have = (most + 1024) / blocks - OTHER;
            let cut = Self { n, halves, slots: 1, stay, blocks };
            let fixed = if stay { rows_bytes(form, digits, n, cols) } else { 0 };
            let slots = have.saturating_sub(fixed) / cut.slot_bytes(form, digits);
            (slots >= least).then_some(Self { slots: slots.min(SLOTS_MAX), ..cut })
        };
        let large = [(many, 1, true, 2), (many, 1, false, 2), (many, 1, true, 1), (many, 1, false, 1)];
        let small = [(few, 2, true, 2), (few, 2, false, 2), (few, 1, true, 2), (few, 1, false, 2)];
        let cuts = large.into_iter().filter(|_| room > 8).chain(small);
        let first =
            cuts.map(|(size, blocks, stay, least)| cut(size, blocks, stay, least)).find_map(|cut| cut);
        first.unwrap_or(Self { n: 8, halves: 1, slots: 1, stay: false, blocks: 1 })
    }

    fn m(&self) -> u32 {
        16 * self.halves
    }

    fn slot_bytes(&self, form: Form, digits: u32) -> u32 {
        let rows = if self.stay { 0 } else { rows_bytes(form, digits, self.n, STAGE_COLS) };
        // The sums of eight accumulators come to lie where a stage's weights lay.
        weights_bytes(form, self.m()).max(8 * self.n * (self.m() + 4) * 4) + rows
    }

    fn bytes(&self, form: Form, digits: u32, cols: u32) -> u32 {
        let fixed = if self.stay { rows_bytes(form, digits, self.n, cols) } else { 0 };
        fixed + self.slots * self.slot_bytes(form, digits)
    }
}

/// Rows of activations in a panel.
fn panel_n(digits: u32, major: u32) -> u32 {
    if digits == 1 && major >= 9 { 64 } else { 32 }
}

/// Shared memory of a panel.
fn panel_bytes(form: Form, digits: u32, n: u32) -> u32 {
    let unit = form.unit().unwrap_or(32) as u32;
    let pairs = PANEL_COLS / unit / 2;
    let [first, second, third] = form.unit_bytes().map(|bytes| bytes as u32);
    // A copy has four bytes at least.
    let small = |bytes: u32| if bytes == 0 { 0 } else { pitch(pairs * (2 * bytes).max(4)) };
    let weights = pitch(pairs * 2 * first) + small(second) + small(third);
    let sums = if form.has_minima() { PANEL_COLS / 16 * 2 } else { 0 };
    let stage = PANEL_ROWS * weights + digits * n * (pitch(PANEL_COLS) + pitch(sums)) + n * pitch(8 * pairs);
    // A third sum of each output, and what the block is to do.
    let parked = if unit == 256 { PANEL_ROWS * n * 4 } else { 0 };
    PANEL_SLOTS * stage + parked + 16
}

/// Whether a launch makes panels of n rows of activations: there are enough to occupy the device, and they fit.
fn panels(room: u32, n: u32, panels: u32, bytes: u32, multiprocessors: u32, most: u32) -> bool {
    // Half a panel is no faster than tiles.
    room > n / 2 && panels * room.div_ceil(n) * 4 >= 3 * multiprocessors && bytes <= most
}

/// Bytes from row to row in shared memory.
fn pitch(bytes: u32) -> u32 {
    if bytes == 0 { 0 } else { ((bytes / 16) | 1) * 16 }
}

/// Shared memory of a stage's weights.
fn weights_bytes(form: Form, m: u32) -> u32 {
    let units = form.unit().map_or(0, |unit| STAGE_COLS / unit as u32);
    m * form.unit_bytes().iter().map(|&bytes| pitch(units * bytes as u32)).sum::<u32>()
}

/// Shared memory of `cols` columns of n rows of activations.
fn rows_bytes(form: Form, digits: u32, n: u32, cols: u32) -> u32 {
    let units = form.unit().map_or(0, |unit| cols / unit as u32);
    let padded = |bytes: u32| pitch(bytes.next_multiple_of(16));
    let sums = if form.has_minima() { padded(cols / 16 * 2) } else { 0 };
    digits * n * (padded(cols) + sums) + n * padded(4 * units)
}

/// The launch of parts that join.
pub(super) fn issue<'a>(
    step: Span<'a>,
    which: Rows,
    room: u32,
    digits: u32,
    parts: &[&Part<'a>],
) -> Issue<'a> {
    let matrix: &Matrix = parts[0].matrix;
    let form = matrix.layout().form;
    let outputs = || parts.iter().map(|part| part.matrix.layout().rows as u32);
    let limits = matrix.limits();
    let (multiprocessors, most) = (limits.multiprocessors, limits.shared_bytes as u32);
    let entries = source(form).entries;
    let n = panel_n(digits, limits.capability.0);
    let (count, bytes) =
        (outputs().map(|rows| rows.div_ceil(PANEL_ROWS)).sum(), panel_bytes(form, digits, n));
    if panels(room, n, count, bytes, multiprocessors, most) {
        let shape = Launch { shared_bytes: bytes, ..Launch::new([room.div_ceil(n), count], THREADS) };
        let entry = entries[5 + digits as usize];
        return Issue { entry, shape, arguments: arguments(step, which, room, 0, parts) };
    }
    let cols = parts[0].matrix.layout().cols as u32;
    let cut = Cut::new(form, digits, room, cols, most);
    let tiles: u32 = outputs().map(|rows| rows.div_ceil(cut.m())).sum();
    let blocks = tiles.min(multiprocessors.max(1) * cut.blocks);
    let mut shape = Launch::new([blocks, room.div_ceil(cut.n)], THREADS * cut.halves);
    shape.shared_bytes = cut.bytes(form, digits, cols);
    // After those for one row.
    let entry = entries[2 * digits as usize + usize::from(cut.n > 8)];
    let told = cut.slots | u32::from(cut.stay) << 8;
    Issue { entry, shape, arguments: arguments(step, which, room, told, parts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_fit_in_shared_memory() {
        let forms = [Form::Q4_0, Form::Q4_1, Form::Q5_0, Form::Q5_1, Form::Q8_0, Form::IQ4NL, Form::MXFP4];
        let forms = forms.into_iter().chain([Form::Q4K, Form::Q5K, Form::Q6K, Form::IQ4XS]);
        // Compute capabilities 8.0, 8.9, 9.0 and 10.0.
        for (form, kib) in forms.flat_map(|form| [163, 99, 227, 227].map(|kib| (form, kib))) {
            for (digits, room) in [(1, 2), (1, 8), (1, 9), (1, 512), (2, 8), (2, 64)] {
                for cols in [256, 1024, 4096, 14336, 65536] {
                    let cut = Cut::new(form, digits, room, cols, kib << 10);
                    let bytes = cut.bytes(form, digits, cols);
                    assert!(
                        cut.blocks * (bytes + OTHER) <= (kib + 1) << 10,
                        "{form:?} {digits} {room} {cut:?}"
                    );
                    assert!((1..=SLOTS_MAX).contains(&cut.slots), "{cut:?}");
                }
            }
        }
        let cut = |room, cols| Cut::new(Form::Q4K, 1, room, cols, 227 << 10);
        assert_eq!(cut(8, 4096), Cut { n: 8, halves: 1, slots: 4, stay: true, blocks: 2 });
        assert_eq!(cut(8, 14336), Cut { n: 8, halves: 1, slots: 3, stay: false, blocks: 2 });
        assert_eq!(cut(32, 4096), Cut { n: 32, halves: 2, slots: 2, stay: true, blocks: 1 });
        assert_eq!(cut(32, 14336), Cut { n: 32, halves: 2, slots: 2, stay: false, blocks: 1 });
    }
}
