//! Leaving in order: at the first signal replies in flight are finished and new requests refused; at the second everything ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

/// How far the leaving has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// What is in flight is finished; nothing new begins.
    Draining,
    /// What is in flight ends now, with an error.
    Ending,
}

/// Told by the program when to leave; clones speak of the same server.
#[derive(Debug, Clone)]
pub struct Drain {
    phase: watch::Sender<Phase>,
    in_flight: Arc<InFlight>,
}

#[derive(Debug, Default)]
struct InFlight {
    count: AtomicUsize,
    emptied: Notify,
}

/// A reply in flight; the server waits for it before it leaves.
#[derive(Debug)]
pub(crate) struct Flight(Arc<InFlight>);

impl Default for Drain {
    fn default() -> Drain {
        Drain { phase: watch::Sender::new(Phase::Serving), in_flight: Arc::default() }
    }
}

impl Drain {
    /// The first call begins to drain, the second ends everything.
    pub fn ask(&self) {
        self.phase.send_modify(|phase| {
            *phase = if *phase == Phase::Serving { Phase::Draining } else { Phase::Ending };
        });
    }

    pub(crate) fn end(&self) {
        self.phase.send_replace(Phase::Ending);
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until a phase has come.
    pub(crate) fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.phase.subscribe();
        // The sender lives as long as the server; when it is gone, everything is over.
        async move { drop(receiver.wait_for(|now| *now >= phase).await) }
    }

    pub(crate) fn take_off(&self) -> Flight {
        self.in_flight.count.fetch_add(1, Ordering::SeqCst);
        Flight(self.in_flight.clone())
    }

    pub(crate) fn num_in_flight(&self) -> usize {
        self.in_flight.count.load(Ordering::SeqCst)
    }

    /// Waits until nothing is in flight.
    pub(crate) async fn emptied(&self) {
        loop {
            let emptied = self.in_flight.emptied.notified();
            if self.num_in_flight() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.emptied.notify_waiters();
        }
    }
}
