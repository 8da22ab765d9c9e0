//! A team of threads that stays alive between steps and meets at barriers.
//!
//! Work is cut into items by the caller, and workers claim items one at a time: a worker that the system interrupts
//! holds up one item and not a fixed share. That is free to vary because no sum crosses items. At a barrier a worker
//! spins for a short while and then sleeps, so that another busy process on the machine costs its share and no more.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins at a barrier inside a job: longer than any fair wait between two steps of a decode.
const SPIN: Duration = Duration::from_micros(50);

/// How long helpers spin for the next job: about the time a sampler takes between two steps.
const SPIN_IDLE: Duration = Duration::from_micros(100);

type Job = dyn Fn(&mut Worker<'_>) + Sync;

/// A team of workers; the thread that calls [`Team::run`] is worker 0.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held during a job: a team does one at a time.
    busy: Mutex<()>,
}

/// One worker's view of a job.
pub struct Worker<'a> {
    index: usize,
    shared: &'a Shared,
    /// Tickets given out before the current [`Worker::share`].
    base: usize,
}

struct Shared {
    size: usize,
    /// Start and end of a job.
    gate: Barrier,
    /// Meeting points inside a job.
    meet: Barrier,
    /// Items claimed since the job began, past each share's end by one for every worker.
    ticket: Padded<AtomicUsize>,
    job: UnsafeCell<Option<*const Job>>,
    quit: AtomicBool,
    /// A worker of this job panicked: the others leave at their next barrier.
    failed: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the caller's thread only while all helpers wait at the gate, and read by them only after
// it; the gate orders both.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Alone on its cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

impl Team {
    /// A team of `threads` workers (at least 1), of which `threads - 1` are started here.
    ///
    /// # Panics
    /// When the system refuses a thread.
    pub fn new(threads: usize) -> Team {
        let size = threads.max(1);
        let shared = Arc::new(Shared {
            size,
            gate: Barrier::default(),
            meet: Barrier::default(),
            ticket: Padded::default(),
            job: UnsafeCell::new(None),
            quit: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            payload: Mutex::new(None),
        });
        let helpers = (1..size)
            .map(|index| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("ingle-cpu-{index}"))
                    .spawn(move || shared.help(index))
                    .expect("the system refuses a thread; choose fewer")
            })
            .collect();
        Team { shared, helpers, busy: Mutex::new(()) }
    }

    /// Workers, the caller's thread included.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Calls `f(worker, workers)` once on every worker, and returns when all have returned. Not to be called from
    /// inside a job of the same team.
    ///
    /// # Panics
    /// When `f` panics on any worker.
    pub fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        self.work(&|worker: &mut Worker<'_>| f(worker.index, worker.shared.size));
    }

    /// Like [`Team::run`], for jobs that share items and meet between shares.
    ///
    /// # Panics
    /// When `job` panics on any worker.
    pub fn work(&self, job: &(dyn Fn(&mut Worker<'_>) + Sync)) {
        let _busy = lock(&self.busy);
        let shared = &*self.shared;
        shared.ticket.0.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime changes; helpers drop the pointer before they pass the gate a second time, and
        // that is before this function returns.
        let job: *const Job =
            unsafe { std::mem::transmute::<*const (dyn Fn(&mut Worker<'_>) + Sync), _>(job) };
        // SAFETY: all helpers wait at the gate.
        unsafe { *shared.job.get() = Some(job) };
        shared.gate.wait(shared.size, SPIN_IDLE, None);
        shared.run_job(0);
        shared.gate.wait(shared.size, SPIN, None);
        if shared.failed.swap(false, Ordering::SeqCst) {
            shared.meet.reset();
            let payload = lock(&shared.payload).take();
            resume_unwind(payload.unwrap_or_else(|| Box::new("a worker panicked")));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.gate.wait(self.shared.size, SPIN, None);
        for helper in self.helpers.drain(..) {
            // A helper catches its panics, and there is nobody here to tell.
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn help(&self, index: usize) {
        loop {
            self.gate.wait(self.size, SPIN_IDLE, None);
            if self.quit.load(Ordering::SeqCst) {
                return;
            }
            self.run_job(index);
            self.gate.wait(self.size, SPIN, None);
        }
    }

    fn run_job(&self, index: usize) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            float_environment();
            // SAFETY: set before the gate opened, and alive until every worker has passed it again.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job {
                job(&mut Worker { index, shared: self, base: 0 });
            }
        }));
        if let Err(panic) = outcome {
            lock(&self.payload).get_or_insert(panic);
            self.failed.store(true, Ordering::SeqCst);
            self.meet.wake();
        }
    }
}

impl Worker<'_> {
    /// Index of this worker, 0 for the caller's thread.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Workers of the team.
    pub fn workers(&self) -> usize {
        self.shared.size
    }

    /// Calls `f` on items `0..items`, each on one worker, and returns on all workers when all items are done. Every
    /// worker of the team makes the same calls in the same order.
    ///
    /// # Panics
    /// When another worker of the job has panicked.
    #[inline]
    pub fn share(&mut self, items: usize, mut f: impl FnMut(usize)) {
        if self.shared.size == 1 {
            (0..items).for_each(f);
            return;
        }
        loop {
            let item = self.shared.ticket.0.fetch_add(1, Ordering::Relaxed) - self.base;
            if item >= items {
                break;
            }
            f(item);
        }
        // Each worker took one ticket past the end, which is what keeps the next share's tickets known to all.
        self.base += items + self.shared.size;
        self.shared.meet.wait(self.shared.size, SPIN, Some(&self.shared.failed));
    }
}

/// All of a known number of threads meet here, again and again.
#[derive(Default)]
struct Barrier {
    arrived: Padded<AtomicUsize>,
    generation: Padded<AtomicUsize>,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Barrier {
    /// Returns when `size` threads have called it. With `failed`, panics once that is set.
    fn wait(&self, size: usize, spin: Duration, failed: Option<&AtomicBool>) {
        if size == 1 {
            return;
        }
        // No thread can pass this generation before this one has arrived.
        let generation = self.generation.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == size {
            self.arrived.0.store(0, Ordering::Relaxed);
            // Sequentially consistent with the sleeper's registration: either it sees the new generation, or this
            // thread sees the sleeper.
            self.generation.0.store(generation.wrapping_add(1), Ordering::SeqCst);
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                self.wake();
            }
            return;
        }
        let passed = || self.generation.0.load(Ordering::SeqCst) != generation;
        let gave_up = || failed.is_some_and(|failed| failed.load(Ordering::SeqCst));
        if !self.spin(spin, generation) {
            let mut guard = lock(&self.lock);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            while !passed() && !gave_up() {
                guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
        if !passed() {
            panic!("another worker of this job panicked");
        }
    }

    /// Whether the generation passed within about `limit`.
    fn spin(&self, limit: Duration, generation: usize) -> bool {
        let mut start = None;
        loop {
            for _ in 0..32 {
                if self.generation.0.load(Ordering::Acquire) != generation {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > limit {
                return false;
            }
        }
    }

    /// Wakes sleepers to look again. The lock orders this after the look of one who is about to sleep.
    fn wake(&self) {
        drop(lock(&self.lock));
        self.wake.notify_all();
    }

    /// Forgets those who arrived; nobody may be waiting.
    fn reset(&self) {
        self.arrived.0.store(0, Ordering::SeqCst);
    }
}

/// A lock whose data no panic can leave half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets and checks the contract's floating-point environment on this thread: round to nearest even, no flush to zero,
/// no traps. A library that started this thread may have left another.
fn float_environment() {
    #[cfg(target_arch = "x86_64")]
    {
        const DEFAULT: u32 = 0x1F80;
        /// Sticky exception flags, which say what happened and change nothing.
        const FLAGS: u32 = 0x3F;
        let mut mxcsr = 0u32;
        // SAFETY: stores the control register to a local; loading the architecture's default is what compiled code
        // assumes anyway.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack, preserves_flags));
            if mxcsr & !FLAGS != DEFAULT {
                std::arch::asm!("ldmxcsr [{}]", in(reg) &DEFAULT, options(nostack, preserves_flags));
                std::arch::asm!("stmxcsr [{}]", in(reg) &mut mxcsr, options(nostack, preserves_flags));
            }
        }
        assert_eq!(mxcsr & !FLAGS, DEFAULT, "the floating-point environment cannot be set");
    }
    #[cfg(target_arch = "aarch64")]
    {
        let mut fpcr: u64;
        // SAFETY: reads and writes the control register of this thread; zero is what compiled code assumes anyway.
        unsafe {
            std::arch::asm!("msr fpcr, xzr", options(nomem, nostack, preserves_flags));
            std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack, preserves_flags));
        }
        assert_eq!(fpcr, 0, "the floating-point environment cannot be set");
    }
}

/// Physical cores this process may use: its processors, without the second threads of cores, within its quota.
pub fn physical_cores() -> usize {
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    cores_in_affinity().map_or(quota, |cores| cores.clamp(1, quota))
}

#[cfg(target_os = "linux")]
fn cores_in_affinity() -> Option<usize> {
    // SAFETY: an all-zero set is a valid set, and the call fills at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return None;
        }
        set
    };
    // SAFETY: the index is below the set's size.
    let processors = (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
    let siblings = |cpu| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
            .ok()
    };
    let cores: Option<std::collections::HashSet<String>> = processors.map(siblings).collect();
    cores.map(|cores| cores.len())
}

#[cfg(not(target_os = "linux"))]
fn cores_in_affinity() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_and_before_the_next_share() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(threads);
            let done: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            for job in 0..50 {
                team.work(&|worker| {
                    for round in 0..20 {
                        let items = [97, 1, 0, 13][(job + round) % 4];
                        let before: Vec<_> = done.iter().map(|d| d.load(Ordering::Relaxed)).collect();
                        worker.share(0, |_| unreachable!());
                        worker.share(items, |i| {
                            done[i].fetch_add(1, Ordering::Relaxed);
                        });
                        for (i, (done, before)) in done.iter().zip(before).enumerate() {
                            assert_eq!(done.load(Ordering::Relaxed) - before, usize::from(i < items));
                        }
                        worker.share(0, |_| unreachable!());
                    }
                });
            }
        }
    }

    #[test]
    fn run_reaches_every_worker() {
        let team = Team::new(3);
        let seen = AtomicUsize::new(0);
        team.run(&|worker, workers| {
            assert_eq!(workers, 3);
            seen.fetch_add(1 << (8 * worker), Ordering::Relaxed);
        });
        assert_eq!((seen.into_inner(), team.size()), (0x01_01_01, 3));
    }

    #[test]
    fn sleepers_wake() {
        let team = Team::new(3);
        for _ in 0..3 {
            std::thread::sleep(4 * SPIN_IDLE);
            team.work(&|worker| {
                if worker.index() == 1 {
                    std::thread::sleep(10 * SPIN);
                }
                worker.share(2, |_| {});
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3);
        for guilty in 0..3 {
            let job = catch_unwind(AssertUnwindSafe(|| {
                team.work(&|worker| {
                    assert!(worker.index() != guilty, "planted");
                    worker.share(5, |_| {});
                });
            }));
            assert!(job.is_err());
            let done = AtomicUsize::new(0);
            team.work(&|worker| {
                worker.share(5, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                })
            });
            assert_eq!(done.into_inner(), 5);
        }
    }

    #[test]
    fn there_is_a_core() {
        assert!(physical_cores() >= 1);
    }
}
