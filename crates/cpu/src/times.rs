//! Times of a program's steps, as the caller's thread sees them.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ingle_graph::StepTime;

use crate::threads::Worker;

/// What each step took.
pub struct Times(Mutex<Vec<StepTime>>);

impl Times {
    /// No time for any of `steps` steps.
    pub fn new(steps: usize) -> Self {
        Self(Mutex::new(vec![StepTime::default(); steps]))
    }

    /// Runs a step; `within` is one whose time holds this one's, which is this one's alone from now on. The step may run
    /// on another worker than the caller's thread, which waits meanwhile.
    pub fn step(
        &self,
        step: usize,
        within: Option<usize>,
        worker: &mut Worker<'_>,
        run: impl FnOnce(&mut Worker<'_>),
    ) {
        let caller = worker.index() == 0;
        if !caller && !worker.alone() {
            return run(worker);
        }
        let (start, before) = (Instant::now(), worker.waited());
        run(worker);
        let seconds = start.elapsed().as_secs_f64();
        let waited = if caller { (worker.waited() - before).as_secs_f64() } else { seconds };
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        times[step].seconds += seconds;
        times[step].waited += waited;
        if let Some(within) = within {
            times[within].seconds -= seconds;
            times[within].waited -= waited;
        }
    }

    /// The times, in order of steps. What two workers timed can be apart by less than a microsecond, which is cut off.
    pub fn into_inner(self) -> Vec<StepTime> {
        let mut times = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for time in &mut times {
            time.seconds = time.seconds.max(0.0);
            time.waited = time.waited.clamp(0.0, time.seconds);
        }
        times
    }
}
