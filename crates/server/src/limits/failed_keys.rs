//! The throttle of failed authentications: bounds how many wrong keys an address may try.
//!
//! Each address has a bucket of attempts that refills steadily. A wrong key takes one out. While the bucket is empty,
//! keys that have not been accepted from this address before are refused without being compared, so that an attacker
//! learns nothing, not even by the correct key. Keys that were accepted from the address before pass: many clients can
//! share an address (NAT, a proxy that was not declared), and one of them that guesses keys must not lock out the
//! others. A client with a correct key that is new to such an address waits until the bucket has refilled; refused
//! attempts take nothing out, so this happens even during an attack.
//!
//! Requests without any key are refused and take no attempt: they guess nothing.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::rate_limit::RateLimit;
use super::recent::RecentMap;
use super::tenants::KeyHash;
use crate::connection::client_address::AddressKey;
use crate::http::error::ApiError;

/// Maximum addresses with failures, and maximum pairs of address and accepted key, that are remembered.
const CAPACITY: usize = 16_384;

/// Failures by address, and keys that were accepted.
#[derive(Debug)]
pub(crate) struct FailedKeys {
    /// Failures per minute and address.
    limit: u32,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    failures: RecentMap<AddressKey, RateLimit>,
    accepted: RecentMap<(AddressKey, KeyHash), ()>,
}

impl FailedKeys {
    pub(crate) fn new(limit: u32) -> FailedKeys {
        let table = Table { failures: RecentMap::new(CAPACITY), accepted: RecentMap::new(CAPACITY) };
        FailedKeys { limit, table: Mutex::new(table) }
    }

    /// Refuses to compare a key while its address has no attempt left, unless the key was accepted from there before.
    pub(crate) fn check(&self, address: AddressKey, key: &KeyHash, now: Instant) -> Result<(), ApiError> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(wait_s) = table.failures.get(&address).and_then(|failures| failures.wait_s(now)) else {
            return Ok(());
        };
        if table.accepted.get(&(address, *key)).is_some() {
            return Ok(());
        }
        let message = format!("too many wrong API keys from this address; try again in {wait_s} s");
        Err(ApiError::too_many("too_many_wrong_keys", message, wait_s))
    }

    /// Records whether a key that was compared is correct.
    pub(crate) fn record(&self, address: AddressKey, key: &KeyHash, is_correct: bool, now: Instant) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if is_correct {
            table.accepted.get_or_insert(&(address, *key), || ());
        } else if let Some(failures) = table.failures.get_or_insert(&address, || RateLimit::new(self.limit, now)) {
            // Refills, so that the charge is taken from what is there now.
            let _ = failures.wait_s(now);
            failures.charge(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;
    use std::time::Duration;

    #[test]
    fn wrong_keys_are_throttled_by_address() {
        let (start, failed) = (Instant::now(), FailedKeys::new(3));
        let address = |last: u8| AddressKey::of(IpAddr::from([192, 0, 2, last]));
        let attempt = |last: u8, key: u8, is_correct: bool, now: Instant| {
            let key = KeyHash([key; 32]);
            let checked = failed.check(address(last), &key, now).map_err(|error| error.retry_after_s.unwrap());
            checked.inspect(|()| failed.record(address(last), &key, is_correct, now))
        };
        assert_eq!(attempt(1, 1, true, start), Ok(()));
        for key in 10..13 {
            assert_eq!(attempt(1, key, false, start), Ok(()));
        }
        // A correct key that is new to the address is not compared; a known one passes, and other addresses too.
        assert_eq!(attempt(1, 2, true, start), Err(20));
        assert_eq!(attempt(1, 1, true, start), Ok(()));
        assert_eq!(attempt(2, 2, true, start), Ok(()));
        // Attempts that were refused delay nothing.
        for seconds in 0..20 {
            assert!(attempt(1, 13, false, start + Duration::from_secs(seconds)).is_err());
        }
        assert_eq!(attempt(1, 2, true, start + Duration::from_secs(21)), Ok(()));
        // The known key is removed from the server: it passes the throttle, and counts as a failure.
        let later = start + Duration::from_secs(21);
        assert_eq!(attempt(1, 1, false, later), Ok(()));
        assert!(attempt(1, 14, false, later).is_err());
    }

    #[test]
    fn the_table_is_bounded() {
        let (now, failed) = (Instant::now(), FailedKeys::new(1));
        for number in 0..2 * CAPACITY as u32 {
            let address = AddressKey::of(IpAddr::from(number.to_be_bytes()));
            failed.record(address, &KeyHash([0; 32]), false, now);
            failed.record(address, &KeyHash([1; 32]), true, now);
        }
        let table = failed.table.lock().unwrap();
        assert_eq!((table.failures.len(), table.accepted.len()), (CAPACITY, CAPACITY));
    }
}
