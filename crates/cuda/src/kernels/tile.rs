//! Products of several rows of activations with integer weights, on tensor cores: how a launch cuts them, into tiles of few
//! rows (`tile.cuh`) or panels of many (`panel.cuh`).

use ingle_graph::Rows;

use super::Issue;
use super::linear::{Part, arguments, source};
use crate::driver::{Launch, Span};
use crate::weights::{Form, Matrix};

/// Threads of a block: a warp for each of the contract's accumulators.
const THREADS: u32 = 256;

/// Columns of a stage.
const STAGE_COLS: u32 = 2048;

/// Most stages in shared memory.
const SLOTS_MAX: u32 = 4;

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
    /// Rows of a matrix in a tile: 16 or 32.
    m: u32,
    /// Rows of activations.
    n: u32,
    /// Stages in shared memory.
    slots: u32,
    /// Blocks that a multiprocessor holds.
    blocks: u32,
}

impl Cut {
    /// For all rows `outputs` of a launch's matrices, on a device of so many multiprocessors with so much shared memory for
    /// a block.
    fn new(form: Form, digits: u32, room: u32, outputs: u32, multiprocessors: u32, most: u32) -> Self {
        let slots_of = |m, n, blocks| -> u32 {
            // A block takes 1 KiB more than it asks for, and together they have so much more than one alone.
            let each: u32 = (most + 1024) / blocks - 1024;
            (each / stage_bytes(form, digits, m, n)).min(SLOTS_MAX)
        };
        // Tiles of 16 rows where those of 32 would leave many multiprocessors idle.
        let large = outputs.div_ceil(32) * 4 >= 3 * multiprocessors;
        let sizes: &[u32] = if large { &[32, 16] } else { &[16] };
        let many = sizes.iter().map(|&m| (m, 32 / digits, 1));
        let few = sizes.iter().flat_map(|&m| [(m, 8, 2), (m, 8, 1)]);
        let cuts = many.filter(|_| room > 8).chain(few).map(|(m, n, blocks)| {
            let slots = slots_of(m, n, blocks);
            Self { m, n, slots, blocks }
        });
        let smallest = Self { m: 16, n: 8, slots: slots_of(16, 8, 1).max(1), blocks: 1 };
        cuts.into_iter().find(|cut| cut.slots >= 2).unwrap_or(smallest)
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

/// Shared memory of a stage.
fn stage_bytes(form: Form, digits: u32, m: u32, n: u32) -> u32 {
    let units = form.unit().map_or(0, |unit| STAGE_COLS / unit as u32);
    let weights: u32 = form.unit_bytes().iter().map(|&bytes| pitch(units * bytes as u32)).sum();
    let sums = if form.has_minima() { STAGE_COLS / 16 * 2 } else { 0 };
    m * weights + digits * n * (pitch(STAGE_COLS) + pitch(sums)) + n * pitch(4 * units)
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
    let cut = Cut::new(form, digits, room, outputs().sum(), multiprocessors, most);
    let tiles: u32 = outputs().map(|rows| rows.div_ceil(cut.m)).sum();
    let blocks = tiles.min(multiprocessors.max(1) * cut.blocks);
    let mut shape = Launch::new([blocks, room.div_ceil(cut.n)], THREADS);
    shape.shared_bytes = cut.slots * stage_bytes(form, digits, cut.m, cut.n);
    // After those for one row.
    let entry = entries[2 * digits as usize + usize::from(cut.n > 8)];
    Issue { entry, shape, arguments: arguments(step, which, room, cut.m | (cut.slots << 8), parts) }
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
                for outputs in [1, 1024, 4096, 28672] {
                    let cut = Cut::new(form, digits, room, outputs, 132, kib << 10);
                    let bytes = cut.slots * stage_bytes(form, digits, cut.m, cut.n);
                    assert!(
                        cut.blocks * (bytes + 1024) <= (kib + 1) << 10,
                        "{form:?} {digits} {room} {cut:?}"
                    );
                    assert!((1..=SLOTS_MAX).contains(&cut.slots) && matches!(cut.m, 16 | 32), "{cut:?}");
                    // The sums of eight warps fit where a stage lay.
                    assert!(
                        8 * cut.n * (cut.m + 4) * 4 <= stage_bytes(form, digits, cut.m, cut.n),
                        "{cut:?}"
                    );
                }
            }
        }
        let cut = |room, outputs| Cut::new(Form::Q4K, 1, room, outputs, 132, 227 << 10);
        assert_eq!(cut(8, 4096), Cut { m: 32, n: 8, slots: 2, blocks: 2 });
        assert_eq!(cut(32, 4096), Cut { m: 32, n: 32, slots: 2, blocks: 1 });
        assert_eq!(cut(32, 1024).m, 16);
    }
}
