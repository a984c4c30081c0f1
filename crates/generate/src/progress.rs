//! The progress of a generation, as the engine's events tell it. It holds counts and times, never text.

use std::time::{Duration, Instant};

use pellucid_engine::Event;

/// The part of the work that the engine does for a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// No prompt was admitted yet.
    #[default]
    Queued,
    /// A prompt is being computed, and no token was generated.
    Prefill,
    /// Tokens are generated, one after the other.
    Decode,
}

/// How far the engine is with a generation. See [`Monitor`](crate::Monitor).
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// The part of the work that the engine does now.
    pub phase: Phase,
    /// Tokens of all choices. Those of a beam search and of `best_of` are reported at the end.
    pub num_tokens: usize,
    /// Time of the last token.
    pub(crate) last_token: Option<Instant>,
    /// Whether the reader is so far behind that the engine does not compute for it.
    pub waits_for_reader: bool,
    /// Whether the generation was cancelled through its monitor.
    pub is_cancelled: bool,
}

impl Progress {
    /// Time since the last token; `None` before the first.
    pub fn since_last_token(&self) -> Option<Duration> {
        self.last_token.map(|at| at.elapsed())
    }

    /// Counts an event of the engine.
    pub(crate) fn observe(&mut self, event: &Event) {
        match event {
            Event::Started { .. } if self.phase == Phase::Queued => self.phase = Phase::Prefill,
            Event::Token(_) => {
                self.phase = Phase::Decode;
                self.num_tokens += 1;
                self.last_token = Some(Instant::now());
            }
            _ => {}
        }
    }
}
