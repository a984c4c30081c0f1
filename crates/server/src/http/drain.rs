//! Shutdown: at the first signal, replies in flight are completed and new requests refused; at the second, all replies
//! end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

/// Phases of the server's life, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// Replies in flight are completed; new requests are refused.
    Draining,
    /// Replies in flight end now, with an error.
    Stopping,
}

/// Shuts a server down. Clones control the same server.
#[derive(Debug, Clone)]
pub struct Drain {
    phase: watch::Sender<Phase>,
    in_flight: Arc<InFlightCount>,
}

#[derive(Debug, Default)]
struct InFlightCount {
    count: AtomicUsize,
    reached_zero: Notify,
}

/// Counts a request as in flight while it lives; a draining server waits for it.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<InFlightCount>);

impl Default for Drain {
    fn default() -> Drain {
        Drain { phase: watch::Sender::new(Phase::Serving), in_flight: Arc::default() }
    }
}

impl Drain {
    /// Starts to drain at the first call, and stops all replies at the second.
    pub fn signal(&self) {
        self.phase.send_modify(|phase| {
            *phase = if *phase == Phase::Serving { Phase::Draining } else { Phase::Stopping };
        });
    }

    pub(crate) fn stop(&self) {
        self.phase.send_replace(Phase::Stopping);
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until `phase` or a later one begins.
    pub(crate) fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.phase.subscribe();
        // An error means that the sender was dropped with the server, which is later than any phase.
        async move { drop(receiver.wait_for(|now| *now >= phase).await) }
    }

    /// Counts a request as in flight until the returned value is dropped.
    pub(crate) fn start_request(&self) -> InFlight {
        self.in_flight.count.fetch_add(1, Ordering::SeqCst);
        InFlight(self.in_flight.clone())
    }

    pub(crate) fn num_in_flight(&self) -> usize {
        self.in_flight.count.load(Ordering::SeqCst)
    }

    /// Waits until no request is in flight.
    pub(crate) async fn finished(&self) {
        loop {
            let reached_zero = self.in_flight.reached_zero.notified();
            if self.num_in_flight() == 0 {
                return;
            }
            reached_zero.await;
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.reached_zero.notify_waiters();
        }
    }
}
