//! The table of open connections, bounded in all and by address.
//!
//! No connection waits to be accepted. When the bound is reached, the connection that has been idle for the longest
//! time is closed in favour of the new one: clients open a closed idle connection again. If none is idle, the new one
//! is accepted to be refused: `/health` is answered, every other request gets an error, and the connection is closed.
//! At most `max_refusing` of these exist; the oldest is closed for the next, so that neither health checks nor errors
//! wait behind clients that send nothing.
//!
//! An address may open a connection only if it then has no more than are free ([`within_share`]), so that one address
//! ends at half of the connections and another always finds some. Addresses of declared proxies and of this machine are
//! exempt, because several clients share them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pellucid_engine::scheduler::within_share;
use tokio::sync::Notify;

use super::client_address::AddressKey;
use crate::http::error::{ApiError, RETRY_SOON_S};

/// Bounds on the number of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Maximum connections that are served.
    pub(crate) max_open: usize,
    /// Maximum further connections that are answered with a refusal.
    pub(crate) max_refusing: usize,
}

/// Why requests of a connection are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// All connections are in use.
    Full,
    /// The client's address has its share of the connections.
    Address,
}

impl Refusal {
    pub(crate) fn error(self) -> ApiError {
        match self {
            Refusal::Full => {
                let message = "all connections of the server are in use; try again later";
                ApiError::unavailable("too_many_connections", message, RETRY_SOON_S)
            }
            Refusal::Address => {
                let message = "this address has too many connections; close some or try again later";
                ApiError::too_many("connections_per_address", message, RETRY_SOON_S)
            }
        }
    }
}

/// Maximum connections that were told to close and have not yet: each still has its descriptor.
const MAX_CLOSING: usize = 8;

/// All open connections.
#[derive(Debug)]
pub(crate) struct Connections {
    bounds: Bounds,
    /// Maximum connections of an address, if the operator set one.
    max_per_address: usize,
    table: Mutex<Table>,
    /// Notified when a connection that was told to close has done so.
    has_closed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    last_id: u64,
    entries: HashMap<u64, Entry>,
    /// Number of entries that are served.
    num_served: usize,
    /// Number of served entries by address.
    by_address: HashMap<AddressKey, usize>,
    /// Served entries without a request, in the order in which they became idle.
    idle: BTreeMap<u64, u64>,
    /// Ids of idle entries by address, in the same order.
    idle_by_address: BTreeSet<(AddressKey, u64, u64)>,
    /// Ids of refusing entries, the oldest first.
    refusing: BTreeSet<u64>,
    /// Connections that were told to close and have not yet.
    num_closing: usize,
}

#[derive(Debug)]
struct Entry {
    address: AddressKey,
    refusal: Option<Refusal>,
    num_requests: usize,
    /// Position in the order of idle entries.
    idle_since: Option<u64>,
    close: Arc<Notify>,
}

/// One connection in the table; dropping it removes it.
#[derive(Debug)]
pub(crate) struct Slot {
    connections: Arc<Connections>,
    id: u64,
    /// Set if the connection is only answered with a refusal.
    pub(crate) refusal: Option<Refusal>,
    close: Arc<Notify>,
}

impl Connections {
    pub(crate) fn new(bounds: Bounds, max_per_address: Option<usize>) -> Arc<Connections> {
        let max_per_address = max_per_address.unwrap_or(usize::MAX);
        Arc::new(Connections { bounds, max_per_address, table: Mutex::default(), has_closed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. `is_shared` tells that several clients have its address.
    pub(crate) fn admit(self: &Arc<Connections>, address: IpAddr, is_shared: bool) -> Slot {
        let key = AddressKey::of(address);
        let mut table = self.lock();
        let own = table.by_address.get(&key).copied().unwrap_or(0);
        let (all, total) = (table.num_served, self.bounds.max_open);
        let is_full = all >= total;
        // If all are in use, an idle one must be closed first. There may always be a second address.
        let others = all - usize::from(is_full && all > 0);
        let fits = is_shared || (own < self.max_per_address && within_share(own, others, total, 1, 2));
        let refusal = match (fits, is_full) {
            (true, false) => None,
            (true, true) => (!table.close_idle()).then_some(Refusal::Full),
            // A connection of the same address makes way, so that the others keep theirs.
            (false, _) if table.close_idle_of(key) => None,
            (false, _) => Some(if own == 0 { Refusal::Full } else { Refusal::Address }),
        };
        if refusal.is_some() && table.refusing.len() >= self.bounds.max_refusing {
            table.close_refusing();
        }
        let (id, close) = table.insert(key, refusal);
        drop(table);
        Slot { connections: self.clone(), id, refusal, close }
    }

    /// Waits while many connections are closing: accepting faster than they close would use up the descriptors.
    pub(crate) async fn wait_for_closing(&self) {
        while self.lock().num_closing >= MAX_CLOSING {
            self.has_closed.notified().await;
        }
    }

    /// Closes the connection that has been idle for the longest time; used when the system has no descriptor left.
    pub(crate) fn close_idle(&self) -> bool {
        self.lock().close_idle()
    }
}

impl Table {
    fn insert(&mut self, address: AddressKey, refusal: Option<Refusal>) -> (u64, Arc<Notify>) {
        self.last_id += 1;
        let (id, close) = (self.last_id, Arc::new(Notify::new()));
        self.entries.insert(id, Entry { address, refusal, num_requests: 0, idle_since: None, close: close.clone() });
        if refusal.is_some() {
            self.refusing.insert(id);
        } else {
            self.num_served += 1;
            *self.by_address.entry(address).or_default() += 1;
            self.set_idle(id);
        }
        (id, close)
    }

    /// Removes an entry; does nothing if it was closed before.
    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        if entry.refusal.is_some() {
            self.refusing.remove(&id);
            return Some(entry);
        }
        if let Some(since) = entry.idle_since {
            self.idle.remove(&since);
            self.idle_by_address.remove(&(entry.address, since, id));
        }
        self.num_served -= 1;
        if let Some(count) = self.by_address.get_mut(&entry.address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&entry.address);
            }
        }
        Some(entry)
    }

    /// Removes an entry and tells its connection to close. It does not count any more from here on.
    fn close(&mut self, id: u64) -> bool {
        let entry = self.remove(id);
        if let Some(entry) = &entry {
            self.num_closing += 1;
            entry.close.notify_one();
        }
        entry.is_some()
    }

    fn close_idle(&mut self) -> bool {
        let oldest = self.idle.values().next().copied();
        oldest.is_some_and(|id| self.close(id))
    }

    fn close_idle_of(&mut self, address: AddressKey) -> bool {
        let oldest = self.idle_by_address.range((address, 0, 0)..=(address, u64::MAX, u64::MAX)).next().copied();
        oldest.is_some_and(|(_, _, id)| self.close(id))
    }

    fn close_refusing(&mut self) {
        if let Some(id) = self.refusing.first().copied() {
            self.close(id);
        }
    }

    fn set_idle(&mut self, id: u64) {
        // Ids and positions come from one counter, so that both ascend with time.
        self.last_id += 1;
        let since = self.last_id;
        if let Some(entry) = self.entries.get_mut(&id).filter(|entry| entry.refusal.is_none()) {
            entry.idle_since = Some(since);
            self.idle.insert(since, id);
            self.idle_by_address.insert((entry.address, since, id));
        }
    }

    fn set_busy(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if let Some(since) = entry.idle_since.take() {
            self.idle.remove(&since);
            self.idle_by_address.remove(&(entry.address, since, id));
        }
    }
}

impl Slot {
    /// Counts a request; the connection is not idle until [`Slot::end_request`].
    pub(crate) fn start_request(&self) {
        let mut table = self.connections.lock();
        if let Some(entry) = table.entries.get_mut(&self.id) {
            entry.num_requests += 1;
            table.set_busy(self.id);
        }
    }

    pub(crate) fn end_request(&self) {
        let mut table = self.connections.lock();
        let Some(entry) = table.entries.get_mut(&self.id) else { return };
        entry.num_requests -= 1;
        if entry.num_requests == 0 {
            table.set_idle(self.id);
        }
    }

    /// Waits until the connection is to be closed in favour of another one.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.connections.lock();
        if table.remove(self.id).is_none() {
            table.num_closing -= 1;
            self.connections.has_closed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn is_closed(slot: &Slot) -> bool {
        use std::task::{Context, Poll, Waker};
        let mut closed = std::pin::pin!(slot.closed());
        let is_closed = closed.as_mut().poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(());
        if is_closed {
            slot.close.notify_one();
        }
        is_closed
    }

    fn table(max_open: usize, max_per_address: Option<usize>) -> Arc<Connections> {
        Connections::new(Bounds { max_open, max_refusing: 2 }, max_per_address)
    }

    #[test]
    fn the_longest_idle_connection_makes_way() {
        let connections = table(3, None);
        let slots: Vec<Slot> = (0..3).map(|_| connections.admit(address(1), true)).collect();
        // The first is busy, the second was used last.
        slots[0].start_request();
        slots[1].start_request();
        slots[1].end_request();
        let next = connections.admit(address(1), true);
        assert_eq!(next.refusal, None);
        assert_eq!(slots.iter().map(is_closed).collect::<Vec<_>>(), [false, false, true]);
        next.start_request();
        slots[1].start_request();
        // All are busy: further connections are refused, and the oldest of these makes way for the next.
        let refused: Vec<Slot> = (0..3).map(|_| connections.admit(address(1), true)).collect();
        assert!(refused.iter().all(|slot| slot.refusal == Some(Refusal::Full)));
        assert_eq!(refused.iter().map(is_closed).collect::<Vec<_>>(), [true, false, false]);
        drop(next);
        assert_eq!(connections.admit(address(1), true).refusal, None);
        drop((slots, refused));
        let table = connections.lock();
        assert_eq!((table.entries.len(), table.num_served, table.by_address.len()), (0, 0, 0));
        assert_eq!(table.num_closing, 0);
        assert!(table.idle.is_empty() && table.idle_by_address.is_empty() && table.refusing.is_empty());
    }

    #[test]
    fn one_address_leaves_connections_for_others() {
        let connections = table(30, None);
        let take = |last: u8| {
            let mut slots = Vec::new();
            loop {
                let slot = connections.admit(address(last), false);
                if slot.refusal.is_some() {
                    assert_eq!(slot.refusal, Some(Refusal::Address));
                    return slots;
                }
                slot.start_request();
                slots.push(slot);
            }
        };
        let first = take(1);
        assert_eq!(first.len(), 15);
        let second = take(2);
        assert_eq!(second.len(), 7, "half of what the first left");
        assert_eq!(connections.admit(address(3), false).refusal, None);
        // With an idle connection of its own, an address can always open another one.
        first[0].end_request();
        let next = connections.admit(address(1), false);
        assert!(next.refusal.is_none() && is_closed(&first[0]));
        // The control: an address that several clients share may take all.
        let shared: Vec<Slot> = (0..7).map(|_| connections.admit(address(9), true)).collect();
        assert!(shared.iter().all(|slot| slot.refusal.is_none()));
    }

    #[test]
    fn a_newcomer_displaces_an_idle_connection_of_another_address() {
        let connections = table(4, None);
        let slots: Vec<Slot> = (1..=4).map(|last| connections.admit(address(last), false)).collect();
        assert!(slots.iter().all(|slot| slot.refusal.is_none()));
        let newcomer = connections.admit(address(5), false);
        assert!(newcomer.refusal.is_none() && is_closed(&slots[0]));
        // An address that has a connection may only displace its own.
        let second = connections.admit(address(5), false);
        assert!(second.refusal.is_none() && is_closed(&newcomer) && !is_closed(&slots[1]));
    }

    #[test]
    fn a_set_limit_applies_to_each_address() {
        let connections = table(100, Some(2));
        let slots: Vec<Slot> = (0..3).map(|_| connections.admit(address(1), false)).collect();
        assert!(is_closed(&slots[0]), "the third replaces the first, which is idle");
        slots[1].start_request();
        slots[2].start_request();
        assert_eq!(connections.admit(address(1), false).refusal, Some(Refusal::Address));
        assert_eq!(connections.admit(address(2), false).refusal, None);
    }
}
