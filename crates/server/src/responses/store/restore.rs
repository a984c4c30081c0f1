//! Takes stored responses over from the file of an earlier process.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{RESPONSE_BYTES, ResponseStore, StoredResponse, Turn, items_bytes};
use crate::limits::shared_tenants::SharedTenants;
use crate::limits::tenants::Tenant;
use crate::responses::database::{ResponseDatabase, Saved, SavedResponse};

impl ResponseStore {
    /// Takes over the responses of a file, and repeats all changes in it from now on. Responses of tenants that do not
    /// exist stay in the file.
    pub(crate) fn with_database(self, mut database: ResponseDatabase, tenants: &SharedTenants) -> ResponseStore {
        let saved = std::mem::take(&mut database.saved);
        let writer = match database.start() {
            Ok(writer) => writer,
            Err(error) => {
                tracing::error!(%error, "the system has no thread for the file of stored responses, which is not used");
                return self;
            }
        };
        let next_key = AtomicU64::new(saved.last_key() + 1);
        let store = ResponseStore { next_key, writer: Some(writer), ..self };
        let mut turns = HashMap::new();
        let num_saved = saved.responses.len();
        let restored = saved.responses.iter().filter(|response| match tenants.named(&response.tenant) {
            Some(tenant) => store.restore(&tenant, response, &saved, &mut turns),
            None => false,
        });
        let num_restored = restored.count();
        tracing::info!(restored = num_restored, saved = num_saved, "stored responses were read from their file");
        store
    }

    /// Takes over a response of a file. `known` holds the turns of the responses before it. Returns false, and removes
    /// the response from the file, if there is no memory for it.
    fn restore(
        &self,
        tenant: &Tenant,
        response: &SavedResponse,
        saved: &Saved,
        known: &mut HashMap<u64, Arc<Turn>>,
    ) -> bool {
        let mut tenants = self.lock();
        let responses = self.of_tenant(&mut tenants, tenant);
        let mut turns = Vec::new();
        for key in &response.turns {
            if let (None, Some(turn)) = (known.get(key), saved.turns.get(key)) {
                let Some(held) = responses.take(items_bytes(&turn.items), tenant, &self.memory) else { break };
                let (items, num_input) = (turn.items.clone(), turn.num_input);
                known.insert(*key, Arc::new(Turn { key: *key, items, num_input, _held: held }));
            }
            turns.extend(known.get(key).cloned());
        }
        let (before, after) = (response.before.clone(), response.after.clone());
        let own = before.len() + after.len() + size_of_val(turns.as_slice()) + RESPONSE_BYTES;
        let held = responses.take(own, tenant, &self.memory);
        let max_responses = ResponseStore::max_responses(tenant);
        let (Some(held), Some(turn), true) = (held, turns.last().cloned(), turns.len() == response.turns.len()) else {
            responses.forget(&response.id);
            return false;
        };
        while responses.by_id.len() >= max_responses && responses.evict() {}
        if max_responses == 0 {
            responses.forget(&response.id);
            return false;
        }
        let stored = Arc::new(StoredResponse { turns, before, after, events: None, _held: held });
        responses.add(&response.id, stored, &turn);
        true
    }
}
