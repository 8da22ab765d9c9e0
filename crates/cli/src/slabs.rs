//! Tensors made in slabs of whole rows: one slab is written while the next is made, by as many threads as there are.

use std::thread;

use crate::threads::Work;

/// Bytes that are made while as many are written.
const SLAB_BYTES: usize = 16 << 20;

/// Rows of one tensor.
#[derive(Clone, Copy)]
struct Slab {
    /// Which tensor.
    at: usize,
    first: usize,
    rows: usize,
    row_bytes: usize,
}

/// Makes tensors of these sizes (rows, bytes of a row; both at least 1) in order. `make(tensor, first row, out)` fills
/// `out` with whole rows, on up to `threads` threads at once; `sink(tensor, bytes)` takes the bytes of each piece in order.
///
/// # Errors
/// The first of either.
pub fn stream<E: Send>(
    sizes: impl Iterator<Item = (usize, usize)>,
    threads: usize,
    make: impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync,
    mut sink: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut slabs = sizes.enumerate().flat_map(|(at, (rows, row_bytes))| {
        let step = (SLAB_BYTES / row_bytes).max(1);
        (0..rows).step_by(step).map(move |first| Slab { at, first, rows: step.min(rows - first), row_bytes })
    });
    let fill = |slab: Slab, out: &mut Vec<u8>| {
        out.resize(slab.rows * slab.row_bytes, 0);
        in_parts(slab, threads, &make, out)
    };
    let (mut ready, mut next) = (Vec::new(), Vec::new());
    let mut slab = slabs.next();
    slab.map_or(Ok(()), |slab| fill(slab, &mut ready))?;
    while let Some(Slab { at, .. }) = slab {
        let following = slabs.next();
        thread::scope(|scope| {
            let made = following.map(|following| {
                let (fill, next) = (&fill, &mut next);
                Work::begin(scope, move || fill(following, next))
            });
            sink(at, &ready)?;
            made.map_or(Ok(()), Work::end)
        })?;
        std::mem::swap(&mut ready, &mut next);
        slab = following;
    }
    Ok(())
}

/// Fills a slab with an equal share of its rows on each thread.
fn in_parts<E: Send>(
    slab: Slab,
    threads: usize,
    make: &(impl Fn(usize, usize, &mut [u8]) -> Result<(), E> + Sync),
    out: &mut [u8],
) -> Result<(), E> {
    let part = slab.rows.div_ceil(threads).max(1);
    thread::scope(|scope| {
        let mut parts = out.chunks_mut(part * slab.row_bytes).enumerate();
        let mine = parts.next();
        let others: Vec<_> = parts
            .map(|(i, out)| Work::begin(scope, move || make(slab.at, slab.first + i * part, out)))
            .collect();
        let mine = mine.map_or(Ok(()), |(_, out)| make(slab.at, slab.first, out));
        others.into_iter().map(Work::end).fold(mine, |first, next| first.and(next))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of 3 MiB, so that slabs hold five, and rows larger than a slab.
    const SIZES: [(usize, usize); 3] = [(12, 3 << 20), (1, 1), (2, 17 << 20)];

    fn made(threads: usize, fails_at: Option<(usize, usize)>) -> Result<Vec<Vec<u8>>, (usize, usize)> {
        let mut all = vec![Vec::new(); SIZES.len()];
        let make = |at: usize, first: usize, out: &mut [u8]| {
            out.chunks_exact_mut(SIZES[at].1).enumerate().try_for_each(|(i, row)| {
                row.fill((16 * at + first + i) as u8);
                if fails_at == Some((at, first + i)) { Err((at, first + i)) } else { Ok(()) }
            })
        };
        stream(SIZES.into_iter(), threads, make, |at, bytes| {
            all[at].extend(bytes.iter().step_by(SIZES[at].1));
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn every_row_is_made_once_and_in_order() {
        for threads in [1, 2, 7] {
            let want = [(0..12).collect(), vec![16], vec![32, 33]];
            assert_eq!(made(threads, None).unwrap(), want, "{threads} threads");
        }
    }

    #[test]
    fn an_error_ends_the_work() {
        for (threads, at) in [(1, (0, 0)), (2, (0, 4)), (2, (0, 11)), (3, (2, 1))] {
            assert_eq!(made(threads, Some(at)).unwrap_err(), at);
        }
    }
}
