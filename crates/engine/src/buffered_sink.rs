//! A request's sink, and the events that are held back for a moment.
//!
//! What a step gave is told while the device is already at work on the next one, where it works by itself: a token is held back for as
//! long as it takes to launch that step, and no longer. Whatever else is said goes out at once, after what is held.

use crate::event::{Control, Event, EventSink};

pub(crate) struct BufferedSink {
    sink: Box<dyn EventSink>,
    held: Vec<Event>,
}

impl BufferedSink {
    pub(crate) fn new(sink: Box<dyn EventSink>) -> BufferedSink {
        BufferedSink { sink, held: Vec::new() }
    }

    /// For events of a step: they go out with [`BufferedSink::deliver`].
    pub(crate) fn hold(&mut self, event: Event) {
        self.held.push(event);
    }

    pub(crate) fn send(&mut self, event: Event) {
        self.deliver();
        self.sink.send(event);
    }

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
