//! Stored responses, in memory: what `previous_response_id`, `item_reference` and the `GET` routes find.
//!
//! Responses belong to the tenant whose key made them; no other tenant finds them. Two bounds apply: the number of a
//! tenant's responses, and a budget of bytes that all tenants share by the rule of [`ClientMemory`]. A tenant at a
//! bound loses its own least recently used responses, never those of another tenant.
//!
//! If the operator gives a file, `database` repeats every change in it, and responses outlive the process.
//!
//! A response shares the items of the responses before it, so a long conversation is held once. Deleting or evicting a
//! response takes away its id; its items stay while a later response continues it.

mod restore;
mod shown;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::StatusCode;
use pellucid_engine::TenantId;
use prometheus_client::metrics::gauge::Gauge;

use super::background::Running;
use super::database::{Journal, Writer};
use super::event_log::EventLog;
use crate::limits::client_memory::{ClientMemory, HeldMemory};
use crate::limits::tenants::Tenant;

/// Maximum stored responses of a tenant that the keys file gives no other limit.
pub(crate) const MAX_RESPONSES: usize = 1000;
/// Memory that is charged for an item and for a response beside their texts: ids, entries of indexes, allocations.
const ITEM_BYTES: usize = 256;
const RESPONSE_BYTES: usize = 512;

/// An item of a conversation, as JSON.
#[derive(Debug, Clone)]
pub(super) struct StoredItem {
    pub(super) id: String,
    pub(super) json: String,
}

/// The items that one response added to a conversation: its input, then its output.
#[derive(Debug)]
pub(super) struct Turn {
    /// Identifies the turn in the file of stored responses.
    key: u64,
    items: Vec<StoredItem>,
    num_input: usize,
    _held: HeldMemory,
}

/// A response that can be continued and shown again.
#[derive(Debug)]
pub(super) struct StoredResponse {
    /// The conversation before this response, and last its own turn.
    turns: Vec<Arc<Turn>>,
    /// The JSON of the response before and after its output items.
    before: String,
    after: String,
    /// Events of a background response.
    events: Option<Arc<EventLog>>,
    _held: HeldMemory,
}

/// A response of a tenant.
#[derive(Debug)]
pub(super) enum Found {
    /// A background response that is being generated.
    Running(Arc<Running>),
    Stored(Arc<StoredResponse>),
}

/// A response that is to be stored.
#[derive(Debug, Default)]
pub(super) struct NewResponse {
    /// The conversation that it continues.
    pub(super) previous: Vec<Arc<Turn>>,
    pub(super) input: Vec<StoredItem>,
    pub(super) output: Vec<StoredItem>,
    pub(super) before: String,
    pub(super) after: String,
    /// Events of a background response.
    pub(super) events: Option<Arc<EventLog>>,
}

impl StoredResponse {
    /// Whether it was generated in the background.
    pub(super) fn is_background(&self) -> bool {
        // `ResponseForm::before` writes this member before any text of a client.
        self.events.is_some() || self.before.contains(",\"background\":true,")
    }

    /// Events of a background response, which only this process keeps; `None` for any other.
    pub(super) fn events(&self) -> Option<&Arc<EventLog>> {
        self.events.as_ref()
    }

    /// Returns the turns of the conversation, this response included.
    pub(super) fn turns(&self) -> &[Arc<Turn>] {
        &self.turns
    }

    /// Returns all items that the model was given: those of earlier responses, then the input of this one.
    pub(super) fn input(&self) -> impl Iterator<Item = &StoredItem> {
        let (own, earlier) = self.turns.split_last().map_or((None, &[][..]), |(own, earlier)| (Some(own), earlier));
        let own = own.into_iter().flat_map(|turn| &turn.items[..turn.num_input]);
        earlier.iter().flat_map(|turn| &turn.items).chain(own)
    }

    pub(super) fn num_output(&self) -> usize {
        self.turns.last().map_or(0, |turn| turn.items.len() - turn.num_input)
    }

    /// Returns the JSON of the output item `index`.
    pub(super) fn output(&self, index: usize) -> &str {
        self.turns.last().map_or("", |turn| &turn.items[turn.num_input + index].json)
    }

    pub(super) fn before(&self) -> &str {
        &self.before
    }

    pub(super) fn after(&self) -> &str {
        &self.after
    }
}

impl Turn {
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn num_input(&self) -> usize {
        self.num_input
    }

    pub(super) fn items(&self) -> &[StoredItem] {
        &self.items
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.items.iter().map(|item| item.json.len()).sum()
    }
}

/// The responses of all tenants.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    memory: Arc<ClientMemory>,
    tenants: Mutex<HashMap<TenantId, TenantResponses>>,
    /// Key of the next turn.
    next_key: AtomicU64,
    /// Repeats every change in a file. Dropped after `tenants`, whose journals it waits for.
    writer: Option<Writer>,
}

/// The responses of one tenant.
#[derive(Debug, Default)]
struct TenantResponses {
    name: Arc<str>,
    journal: Option<Journal>,
    by_id: HashMap<String, Entry>,
    /// Ids by the time of their last use.
    by_use: BTreeMap<u64, String>,
    /// The turn that has an item, and the item's index in it. The newest turn wins.
    items: HashMap<String, (Arc<Turn>, usize)>,
    num_uses: u64,
    /// Background responses that are being generated. The tenant's limit on requests bounds their number.
    running: HashMap<String, Arc<Running>>,
}

#[derive(Debug)]
struct Entry {
    response: Arc<StoredResponse>,
    last_use: u64,
}

impl ResponseStore {
    /// Returns an empty store of at most `total` bytes.
    pub(crate) fn new(total: usize, num_tenants: usize, gauge: Gauge) -> ResponseStore {
        let memory = Arc::new(ClientMemory::new(total, num_tenants, gauge));
        ResponseStore { memory, tenants: Mutex::default(), next_key: AtomicU64::new(1), writer: None }
    }

    /// Returns the responses of a tenant.
    fn of_tenant<'a>(
        &self,
        tenants: &'a mut HashMap<TenantId, TenantResponses>,
        tenant: &Tenant,
    ) -> &'a mut TenantResponses {
        let journal = || self.writer.as_ref().and_then(|writer| writer.journal.clone());
        let new = || TenantResponses {
            name: tenant.config.name.as_str().into(),
            journal: journal(),
            ..TenantResponses::default()
        };
        tenants.entry(tenant.id).or_insert_with(new)
    }

    /// Returns the budget, whose shares depend on the number of tenants.
    pub(crate) fn memory(&self) -> &Arc<ClientMemory> {
        &self.memory
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TenantId, TenantResponses>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a tenant's response, which counts as used now.
    pub(super) fn find(&self, tenant: &Tenant, id: &str) -> Option<Found> {
        let mut tenants = self.lock();
        let responses = tenants.get_mut(&tenant.id)?;
        match responses.running.get(id) {
            Some(running) => Some(Found::Running(running.clone())),
            None => responses.get(id).map(Found::Stored),
        }
    }

    /// Records a background response that is being generated.
    pub(super) fn start(&self, tenant: &Tenant, id: &str, running: Arc<Running>) {
        self.of_tenant(&mut self.lock(), tenant).running.insert(id.to_owned(), running);
    }

    /// Records that a background response is not generated any more.
    pub(super) fn end(&self, tenant: &Tenant, id: &str) {
        if let Some(responses) = self.lock().get_mut(&tenant.id) {
            responses.running.remove(id);
        }
    }

    /// Whether a tenant has no response, so that none of its requests can name a stored text.
    pub(super) fn is_empty(&self, tenant: &Tenant) -> bool {
        self.lock().get(&tenant.id).is_none_or(|responses| responses.by_id.is_empty())
    }

    /// Returns an item of a tenant's responses.
    pub(super) fn item(&self, tenant: &Tenant, id: &str) -> Option<StoredItem> {
        let tenants = self.lock();
        let (turn, index) = tenants.get(&tenant.id)?.items.get(id)?;
        turn.items.get(*index).cloned()
    }

    /// Removes a tenant's response, and ends it if it is being generated. Returns whether there was one.
    pub(super) fn remove(&self, tenant: &Tenant, id: &str) -> bool {
        let mut tenants = self.lock();
        let Some(responses) = tenants.get_mut(&tenant.id) else { return false };
        match responses.running.remove(id) {
            Some(running) => {
                running.cancel();
                true
            }
            None => responses.remove(id),
        }
    }

    /// Maximum number of a tenant's responses.
    pub(super) fn max_responses(tenant: &Tenant) -> usize {
        tenant.config.stored_responses.map_or(MAX_RESPONSES, |limit| limit as usize)
    }

    /// Stores a response, at the cost of the tenant's least recently used ones. Returns `None` if it is too large.
    pub(super) fn insert(&self, tenant: &Tenant, id: &str, new: NewResponse) -> Option<Arc<StoredResponse>> {
        let max_responses = ResponseStore::max_responses(tenant);
        if max_responses == 0 {
            return None;
        }
        let NewResponse { previous, input, output, before, after, events } = new;
        let items = items_bytes(&input) + items_bytes(&output);
        let own = before.len() + after.len() + size_of_val(previous.as_slice()) + RESPONSE_BYTES;
        let mut tenants = self.lock();
        let responses = self.of_tenant(&mut tenants, tenant);
        // A background response that is not there any more was deleted.
        if events.is_some() && responses.running.remove(id).is_none() {
            return None;
        }
        let turn_held = responses.take(items, tenant, &self.memory)?;
        let own_held = responses.take(own, tenant, &self.memory)?;
        let num_input = input.len();
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let items = input.into_iter().chain(output).collect();
        let turn = Arc::new(Turn { key, items, num_input, _held: turn_held });
        let turns = previous.into_iter().chain([turn.clone()]).collect();
        let response = Arc::new(StoredResponse { turns, before, after, events, _held: own_held });
        while responses.by_id.len() >= max_responses && responses.evict() {}
        if let Some(journal) = &responses.journal {
            journal.insert(&responses.name, id, &response);
        }
        responses.add(id, response.clone(), &turn);
        Some(response)
    }
}

/// Memory that is charged for items.
fn items_bytes(items: &[StoredItem]) -> usize {
    items.iter().map(|item| item.json.len() + 2 * item.id.len() + ITEM_BYTES).sum()
}

impl TenantResponses {
    fn get(&mut self, id: &str) -> Option<Arc<StoredResponse>> {
        self.num_uses += 1;
        let entry = self.by_id.get_mut(id)?;
        self.by_use.remove(&entry.last_use);
        entry.last_use = self.num_uses;
        self.by_use.insert(self.num_uses, id.to_owned());
        Some(entry.response.clone())
    }

    /// Takes memory of the budget, for which responses are evicted. `None` if there is not enough for any response of
    /// this size.
    fn take(&mut self, bytes: usize, tenant: &Tenant, memory: &Arc<ClientMemory>) -> Option<HeldMemory> {
        let mut held = HeldMemory::none(memory, tenant);
        loop {
            match held.grow_to(bytes) {
                Ok(()) => return Some(held),
                Err(error) if error.status == StatusCode::PAYLOAD_TOO_LARGE => return None,
                Err(_) if self.evict() => {}
                Err(_) => return None,
            }
        }
    }

    /// Removes the least recently used response. Returns false if there is none.
    fn evict(&mut self) -> bool {
        let oldest = self.by_use.first_key_value().map(|(_, id)| id.clone());
        oldest.is_some_and(|id| self.remove(&id))
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.by_id.remove(id) else { return false };
        self.forget(id);
        self.by_use.remove(&entry.last_use);
        if let Some(turn) = entry.response.turns.last() {
            for item in &turn.items {
                if self.items.get(&item.id).is_some_and(|(newest, _)| Arc::ptr_eq(newest, turn)) {
                    self.items.remove(&item.id);
                }
            }
        }
        true
    }

    /// Removes a response from the file.
    fn forget(&self, id: &str) {
        if let Some(journal) = &self.journal {
            journal.remove(&self.name, id);
        }
    }

    fn add(&mut self, id: &str, response: Arc<StoredResponse>, turn: &Arc<Turn>) {
        self.num_uses += 1;
        self.by_use.insert(self.num_uses, id.to_owned());
        for (index, item) in turn.items.iter().enumerate() {
            self.items.insert(item.id.clone(), (turn.clone(), index));
        }
        self.by_id.insert(id.to_owned(), Entry { response, last_use: self.num_uses });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::keys_file::TenantConfig;
    use crate::limits::tenants::Tenants;

    const UNIT: usize = 4096;

    fn tenants(max_responses: Option<u32>) -> [Arc<Tenant>; 2] {
        let keys = ["key-of-a", "key-of-b"];
        let config = |key: &str| TenantConfig {
            name: key.into(),
            keys: vec![key.into()],
            stored_responses: max_responses,
            ..TenantConfig::default()
        };
        let tenants = Tenants::new(keys.map(config).into()).unwrap();
        keys.map(|key| tenants.find(Some(key.as_bytes())).unwrap())
    }

    /// Returns a response with one item of `num_bytes` in its input and one in its output.
    fn response(name: &str, num_bytes: usize, previous: &[Arc<Turn>]) -> NewResponse {
        let item = |prefix: &str| StoredItem { id: format!("{prefix}_{name}"), json: "x".repeat(num_bytes) };
        let (before, after) = ("{".to_owned(), "}".to_owned());
        let (input, output) = (vec![item("in")], vec![item("out")]);
        NewResponse { previous: previous.to_vec(), input, output, before, after, events: None }
    }

    fn stored(store: &ResponseStore, tenant: &Tenant, id: &str) -> Option<Arc<StoredResponse>> {
        match store.find(tenant, id)? {
            Found::Stored(response) => Some(response),
            Found::Running(_) => None,
        }
    }

    fn store(units: usize) -> ResponseStore {
        ResponseStore::new(units * UNIT, 2, Gauge::default())
    }

    #[test]
    fn a_tenant_finds_its_own_responses_only() {
        let store = store(1000);
        let [a, b] = tenants(None);
        assert!(store.insert(&a, "r", response("r", 10, &[])).is_some());
        assert!(stored(&store, &a, "r").is_some() && store.item(&a, "out_r").is_some());
        assert!(stored(&store, &b, "r").is_none() && store.item(&b, "out_r").is_none());
        assert!(!store.remove(&b, "r") && store.remove(&a, "r") && !store.remove(&a, "r"));
        assert!(stored(&store, &a, "r").is_none() && store.item(&a, "out_r").is_none());
    }

    #[test]
    fn the_least_recently_used_response_is_evicted() {
        let store = store(1000);
        let [a, b] = tenants(Some(3));
        assert!(store.insert(&b, "other", response("other", 10, &[])).is_some());
        for name in ["r1", "r2", "r3"] {
            assert!(store.insert(&a, name, response(name, 10, &[])).is_some());
        }
        assert!(stored(&store, &a, "r1").is_some());
        assert!(store.insert(&a, "r4", response("r4", 10, &[])).is_some());
        let found = ["r1", "r2", "r3", "r4"].map(|name| stored(&store, &a, name).is_some());
        assert_eq!(found, [true, false, true, true]);
        assert!(store.item(&a, "in_r2").is_none() && store.item(&a, "in_r3").is_some());
        assert!(stored(&store, &b, "other").is_some());
        let [none, _] = tenants(Some(0));
        assert!(store.insert(&none, "r", response("r", 10, &[])).is_none());
    }

    #[test]
    fn a_tenant_at_its_share_loses_its_own_responses() {
        // Each response takes a unit for its items and one for itself; one of two tenants ends at half of 20 units.
        let store = store(20);
        let [a, b] = tenants(None);
        for i in 0..50 {
            assert!(store.insert(&a, &format!("a{i}"), response(&format!("a{i}"), 10, &[])).is_some());
        }
        let found: Vec<usize> = (0..50).filter(|i| stored(&store, &a, &format!("a{i}")).is_some()).collect();
        assert_eq!(found, [45, 46, 47, 48, 49]);
        assert!(!store.is_empty(&a) && store.is_empty(&b));
        assert!(store.insert(&b, "b", response("b", 10, &[])).is_some());
        // A response that can never fit evicts nothing.
        assert!(store.insert(&a, "large", response("large", 20 * UNIT, &[])).is_none());
        assert!(stored(&store, &a, "a49").is_some() && stored(&store, &b, "b").is_some());
    }

    #[test]
    fn a_conversation_is_held_once_and_outlives_its_ids() {
        let store = store(1000);
        let [a, _] = tenants(None);
        let mut turns: Vec<Arc<Turn>> = Vec::new();
        for i in 0..5 {
            let name = format!("r{i}");
            assert!(store.insert(&a, &name, response(&name, UNIT, &turns)).is_some());
            turns = stored(&store, &a, &name).unwrap().turns().to_vec();
        }
        let last = stored(&store, &a, "r4").unwrap();
        let ids: Vec<&str> = last.input().map(|item| item.id.as_str()).collect();
        let expected = ["in_r0", "out_r0", "in_r1", "out_r1", "in_r2", "out_r2", "in_r3", "out_r3", "in_r4"];
        assert_eq!(ids, expected);
        assert_eq!((last.num_output(), last.output(0).len()), (1, UNIT));
        for i in 0..4 {
            assert!(store.remove(&a, &format!("r{i}")));
        }
        assert_eq!(last.input().count(), 9);
        drop((last, turns));
        assert!(store.remove(&a, "r4"));
        let mut all = HeldMemory::none(&store.memory, &a);
        assert_eq!(all.grow_to(500 * UNIT), Ok(()), "all memory is given back");
    }
}
