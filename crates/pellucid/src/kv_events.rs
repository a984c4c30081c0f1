//! The changes of the prefix cache, for programs that route requests.

use pellucid_engine::TenantId;
use pellucid_engine::kv_cache::KvEventSink;

use crate::Builder;

impl Builder {
    /// Sends changes of the prefix cache that concern a tenant to `sink`, which must not block.
    pub fn kv_events(mut self, tenant: TenantId, sink: Box<dyn KvEventSink>) -> Builder {
        self.kv_events = Some((tenant, sink));
        self
    }
}
