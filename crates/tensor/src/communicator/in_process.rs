//! Ranks that are threads of one process and exchange bytes through shared memory.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::{Communicator, Patience, check_lens};
use crate::Error;

/// Polls of the other ranks before the thread sleeps. Ranks of a step arrive within microseconds of each other, and a
/// sleeping thread takes tens of microseconds to wake.
const POLLS_BEFORE_SLEEP: u32 = 4_000;

/// Longest sleep before the time limit is checked again.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// One rank of a group of threads.
#[derive(Debug)]
pub struct InProcess {
    rank: usize,
    time_limit: Duration,
    /// Number of operations begun.
    operation: u64,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    members: Vec<Member>,
    num_sleeping: AtomicUsize,
    is_lost: AtomicBool,
    /// Reason of the loss.
    reason: Mutex<Option<String>>,
    changed: Condvar,
}

/// The part of the shared memory that one rank writes.
#[derive(Debug, Default)]
struct Member {
    /// Number of operations to which the rank has brought its part.
    arrived: AtomicU64,
    /// Parts of even and of odd operations. A rank that brings its part to an operation knows that every rank has
    /// arrived at the one before, and so has read the parts of the one before that: two buffers are enough.
    parts: [RwLock<Vec<u8>>; 2],
}

impl InProcess {
    /// Returns the ranks of a new group. An operation in which a rank does not take part within `time_limit` fails.
    pub fn group(num_ranks: usize, time_limit: Duration) -> Vec<InProcess> {
        assert!(num_ranks > 0, "a group has a rank 0");
        let shared = Arc::new(Shared {
            members: (0..num_ranks).map(|_| Member::default()).collect(),
            num_sleeping: AtomicUsize::new(0),
            is_lost: AtomicBool::new(false),
            reason: Mutex::new(None),
            changed: Condvar::new(),
        });
        (0..num_ranks).map(|rank| InProcess { rank, time_limit, operation: 0, shared: shared.clone() }).collect()
    }

    /// Brings this rank's part to the next operation.
    fn arrive(&mut self, part: &[u8], what: &'static str) -> Result<(), Error> {
        self.shared.check(what)?;
        let member = &self.shared.members[self.rank];
        let mut buffer = member.parts[self.operation as usize % 2].write().unwrap_or_else(PoisonError::into_inner);
        buffer.clear();
        buffer.extend_from_slice(part);
        drop(buffer);
        self.operation += 1;
        member.arrived.store(self.operation, Ordering::SeqCst);
        if self.shared.num_sleeping.load(Ordering::SeqCst) > 0 {
            // The lock orders this with a thread that is about to sleep.
            drop(self.shared.lock_reason());
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    /// Waits until these ranks have arrived at the operation that this rank arrived at last.
    fn wait(&self, ranks: std::ops::Range<usize>, patience: Patience, what: &'static str) -> Result<(), Error> {
        let shared = &*self.shared;
        let missing = || {
            let has_arrived = |rank: usize| shared.members[rank].arrived.load(Ordering::SeqCst) >= self.operation;
            ranks.clone().find(|&rank| !has_arrived(rank))
        };
        for poll in 0..POLLS_BEFORE_SLEEP {
            if missing().is_none() {
                return Ok(());
            }
            shared.check(what)?;
            // With more threads than cores, the missing rank may need this core.
            if poll % 64 == 63 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let started = Instant::now();
        shared.num_sleeping.fetch_add(1, Ordering::SeqCst);
        let mut reason = shared.lock_reason();
        let outcome = loop {
            let Some(rank) = missing() else { break Ok(()) };
            if let Some(reason) = &*reason {
                break Err(shared.lost(what, reason));
            }
            if patience == Patience::Step && started.elapsed() >= self.time_limit {
                let text = format!("rank {rank} did not answer within {} s", self.time_limit.as_secs_f32());
                break Err(shared.lose(&mut reason, what, text));
            }
            let waited = shared.changed.wait_timeout(reason, LONGEST_SLEEP);
            reason = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(reason);
        shared.num_sleeping.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Calls `f` with the part that a rank brought to the last operation.
    fn with_part(&self, rank: usize, f: impl FnOnce(&[u8])) {
        let parity = (self.operation - 1) as usize % 2;
        f(&self.shared.members[rank].parts[parity].read().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    fn lock_reason(&self) -> MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, what: &'static str) -> Result<(), Error> {
        if !self.is_lost.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(self.lost(what, self.lock_reason().as_deref().unwrap_or("a rank ended")))
    }

    fn lost(&self, operation: &'static str, reason: &str) -> Error {
        let device = format!("the group of {} ranks", self.members.len());
        Error::Lost { device, operation, reason: reason.to_owned() }
    }

    /// Ends the work of all ranks, unless it has ended, and returns the error.
    fn lose(&self, reason: &mut Option<String>, what: &'static str, text: String) -> Error {
        let text = reason.get_or_insert(text).clone();
        self.is_lost.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        self.lost(what, &text)
    }
}

impl Communicator for InProcess {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.shared.members.len()
    }

    fn all_gather(&mut self, part: &[u8], lens: &[usize], all: &mut [u8]) -> Result<(), Error> {
        check_lens(self.rank, part, lens, all);
        self.arrive(part, "all-gather")?;
        self.wait(0..self.num_ranks(), Patience::Step, "all-gather")?;
        let mut rest = all;
        for (rank, &len) in lens.iter().enumerate() {
            let (own, others) = rest.split_at_mut(len);
            self.with_part(rank, |part| own.copy_from_slice(part));
            rest = others;
        }
        Ok(())
    }

    fn broadcast(&mut self, bytes: &mut [u8], patience: Patience) -> Result<(), Error> {
        // Every rank waits for every other, so that two buffers for each are enough.
        let part: &[u8] = if self.rank == 0 { bytes } else { &[] };
        self.arrive(part, "broadcast")?;
        let others = if self.rank == 0 { Patience::Step } else { patience };
        self.wait(0..1, others, "broadcast")?;
        self.wait(0..self.num_ranks(), Patience::Step, "broadcast")?;
        if self.rank > 0 {
            self.with_part(0, |part| bytes.copy_from_slice(part));
        }
        Ok(())
    }

    fn barrier(&mut self, patience: Patience) -> Result<(), Error> {
        self.arrive(&[], "barrier")?;
        self.wait(0..self.num_ranks(), patience, "barrier")
    }

    fn abort(&mut self, reason: &str) {
        let text = format!("rank {}: {reason}", self.rank);
        let mut reason = self.shared.lock_reason();
        _ = self.shared.lose(&mut reason, "abort", text);
    }
}

impl Drop for InProcess {
    /// Ends the work of the ranks that go on, which would wait for this one.
    fn drop(&mut self) {
        self.abort("it ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `f` on every rank of a group, each on a thread.
    fn on_ranks<T: Send>(num_ranks: usize, f: impl Fn(InProcess) -> T + Sync) -> Vec<T> {
        let group = InProcess::group(num_ranks, Duration::from_millis(300));
        std::thread::scope(|scope| {
            let f = &f;
            let threads: Vec<_> = group.into_iter().map(|rank| scope.spawn(move || f(rank))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }

    #[test]
    fn parts_are_joined_in_the_order_of_ranks() {
        for num_ranks in 1..=4 {
            let outcomes = on_ranks(num_ranks, |mut rank| {
                let own = rank.rank() as u8;
                for round in 0..500u32 {
                    let lens: Vec<usize> = (0..num_ranks).map(|rank| (rank + round as usize) % 5).collect();
                    let mut all = vec![0; lens.iter().sum()];
                    let value = |rank: u8| rank.wrapping_add(round as u8);
                    rank.all_gather(&vec![value(own); lens[own as usize]], &lens, &mut all)?;
                    let expected: Vec<u8> =
                        lens.iter().enumerate().flat_map(|(rank, &len)| vec![value(rank as u8); len]).collect();
                    assert_eq!(all, expected, "round {round}");
                    let mut message = if own == 0 { round.to_le_bytes() } else { [0; 4] };
                    rank.broadcast(&mut message, Patience::Idle)?;
                    assert_eq!(u32::from_le_bytes(message), round);
                }
                rank.barrier(Patience::Step)
            });
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        }
    }

    #[test]
    fn a_rank_that_ends_ends_the_work_of_all() {
        let outcomes = on_ranks(3, |mut rank| match rank.rank() {
            1 => Ok(()),
            _ => rank.barrier(Patience::Step).and_then(|()| rank.barrier(Patience::Step)),
        });
        for rank in [0, 2] {
            let error = outcomes[rank].as_ref().expect_err("rank 1 is missing").to_string();
            assert!(error.contains("rank 1: it ended"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_hangs_is_named_after_the_time_limit() {
        let outcomes = on_ranks(2, |mut rank| {
            if rank.rank() == 1 {
                std::thread::sleep(Duration::from_millis(600));
            }
            rank.all_gather(&[7], &[1, 1], &mut [0; 2])
        });
        let error = outcomes[0].as_ref().expect_err("rank 1 came late").to_string();
        assert!(error.contains("rank 1 did not answer within 0.3 s"), "{error}");
        assert!(outcomes[1].is_err(), "the group stays lost");
    }

    #[test]
    fn an_idle_rank_waits_beyond_the_time_limit() {
        let outcomes = on_ranks(2, |mut rank| {
            if rank.rank() == 0 {
                std::thread::sleep(Duration::from_millis(600));
            }
            rank.broadcast(&mut [0], Patience::Idle)
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
}
