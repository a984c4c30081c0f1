//! The tenants of a running server, which a changed keys file replaces without a restart.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use pellucid_engine::TenantId;

use super::keys_file::{KeysError, TenantConfig};
use super::tenants::{Tenant, Tenants};

/// The tenants of a running server. Clones share them.
#[derive(Debug, Clone)]
pub struct SharedTenants(Arc<Shared>);

struct Shared {
    current: RwLock<Arc<Tenants>>,
    /// Called with the number of tenants after each change.
    listeners: Mutex<Vec<Listener>>,
}

type Listener = Box<dyn Fn(usize) + Send>;

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.current.fmt(f)
    }
}

/// The effect of new keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Names of tenants that were added.
    pub added: Vec<String>,
    /// Names of tenants that were removed. Their requests in flight go on.
    pub removed: Vec<String>,
    /// Names of tenants whose `kv_tokens` changed, which takes effect at the next start: the engine reads it once.
    pub needs_restart: Vec<String>,
}

impl From<Tenants> for SharedTenants {
    fn from(tenants: Tenants) -> SharedTenants {
        SharedTenants(Arc::new(Shared { current: RwLock::new(Arc::new(tenants)), listeners: Mutex::default() }))
    }
}

impl SharedTenants {
    /// Whether requests need a key. Does not change while the server runs.
    pub fn has_keys(&self) -> bool {
        self.current().has_keys()
    }

    /// Returns the KV quota in tokens of each tenant that has one now.
    pub fn kv_quotas(&self) -> Vec<(TenantId, u32)> {
        self.current().kv_quotas().collect()
    }

    /// Returns the id of the tenant with this name, or without keys and a name that of all requests. A tenant keeps its
    /// id as long as the server runs.
    pub fn id_of(&self, name: Option<&str>) -> Option<TenantId> {
        match name {
            Some(name) => self.named(name).map(|tenant| tenant.id),
            None => self.current().tenants.first().filter(|_| !self.has_keys()).map(|tenant| tenant.id),
        }
    }

    /// Returns the tenants as they are now.
    pub(crate) fn current(&self) -> Arc<Tenants> {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the tenant with this name, if the keys list it now.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Tenant>> {
        self.current().tenants.iter().find(|tenant| tenant.config.name == name).cloned()
    }

    /// Calls `listener` with the number of tenants after each change.
    pub(crate) fn on_change(&self, listener: impl Fn(usize) + Send + 'static) {
        self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(listener));
    }

    /// Replaces all tenants. Requests with a removed key are refused from now on; requests in flight go on. A tenant
    /// keeps its id, its running requests and the state of its rate limits by its name. If `configs` is refused,
    /// nothing changes.
    pub fn replace(&self, configs: Vec<TenantConfig>) -> Result<Reloaded, KeysError> {
        let mut current = self.0.current.write().unwrap_or_else(PoisonError::into_inner);
        let tenants = current.reloaded(configs)?;
        let mut reloaded = Reloaded::default();
        for tenant in tenants.all() {
            let before = current.by_name(&tenant.config.name);
            if before.is_none() {
                reloaded.added.push(tenant.config.name.clone());
            }
            if before.and_then(|before| before.config.kv_tokens) != tenant.config.kv_tokens {
                reloaded.needs_restart.push(tenant.config.name.clone());
            }
        }
        let removed = current.all().iter().filter(|tenant| tenants.by_name(&tenant.config.name).is_none());
        reloaded.removed = removed.map(|tenant| tenant.config.name.clone()).collect();
        *current = Arc::new(tenants);
        let num_tenants = current.len();
        for listener in &*self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner) {
            listener(num_tenants);
        }
        Ok(reloaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str, key: &str) -> TenantConfig {
        TenantConfig { name: name.into(), keys: vec![key.into()], ..TenantConfig::default() }
    }

    #[test]
    fn a_tenant_keeps_its_id_and_its_usage_by_name() {
        let limited = |key: &str, limit: u32| TenantConfig {
            requests_per_minute: Some(limit),
            concurrent_requests: Some(1),
            ..tenant("b", key)
        };
        let shared = SharedTenants::from(Tenants::new(vec![tenant("a", "key-of-a"), limited("key-of-b", 2)]).unwrap());
        let find = |key: &str| shared.current().find(Some(key.as_bytes()));
        let code = |key: &str| find(key).unwrap().admit(false).map(drop).map_err(|error| error.detail.code.unwrap());
        let (id_of_a, id_of_b) = (find("key-of-a").unwrap().id, find("key-of-b").unwrap().id);
        let running = find("key-of-b").unwrap().admit(false).unwrap();
        // Another key, another order, a new tenant, and one removed.
        let quota = TenantConfig { kv_tokens: Some(64), ..tenant("c", "key-of-c") };
        let reloaded = shared.replace(vec![quota, limited("new-key-of-b", 2)]).unwrap();
        assert_eq!(reloaded.added, ["c"]);
        assert_eq!(reloaded.removed, ["a"]);
        assert_eq!(reloaded.needs_restart, ["c"]);
        for removed in ["key-of-a", "key-of-b"] {
            assert_eq!(find(removed).unwrap_err().status.as_u16(), 401);
        }
        assert_eq!(find("new-key-of-b").unwrap().id, id_of_b);
        let id_of_c = find("key-of-c").unwrap().id;
        assert!(id_of_c != id_of_a && id_of_c != id_of_b, "an id is not given to another tenant");
        assert_eq!(code("new-key-of-b"), Err("concurrent_requests"), "requests in flight still count");
        drop(running);
        assert_eq!(code("new-key-of-b"), Ok(()));
        assert_eq!(code("new-key-of-b"), Err("requests_per_minute"), "a reload does not fill the bucket");
        // A higher limit applies at once, and what was used stays used.
        shared.replace(vec![limited("new-key-of-b", 3)]).unwrap();
        assert_eq!(code("new-key-of-b"), Ok(()));
        assert_eq!(code("new-key-of-b"), Err("requests_per_minute"));
        // A refused file changes nothing, and a tenant that returns keeps its id.
        let twice = vec![tenant("d", "key-of-d"), tenant("d", "key-of-e")];
        assert_eq!(shared.replace(twice), Err(KeysError::NamedTwice("d".into())));
        assert!(find("new-key-of-b").is_ok() && find("key-of-d").is_err());
        shared.replace(vec![tenant("d", "key-of-d"), tenant("a", "key-of-a")]).unwrap();
        assert_eq!(find("key-of-a").unwrap().id, id_of_a);
        shared.replace(vec![limited("new-key-of-b", 3)]).unwrap();
        assert_eq!(code("new-key-of-b"), Err("requests_per_minute"), "leaving and returning does not fill the bucket");
    }
}
