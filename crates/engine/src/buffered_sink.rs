//! A request's event sink with a buffer for the events of a step.
//!
//! With an asynchronous device, the events of a step are sent while the device computes the next one. A token therefore
//! waits in the buffer for as long as it takes to launch that step. All other events are sent at once, after those in
//! the buffer.

use crate::event::{Control, Event, EventSink};

pub(crate) struct BufferedSink {
    sink: Box<dyn EventSink>,
    held: Vec<Event>,
}

impl BufferedSink {
    pub(crate) fn new(sink: Box<dyn EventSink>) -> BufferedSink {
        BufferedSink { sink, held: Vec::new() }
    }

    /// Buffers an event of a step until [`BufferedSink::deliver`].
    pub(crate) fn hold(&mut self, event: Event) {
        self.held.push(event);
    }

    /// Sends the buffered events, then `event`.
    pub(crate) fn send(&mut self, event: Event) {
        self.deliver();
        self.sink.send(event);
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
