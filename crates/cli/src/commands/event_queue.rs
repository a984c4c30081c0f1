//! A sink that sends every event of a request to a channel, for commands that drive an engine themselves.

use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Result, bail};
use pellucid_engine::{Event, EventSink};

/// Sends every event to a channel.
pub(crate) struct EventQueue(Sender<Event>);

impl EventQueue {
    /// Returns a sink and the receiver of its events.
    pub(crate) fn new() -> (EventQueue, Receiver<Event>) {
        let (sender, events) = channel();
        (EventQueue(sender), events)
    }
}

impl EventSink for EventQueue {
    fn send(&mut self, event: Event) {
        // The receiver of a request that only fills the cache is dropped.
        let _ = self.0.send(event);
    }

    fn is_open(&self) -> bool {
        true
    }
}

/// Appends the tokens that have arrived to a reply. Fails if the request failed.
pub(crate) fn append_tokens(events: &Receiver<Event>, reply: &mut Vec<u32>) -> Result<()> {
    for event in events.try_iter() {
        match event {
            Event::Token(token) => reply.push(token.id),
            Event::Failed(error) => bail!("a request failed: {error}"),
            _ => {}
        }
    }
    Ok(())
}
