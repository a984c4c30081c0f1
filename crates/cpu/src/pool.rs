//! A fixed pool of threads, which spin briefly between operations and sleep when idle.
//!
//! An operation (a *job*) is a number of tasks. A thread takes the next task until none is left. Which thread computes
//! which task is not fixed and does not matter: a task owns its part of the output, and no sum is split between tasks.
//! A token takes hundreds of jobs of a few microseconds, so starting a job costs one store that spinning threads see; a
//! system call is needed only to wake sleeping threads. The caller waits only for threads that have joined the job. On
//! a busy machine it computes the tasks of threads that the operating system did not schedule.
//!
//! Tasks that read memory sequentially are taken from both ends ([`Pool::run_from_both_ends`]): of two threads, one
//! takes ascending tasks and the other descending ones, so the memory of a thread's next task adjoins that of its last.
//! More than two threads work in pairs, each pair on its own range of the tasks, and help other pairs when their range
//! is done.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::core_affinity;
use crate::idle_prefetch::{NextWeights, PrefetchPath};
use crate::sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, JoinHandle, Mutex, Ordering, SPINS_BEFORE_SLEEP, SharedCell, park, spawn,
    spin_loop, yield_now,
};

/// Prefetches that the caller issues after a job before it returns.
const LINES_AT_ONCE: usize = 8;

/// Whether the thread's next task will probably be the next higher or the next lower one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Up,
    Down,
}

/// A borrowed task function with its lifetime erased; `Pool::run` does not return while a thread may still call it.
#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize, Direction) + Sync),
    num_tasks: usize,
    /// Whether each pair of threads has a range of the tasks; otherwise all threads take the next task of all.
    both_ends: bool,
    /// The weights that are read after this job, if known.
    next_weights: Option<NextWeights>,
}

/// A value on its own pair of cache lines, so that threads that poll one value do not slow down threads that write
/// another.
#[derive(Default)]
#[repr(align(128))]
struct OwnLine<T>(T);

struct Shared {
    /// The job's number, counted from one, and whether it can be joined. Only the caller writes it.
    state: OwnLine<AtomicU64>,
    /// For each worker, whether it is in the job, or about to find the job closed. Each has its own cache line: with
    /// many workers, a shared line would be the bottleneck.
    inside: Box<[OwnLine<AtomicBool>]>,
    /// Written only while no worker is in a job.
    job: SharedCell<Option<Job>>,
    num_threads: usize,
    /// Number of tasks taken of each pair's range: from its start in the lower 32 bits, from its end in the upper 32. A
    /// job without pairs uses the first entry for all tasks.
    taken: Box<[OwnLine<AtomicU64>]>,
    /// Number of workers that sleep, or are about to.
    sleepers: OwnLine<AtomicUsize>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

const OPEN: u64 = 1;

fn generation(state: u64) -> u64 {
    state >> 1
}

// SAFETY: `job` is written by `run_job` alone, which holds the lock, has closed the previous job and has seen every
// worker leave it; workers read it after they have joined, which only an open job allows.
unsafe impl Sync for Shared {}
// SAFETY: a job's task is `Sync`, and `run_job` keeps it alive until every thread has left the job.
unsafe impl Send for Shared {}

/// The operating system refused to start a thread.
#[derive(Debug)]
pub(crate) struct ThreadRefused {
    /// Number of threads that exist, including the calling one.
    pub(crate) obtained: usize,
    pub(crate) cause: std::io::Error,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs: two callers of one pool run their jobs one after the other.
    running: Mutex<()>,
}

impl Pool {
    /// Creates a pool of `num_threads` threads, one of which is the calling thread.
    ///
    /// If `num_threads` equals the number of cores that the program may use, each worker is pinned to a core. With
    /// fewer threads the operating system chooses the cores: another program might be pinned to the same ones.
    pub(crate) fn new(num_threads: usize) -> Result<Self, ThreadRefused> {
        let cores = core_affinity::allowed_cores();
        let own_core = |worker: usize| (cores.len() == num_threads).then(|| cores[worker]);
        let shared = Arc::new(Shared {
            state: OwnLine::default(),
            inside: (1..num_threads).map(|_| OwnLine::default()).collect(),
            job: SharedCell::new(None),
            num_threads,
            taken: (0..num_threads.div_ceil(2)).map(|_| OwnLine::default()).collect(),
            sleepers: OwnLine::default(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Pool { shared, workers: Vec::new(), running: Mutex::new(()) };
        for i in 1..num_threads {
            let (shared, core) = (pool.shared.clone(), own_core(i));
            let worker = spawn(format!("compute-{i}"), move || {
                if let Some(core) = core {
                    core_affinity::pin_to(core);
                }
                work(&shared, i);
            });
            pool.workers.push(worker.map_err(|cause| ThreadRefused { obtained: i, cause })?);
        }
        Ok(pool)
    }

    pub(crate) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for every i below `num_tasks`, on all threads, and returns when all calls have.
    pub(crate) fn run(&self, num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.run_job(num_tasks, false, None, &|i, _| task(i));
    }

    /// Like [`Pool::run`], but threads take tasks from both ends of their range. Threads that have to wait prefetch the
    /// part of `next_weights` that they will read first.
    pub(crate) fn run_from_both_ends(
        &self,
        num_tasks: usize,
        next_weights: Option<NextWeights>,
        task: &(dyn Fn(usize, Direction) + Sync),
    ) {
        self.run_job(num_tasks, true, next_weights, task);
    }

    fn run_job(
        &self,
        num_tasks: usize,
        both_ends: bool,
        next_weights: Option<NextWeights>,
        task: &(dyn Fn(usize, Direction) + Sync),
    ) {
        if self.workers.is_empty() || num_tasks <= 1 {
            (0..num_tasks).for_each(|i| task(i, Direction::Up));
            return;
        }
        let running = self.running.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the reference only while they are in the job, and the loop
        // below waits for them.
        let task: *const (dyn Fn(usize, Direction) + Sync + 'static) =
            unsafe { std::mem::transmute::<&(dyn Fn(usize, Direction) + Sync), _>(task) };
        let job = Job { task, num_tasks, both_ends, next_weights };
        // SAFETY: the previous call closed its job and waited until every worker had left it.
        unsafe { shared.job.set(Some(job)) };
        shared.taken.iter().for_each(|taken| taken.0.store(0, Ordering::Relaxed));
        self.announce(OPEN);
        take_tasks(shared, job, 0);
        // Closes the job: workers that have not joined by now are not needed.
        shared.state.0.store(shared.state.0.load(Ordering::Relaxed) & !OPEN, Ordering::SeqCst);
        let mut path =
            next_weights.map_or(PrefetchPath::default(), |next_weights| next_weights.path(0, shared.num_threads));
        // These cache lines arrive while the caller prepares the next job.
        (0..LINES_AT_ONCE).for_each(|_| _ = path.fetch());
        let mut spins = 0;
        for inside in &shared.inside {
            while inside.0.load(Ordering::SeqCst) {
                if path.fetch() {
                    continue;
                }
                spins += 1;
                if spins < SPINS_BEFORE_SLEEP { spin_loop() } else { yield_now() }
            }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        drop(running);
        assert!(!panicked, "a compute thread panicked; its message was printed before this one");
    }

    /// Begins a new generation and wakes sleeping workers.
    ///
    /// A worker counts itself among the sleepers and then reads the state; this function writes the state and then
    /// reads the count. In any order of these four steps, the worker sees the change or is woken.
    fn announce(&self, open: u64) {
        let state = &self.shared.state.0;
        let next = generation(state.load(Ordering::Relaxed)).wrapping_add(1) << 1;
        state.store(next | open, Ordering::SeqCst);
        if self.shared.sleepers.0.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
    }
}

/// Returns the range of tasks that a thread begins with, which it shares with the other thread of its pair, and the end
/// it begins at.
pub(crate) fn share(num_tasks: usize, thread: usize, num_threads: usize) -> (Range<usize>, Direction) {
    let edge = |thread: usize| num_tasks * thread.min(num_threads) / num_threads;
    let first = thread / 2 * 2;
    (edge(first)..edge(first + 2), if thread == first { Direction::Up } else { Direction::Down })
}

/// Takes tasks until none is left. A panic is recorded, and raised by `run_job` later: other threads still use the job.
fn take_tasks(shared: &Shared, job: Job, thread: usize) {
    // SAFETY: `run_job` keeps the function alive until every thread has left this job.
    let task = unsafe { &*job.task };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        if !job.both_ends {
            return take_range(&shared.taken[0].0, 0..job.num_tasks, Direction::Up, task);
        }
        let (_, direction) = share(job.num_tasks, thread, shared.num_threads);
        // The range of this thread's pair, then the ranges of the other pairs.
        for pair in (thread / 2..shared.taken.len()).chain(0..thread / 2) {
            let (range, _) = share(job.num_tasks, 2 * pair, shared.num_threads);
            take_range(&shared.taken[pair].0, range, direction, task);
        }
    }));
    if outcome.is_err() {
        shared.panicked.store(true, Ordering::Relaxed);
    }
}

/// Takes tasks of a range from one of its ends until none is left.
///
/// One atomic addition returns the number of tasks taken from each end before. No task is taken twice: the task taken
/// as the i-th from the start and the j-th from the end has i + j + 1 equal to the length, and the second thread would
/// find i + j + 1 tasks taken.
fn take_range(taken: &AtomicU64, range: Range<usize>, direction: Direction, task: &(dyn Fn(usize, Direction) + Sync)) {
    let counts = |taken: u64| ((taken & u64::from(u32::MAX)) as usize, (taken >> 32) as usize);
    let is_left = |(from_start, from_end): (usize, usize)| from_start + from_end < range.len();
    // Reading first is cheaper than a useless atomic addition when nothing is left.
    while is_left(counts(taken.load(Ordering::Relaxed))) {
        let one = if direction == Direction::Up { 1 } else { 1 << 32 };
        let before = counts(taken.fetch_add(one, Ordering::Relaxed));
        if !is_left(before) {
            break;
        }
        match direction {
            Direction::Up => task(range.start + before.0, direction),
            Direction::Down => task(range.end - 1 - before.1, direction),
        }
    }
}

/// The loop of a worker. Workers are numbered from one; the calling thread is number zero.
fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    let mut path = PrefetchPath::default();
    let inside = &shared.inside[worker - 1].0;
    while join_next(shared, inside, &mut seen, &mut path) {
        // SAFETY: the worker has joined, so the job is set and is not written again before the worker has left.
        if let Some(job) = unsafe { shared.job.get() } {
            take_tasks(shared, job, worker);
            if let Some(next_weights) = job.next_weights {
                path = next_weights.path(worker, shared.num_threads);
            }
        }
        inside.store(false, Ordering::Release);
    }
}

/// Waits for a job that this worker has not seen and joins it. Returns false when the pool is dropped.
fn join_next(shared: &Shared, inside: &AtomicBool, seen: &mut u64, path: &mut PrefetchPath) -> bool {
    let stop = || shared.stop.load(Ordering::SeqCst);
    let mut spins = 0;
    while spins < SPINS_BEFORE_SLEEP {
        if try_join(shared, inside, seen) {
            return true;
        }
        if !path.fetch() {
            spins += 1;
            spin_loop();
        }
    }
    shared.sleepers.0.fetch_add(1, Ordering::SeqCst);
    let mut joined = try_join(shared, inside, seen);
    while !joined && !stop() {
        // `park` may return without cause, and returns at once if the thread was unparked before.
        park();
        joined = try_join(shared, inside, seen);
    }
    shared.sleepers.0.fetch_sub(1, Ordering::SeqCst);
    joined
}

/// Joins the job if it is open. The worker sets `inside` and then reads the state; the caller closes the job and then
/// reads `inside`. In any order of these four steps, the worker sees that the job is closed or the caller waits for the
/// worker.
fn try_join(shared: &Shared, inside: &AtomicBool, seen: &mut u64) -> bool {
    let state = &shared.state.0;
    let mut found = state.load(Ordering::SeqCst);
    if generation(found) == *seen {
        return false;
    }
    if found & OPEN != 0 {
        inside.store(true, Ordering::SeqCst);
        // By now the job may be closed, or be a later one, which can be joined just as well.
        found = state.load(Ordering::SeqCst);
        if found & OPEN == 0 {
            inside.store(false, Ordering::Release);
        }
    }
    *seen = generation(found);
    found & OPEN != 0
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.announce(0);
        for worker in self.workers.drain(..) {
            // A panic in a task was reported by `run_job`, so there is no result to look at.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for num_threads in if cfg!(miri) { &[1, 3][..] } else { &[1, 2, 3, 5, 8] } {
            let num_threads = *num_threads;
            let pool = Pool::new(num_threads).expect("threads");
            for num_tasks in [0, 1, 2, 3, 7, 16, if cfg!(miri) { 50 } else { 1000 }] {
                let calls: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_tasks, &|i| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                pool.run_from_both_ends(num_tasks, None, &|i, _| {
                    calls[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 2));
            }
        }
    }

    #[test]
    fn pairs_share_all_tasks_in_proportion() {
        for (num_tasks, num_threads) in [(0, 2), (1, 5), (9, 2), (9, 4), (100, 7), (128, 16)] {
            let pairs: Vec<_> =
                (0..num_threads).step_by(2).map(|thread| share(num_tasks, thread, num_threads).0).collect();
            assert_eq!((pairs[0].start, pairs[pairs.len() - 1].end), (0, num_tasks));
            assert!(pairs.windows(2).all(|pair| pair[0].end == pair[1].start), "{pairs:?}");
            for thread in 0..num_threads {
                let (range, direction) = share(num_tasks, thread, num_threads);
                assert_eq!((&range, direction == Direction::Down), (&pairs[thread / 2], thread % 2 == 1));
            }
        }
        assert_eq!([0, 2, 4].map(|thread| share(10, thread, 5).0), [0..4, 4..8, 8..10]);
    }

    #[test]
    fn many_short_operations_of_several_callers_lose_no_task() {
        // A multiple of ten, because both the number of tasks and the kind of job repeat.
        const ROUNDS: usize = if cfg!(miri) { 20 } else { 2_000 };
        for num_threads in [3, 9] {
            let pool = Pool::new(num_threads).expect("threads");
            let sum = AtomicUsize::new(0);
            let add = |i: usize| {
                sum.fetch_add(i + 1, Ordering::Relaxed);
            };
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        for round in 0..ROUNDS {
                            match round % 2 {
                                0 => pool.run(1 + round % 5, &add),
                                _ => pool.run_from_both_ends(1 + round % 5, None, &|i, _| add(i)),
                            }
                            // Long enough for the workers to fall asleep.
                            if round % 500 == 0 {
                                std::thread::sleep(std::time::Duration::from_millis(2));
                            }
                        }
                    });
                }
            });
            // A round adds 1, 3, 6, 10 or 15.
            assert_eq!(sum.load(Ordering::Relaxed), 2 * (ROUNDS / 5) * (1 + 3 + 6 + 10 + 15));
        }
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).expect("threads");
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(64, &|i| assert_ne!(i, 40, "on purpose"))));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 45);
    }
}
