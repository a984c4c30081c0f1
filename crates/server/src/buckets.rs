//! A limit over time: a bucket that fills at a steady rate and may be overdrawn by what could not be known before.
//!
//! Nobody knows how long a reply will be, so a request is let in while the bucket holds something, its output is charged as it is made,
//! and a debt is waited off. Over time no more is used than the rate allows.

use std::time::Instant;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bucket {
    /// A minute's worth, which is also the most it holds.
    limit: u32,
    level: f64,
    filled: Instant,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(limit: u32, now: Instant) -> Bucket {
        Bucket { limit, level: limit.into(), filled: now }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// `None` when there is something in it; else the whole seconds until there is.
    pub(crate) fn wait_s(&mut self, now: Instant) -> Option<u64> {
        let rate = f64::from(self.limit) / 60.0;
        self.level = (self.level + rate * (now - self.filled).as_secs_f64()).min(self.limit.into());
        self.filled = now;
        if self.level >= 1.0 {
            return None;
        }
        // A limit of 0 never fills; say a minute.
        Some(if self.limit == 0 { 60 } else { ((1.0 - self.level) / rate).ceil() as u64 }.max(1))
    }

    pub(crate) fn charge(&mut self, amount: usize) {
        self.level -= amount as f64;
    }

    /// Takes a charge back.
    pub(crate) fn refund(&mut self, amount: usize) {
        self.level += amount as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_overdrawn_is_waited_off() {
        let start = Instant::now();
        let mut bucket = Bucket::new(60, start);
        assert_eq!(bucket.wait_s(start), None);
        bucket.charge(90);
        assert_eq!(bucket.wait_s(start), Some(31), "30 below 0, and one more to be let in, at one a second");
        assert_eq!(bucket.wait_s(start + Duration::from_secs(20)), Some(11));
        assert_eq!(bucket.wait_s(start + Duration::from_secs(31)), None);
        assert_eq!(bucket.wait_s(start + Duration::from_secs(3600)), None);
        bucket.charge(60);
        assert!(
            bucket.wait_s(start + Duration::from_secs(3600)).is_some(),
            "it never holds more than a minute's worth"
        );
    }
}
