//! The places in the queue, and each tenant's share of them.
//!
//! A request takes a place when it is submitted, on the submitting thread, and gives it back when it starts or ends. A
//! place is returned by `Drop`, so no path of a request can lose one or return it twice. A preempted request goes back
//! to the queue without a place: otherwise the preempted requests of one tenant could fill the queue for the others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::scheduler::within_share;
use crate::{Error, TenantId};

/// The places of the queue. Shared by the engine's loop and the threads that submit; the lock is held for the time of
/// a few additions.
#[derive(Debug)]
pub(crate) struct Queue {
    max_waiting: usize,
    /// Number of tenants that may submit, as far as the caller has told.
    num_tenants: AtomicUsize,
    taken: Mutex<HashMap<TenantId, usize>>,
}

/// A place that a request holds until it starts.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Arc<Queue>,
    tenant: TenantId,
}

impl Queue {
    pub(crate) fn new(max_waiting: usize) -> Arc<Queue> {
        Arc::new(Queue { max_waiting, num_tenants: AtomicUsize::new(1), taken: Mutex::default() })
    }

    /// Sets the number of tenants that may submit. With more than one, no tenant can fill the queue.
    pub(crate) fn set_num_tenants(&self, num_tenants: usize) {
        self.num_tenants.store(num_tenants, Ordering::Relaxed);
    }

    /// Takes a place for each request, given by its tenant: for all of them, or for none.
    pub(crate) fn take(self: &Arc<Queue>, tenants: &[TenantId]) -> Result<Vec<Place>, Error> {
        let num_known = self.num_tenants.load(Ordering::Relaxed);
        // One tenant gets half of the queue; see `within_share`.
        let max = if num_known > 1 { (self.max_waiting / 2).max(1) } else { self.max_waiting };
        // Not `QueueFull`: these requests would not fit into an empty queue either.
        if tenants.len() > max {
            let expected = format!("at most {max} in one request, which is what the queue holds for it");
            return Err(Error::OutOfRange { name: "prompts", expected, found: tenants.len().to_string() });
        }
        let mut places: Vec<Place> = Vec::with_capacity(tenants.len());
        let mut taken = self.lock();
        for &tenant in tenants {
            let own = taken.get(&tenant).copied().unwrap_or(0);
            let num_present = taken.len() + usize::from(own == 0);
            let all = taken.values().sum();
            if !within_share(own, all, self.max_waiting, 1, num_known.max(num_present)) {
                // Dropping the places needs the lock.
                drop(taken);
                return Err(Error::QueueFull);
            }
            taken.insert(tenant, own + 1);
            places.push(Place { queue: self.clone(), tenant });
        }
        Ok(places)
    }

    /// Returns the number of requests that hold a place.
    pub(crate) fn num_taken(&self) -> usize {
        self.lock().values().sum()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TenantId, usize>> {
        // No code panics while it holds the lock, and a count is valid between any two operations.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.queue.lock();
        let own = taken.get(&self.tenant).copied().unwrap_or(0);
        debug_assert!(own > 0, "a place is returned once");
        if own > 1 {
            taken.insert(self.tenant, own - 1);
        } else {
            taken.remove(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    /// Takes places one at a time until the queue refuses.
    fn fill(queue: &Arc<Queue>, tenant: TenantId) -> Vec<Place> {
        std::iter::from_fn(|| queue.take(&[tenant]).ok()).flatten().collect()
    }

    #[test]
    fn a_single_tenant_fills_the_queue_and_another_finds_no_place() {
        let queue = Queue::new(8);
        assert_eq!(fill(&queue, A).len(), 8, "every place was returned");
        let places = fill(&queue, A);
        assert_eq!((places.len(), queue.num_taken()), (8, 8));
        // The positive control of the next test: without the number of tenants, nothing is left.
        assert_eq!(queue.take(&[B]).unwrap_err(), Error::QueueFull);
        drop(places);
        assert_eq!(queue.num_taken(), 0);
    }

    #[test]
    fn with_two_tenants_each_always_finds_a_place() {
        let queue = Queue::new(8);
        queue.set_num_tenants(2);
        let flood = fill(&queue, A);
        assert_eq!(flood.len(), 4);
        let quiet = fill(&queue, B);
        assert_eq!(quiet.len(), 2, "half of what is left");
        drop(flood);
        assert_eq!(fill(&queue, B).len(), 2, "with two taken, four of eight");
        assert_eq!(queue.num_taken(), 2);
    }

    #[test]
    fn a_list_of_prompts_takes_all_its_places_or_none() {
        let queue = Queue::new(9);
        queue.set_num_tenants(2);
        let too_long = queue.take(&[A; 5]).unwrap_err();
        assert!(matches!(too_long, Error::OutOfRange { name: "prompts", .. }), "{too_long}");
        let places = queue.take(&[A; 4]).expect("half of the queue");
        assert_eq!(queue.take(&[A]).unwrap_err(), Error::QueueFull);
        assert_eq!(queue.take(&[B; 3]).unwrap_err(), Error::QueueFull);
        assert_eq!(queue.num_taken(), 4, "a refused list holds nothing");
        assert_eq!(queue.take(&[B; 2]).expect("two of the five that are left").len(), 2);
        drop(places);
        let single = Queue::new(9);
        assert_eq!(single.take(&[A; 9]).expect("a single tenant may take all").len(), 9);
        assert!(single.take(&[A; 10]).is_err());
    }

    #[test]
    fn the_smallest_queue_serves_several_tenants_in_turn() {
        let queue = Queue::new(1);
        queue.set_num_tenants(3);
        for tenant in [A, B, A] {
            assert_eq!(fill(&queue, tenant).len(), 1);
        }
    }

    #[test]
    fn a_refusal_tells_nothing_about_other_tenants() {
        let texts = [3, 30].map(|max_waiting| {
            let queue = Queue::new(max_waiting);
            queue.set_num_tenants(2);
            let _others = fill(&queue, A);
            let _own = fill(&queue, B);
            queue.take(&[B]).unwrap_err().to_string()
        });
        assert_eq!(texts[0], texts[1]);
        assert!(!texts[0].contains(|c: char| c.is_ascii_digit()), "{}", texts[0]);
    }

    #[test]
    fn threads_that_take_and_return_places_never_exceed_a_share() {
        let queue = Queue::new(16);
        queue.set_num_tenants(2);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let queue = &queue;
                scope.spawn(move || {
                    let tenant = if thread < 3 { A } else { B };
                    let mut held = Vec::new();
                    let mut served = 0;
                    for i in 0..20_000 {
                        held.extend(queue.take(&[tenant]).into_iter().flatten());
                        served += usize::from(!held.is_empty());
                        let taken = queue.lock();
                        let all: usize = taken.values().sum();
                        assert!(all <= 16 && taken.get(&A).is_none_or(|&own| own <= 8), "{taken:?}");
                        drop(taken);
                        if (i + thread) % 3 == 0 {
                            held.clear();
                        }
                    }
                    assert!(served > 0 && (tenant == A || served == 20_000), "{served} for {tenant:?}");
                });
            }
        });
        assert_eq!(queue.num_taken(), 0);
    }
}
