//! What this machine can do: read bandwidth from memory, int8 products and f32 products, with the threads that the benchmark uses.
//! Tokens per second mean little without them.

use std::hint::black_box;
use std::io;
use std::sync::{PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use ingle_cuda::CudaOptions;
use ingle_cuda::rates::{self, Rates};

/// Most bytes that are read in turn: past any cache.
const BUFFER_BYTES_MAX: usize = 1 << 30;

/// Bytes that are read between two looks at the clock, so that the start of threads does not count.
const PASS_BYTES: usize = 1 << 28;

/// Times that so much is read; the best counts.
const PASSES: usize = 6;

/// How long each thread multiplies.
const PRODUCTS_TIME: Duration = Duration::from_millis(150);

/// Rates of this machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Sequential reads of the same `read_bytes` again and again, 10^9 bytes a second, all threads together.
    pub read_gb_per_second: f64,
    /// As many bytes as a step of the tests reads, at most 1 GiB: what of them stays in cache stays there for both.
    pub read_bytes: usize,
    /// int8 multiplications and additions, 10^12 a second, all threads together, by the widest vector instruction that
    /// ingle's kernels use here.
    pub int8_tops: f64,
    /// f32 multiplications and additions, fused, 10^12 a second, all threads together.
    pub f32_tflops: f64,
}

impl Limits {
    /// Of a model that is on two devices, one after the other: this one has these shares of the bytes that a step reads and
    /// of the products, `other` the rest.
    pub fn beside(self, other: Self, reads: f64, products: f64) -> Self {
        let rate = |a: f64, b: f64, share: f64| 1.0 / (share / a + (1.0 - share) / b);
        Self {
            read_gb_per_second: rate(self.read_gb_per_second, other.read_gb_per_second, reads),
            read_bytes: self.read_bytes,
            int8_tops: rate(self.int8_tops, other.int8_tops, products),
            f32_tflops: rate(self.f32_tflops, other.f32_tflops, products),
        }
    }
}

/// The same of a GPU.
///
/// # Errors
/// What of CUDA is missing; too little memory.
pub fn of_gpu(options: &CudaOptions, step_bytes: usize) -> ingle_graph::Result<Limits> {
    let Rates { read_gb_per_second, read_bytes, int8_tops, f32_tflops } =
        rates::measure(options, step_bytes)?;
    Ok(Limits { read_gb_per_second, read_bytes, int8_tops, f32_tflops })
}

/// Measures all with `threads` threads, reads with as much memory as a step reads (`step_bytes`). Takes less than a
/// second, and that memory for the time.
///
/// # Errors
/// The system refuses a thread.
pub fn measure(threads: usize, step_bytes: usize) -> io::Result<Limits> {
    let read_bytes = step_bytes.clamp(1 << 20, BUFFER_BYTES_MAX);
    Ok(Limits {
        read_gb_per_second: read_rate(threads, read_bytes)? / 1e9,
        read_bytes,
        int8_tops: product_rate(threads, products)? / 1e12,
        f32_tflops: product_rate(threads, fused)? / 1e12,
    })
}

/// Bytes a second.
fn read_rate(threads: usize, bytes: usize) -> io::Result<f64> {
    // Where memory is limited, the largest half, quarter and so on that there is.
    let mut buffer: Vec<u64> = Vec::new();
    let words = std::iter::successors(Some(bytes / 8), |words| Some(words / 2))
        .find(|&words| buffer.try_reserve_exact(words).is_ok())
        .unwrap_or(0);
    huge_pages(&mut buffer);
    // Written, not zero-filled: untouched pages would all be the same page of zeros.
    buffer.extend((0..words as u64).map(|i| i ^ 0x9e37_79b9));
    let share = buffer.len().div_ceil(threads).max(1);
    let times = PASS_BYTES.div_ceil(bytes.max(1));
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let seconds = together(threads, |thread| {
            let part = buffer.chunks(share).nth(thread).unwrap_or_default();
            for _ in 0..times {
                black_box(sum(black_box(part)));
            }
        })?;
        best = best.min(seconds);
    }
    Ok((size_of_val(buffer.as_slice()) * times) as f64 / best)
}

/// Runs `f` on so many threads at once, of which this is the first; seconds from the first start to the last end, which the
/// threads themselves take: who only waits for them may be woken when they are done.
fn together(threads: usize, f: impl Fn(usize) + Sync) -> io::Result<f64> {
    // Held until all are there: a barrier would wait for one that could not be started.
    let are_all_there = RwLock::new(false);
    let timed = |thread| {
        let start = Instant::now();
        f(thread);
        (start, Instant::now())
    };
    let spans: Vec<(Instant, Instant)> = thread::scope(|scope| {
        let mut go = are_all_there.write().unwrap_or_else(PoisonError::into_inner);
        let run = |thread| {
            let (timed, are_all_there) = (&timed, &are_all_there);
            thread::Builder::new().spawn_scoped(scope, move || {
                let goes = *are_all_there.read().unwrap_or_else(PoisonError::into_inner);
                goes.then(|| timed(thread))
            })
        };
        // On an error, those already started see that they are not all there, and end.
        let others = (1..threads).map(run).collect::<io::Result<Vec<_>>>()?;
        *go = true;
        drop(go);
        let mine = timed(0);
        let theirs = others
            .into_iter()
            .filter_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok::<_, io::Error>(theirs.chain([mine]).collect())
    })?;
    let start = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    Ok(end.zip(start).map_or(f64::INFINITY, |(end, start)| (end - start).as_secs_f64()))
}

fn huge_pages(buffer: &mut Vec<u64>) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is this vector's own allocation; the advice changes how it is backed and not what it holds.
    unsafe {
        const PAGE: usize = 4096;
        let start = (buffer.as_mut_ptr() as usize).next_multiple_of(PAGE);
        let end = buffer.as_mut_ptr() as usize + 8 * buffer.capacity();
        libc::madvise(start as *mut libc::c_void, end.saturating_sub(start), libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = buffer;
}

/// Reads everything, in as wide loads as the processor has.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature.
            return unsafe { x86::sum_avx512(words) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { x86::sum_avx2(words) };
        }
    }
    sum_plain(words)
}

fn sum_plain(words: &[u64]) -> u64 {
    words.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Multiplications and additions a second of `products`, which says how many it made.
fn product_rate(threads: usize, products: impl Fn() -> u64 + Sync) -> io::Result<f64> {
    let counts: Vec<std::sync::atomic::AtomicU64> = (0..threads).map(|_| Default::default()).collect();
    let seconds = together(threads, |thread| {
        let start = Instant::now();
        let mut operations = 0;
        while start.elapsed() < PRODUCTS_TIME {
            operations += products();
        }
        counts[thread].store(operations, std::sync::atomic::Ordering::Relaxed);
    })?;
    Ok(counts.into_iter().map(|count| count.into_inner() as f64).sum::<f64>() / seconds)
}

/// Multiplies int8 from registers for a few microseconds; how many multiplications and additions it was.
fn products() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the features.
            return unsafe { x86::products_vnni() };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            return unsafe { x86::products_avx2() };
        }
    }
    products_plain()
}

/// As [`products`], of f32.
fn fused() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has the feature.
            return unsafe { x86::fused_avx512() };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the processor has the features.
            return unsafe { x86::fused_avx2() };
        }
    }
    fused_plain()
}

fn fused_plain() -> u64 {
    const ROUNDS: usize = 256;
    let (a, b) = (black_box([0.5f32; 256]), black_box([0.25f32; 256]));
    let mut sums = [0f32; 256];
    for _ in 0..ROUNDS {
        for ((sum, a), b) in sums.iter_mut().zip(black_box(&a)).zip(&b) {
            *sum += a * b;
        }
    }
    black_box(sums);
    (2 * 256 * ROUNDS) as u64
}

fn products_plain() -> u64 {
    const ROUNDS: usize = 256;
    let (a, b) = (black_box([3i8; 256]), black_box([5i8; 256]));
    let mut sum = 0i32;
    for _ in 0..ROUNDS {
        sum =
            sum.wrapping_add(black_box(&a).iter().zip(&b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum());
    }
    black_box(sum);
    (2 * 256 * ROUNDS) as u64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Independent accumulators: more than latency times throughput of the product.
    const CHAINS: usize = 12;
    const ROUNDS: usize = 4096;

    /// Four independent sums, so that nothing but memory is waited for.
    #[target_feature(enable = "avx512f")]
    pub fn sum_avx512(words: &[u64]) -> u64 {
        let (chunks, rest) = words.as_chunks::<32>();
        let mut sums = [_mm512_setzero_si512(); 4];
        for chunk in chunks {
            for (sum, part) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
                // SAFETY: a part has 64 bytes; the load asks for no alignment.
                let loaded = unsafe { _mm512_loadu_si512(part.as_ptr().cast()) };
                *sum = _mm512_add_epi64(*sum, loaded);
            }
        }
        let lanes = sums.map(|sum| _mm512_reduce_add_epi64(sum) as u64);
        super::sum_plain(&lanes).wrapping_add(super::sum_plain(rest))
    }

    /// As [`sum_avx512`], in halves.
    #[target_feature(enable = "avx2")]
    pub fn sum_avx2(words: &[u64]) -> u64 {
        let (chunks, rest) = words.as_chunks::<32>();
        let mut sums = [_mm256_setzero_si256(); 8];
        for chunk in chunks {
            for (sum, part) in sums.iter_mut().zip(chunk.as_chunks::<4>().0) {
                // SAFETY: a part has 32 bytes; the load asks for no alignment.
                let loaded = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
                *sum = _mm256_add_epi64(*sum, loaded);
            }
        }
        let mut lanes = [0u64; 4];
        for sum in sums {
            let parts = [
                _mm256_extract_epi64::<0>(sum),
                _mm256_extract_epi64::<1>(sum),
                _mm256_extract_epi64::<2>(sum),
                _mm256_extract_epi64::<3>(sum),
            ];
            lanes.iter_mut().zip(parts).for_each(|(lane, part)| *lane = lane.wrapping_add(part as u64));
        }
        super::sum_plain(&lanes).wrapping_add(super::sum_plain(rest))
    }

    /// 64 products and additions per instruction.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn products_vnni() -> u64 {
        let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(5)));
        let mut acc = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm512_dpbusd_epi32(*acc, a, b);
            }
        }
        black_box(acc);
        (2 * 64 * CHAINS * ROUNDS) as u64
    }

    /// 32 products per multiplication, widened in two further instructions, as the kernels do.
    #[target_feature(enable = "avx2")]
    pub fn products_avx2() -> u64 {
        let (a, b) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(5)));
        let ones = _mm256_set1_epi16(1);
        let mut acc = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                // The operand passes through the accumulator, so that the product is not computed once for all rounds.
                let a = _mm256_xor_si256(a, *acc);
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), b);
                *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(acc);
        (2 * 32 * CHAINS * ROUNDS) as u64
    }

    /// 16 products and additions per instruction.
    #[target_feature(enable = "avx512f")]
    pub fn fused_avx512() -> u64 {
        let (a, b) = (black_box(_mm512_set1_ps(0.5)), black_box(_mm512_set1_ps(0.25)));
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc);
        (2 * 16 * CHAINS * ROUNDS) as u64
    }

    /// 8 products and additions per instruction.
    #[target_feature(enable = "avx2,fma")]
    pub fn fused_avx2() -> u64 {
        let (a, b) = (black_box(_mm256_set1_ps(0.5)), black_box(_mm256_set1_ps(0.25)));
        let mut acc = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, a, b);
            }
        }
        black_box(acc);
        (2 * 8 * CHAINS * ROUNDS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_agree_on_every_path() {
        let words: Vec<u64> = (0..1003).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        assert_eq!(sum(&words), sum_plain(&words));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the feature.
            assert_eq!(unsafe { x86::sum_avx2(&words) }, sum_plain(&words));
        }
    }

    /// A step that reads 30 bytes on a device of 10 a second and 20 on one of 5 takes 7 seconds.
    #[test]
    fn rates_of_two_devices_are_those_of_one_after_the_other() {
        let limits =
            |rate| Limits { read_gb_per_second: rate, read_bytes: 50, int8_tops: rate, f32_tflops: rate };
        let both = limits(10.0).beside(limits(5.0), 0.6, 0.5);
        assert!((both.read_gb_per_second - 50.0 / 7.0).abs() < 1e-9, "{both:?}");
        assert!((both.int8_tops - 20.0 / 3.0).abs() < 1e-9 && both.f32_tflops == both.int8_tops, "{both:?}");
        assert_eq!(limits(10.0).beside(limits(5.0), 1.0, 1.0), limits(10.0));
    }

    #[test]
    fn reads_are_of_as_many_bytes_as_a_step_reads() {
        for (asked, read) in [(0, 1 << 20), (3 << 20, 3 << 20)] {
            let limits = measure(1, asked).unwrap();
            assert_eq!(limits.read_bytes, read);
            assert!((0.01..10_000.0).contains(&limits.read_gb_per_second), "{limits:?}");
        }
    }

    #[test]
    fn a_rate_is_within_reason() {
        let rate = product_rate(2, products).unwrap() / 1e12;
        assert!((1e-5..100.0).contains(&rate), "{rate} TOPS on two threads");
        let rate = product_rate(2, fused).unwrap() / 1e12;
        assert!((1e-5..10.0).contains(&rate), "{rate} TFLOPS on two threads");
    }
}
