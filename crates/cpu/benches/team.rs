//! What a node of a program costs besides its work, on a team of threads.
//!
//!     cargo bench -p ingle-cpu --bench team
//!
//! Phases of items of about a microsecond, which every worker does equally fast; what a phase takes beyond the items of
//! the worker that has most is overhead. Median of many jobs of 500 phases.

use std::hint::black_box;
use std::time::Instant;

use ingle_cpu::{Team, physical_cores};

const PHASES: usize = 500;
const JOBS: usize = 201;

fn main() {
    let threads = physical_cores().max(2);
    let (alone, team) = (Team::new(1).expect("a thread"), Team::new(threads).expect("threads"));
    println!("{:>7} {:>6} {:>8}", "threads", "items", "ns");
    for items in [1, 2, 8, 16, 32] {
        // In turn, so that a change of the processor's speed meets both.
        let mut times: Vec<f64> = (0..JOBS)
            .map(|_| {
                let item = phase(&alone, 8) / 8.0;
                phase(&team, items) - item * items.div_ceil(threads) as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{threads:7} {items:6} {:8.0}", times[JOBS / 2]);
    }
}

/// Nanoseconds of one phase.
fn phase(team: &Team, items: usize) -> f64 {
    let begin = Instant::now();
    team.work(&|worker| {
        for _ in 0..PHASES {
            worker.share(items, work);
        }
    });
    begin.elapsed().as_secs_f64() * 1e9 / PHASES as f64
}

/// A chain of multiplications.
fn work(item: usize) {
    let mut x = item as u64 | 1;
    for _ in 0..1000 {
        x = black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    }
    black_box(x);
}
