//! The budget for all bytes that clients make the server hold: request bodies and messages while they arrive and are
//! processed, and replies until the client has read them.
//!
//! With several tenants, each may hold as much as is still free: see [`within_share`]. One greedy tenant ends at half
//! of the budget, two end at a third each, and a tenant that holds nothing finds free memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use pellucid_engine::TenantId;
use pellucid_engine::scheduler::within_share;
use prometheus_client::metrics::gauge::Gauge;

use super::tenants::Tenant;
use crate::http::error::{ApiError, RETRY_SOON_S};

/// Bytes are counted in multiples of this, so that not every read of a few bytes locks the counts.
const UNIT: usize = 4096;

/// Memory that clients make the server hold: its limit, and the bytes in use.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    total: usize,
    num_tenants: AtomicUsize,
    used: Mutex<Used>,
    /// Shows `Used::all` in the metrics.
    gauge: Gauge,
}

#[derive(Debug, Default)]
struct Used {
    all: usize,
    /// Bytes of each tenant that holds some.
    by_tenant: HashMap<TenantId, usize>,
}

impl ClientMemory {
    pub(crate) fn new(total: usize, num_tenants: usize, gauge: Gauge) -> ClientMemory {
        ClientMemory { total, num_tenants: AtomicUsize::new(num_tenants), used: Mutex::default(), gauge }
    }

    /// Applies a change of the number of tenants to memory that is taken from now on.
    pub(crate) fn set_num_tenants(&self, num_tenants: usize) {
        self.num_tenants.store(num_tenants, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, tenant: TenantId, more: usize) -> Result<(), ApiError> {
        let mut used = self.lock();
        let own = used.by_tenant.get(&tenant).copied().unwrap_or(0);
        if !within_share(own, used.all, self.total, more, self.num_tenants.load(Ordering::Relaxed)) {
            return Err(if used.all.saturating_add(more) > self.total { full() } else { above_share() });
        }
        used.all += more;
        *used.by_tenant.entry(tenant).or_default() += more;
        self.gauge.set(used.all as i64);
        Ok(())
    }

    /// Refuses a request that would be refused even if no other one held memory: trying again is of no use.
    fn check_possible(&self, held: usize, more: usize) -> Result<(), ApiError> {
        let num_tenants = self.num_tenants.load(Ordering::Relaxed);
        if within_share(held, held, self.total, more, num_tenants) {
            return Ok(());
        }
        // A share of several tenants that is taken in steps ends at half.
        let limit = if num_tenants > 1 && held > 0 { self.total / 2 } else { self.total };
        let message = format!(
            "the request and its reply need {} bytes of the server's memory, but one request can have {limit}; \
             send a shorter one",
            held.saturating_add(more)
        );
        Err(ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message))
    }

    fn give_back(&self, tenant: TenantId, less: usize) {
        let mut used = self.lock();
        used.all -= less;
        if let Some(own) = used.by_tenant.get_mut(&tenant) {
            *own -= less;
            if *own == 0 {
                used.by_tenant.remove(&tenant);
            }
        }
        self.gauge.set(used.all as i64);
    }
}

fn full() -> ApiError {
    let message = "the server's memory for requests and replies is used up; try again later";
    ApiError::unavailable("client_memory", message, RETRY_SOON_S)
}

fn above_share() -> ApiError {
    let message = "this tenant's requests and unread replies hold its share of the server's memory for them; \
                   try again when some have ended";
    ApiError::too_many("client_memory_share", message, RETRY_SOON_S)
}

/// Returns the error of an allocation that the system refused.
pub(crate) fn out_of_memory() -> ApiError {
    tracing::warn!("the system has no memory for a request");
    ApiError::unavailable("client_memory", "the server is short of memory; try again later", RETRY_SOON_S)
}

/// Bytes that one request or connection holds; given back when dropped.
#[derive(Debug)]
pub(crate) struct HeldMemory {
    memory: Arc<ClientMemory>,
    tenant: TenantId,
    /// A multiple of [`UNIT`].
    bytes: usize,
    /// Bytes that the same request holds in other accounts.
    elsewhere: usize,
}

thread_local! {
    /// Account of the request for which this thread works.
    static WORKING: RefCell<Option<HeldMemory>> = const { RefCell::new(None) };
}

/// Runs `work`, which can take memory of the request of `account` by [`working_account`].
pub(crate) fn working_for<T>(account: HeldMemory, work: impl FnOnce() -> T) -> T {
    struct Clear;
    impl Drop for Clear {
        fn drop(&mut self) {
            WORKING.take();
        }
    }
    WORKING.set(Some(account));
    let _clear = Clear;
    work()
}

/// Returns an empty account of the request for which this thread works; `None` outside of [`working_for`].
pub(crate) fn working_account() -> Option<HeldMemory> {
    WORKING.with_borrow(|account| account.as_ref().map(HeldMemory::empty))
}

impl HeldMemory {
    /// Returns another account of the same request that holds nothing.
    pub(crate) fn empty(&self) -> HeldMemory {
        let elsewhere = self.elsewhere + self.bytes;
        HeldMemory { memory: self.memory.clone(), tenant: self.tenant, bytes: 0, elsewhere }
    }

    /// Returns an account of `tenant` that holds nothing yet.
    pub(crate) fn none(memory: &Arc<ClientMemory>, tenant: &Tenant) -> HeldMemory {
        HeldMemory { memory: memory.clone(), tenant: tenant.id, bytes: 0, elsewhere: 0 }
    }

    /// Takes memory until at least `bytes` are held; does nothing if they are. On an error, what was held before is
    /// kept.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), ApiError> {
        let bytes = bytes.checked_next_multiple_of(UNIT).unwrap_or(usize::MAX);
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            self.memory.check_possible(self.elsewhere + self.bytes, more)?;
            self.memory.take(self.tenant, more)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Gives memory back until at most `bytes`, rounded up to whole units, are held.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let bytes = bytes.checked_next_multiple_of(UNIT).unwrap_or(usize::MAX);
        let less = self.bytes.saturating_sub(bytes);
        if less > 0 {
            self.memory.give_back(self.tenant, less);
            self.bytes -= less;
        }
    }

    /// Adds the memory that `other` holds. Both must be of one tenant.
    pub(crate) fn merge(&mut self, mut other: HeldMemory) {
        debug_assert_eq!(self.tenant, other.tenant, "memory of two tenants");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::keys_file::TenantConfig;
    use crate::limits::tenants::Tenants;

    const KEYS: [&str; 3] = ["key-of-a", "key-of-b", "key-of-c"];

    fn tenants(count: usize) -> Vec<Arc<Tenant>> {
        let config =
            |key: &&str| TenantConfig { name: (*key).into(), keys: vec![(*key).into()], ..TenantConfig::default() };
        let tenants = Tenants::new(KEYS[..count].iter().map(config).collect()).unwrap();
        KEYS[..count].iter().map(|key| tenants.find(Some(key.as_bytes())).unwrap()).collect()
    }

    fn memory(units: usize, num_tenants: usize) -> Arc<ClientMemory> {
        Arc::new(ClientMemory::new(units * UNIT, num_tenants, Gauge::default()))
    }

    /// Takes single units until one is refused; returns what is held, and the code of the refusal.
    fn take_all(memory: &Arc<ClientMemory>, tenant: &Tenant) -> (HeldMemory, &'static str) {
        let mut held = HeldMemory::none(memory, tenant);
        loop {
            let mut one = HeldMemory::none(memory, tenant);
            match one.grow_to(1) {
                Ok(()) => held.merge(one),
                Err(error) => return (held, error.detail.code.unwrap()),
            }
        }
    }

    #[test]
    fn greedy_tenants_leave_memory_for_the_next() {
        let tenants = tenants(3);
        let memory = memory(120, 3);
        let (a, code) = take_all(&memory, &tenants[0]);
        assert_eq!((a.bytes, code), (60 * UNIT, "client_memory_share"));
        let (b, code) = take_all(&memory, &tenants[1]);
        assert_eq!((b.bytes, code), (30 * UNIT, "client_memory_share"));
        let (c, _) = take_all(&memory, &tenants[2]);
        assert_eq!(c.bytes, 15 * UNIT);
        drop((a, b, c));
        assert!(memory.lock().by_tenant.is_empty());
        assert_eq!((memory.lock().all, memory.gauge.get()), (0, 0));
        // Without the rule for shares, one tenant takes everything.
        memory.set_num_tenants(1);
        let (a, code) = take_all(&memory, &tenants[0]);
        assert_eq!((a.bytes, code), (120 * UNIT, "client_memory"));
        assert_eq!(HeldMemory::none(&memory, &tenants[1]).grow_to(1).unwrap_err().status.as_u16(), 503);
    }

    #[test]
    fn a_request_that_can_never_fit_is_not_told_to_try_again() {
        let tenants = tenants(2);
        for (num_tenants, limit) in [(1, 10 * UNIT), (2, 5 * UNIT)] {
            let memory = memory(10, num_tenants);
            let mut held = HeldMemory::none(&memory, &tenants[0]);
            held.grow_to(1).unwrap();
            let error = held.grow_to(limit + 1).unwrap_err();
            assert_eq!((error.status.as_u16(), error.retry_after_s), (413, None));
            assert!(error.detail.message.contains(&format!("can have {limit};")), "{}", error.detail.message);
            assert_eq!(held.grow_to(usize::MAX).unwrap_err().status.as_u16(), 413);
            // Positive control: at the limit it is granted, and refused for now while others hold memory.
            held.grow_to(limit).unwrap();
            held.shrink_to(1);
            let mut other = HeldMemory::none(&memory, &tenants[1]);
            other.grow_to(2 * UNIT).unwrap();
            let error = held.grow_to(limit).unwrap_err();
            assert!(error.retry_after_s.is_some(), "{error:?}");
        }
    }

    #[test]
    fn memory_is_given_back_exactly_once() {
        let tenant = &tenants(1)[0];
        let memory = memory(10, 1);
        let mut held = HeldMemory::none(&memory, tenant);
        held.grow_to(UNIT + 1).unwrap();
        held.grow_to(5).unwrap();
        assert_eq!(memory.lock().all, 2 * UNIT);
        let mut other = HeldMemory::none(&memory, tenant);
        other.grow_to(2 * UNIT).unwrap();
        assert_eq!(held.grow_to(9 * UNIT).unwrap_err().retry_after_s, Some(1));
        drop(other);
        assert!(held.grow_to(usize::MAX).is_err());
        assert_eq!(memory.lock().all, 2 * UNIT, "a refusal changes nothing");
        let mut other = HeldMemory::none(&memory, tenant);
        other.grow_to(1).unwrap();
        held.merge(other);
        assert_eq!((held.bytes, memory.lock().all), (3 * UNIT, 3 * UNIT));
        held.shrink_to(UNIT);
        assert_eq!((held.bytes, memory.gauge.get()), (UNIT, UNIT as i64));
        drop(held);
        assert_eq!(memory.lock().all, 0);
    }
}
