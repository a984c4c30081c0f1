//! Threads that wait for the next operation: a fixed pool, spinning briefly between operations and sleeping when idle.
//!
//! An operation is a number of tasks. A thread takes the next task until none is left, so who computes what is not fixed, and need
//! not be: a task owns its part of the output, and no reduction is split between tasks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Polls before a thread goes to sleep: around 50 microseconds, longer than the gap between two operations of a step.
const SPINS_BEFORE_SLEEP: usize = 4_000;

/// A borrowed task function with its lifetime erased; `Pool::run` does not return while a thread may still call it.
#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    num_tasks: usize,
}

// SAFETY: the pointee is `Sync`, and `run` keeps it alive until every thread has left the job.
unsafe impl Send for Job {}

struct Shared {
    /// Counts jobs; a change is the signal that `job` holds a new one.
    generation: AtomicUsize,
    job: Mutex<Option<Job>>,
    wake: Condvar,
    next_task: AtomicUsize,
    /// Workers that have not yet left the current job.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs, so that two callers of one pool take turns.
    turn: Mutex<()>,
}

impl Pool {
    /// A pool of `num_threads`, the calling thread being one of them.
    pub(crate) fn new(num_threads: usize) -> Self {
        let shared = Arc::new(Shared {
            generation: AtomicUsize::new(0),
            job: Mutex::new(None),
            wake: Condvar::new(),
            next_task: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let workers = (1..num_threads)
            .map(|i| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("compute-{i}"))
                    .spawn(move || work(&shared))
                    .expect("the operating system gives a thread")
            })
            .collect();
        Pool { shared, workers, turn: Mutex::new(()) }
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every i below `num_tasks`, on all threads, and returns when all calls have.
    pub(crate) fn run(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || num_tasks <= 1 {
            (0..num_tasks).for_each(task);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is used by workers between here and the wait below, which outlasts them.
        let task: *const (dyn Fn(usize) + Sync + 'static) =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), _>(task) };
        let job = Job { task, num_tasks };
        shared.next_task.store(0, Ordering::Relaxed);
        shared.busy.store(self.workers.len(), Ordering::Relaxed);
        {
            let mut slot = shared.job.lock().expect("no thread panics while it holds the lock");
            *slot = Some(job);
            shared.generation.fetch_add(1, Ordering::Release);
        }
        shared.wake.notify_all();
        take_tasks(shared, job);
        let mut spins = 0;
        while shared.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_SLEEP { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        drop(turn);
        assert!(!panicked, "a compute thread panicked; its message is above");
    }
}

/// Takes tasks until none is left. A panic is noted and raised later by `run`, because other threads still use the job.
fn take_tasks(shared: &Shared, job: Job) {
    // SAFETY: `run` keeps the function alive until every thread has left this job.
    let task = unsafe { &*job.task };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        loop {
            let i = shared.next_task.fetch_add(1, Ordering::Relaxed);
            if i >= job.num_tasks {
                break;
            }
            task(i);
        }
    }));
    if outcome.is_err() {
        shared.panicked.store(true, Ordering::Relaxed);
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut spins = 0;
        while shared.generation.load(Ordering::Acquire) == seen && spins < SPINS_BEFORE_SLEEP {
            spins += 1;
            std::hint::spin_loop();
        }
        let job = {
            let mut slot = shared.job.lock().expect("no thread panics while it holds the lock");
            while shared.generation.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Relaxed) {
                slot = shared.wake.wait(slot).expect("no thread panics while it holds the lock");
            }
            *slot
        };
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // Every job waits for all workers, so a worker never falls behind by more than one generation.
        seen = shared.generation.load(Ordering::Acquire);
        if let Some(job) = job {
            take_tasks(shared, job);
        }
        shared.busy.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _slot = self.shared.job.lock();
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker ends by itself; a panic inside it was reported by `run`.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for num_threads in [1, 2, 5] {
            let pool = Pool::new(num_threads);
            for num_tasks in [0, 1, 2, 7, 1000] {
                let calls: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_tasks, &|i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3);
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|i| assert_ne!(i, 40, "on purpose"))));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 45);
    }
}
