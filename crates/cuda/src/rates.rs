//! What a GPU can do, measured: the limits that speeds are shares of.

use crate::backend::{CudaOptions, Functions};
use crate::driver::{Arg, Buffer, Context, Driver, Entry, Event, Launch, Stream};
use crate::kernels::rates::{BLOCKS, F32, F32_OPS, INT8, INT8_OPS, READ, THREADS};
use crate::{Error, Result};

/// Rounds of a measurement of arithmetic, and measurements, of which the best counts.
const ROUNDS: u32 = 20_000;
const REPEATS: usize = 5;

/// Most bytes that are read: several times any second cache.
const READ_MAX: usize = 4 << 30;

/// Rates of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Reads of the same `read_bytes` again and again, 10^9 bytes a second.
    pub read_gb_per_second: f64,
    /// Bytes of such a read.
    pub read_bytes: usize,
    /// int8 multiplications and additions on tensor cores, as `mma.sync` makes them, 10^12 a second.
    pub int8_tops: f64,
    /// f32 multiplications and additions, fused, 10^12 a second.
    pub f32_tflops: f64,
}

/// Measures a GPU, reads with as much memory as a step reads. Takes less than a second, and that memory for the time.
///
/// # Errors
/// What of CUDA is missing; too little memory.
pub fn measure(options: &CudaOptions, step_bytes: usize) -> Result<Rates> {
    let context = Context::new(Driver::get()?, options.device)?;
    let stream = Stream::new(&context)?;
    let mut functions = Functions::new(&context, options)?;
    let blocks = BLOCKS * context.device().multiprocessors as u32;
    let threads = blocks * THREADS;
    let out = Buffer::new(&context, 4 * threads as usize)?;
    let mut best = |entry: Entry, arguments: &[Arg<'_>]| -> Result<f64> {
        let function = functions.get(&context, entry)?;
        let (begin, end) = (Event::new(&context, true)?, Event::new(&context, true)?);
        let mut best = f64::MAX;
        for _ in 0..=REPEATS {
            begin.record(&stream)?;
            stream.launch(&function, &Launch::new([blocks, 1], THREADS), arguments)?;
            end.record(&stream)?;
            end.synchronize()?;
            best = best.min(f64::from(end.elapsed_ms(&begin)?) / 1e3);
        }
        Ok(best)
    };
    let read_bytes = step_bytes.clamp(1 << 20, READ_MAX).next_multiple_of(16);
    let data = Buffer::new(&context, read_bytes)?;
    stream.fill(data.all(), 1)?;
    let count =
        u32::try_from(read_bytes / 16).map_err(|_| Error::Refused("too many bytes to read".into()))?;
    let read = best(READ, &[Arg::Memory(data.all()), Arg::U32(count), Arg::Memory(out.all())])?;
    let int8 = best(INT8, &[Arg::U32(ROUNDS), Arg::Memory(out.all())])?;
    let f32 = best(F32, &[Arg::U32(ROUNDS), Arg::Memory(out.all())])?;
    let rounds = f64::from(ROUNDS) * f64::from(threads);
    Ok(Rates {
        read_gb_per_second: read_bytes as f64 / read / 1e9,
        read_bytes,
        int8_tops: rounds / 32.0 * INT8_OPS / int8 / 1e12,
        f32_tflops: rounds * F32_OPS / f32 / 1e12,
    })
}
