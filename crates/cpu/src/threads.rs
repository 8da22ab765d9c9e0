//! A team of threads that stays alive between steps.
//!
//! Work is cut into items by the caller, and workers claim items one at a time; that is free to vary, because no sum
//! crosses items. Each worker begins with a share of its own, so that claims do not contend, and goes on with what others
//! have left. A phase ends when its items are done, not when all workers have come: a worker that the system has
//! put aside holds up the one item it may have claimed, and nothing else. Waiting workers spin for a short while and
//! then sleep. So another busy process on the machine costs its share and not much more.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the end of a phase: longer than any fair wait between two steps of a decode.
const SPIN: Duration = Duration::from_micros(50);

/// How long a worker runs before it offers its processor to other threads, between two phases: a system that has others to
/// run does so then, and seldom in the middle of an item, for which the whole team would wait.
const RUN: Duration = Duration::from_millis(1);

/// How long helpers spin for the next job: about the time a sampler takes between two steps.
const SPIN_IDLE: Duration = Duration::from_micros(100);

/// [`Shared::state`] of a team that ends. Other states are odd while a job is open, and count up.
const QUIT: usize = usize::MAX - 1;

type Job = dyn Fn(&mut Worker<'_>) + Sync;

/// A team of workers; the thread that calls [`Team::work`] is worker 0.
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
    /// Phases begun.
    phase: u32,
    /// Items of all phases begun.
    target: usize,
    /// Time spent in waits, where somebody wants to know.
    waited: Option<Duration>,
    turn: Turn,
    /// Since when it has not offered its processor to others.
    since: Instant,
}

/// What a worker's next phase is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// One that ends with a wait for its items.
    Whole,
    /// The one before [`Worker::then`]'s last part, not begun yet.
    Before,
    /// That phase has begun, and this worker did the last of its items or not.
    Begun { last: bool },
    /// None: this worker runs the last part, and all items there are its own.
    Alone,
}

struct Shared {
    size: usize,
    /// Odd while a job is open. Helpers enter only then, counted in `active`.
    state: Padded<AtomicUsize>,
    active: Padded<AtomicUsize>,
    /// By worker: the last phase of which an item of its share was claimed, in the upper half, and how many were.
    claims: Box<[Padded<AtomicU64>]>,
    /// Items done since the job began.
    done: Padded<AtomicUsize>,
    job: UnsafeCell<Option<*const Job>>,
    /// A worker of this job panicked: the others leave at their next wait.
    failed: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    /// Rings when `state`, `done` (at the end of a phase) and `active` change.
    started: Bell,
    finished: Bell,
    left: Bell,
}

// SAFETY: `job` is written only by the caller's thread, while no helper is counted in `active`, and read only by those
// who are and saw the job open.
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
    /// # Errors
    /// The system refuses a thread.
    pub fn new(threads: usize) -> io::Result<Team> {
        let shared = Arc::new(Shared {
            size: threads.max(1),
            state: Padded::default(),
            active: Padded::default(),
            claims: (0..threads.max(1)).map(|_| Padded::default()).collect(),
            done: Padded::default(),
            job: UnsafeCell::new(None),
            failed: AtomicBool::new(false),
            payload: Mutex::new(None),
            started: Bell::default(),
            finished: Bell::default(),
            left: Bell::default(),
        });
        let mut team = Team { shared, helpers: Vec::new(), busy: Mutex::new(()) };
        for index in 1..threads {
            let shared = team.shared.clone();
            let helper = std::thread::Builder::new().name(format!("ingle-cpu-{index}"));
            // On an error, those already started end with the team.
            team.helpers.push(helper.spawn(move || shared.help(index))?);
        }
        Ok(team)
    }

    /// Workers, the caller's thread included.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Calls `f(i, size)` for each i below the size of the team, and returns when all calls have returned. Not to be
    /// called from inside a job of the same team.
    ///
    /// # Panics
    /// When `f` panics.
    pub fn run(&self, f: &(dyn Fn(usize, usize) + Sync)) {
        let size = self.size();
        self.work(&|worker: &mut Worker<'_>| worker.share(size, |i| f(i, size)));
    }

    /// Calls `job` on this thread, and on every helper that is there before all its phases are done. Not to be called
    /// from inside a job of the same team.
    ///
    /// # Panics
    /// When `job` panics on any worker.
    pub fn work(&self, job: &(dyn Fn(&mut Worker<'_>) + Sync)) {
        let _busy = lock(&self.busy);
        let shared = &*self.shared;
        for claims in &shared.claims {
            claims.0.store(0, Ordering::Relaxed);
        }
        shared.done.0.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime changes; the pointer is not used once `active` is zero below.
        let job: *const Job =
            unsafe { std::mem::transmute::<*const (dyn Fn(&mut Worker<'_>) + Sync), _>(job) };
        // SAFETY: no helper is active.
        unsafe { *shared.job.get() = Some(job) };
        if shared.size > 1 {
            shared.state.0.fetch_add(1, Ordering::SeqCst);
            shared.started.ring();
        }
        shared.run_job(0);
        if shared.size > 1 {
            shared.state.0.fetch_add(1, Ordering::SeqCst);
            shared.left.wait(SPIN, || shared.active.0.load(Ordering::SeqCst) == 0);
        }
        if shared.failed.swap(false, Ordering::SeqCst) {
            let payload = lock(&shared.payload).take();
            resume_unwind(payload.unwrap_or_else(|| Box::new("a worker panicked")));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.0.store(QUIT, Ordering::SeqCst);
        self.shared.started.ring();
        for helper in self.helpers.drain(..) {
            // A helper catches its panics, and there is nobody here to tell.
            let _ = helper.join();
        }
    }
}

impl Shared {
    fn help(&self, index: usize) {
        let mut seen = 0;
        loop {
            let state = || self.state.0.load(Ordering::SeqCst);
            // Open, and not the job this helper has been in.
            self.started.wait(SPIN_IDLE, || state() == QUIT || (state() % 2 == 1 && state() != seen));
            // Sequentially consistent with the closing of a job: either this helper sees it closed, or the caller sees
            // this helper.
            self.active.0.fetch_add(1, Ordering::SeqCst);
            let now = state();
            if now % 2 == 1 {
                seen = now;
                self.run_job(index);
            }
            self.active.0.fetch_sub(1, Ordering::SeqCst);
            self.left.ring();
            if now == QUIT {
                return;
            }
        }
    }

    fn run_job(&self, index: usize) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            float_environment();
            // SAFETY: set before the job opened, and alive until this worker is no longer active.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(job) = job {
                job(&mut Worker {
                    index,
                    shared: self,
                    phase: 0,
                    target: 0,
                    waited: None,
                    turn: Turn::Whole,
                    since: Instant::now(),
                });
            }
        }));
        if let Err(panic) = outcome {
            lock(&self.payload).get_or_insert(panic);
            self.failed.store(true, Ordering::SeqCst);
            self.finished.ring();
        }
    }

    /// The next of the `items` of a worker's share of a phase, unless all are claimed. The caller has seen the end of the
    /// phase before.
    fn claim(&self, owner: usize, phase: u32, items: usize) -> Option<usize> {
        let claims = &self.claims[owner].0;
        let mut word = claims.load(Ordering::Relaxed);
        loop {
            let (last, claimed) = ((word >> 32) as u32, word as u32);
            let (item, next) = match last.cmp(&phase) {
                std::cmp::Ordering::Less if items > 0 => (0, u64::from(phase) << 32 | 1),
                std::cmp::Ordering::Equal if (claimed as usize) < items => (claimed, word + 1),
                _ => return None,
            };
            match claims.compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(item as usize),
                Err(now) => word = now,
            }
        }
    }
}

impl Worker<'_> {
    /// Index of this worker, 0 for the caller's thread.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Workers that share the next phase.
    pub fn workers(&self) -> usize {
        if self.alone() { 1 } else { self.shared.size }
    }

    /// This worker runs the last part of [`then`](Worker::then), and no other does.
    pub fn alone(&self) -> bool {
        self.turn == Turn::Alone
    }

    /// Turns timing of this worker's waits for others on or off.
    pub fn time_waits(&mut self, on: bool) {
        self.waited = on.then_some(Duration::ZERO);
    }

    /// Time this worker has waited for others at the ends of phases, while that was timed.
    pub fn waited(&self) -> Duration {
        self.waited.unwrap_or_default()
    }

    /// A phase: calls `f` on items `0..items`, each on one worker, and returns when all are done. Every worker of a job
    /// makes the same calls in the same order.
    ///
    /// # Panics
    /// When another worker of the job has panicked. For 2^32 items or phases.
    #[inline]
    pub fn share(&mut self, items: usize, mut f: impl FnMut(usize)) {
        let shared = self.shared;
        if self.workers() == 1 {
            (0..items).for_each(f);
            return;
        }
        if items == 0 {
            return;
        }
        assert!(u32::try_from(items).is_ok() && self.phase < u32::MAX, "{items} items");
        if self.since.elapsed() > RUN {
            std::thread::yield_now();
            self.since = Instant::now();
        }
        assert!(!matches!(self.turn, Turn::Begun { .. }), "two phases before a last part");
        self.phase += 1;
        self.target += items;
        let mut mine = 0;
        let size = shared.size;
        for owner in (self.index..size).chain(0..self.index) {
            // Shares are interleaved, so that items are begun about in their order.
            let share = (items + size - 1 - owner) / size;
            while let Some(i) = shared.claim(owner, self.phase, share) {
                f(owner + i * size);
                mine += 1;
            }
        }
        let last = mine > 0 && shared.done.0.fetch_add(mine, Ordering::SeqCst) + mine == self.target;
        match self.turn {
            Turn::Before => self.turn = Turn::Begun { last },
            _ if last => shared.finished.ring(),
            _ => self.wait(),
        }
    }

    /// Two parts. With `alone`, `first` is one phase, and when all its items are done, the worker that did the last of them
    /// does `last` by itself: all items of its phases are its own, and the others wait once. Otherwise, and where `first`
    /// has no items or there is one worker, both are shared like any phases.
    ///
    /// # Panics
    /// As [`share`](Worker::share) does. With `alone`, when `first` has two phases.
    pub fn then<S>(
        &mut self,
        alone: bool,
        state: &mut S,
        first: impl FnOnce(&mut Self, &mut S),
        last: impl FnOnce(&mut Self, &mut S),
    ) {
        let shared = !self.alone();
        if alone && shared {
            assert!(self.turn == Turn::Whole, "a part within a first part");
            self.turn = Turn::Before;
        }
        first(self, state);
        let turn = self.turn;
        if shared {
            self.turn = Turn::Whole;
        }
        let Turn::Begun { last: mine } = turn else { return last(self, state) };
        // The last part is one more item.
        self.target += 1;
        if mine {
            self.turn = Turn::Alone;
            last(self, state);
            self.turn = Turn::Whole;
            self.shared.done.0.fetch_add(1, Ordering::SeqCst);
            self.shared.finished.ring();
        } else {
            self.wait();
        }
    }

    /// Waits until the items of all phases begun are done.
    fn wait(&mut self) {
        let shared = self.shared;
        let done = || shared.done.0.load(Ordering::SeqCst) >= self.target;
        let start = self.waited.map(|_| Instant::now());
        shared.finished.wait(SPIN, || done() || shared.failed.load(Ordering::SeqCst));
        if let (Some(waited), Some(start)) = (&mut self.waited, start) {
            *waited += start.elapsed();
        }
        assert!(done(), "another worker of this job panicked");
    }
}

/// Wakes threads that wait for a change of atomics, all of which are sequentially consistent.
#[derive(Default)]
struct Bell {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Bell {
    /// Returns when `ready`, which spins for about `spin` and then sleeps until the bell rings.
    fn wait(&self, spin: Duration, ready: impl Fn() -> bool) {
        let mut start = None;
        loop {
            for _ in 0..32 {
                if ready() {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > spin {
                break;
            }
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes sleepers to look again, after a change.
    fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // The lock orders this after the look of one who is about to sleep.
            drop(lock(&self.lock));
            self.wake.notify_all();
        }
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

/// Processors this process may use, whatever its quota of their time: more threads than that only take turns.
pub fn processors() -> usize {
    processors_in_affinity()
        .map(|processors| processors.len().max(1))
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn cores_in_affinity() -> Option<usize> {
    let siblings = |cpu| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
            .ok()
    };
    let cores: Option<std::collections::HashSet<String>> =
        processors_in_affinity()?.into_iter().map(siblings).collect();
    cores.map(|cores| cores.len())
}

/// Processors by number.
#[cfg(target_os = "linux")]
fn processors_in_affinity() -> Option<Vec<usize>> {
    // SAFETY: an all-zero set is a valid set, and the call fills at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return None;
        }
        set
    };
    // SAFETY: the index is below the set's size.
    Some((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

#[cfg(not(target_os = "linux"))]
fn processors_in_affinity() -> Option<Vec<usize>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_and_before_the_next_share() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(threads).unwrap();
            for job in 0..50 {
                let phases: Vec<usize> = (0..20).map(|phase| [97, 1, 0, 13, 2][(job + phase) % 5]).collect();
                let done: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
                team.work(&|worker| {
                    for (phase, &items) in phases.iter().enumerate() {
                        worker.share(items, |i| {
                            // Every phase before this one that had such an item has done it, and no later one.
                            let before = phases[..phase].iter().filter(|&&items| items > i).count();
                            assert_eq!(done[i].fetch_add(1, Ordering::Relaxed), before);
                        });
                    }
                });
                for (i, done) in done.iter().enumerate() {
                    let all = phases.iter().filter(|&&items| items > i).count();
                    assert_eq!(done.load(Ordering::Relaxed), all);
                }
            }
        }
    }

    #[test]
    fn run_calls_once_for_each_worker() {
        let team = Team::new(3).unwrap();
        let seen = AtomicUsize::new(0);
        team.run(&|worker, workers| {
            assert_eq!(workers, 3);
            seen.fetch_add(1 << (8 * worker), Ordering::Relaxed);
        });
        assert_eq!((seen.into_inner(), team.size()), (0x01_01_01, 3));
    }

    #[test]
    fn a_last_part_is_done_once_after_the_first_and_before_what_follows() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(threads).unwrap();
            for job in 0..100 {
                let (first, last, next) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
                let items = [0, 1, 2, 17][job % 4];
                team.work(&|worker| {
                    for round in 1..=20 {
                        let before = |worker: &mut Worker<'_>, _: &mut ()| {
                            worker.share(items, |_| {
                                assert_eq!(next.load(Ordering::Relaxed), (round - 1) * 5);
                                first.fetch_add(1, Ordering::Relaxed);
                            });
                        };
                        let after = |worker: &mut Worker<'_>, state: &mut ()| {
                            // Two phases, of which the second is two parts again.
                            assert_eq!(worker.alone(), threads > 1 && items > 0);
                            worker.share(3, |_| {
                                assert_eq!(first.load(Ordering::Relaxed), round * items);
                                last.fetch_add(1, Ordering::Relaxed);
                            });
                            let count = |worker: &mut Worker<'_>, _: &mut ()| {
                                worker.share(1, |_| {
                                    last.fetch_add(1, Ordering::Relaxed);
                                });
                            };
                            worker.then(true, state, count, count);
                        };
                        worker.then(true, &mut (), before, after);
                        worker.share(5, |_| {
                            assert_eq!(last.load(Ordering::Relaxed), round * 5);
                            next.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
                assert_eq!(next.into_inner(), 100);
            }
        }
    }

    #[test]
    fn sleepers_wake() {
        let team = Team::new(3).unwrap();
        for _ in 0..3 {
            std::thread::sleep(4 * SPIN_IDLE);
            team.work(&|worker| {
                worker.share(3, |i| std::thread::sleep(if i == 1 { 10 * SPIN } else { SPIN }));
                worker.share(2, |_| {});
            });
        }
    }

    #[test]
    fn a_worker_that_does_not_come_holds_nobody_up() {
        let team = Team::new(2).unwrap();
        let late = AtomicBool::new(true);
        team.work(&|worker| {
            // Worker 1 comes when worker 0 has done all phases alone.
            while worker.index() == 1 && late.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            for _ in 0..100 {
                worker.share(7, |_| {});
            }
            late.store(false, Ordering::SeqCst);
        });
        assert!(!late.into_inner());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3).unwrap();
        for guilty in 0..5 {
            let job = catch_unwind(AssertUnwindSafe(|| {
                team.work(&|worker| {
                    worker.share(5, |_| {});
                    worker.share(5, |item| assert!(item != guilty, "planted"));
                    worker.share(5, |_| {});
                });
            }));
            assert!(job.is_err());
            let done = AtomicUsize::new(0);
            team.work(&|worker| {
                worker.share(5, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!(done.into_inner(), 5);
        }
    }

    #[test]
    fn there_is_a_core() {
        assert!((1..=processors()).contains(&physical_cores()));
    }
}
