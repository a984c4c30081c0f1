//! The minimum rate at which clients must send a body and read a reply.
//!
//! A client has a credit of seconds. Waiting for it uses the credit up, and bytes that it moves restore the credit at
//! the minimum rate. A client at or above that rate is never cut off, whatever the size of its reads; one that moves a
//! byte now and then to reset a timer is. Time in which the server itself has nothing to move does not count.

use std::time::Duration;

use tokio::time::Instant;

/// The credit of one client in one direction.
#[derive(Debug)]
pub(crate) struct TransferRate {
    bytes_per_s: u32,
    grace: Duration,
    credit: Duration,
    /// When waiting began.
    since: Option<Instant>,
}

impl TransferRate {
    /// Returns the full credit of `grace`. With a rate of 0, any byte restores all of it.
    pub(crate) fn new(bytes_per_s: u32, grace: Duration) -> TransferRate {
        TransferRate { bytes_per_s, grace, credit: grace, since: None }
    }

    /// Begins to wait for the client, if it has not begun. Returns when the credit is used up.
    pub(crate) fn wait(&mut self, now: Instant) -> Instant {
        *self.since.get_or_insert(now) + self.credit
    }

    /// Ends the wait: the client has moved `num_bytes`.
    pub(crate) fn moved(&mut self, num_bytes: usize, now: Instant) {
        let Some(since) = self.since.take() else { return };
        let restored = match self.bytes_per_s {
            0 => self.grace,
            rate => Duration::from_secs_f64(num_bytes as f64 / f64::from(rate)),
        };
        let left = self.credit.saturating_sub(now.saturating_duration_since(since));
        self.credit = left.saturating_add(restored).min(self.grace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moves `num_bytes` after each `pause`; returns when the client is cut off, `None` if not within an hour.
    fn cut_after_s(bytes_per_s: u32, num_bytes: usize, pause: Duration) -> Option<u64> {
        let mut rate = TransferRate::new(bytes_per_s, Duration::from_secs(30));
        let (start, mut now) = (Instant::now(), Instant::now());
        while now < start + Duration::from_secs(3600) {
            let deadline = rate.wait(now);
            if deadline < now + pause {
                return Some((deadline - start).as_secs());
            }
            now += pause;
            rate.moved(num_bytes, now);
        }
        None
    }

    #[test]
    fn a_client_is_cut_off_by_its_mean_rate() {
        let s = Duration::from_secs;
        assert_eq!(cut_after_s(0, 1, s(29)), None, "the control: without a rate, a byte now and then is enough");
        assert_eq!(cut_after_s(1000, 1, s(29)), Some(30));
        assert_eq!(cut_after_s(1000, 500, s(1)), Some(59), "half of the rate");
        assert_eq!(cut_after_s(1000, 1000, s(1)), None);
        assert_eq!(cut_after_s(1000, 29_000, s(29)), None, "the rate counts, not the size of the reads");
        assert_eq!(cut_after_s(1000, 1 << 20, s(31)), Some(30), "a pause beyond the grace");
    }

    #[test]
    fn time_without_anything_to_move_does_not_count() {
        let mut rate = TransferRate::new(1000, Duration::from_secs(30));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(rate.wait(start), at(30));
        rate.moved(0, at(20));
        rate.moved(0, at(1000));
        assert_eq!(rate.wait(at(2000)), at(2010), "ten seconds of the credit are left");
        assert_eq!(rate.wait(at(2005)), at(2010));
    }
}
