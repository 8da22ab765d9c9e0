//! Products with one or more matrices, shared out by tiles of output rows.

use std::ops::Range;

use ingle_graph::Activation;
use ingle_tensor::quant;

use super::{Emission, Frame, Part, Scratch, Value};
use crate::dot::{Activations, InPtr, OutPtr, TILE, Tail};
use crate::kernels::elementwise::Glu;
use crate::kernels::float::{Float, FloatProduct, panels};
use crate::threads::Worker;

/// Rows up to which a step is bound by reading weights.
const ROWS_FEW: usize = 8;

/// Bytes of weights that one item reads at most, with few rows: some microseconds of work, so that no worker waits long
/// for another at the end.
const ITEM_BYTES: usize = 256 << 10;

/// Quantized output rows that are decoded at a time for a float product.
pub const DECODED: usize = 2;

/// Runs the parts of a product: their tiles, one after the other, are the items.
pub fn linear(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    parts: &[Part],
    y: &[Value],
    residual: Option<&Value>,
) {
    let tiles = |part: &Part| frame.weights.declared(part.weight).rows.div_ceil(TILE);
    let residual = residual.map(|value| value.row(frame, 0).cast_const());
    share(frame, worker, scratch, parts, parts.iter().map(tiles).sum(), 2, |scratch, x_rows, mut run| {
        for (part, y) in parts.iter().zip(y) {
            let here = tiles(part);
            if run.start < here && !run.is_empty() {
                let to = OutPtr::new(y.row(frame, 0), y.cols());
                product(frame, scratch, part, residual, x_rows.clone(), run.start..run.end.min(here), to);
            }
            run = run.start.saturating_sub(here)..run.end.saturating_sub(here);
        }
    });
}

/// Columns of a gated unit that are not cut: whole units of the quantized results, and pairs of tiles.
fn uncut(emit: &Emission) -> usize {
    let units = emit.quantized.iter().filter_map(|value| value.layout).map(|layout| layout.unit);
    units.max().unwrap_or(1).next_multiple_of(2 * TILE)
}

/// Columns of a gated unit that are computed together: many with few rows, since each pair of products costs a call, and
/// as few with many rows as stay in cache until the unit reads them.
fn together(rows: usize, emit: &Emission) -> usize {
    let uncut = uncut(emit);
    (GATED_BYTES / (2 * size_of::<f32>() * rows.max(1) * uncut)).max(1) * uncut
}

/// Bytes of products that a gated unit reads at a time.
const GATED_BYTES: usize = 256 << 10;

/// Bytes of both products of at most `rows` rows.
pub fn gated_bytes(rows: usize, emit: &Emission) -> usize {
    GATED_BYTES.max(2 * size_of::<f32>() * rows * uncut(emit))
}

/// A gated unit over the products of two parts: some columns of both at a time, which stay in cache.
pub fn gated(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    parts: &[Part],
    act: Activation,
    emit: &Emission,
) {
    let targets = emit.targets(frame);
    let cols = parts.first().map_or(0, |part| frame.weights.declared(part.weight).rows);
    let uncut = uncut(emit);
    share(frame, worker, scratch, parts, cols.div_ceil(uncut), 1, |scratch, rows, run| {
        let gate = scratch.gated.bytes(gated_bytes(rows.len(), emit)).cast::<f32>();
        let width = together(rows.len(), emit);
        let up = gate.wrapping_add(rows.len() * width);
        let end = cols.min(run.end * uncut);
        for first in (run.start * uncut..end).step_by(width) {
            let n = width.min(end - first);
            let tiles = first / TILE..(first + n).div_ceil(TILE);
            for (part, at) in parts.iter().zip([gate, up]) {
                let to = OutPtr::new(at.wrapping_sub(rows.start * width + first), width);
                product(frame, scratch, part, None, rows.clone(), tiles.clone(), to);
            }
            let (y, y_stride) = match emit.f32 {
                Some(y) => (y.row(frame, rows.start).wrapping_add(first), y.cols()),
                None => (gate, width),
            };
            let (rows, quantized) = (rows.clone(), &*targets);
            frame.isa.run(Glu { act, gate, up, stride: width, y, y_stride, n, quantized, rows, col: first });
        }
    });
}

/// Shares out `all` pieces of the output columns of products, `together` of them at a time with many rows: a call gets
/// rows of x and a run of pieces.
fn share(
    frame: &Frame<'_>,
    worker: &mut Worker<'_>,
    scratch: &mut Scratch,
    parts: &[Part],
    all: usize,
    together: usize,
    mut f: impl FnMut(&mut Scratch, Range<usize>, Range<usize>),
) {
    let rows = parts.first().map_or(0, |part| part.x.rows(frame));
    // Few rows: small runs, for an even end. Many: long ones, since each pays for arranging its activations, and of pairs,
    // since some kernels take two tiles at a time.
    let (pieces, together) = if rows <= ROWS_FEW {
        let bytes: usize = parts.iter().map(|part| frame.weights.declared(part.weight).bytes()).sum();
        ((8 * worker.workers()).max(bytes / ITEM_BYTES), 1)
    } else {
        (4 * worker.workers(), together)
    };
    let length = all.div_ceil(pieces).max(1).next_multiple_of(together);
    let runs = all.div_ceil(length);
    // As many rows as a worker keeps arranged from one item to the next, and all tiles of these before more rows.
    let at_once = parts.iter().map(|part| rows_at_once(frame, part)).min().unwrap_or(rows).max(1);
    let blocks = rows.div_ceil(at_once);
    scratch.product.forget();
    scratch.floats.forget();
    // The runs that a worker begins with are neighbours, so that what it asks memory for ahead of its reading is its own.
    let workers = worker.workers();
    let each = runs.div_ceil(workers);
    worker.share(workers * each * blocks, |item| {
        let (block, i) = (item / (workers * each), item % (workers * each));
        let i = i % workers * each + i / workers;
        if i < runs {
            let x_rows = block * at_once..rows.min((block + 1) * at_once);
            f(scratch, x_rows, i * length..all.min((i + 1) * length));
        }
    });
}

/// Rows of x that a product should have at once.
fn rows_at_once(frame: &Frame<'_>, part: &Part) -> usize {
    let rows = part.x.rows(frame);
    match (frame.weights.packed(part.weight), part.x.layout) {
        (Some(packed), Some(layout)) => packed.rows_at_once(frame.isa, layout.digits, rows),
        _ if rows >= panels::ROWS_LEAST && frame.weights.floats(part.weight, 0..0).is_some() => {
            panels::rows_at_once(part.x.cols(), rows)
        }
        _ => rows,
    }
}

/// One part's output rows of `tiles`, for `rows` of x.
fn product(
    frame: &Frame<'_>,
    scratch: &mut Scratch,
    part: &Part,
    residual: Option<*const f32>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: OutPtr,
) {
    let bias = part.bias.map(|bias| frame.weights.vector(bias));
    let Some(scale) = part.scale else {
        return dots(frame, scratch, part, bias, residual, rows, tiles, out);
    };
    dots(frame, scratch, part, None, None, rows.clone(), tiles.clone(), out);
    let outputs = tiles.start * TILE..frame.weights.declared(part.weight).rows.min(tiles.end * TILE);
    for row in rows {
        // SAFETY: this row's columns of this item, which are nobody else's and were just written.
        let y = unsafe { std::slice::from_raw_parts_mut(out.at(row, outputs.start), outputs.len()) };
        for (i, y) in y.iter_mut().enumerate() {
            *y *= scale;
            if let Some(bias) = bias {
                *y += bias[outputs.start + i];
            }
        }
    }
}

/// The same without a scale.
fn dots(
    frame: &Frame<'_>,
    scratch: &mut Scratch,
    part: &Part,
    bias: Option<&[f32]>,
    residual: Option<*const f32>,
    rows: Range<usize>,
    tiles: Range<usize>,
    out: OutPtr,
) {
    let (ptr, stride) = out.parts();
    if let (Some(packed), Some(layout)) = (frame.weights.packed(part.weight), part.x.layout) {
        // SAFETY: the value's bytes, which no task of this step writes.
        let bytes = unsafe { std::slice::from_raw_parts(part.x.bytes(frame), layout.bytes()) };
        let tail = Tail { bias, residual: residual.map(|residual| InPtr::new(residual, stride)) };
        let x = Activations::new(layout, bytes).kept();
        // SAFETY: the backend's instruction set is available; out and residual are values of these rows and columns,
        // and this item's columns are nobody else's.
        unsafe { packed.product(frame.isa, &x, rows, tiles, out, tail, &mut scratch.product) };
        return;
    }
    let weight = frame.weights.declared(part.weight);
    let outputs = tiles.start * TILE..weight.rows.min(tiles.end * TILE);
    let row_bytes = weight.bytes() / weight.rows;
    let mapped = || &frame.weights.bytes(part.weight)[outputs.start * row_bytes..outputs.end * row_bytes];
    if let (Some(layout), Some(format)) = (part.x.layout, quant::format(weight.dtype)) {
        // SAFETY: the value's bytes, which no task of this step writes.
        let x = unsafe { std::slice::from_raw_parts(part.x.bytes(frame), layout.bytes()) };
        for (n, bytes) in outputs.clone().zip(mapped().chunks(row_bytes)) {
            scratch.integers.read(bytes, format);
            for row in rows.clone() {
                let mut y = scratch.integers.dot(x, &layout, row);
                if let Some(bias) = bias {
                    y += bias[n];
                }
                // SAFETY: elements of the values, and this item's columns are nobody else's.
                unsafe {
                    if let Some(residual) = residual {
                        y += *residual.add(row * stride + n);
                    }
                    *out.at(row, n) = y;
                }
            }
        }
        return;
    }
    let x = part.x.row(frame, 0).cast_const();
    let cols = weight.cols;
    let float = |float, weights, outputs| FloatProduct {
        float,
        weights,
        outputs,
        cols,
        x,
        rows: rows.clone(),
        out: ptr,
        stride,
        bias,
        residual,
    };
    if let Some((kind, bytes)) = frame.weights.floats(part.weight, outputs.clone()) {
        let product = float(kind, bytes.as_ptr(), outputs);
        if rows.len() >= panels::ROWS_LEAST {
            return scratch.floats.run(frame.isa, product);
        }
        return frame.isa.run(product);
    }
    for (i, bytes) in mapped().chunks(DECODED * row_bytes).enumerate() {
        let n = bytes.len() / row_bytes;
        for (bytes, decoded) in bytes.chunks(row_bytes).zip(scratch.row.chunks_mut(cols)) {
            quant::decode_row(weight.dtype, bytes, decoded);
        }
        let first = outputs.start + i * DECODED;
        frame.isa.run(float(Float::F32, scratch.row.as_ptr().cast(), first..first + n));
    }
}
