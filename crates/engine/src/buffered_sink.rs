//! A request's event sink with a buffer for the events of a step.
//!
//! With an asynchronous device, the events of a step are sent while the device computes the next one. A token therefore
//! waits in the buffer for as long as it takes to launch that step. All other events are sent at once, after those in
//! the buffer.

use crate::event::{Control, Event, EventSink};
use crate::fallible;

pub(crate) struct BufferedSink {
    sink: Box<dyn EventSink>,
    held: Vec<Event>,
    /// Whether an event was lost for want of memory. The request has failed then, and nothing more is sent.
    has_failed: bool,
}

impl BufferedSink {
    pub(crate) fn new(sink: Box<dyn EventSink>) -> BufferedSink {
        BufferedSink { sink, held: Vec::new(), has_failed: false }
    }

    /// Buffers an event of a step until [`BufferedSink::deliver`]. The replies of `best_of` are events of one step, so
    /// there may be no memory for them: the request then ends with an error, and its reader cancels it.
    pub(crate) fn hold(&mut self, event: Event) {
        if self.has_failed {
            return;
        }
        if let Err(error) = fallible::reserve(&mut self.held, 1) {
            self.send(Event::Failed(error));
            self.has_failed = true;
            return;
        }
        self.held.push(event);
    }

    /// Sends the buffered events, then `event`.
    pub(crate) fn send(&mut self, event: Event) {
        self.deliver();
        if !self.has_failed {
            self.sink.send(event);
        }
    }

    /// Sends the buffered events.
    pub(crate) fn deliver(&mut self) {
        self.held.drain(..).for_each(|event| self.sink.send(event));
    }

    pub(crate) fn is_open(&self) -> bool {
        self.sink.is_open()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.sink.is_ready()
    }

    pub(crate) fn control(&mut self) -> Option<Control> {
        self.sink.control()
    }
}
