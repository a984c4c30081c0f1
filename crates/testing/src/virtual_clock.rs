//! A clock that only a fake model advances, by the time that its steps would take on a machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pellucid_engine::Clock;
use pellucid_model::Batch;

/// A virtual time that its clones share.
#[derive(Debug, Clone)]
pub struct VirtualClock {
    start: Instant,
    elapsed_ns: Arc<AtomicU64>,
    num_steps: Arc<AtomicU64>,
    /// Tokens that the last step sent.
    num_sent: Arc<AtomicU64>,
    machine: Machine,
}

/// The time of a step as a function of its rows and of the positions that they attend to.
#[derive(Debug, Clone, Copy)]
pub enum Machine {
    /// Two cores with tiles of 16 rows and a model of 135 million parameters: long contexts are expensive.
    Cpu,
    /// The same, shared with other programs: steps take 0 to 20 % longer, and one of six up to twice as long.
    NoisyCpu,
    /// Many cores, on which threads of connections compete with those of the steps: while a step runs, they send the
    /// tokens of the step before it, which lengthens it by 0.04 ms a token.
    BusyCpu,
    /// A GPU on which the first hundred rows cost no more than one.
    Gpu,
}

impl VirtualClock {
    pub fn new(machine: Machine) -> VirtualClock {
        let [elapsed_ns, num_steps, num_sent] = std::array::from_fn(|_| Arc::default());
        VirtualClock { start: Instant::now(), elapsed_ns, num_steps, num_sent, machine }
    }

    /// Returns the virtual time since the start.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed_ns.load(Ordering::SeqCst))
    }

    /// Calls `act` at an earlier time: something that happened while the last step ran.
    pub fn at<T>(&self, time: Duration, act: impl FnOnce() -> T) -> T {
        let now = self.elapsed_ns.swap(time.as_nanos() as u64, Ordering::SeqCst);
        let result = act();
        self.elapsed_ns.store(now, Ordering::SeqCst);
        result
    }

    /// Advances the time by something that is not a step.
    pub fn advance(&self, time: Duration) {
        self.elapsed_ns.fetch_add(time.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Advances the time to `end`, if that is not over yet.
    pub(crate) fn wait_until(&self, end: Duration) {
        self.elapsed_ns.fetch_max(end.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Returns the duration of a step.
    pub(crate) fn duration_of(&self, batch: &Batch) -> Duration {
        let (mut read, mut compared) = (0.0, 0.0);
        for sequence in batch.sequences() {
            let end = batch.positions()[sequence.rows.end - 1] as usize + 1;
            read += end as f64;
            compared += (end * sequence.rows.len()) as f64;
        }
        let rows = batch.num_rows();
        let num_sending = self.num_sent.swap(batch.num_wanted() as u64, Ordering::SeqCst);
        let seconds = match self.machine {
            Machine::Cpu | Machine::NoisyCpu => {
                let by_tile = rows.next_multiple_of(16) as f64 * 6e-4;
                3.8e-3 + by_tile.min(rows as f64 * 1.3e-3) + 1.1e-6 * read + 2.3e-7 * compared
            }
            Machine::BusyCpu => {
                1.5e-3 + rows as f64 * 2.2e-4 + 2e-7 * read + 2e-8 * compared + 4e-5 * num_sending as f64
            }
            Machine::Gpu => 8e-3 + 4e-5 * rows.saturating_sub(100) as f64 + 1e-8 * compared,
        };
        let seconds = if matches!(self.machine, Machine::NoisyCpu) { seconds * self.noise() } else { seconds };
        Duration::from_nanos((seconds * 1e9) as u64)
    }

    /// Returns the factor of the next step, from 1 to 2.
    fn noise(&self) -> f64 {
        // SplitMix64 of the number of the step.
        let mut x = self.num_steps.fetch_add(1, Ordering::SeqCst).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let part = ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64;
        if x.is_multiple_of(6) { 1.0 + part } else { 1.0 + 0.2 * part }
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Instant {
        self.start + self.elapsed()
    }
}
