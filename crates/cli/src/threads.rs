//! Work on threads that the system may refuse (`ulimit -u`, `ulimit -v`, a container's limit of tasks): it is done all the
//! same then, by the caller's own.

use std::panic::resume_unwind;
use std::sync::mpsc::{SendError, channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

/// Work that another thread does, or that is done.
pub enum Work<'scope, T> {
    /// Another thread is at it.
    Begun(ScopedJoinHandle<'scope, T>),
    /// There was no thread for it.
    Done(T),
}

impl<'scope, T: Send + 'scope> Work<'scope, T> {
    /// Begins `work` on a thread of its own; where there is none, does it before this returns.
    pub fn begin<F: FnOnce() -> T + Send + 'scope>(scope: &'scope Scope<'scope, '_>, work: F) -> Self {
        // What a thread that does not start was given is lost, so work follows when it has started.
        let (give, take) = channel::<F>();
        let started = Builder::new().spawn_scoped(scope, move || {
            let work = take.recv().expect("work follows a thread that has started");
            work()
        });
        match started {
            Ok(thread) => match give.send(work) {
                Ok(()) => Work::Begun(thread),
                Err(SendError(work)) => Work::Done(work()),
            },
            Err(_) => Work::Done(work()),
        }
    }

    /// What came of it; a panic goes on here.
    pub fn end(self) -> T {
        match self {
            Work::Begun(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Work::Done(result) => result,
        }
    }
}

/// Does `work` on this thread and on up to `threads - 1` others at once, as many as the system has; each call takes its share
/// from the others.
pub fn share(threads: usize, work: impl Fn() + Sync) {
    std::thread::scope(|scope| {
        let others = (1..threads).map_while(|_| Builder::new().spawn_scoped(scope, &work).ok());
        let others: Vec<_> = others.collect();
        work();
        for other in others {
            other.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn work_is_done_once() {
        let sum = std::thread::scope(|scope| {
            let works: Vec<_> = (0..5).map(|i| Work::begin(scope, move || i)).collect();
            works.into_iter().map(Work::end).sum::<usize>()
        });
        assert_eq!(sum, 10);
    }

    #[test]
    fn shared_work_is_begun_by_no_more_than_there_are() {
        for threads in [0, 1, 4] {
            let begun = AtomicUsize::new(0);
            share(threads, || _ = begun.fetch_add(1, Ordering::Relaxed));
            assert!((1..=threads.max(1)).contains(&begun.into_inner()));
        }
    }
}
