//! A rate limit as a token bucket: it refills at a steady rate and may be overdrawn.
//!
//! The length of a reply is not known in advance. A request is therefore admitted while the bucket is not empty, its
//! output is charged as it is generated, and later requests wait until the debt is refilled. On average no more is used
//! than the rate allows.

use std::time::Instant;

#[derive(Debug, Clone, Copy)]
pub(crate) struct RateLimit {
    /// Units per minute; also the capacity.
    limit: u32,
    level: f64,
    /// When `level` was last brought up to date.
    refilled: Instant,
}

impl RateLimit {
    /// Returns a full bucket.
    pub(crate) fn new(limit: u32, now: Instant) -> RateLimit {
        RateLimit { limit, level: limit.into(), refilled: now }
    }

    /// Returns the bucket with another limit and the same amount used.
    pub(crate) fn with_limit(self, limit: u32) -> RateLimit {
        RateLimit { limit, level: self.level + f64::from(limit) - f64::from(self.limit), ..self }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns `None` if a request is admitted now, else the whole seconds until one is.
    pub(crate) fn wait_s(&mut self, now: Instant) -> Option<u64> {
        let rate = f64::from(self.limit) / 60.0;
        self.level = (self.level + rate * (now - self.refilled).as_secs_f64()).min(self.limit.into());
        self.refilled = now;
        if self.level >= 1.0 {
            return None;
        }
        // A limit of 0 never refills; clients are told to wait a minute.
        Some(if self.limit == 0 { 60 } else { ((1.0 - self.level) / rate).ceil() as u64 }.max(1))
    }

    pub(crate) fn charge(&mut self, amount: usize) {
        self.level -= amount as f64;
    }

    pub(crate) fn refund(&mut self, amount: usize) {
        self.level += amount as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn requests_wait_until_a_debt_is_refilled() {
        let start = Instant::now();
        let mut limit = RateLimit::new(60, start);
        assert_eq!(limit.wait_s(start), None);
        limit.charge(90);
        assert_eq!(limit.wait_s(start), Some(31), "30 units of debt and one for the request, at one per second");
        assert_eq!(limit.wait_s(start + Duration::from_secs(20)), Some(11));
        assert_eq!(limit.wait_s(start + Duration::from_secs(31)), None);
        assert_eq!(limit.wait_s(start + Duration::from_secs(3600)), None);
        limit.charge(60);
        assert!(limit.wait_s(start + Duration::from_secs(3600)).is_some(), "the capacity is one minute of the rate");
    }
}
