//! Cancellation: what happens when a client disconnects.
//!
//! 1. The reader of a request's events is dropped: a [`TokenStream`](crate::TokenStream), or the server's reply whose
//!    connection has closed. From then on the request's [`EventSink::is_open`](crate::EventSink::is_open) returns
//!    false.
//! 2. The step that is running ends as planned; tokens of this request in it are sampled and sent to nobody.
//! 3. At the next admission, before the next step, [`Engine::drop_cancelled`] removes the request from the running ones
//!    or from the queue. No event is sent.
//! 4. Its blocks of KV memory go back at once. Full ones stay in the tenant's prefix cache until their memory is
//!    needed.
//! 5. Its chunk of a step that was launched ahead is discarded when that step is committed (see `look_ahead`).

use super::Engine;
use crate::sequence_group::GroupId;

impl Engine {
    /// Removes the requests that nobody reads any more and releases their blocks.
    pub(super) fn drop_cancelled(&mut self) {
        let closed = self.running.iter().filter(|(_, group)| !group.sink.is_open());
        let closed: Vec<GroupId> = closed.map(|(&id, _)| id).collect();
        for id in closed {
            let mut group = self.running.remove(&id).expect("it was just there");
            group.release(&mut self.cache);
            self.stats.cancelled_requests += 1;
        }
        // A waiting request holds no blocks.
        for queue in self.waiting.values_mut() {
            let before = queue.len();
            queue.retain(|(_, group)| group.sink.is_open());
            self.stats.cancelled_requests += (before - queue.len()) as u64;
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }
}
