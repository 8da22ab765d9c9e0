//! The KV store and attention: which rows and heads make one item.

use ingle_graph::op::RopeId;
use ingle_graph::{AttentionSpec, FloatArithmetic, PAGE};
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::{ALONE, Emission, Frame, Scratch, Value, quantize, spread};
use crate::kernels::attention::{self, Block, Merge, Sink};
use crate::kernels::kv::{Pages, Store};
use crate::kernels::rope::Rope;
use crate::memory::Aligned;
use crate::threads::Worker;

/// Writes keys and values of all rows, with q and k rotated first where the op says so. An item is one row and one head
/// of keys and values with its query heads.
pub fn store(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    pages: Pages<'_>,
    k: &Value,
    v: &Value,
    rotate: Option<&(RopeId, Value, Value)>,
) {
    let (heads, head_dim) = (pages.layout.heads, pages.layout.head_dim);
    let mut saturated = 0;
    let cells = &frame.inputs.kv[pages.group].cells;
    spread(worker, k.rows(frame) * heads, |item| {
        let (row, head) = (item / heads, item % heads);
        let cell = cells[row] as usize;
        // SAFETY: the page is inside the pool, as `Inputs::check` made sure.
        pages.layout.prefetch(unsafe { pages.page(cell / PAGE) }, head, cell % PAGE);
        let key = scratch.row.as_mut_ptr();
        // SAFETY: one head of each value's row; the page is inside the pool, as `Inputs::check` made sure; this cell
        // and head are nobody else's.
        unsafe {
            let from = k.row(frame, row).add(head * head_dim);
            match rotate {
                None => from.copy_to_nonoverlapping(key, head_dim),
                Some((rope, q, y)) => {
                    let rope = |x, y, heads| Rope {
                        table: &frame.ropes[rope.0 as usize],
                        position: frame.inputs.positions[row] as usize,
                        x,
                        y,
                        heads,
                        head_dim,
                    };
                    frame.isa.run(rope(from, key, 1));
                    let all = q.cols() / head_dim;
                    let mine = head * all / heads..(head + 1) * all / heads;
                    let first = mine.start * head_dim;
                    let (q, y) = (q.row(frame, row).add(first), y.row(frame, row).add(first));
                    frame.isa.run(rope(q, y, mine.len()));
                }
            }
            frame.isa.run(Store {
                layout: pages.layout,
                page: pages.page(cell / PAGE),
                head,
                at: cell % PAGE,
                key,
                value: v.row(frame, row).add(head * head_dim),
                saturated: &mut saturated,
            });
        }
    });
    if saturated > 0 {
        frame.saturated.fetch_add(saturated, Ordering::Relaxed);
    }
}

/// Attention of all rows. With many rows an item is a block of them and one head of keys and values; with few, one row,
/// one such head and one chunk of positions, and the chunks of a row are merged afterwards.
pub fn attend(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    spec: &AttentionSpec,
    float: FloatArithmetic,
    q: &Value,
    emit: &Emission,
) {
    let rows = q.rows(frame);
    let start = |memory: &Option<Aligned>| memory.as_ref().map_or(std::ptr::null_mut(), Aligned::as_mut_ptr);
    let out = match emit.f32 {
        Some(y) => y.row(frame, 0),
        None => start(&frame.spare.rows).cast(),
    };
    let chunks = |row: usize| attention::chunks(spec, frame.inputs.positions[row] as usize);
    let longest = (0..rows).map(|row| chunks(row).len()).max().unwrap_or(0);
    let pages = frame.pool.layer(spec.layer);
    let group = spec.heads / spec.kv_heads;
    let workers = worker.workers();
    let block = |scratch: &mut Scratch, rows: Range<usize>, kv_head, chunks, next, sink| {
        let q = q.row(frame, 0);
        let block = Block { spec, float, pages, inputs: frame.inputs, q, rows, kv_head, chunks, next, sink };
        block.run(frame.isa, &mut scratch.attention);
    };
    let finish = |worker: &mut Worker<'_>, _: &mut Scratch| quantize(frame, worker, out, emit);
    if longest > 1 && rows * spec.kv_heads < few(workers) {
        let partial = attention::partial_len(spec.head_dim);
        let stride = (1 + longest) * partial;
        let partials = start(&frame.spare.partials).cast::<f32>();
        let parts = |worker: &mut Worker<'_>, scratch: &mut Scratch| {
            worker.share(rows * spec.kv_heads * longest, |item| {
                let place = |item: usize| {
                    let (row, kv_head) = (item / longest / spec.kv_heads, item / longest % spec.kv_heads);
                    (row < rows).then(|| (row, kv_head, chunks(row).start + item % longest))
                };
                let Some((row, kv_head, chunk)) = place(item) else { return };
                if chunk < chunks(row).end {
                    let at = 1 + chunk - chunks(row).start;
                    let first = (row * spec.heads + kv_head * group) * stride + at * partial;
                    // SAFETY: `needs` made room for these rows, all heads and the longest context.
                    let sink = Sink::Partial { out: unsafe { partials.add(first) }, stride };
                    block(scratch, row..row + 1, kv_head, chunk..chunk + 1, place(item + workers), sink);
                }
            });
        };
        let merge = |worker: &mut Worker<'_>, _: &mut Scratch| {
            worker.share(rows * spec.kv_heads, |item| {
                let chunks = chunks(item / spec.kv_heads).len();
                for head in item * group..(item + 1) * group {
                    // SAFETY: as above; a head of a row of the result.
                    let (partials, out) =
                        unsafe { (partials.add(head * stride), out.add(head * spec.head_dim)) };
                    frame.isa.run(Merge { spec, partials, chunks, out });
                }
            });
        };
        let merged = |worker: &mut Worker<'_>, scratch: &mut Scratch| {
            worker.then(rows * q.cols() <= ALONE, scratch, merge, finish);
        };
        worker.then(rows * spec.heads * stride <= ALONE, scratch, parts, merged);
    } else {
        // Rows of different sequences share nothing: blocks of them would only end less evenly.
        let height = (attention::queries(float) / group)
            .min(rows * spec.kv_heads / few(workers))
            .min(rows.div_ceil(frame.inputs.sequence_count().max(1)))
            .max(1);
        let blocks = rows.div_ceil(height);
        let all = |worker: &mut Worker<'_>, scratch: &mut Scratch| {
            worker.share(blocks * spec.kv_heads, |item| {
                // Later rows look at more keys: they go first.
                let place = |item: usize| {
                    let before =
                        (item / spec.kv_heads < blocks).then(|| blocks - 1 - item / spec.kv_heads)?;
                    Some((before * height, item % spec.kv_heads, 0))
                };
                let Some((first, kv_head, _)) = place(item) else { return };
                let mut rest = first..rows.min(first + height);
                let next = place(item + workers);
                while !rest.is_empty() {
                    let sequence = frame.inputs.sequences[rest.start];
                    let same =
                        rest.clone().take_while(|&row| frame.inputs.sequences[row] == sequence).count();
                    let run = rest.start..rest.start + same;
                    rest.start += same;
                    let from = run.clone().map(|row| chunks(row).start).min().unwrap_or(0);
                    let to = run.clone().map(|row| chunks(row).end).max().unwrap_or(0);
                    block(scratch, run, kv_head, from..to, next, Sink::Rows { out, stride: q.cols() });
                }
            });
        };
        worker.then(rows * q.cols() <= ALONE, scratch, all, finish);
    }
}

/// Rows times heads of keys and values below which there is too little to share out without cutting along chunks.
pub fn few(workers: usize) -> usize {
    4 * workers
}
