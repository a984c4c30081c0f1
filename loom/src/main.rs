//! The thread pool of the CPU backend under every interleaving of its threads, up to a number of preemptions.
//!
//! The pool is the same file that the product compiles; only its module `sync` differs. Checked are: each task runs
//! once, its writes are seen by the caller, the job is never written while a worker may read it, and a pool that is
//! dropped wakes and ends its threads. A thread that would wait for ever is a deadlock, which Loom reports.

#![allow(dead_code, reason = "the pool's other users are not part of this program")]

#[path = "../../crates/cpu/src/idle_prefetch.rs"]
mod idle_prefetch;
#[path = "../../crates/cpu/src/pool.rs"]
mod pool;
mod sync;

/// Threads are not pinned here.
mod core_affinity {
    pub(crate) fn allowed_cores() -> Vec<usize> {
        Vec::new()
    }

    pub(crate) fn pin_to(_core: usize) {}
}

/// Nothing is prefetched here.
mod simd {
    pub(crate) fn prefetch_to_l2(_address: *const u8) {}
}

use std::time::Instant;

use loom::cell::UnsafeCell;
use pool::Pool;

/// Numbers that tasks write without synchronization of their own: Loom reports a race if the pool provides none.
struct Slots(Vec<UnsafeCell<usize>>);

// SAFETY: every task writes its own slot, and the caller reads after the job; Loom checks both.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(count: usize) -> Slots {
        Slots((0..count).map(|_| UnsafeCell::new(0)).collect())
    }

    fn increment(&self, slot: usize) {
        // SAFETY: one task for each slot, which Loom checks.
        self.0[slot].with_mut(|number| unsafe { *number += 1 });
    }

    fn check(&self, expected: usize) {
        for slot in &self.0 {
            // SAFETY: the job is over, which Loom checks.
            assert_eq!(slot.with(|number| unsafe { *number }), expected);
        }
    }
}

/// Runs `num_jobs` jobs, alternately of both kinds, and drops the pool.
fn jobs(num_threads: usize, num_tasks: usize, num_jobs: usize) {
    let pool = Pool::new(num_threads).unwrap_or_else(|refused| panic!("{refused:?}"));
    let slots = Slots::new(num_tasks);
    for job in 0..num_jobs {
        if job % 2 == 0 {
            pool.run(num_tasks, &|task| slots.increment(task));
        } else {
            pool.run_from_both_ends(num_tasks, None, &|task, _| slots.increment(task));
        }
        slots.check(job + 1);
    }
}

/// Checks a scenario under every interleaving with at most `preemptions` preemptions.
fn check(name: &str, preemptions: usize, scenario: impl Fn() + Sync + Send + 'static) {
    let started = Instant::now();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        scenario();
    });
    let runs = count.load(std::sync::atomic::Ordering::Relaxed);
    println!("{name}: {runs} interleavings in {:.1} s", started.elapsed().as_secs_f64());
}

fn main() {
    check("a pool that is dropped without a job", 4, || jobs(2, 2, 0));
    check("one worker, one job", 5, || jobs(2, 2, 1));
    check("one worker, two jobs", 4, || jobs(2, 2, 2));
    check("one worker, three jobs", 3, || jobs(2, 2, 3));
    check("two workers, one job", 3, || jobs(3, 2, 1));
    check("two workers, two jobs", 2, || jobs(3, 3, 2));
}
