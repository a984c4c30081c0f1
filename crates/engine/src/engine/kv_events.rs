//! Sends the changes of the prefix cache to whoever follows them, after each step.

use super::Engine;
use crate::TenantId;
use crate::kv_cache::KvEventSink;

impl Engine {
    /// Sends changes of the prefix cache that concern `tenant` to `sink` from now on.
    pub fn set_kv_events(&mut self, tenant: TenantId, sink: Box<dyn KvEventSink>) {
        self.cache.record_events(tenant);
        self.kv_events = Some(sink);
    }

    pub(super) fn send_kv_events(&mut self) {
        let Some(sink) = &mut self.kv_events else { return };
        let events = self.cache.take_events();
        if !events.is_empty() {
            sink.send(events);
        }
    }
}
