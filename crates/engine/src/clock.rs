//! The time by which the engine measures steps and requests.

use std::time::Instant;

/// A source of time. Simulators replace it by a virtual one, so that their results do not depend on the machine.
pub trait Clock: Send {
    /// Returns the current time.
    fn now(&self) -> Instant;
}

/// The clock of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
