//! Tenants: who sent a request, by its API key, and the limits that apply to it.
//!
//! Keys are stored as keyed hashes. A presented key is hashed and compared with all of them in constant time, so that
//! neither the time of a refusal nor a memory dump reveals a key. The tenant depends on the key alone; nothing in a
//! request's body changes it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::http::StatusCode;
use pellucid_engine::TenantId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::keys_file::{KeysError, MAX_KEYS, TenantConfig};
use super::permit::Permit;
use super::rate_limit::RateLimit;
use crate::http::blocking;
use crate::http::error::ApiError;
use crate::random;

/// Allowed lengths of a key in bytes.
const KEY_LENGTHS: std::ops::RangeInclusive<usize> = 8..=512;

/// Keyed hash of an API key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyHash(pub(super) [u8; 32]);

impl fmt::Debug for KeyHash {
    /// Shows nothing of the hash: debug output ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

/// A tenant with the state of its limits.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) config: TenantConfig,
    /// Shared by all versions of the tenant, so that a reload of the keys file resets no limit.
    pub(super) usage: Arc<Usage>,
    /// Bounds the blocking threads that the tenant's long texts may use; further texts wait in order of arrival.
    threads: Arc<Semaphore>,
    num_threads: usize,
}

/// Use of a tenant's limits.
#[derive(Debug)]
pub(super) struct Usage {
    pub(super) num_running: AtomicUsize,
    budgets: Mutex<Budgets>,
}

#[derive(Debug)]
pub(super) struct Budgets {
    pub(super) requests: Option<RateLimit>,
    pub(super) tokens: Option<RateLimit>,
    pub(super) logprobs: Option<RateLimit>,
    pub(super) probes: Option<RateLimit>,
}

/// All tenants with their keys.
pub struct Tenants {
    /// Exactly one if there are no keys.
    pub(super) tenants: Vec<Arc<Tenant>>,
    /// Keyed hash of each key, and the index of its tenant.
    keys: Vec<(KeyHash, usize)>,
    /// Key of the hashes. Kept when the keys are reloaded.
    secret: [u8; 32],
    /// Tenants of earlier keys files that this one does not list. One that returns keeps its id and its usage.
    removed: Vec<Arc<Tenant>>,
}

impl fmt::Debug for Tenants {
    /// Shows neither the secret nor the hashes of keys: with both, keys could be guessed from a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.tenants.iter().map(|tenant| tenant.config.name.as_str()).collect();
        f.debug_struct("Tenants").field("names", &names).field("num_keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl Tenants {
    /// Returns a single tenant without limits for all clients, who need no key.
    pub fn open() -> Tenants {
        let config = TenantConfig { name: "everybody".into(), trace: true, probe: true, ..TenantConfig::default() };
        let everybody = Arc::new(Tenant::new(0, config, blocking::num_threads(crate::num_cores())));
        Tenants { tenants: vec![everybody], keys: Vec::new(), secret: random::secret(), removed: Vec::new() }
    }

    /// Checks and hashes the keys of all tenants. Tenant ids count from 1 in the order of `configs`.
    pub fn new(configs: Vec<TenantConfig>) -> Result<Tenants, KeysError> {
        Tenants::build(configs, &[], random::secret())
    }

    /// Returns the tenants of a changed keys file. A tenant keeps its id, its running requests and the state of its
    /// rate limits by its name. A new tenant gets an id that none had before, because cached prefixes are found by id.
    pub(super) fn reloaded(&self, configs: Vec<TenantConfig>) -> Result<Tenants, KeysError> {
        let known: Vec<Arc<Tenant>> = self.tenants.iter().chain(&self.removed).cloned().collect();
        let mut tenants = Tenants::build(configs, &known, self.secret)?;
        for tenant in &tenants.tenants {
            tenant.apply_limits();
        }
        tenants.removed = known.into_iter().filter(|tenant| tenants.by_name(&tenant.config.name).is_none()).collect();
        Ok(tenants)
    }

    fn build(configs: Vec<TenantConfig>, known: &[Arc<Tenant>], secret: [u8; 32]) -> Result<Tenants, KeysError> {
        let mut tenants = Tenants { tenants: Vec::new(), keys: Vec::new(), secret, removed: Vec::new() };
        let mut last_id = known.iter().map(|tenant| tenant.id.0).max().unwrap_or(0);
        // With several tenants, none may use all blocking threads.
        let num_threads = blocking::num_threads(crate::num_cores());
        let num_threads = if configs.len() == 1 { num_threads } else { num_threads / 2 };
        for (index, mut config) in configs.into_iter().enumerate() {
            let refused = |reason: String| KeysError::Tenant { tenant: config.name.clone(), reason };
            let is_word = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if config.name.is_empty() || config.name.len() > 64 || !config.name.chars().all(is_word) {
                return Err(KeysError::Name { number: index + 1 });
            }
            if tenants.tenants.iter().any(|other| other.config.name == config.name) {
                return Err(KeysError::NamedTwice(config.name));
            }
            let mut digests = Vec::new();
            for key in &config.keys {
                if !KEY_LENGTHS.contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                    let (least, most) = (KEY_LENGTHS.start(), KEY_LENGTHS.end());
                    return Err(refused(format!("expected keys of {least} to {most} visible ASCII characters")));
                }
                digests.push(<[u8; 32]>::from(Sha256::digest(key.as_bytes())));
            }
            for digest in &config.keys_sha256 {
                digests.push(
                    from_hex(digest).ok_or_else(|| refused("keys_sha256: expected 64 hexadecimal digits".into()))?,
                );
            }
            if digests.is_empty() {
                return Err(refused("expected at least one key, found no key".into()));
            }
            for digest in digests {
                let hash = tenants.hash(&digest);
                if let Some((_, other)) = tenants.keys.iter().find(|(known, _)| *known == hash) {
                    let first = tenants.tenants.get(*other).map_or(&config.name, |tenant| &tenant.config.name).clone();
                    return Err(KeysError::KeyTwice { first, second: config.name });
                }
                tenants.keys.push((hash, index));
            }
            if tenants.keys.len() > MAX_KEYS {
                return Err(KeysError::TooMany);
            }
            // Only hashes are kept from here on.
            config.keys.clear();
            let tenant = match known.iter().find(|known| known.config.name == config.name) {
                Some(known) => known.with_config(config, num_threads),
                None => {
                    last_id += 1;
                    Tenant::new(last_id, config, num_threads)
                }
            };
            tenants.tenants.push(Arc::new(tenant));
        }
        Ok(tenants)
    }

    pub(super) fn by_name(&self, name: &str) -> Option<&Arc<Tenant>> {
        self.tenants.iter().find(|tenant| tenant.config.name == name)
    }

    /// Returns the name of a tenant; `None` if it is not in the keys file any more.
    pub(crate) fn name_of(&self, id: TenantId) -> Option<String> {
        self.tenants.iter().find(|tenant| tenant.id == id).map(|tenant| tenant.config.name.clone())
    }

    pub(super) fn all(&self) -> &[Arc<Tenant>] {
        &self.tenants
    }

    /// Whether requests need a key.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Number of tenants; one if there are no keys.
    pub(crate) fn len(&self) -> usize {
        self.tenants.len()
    }

    /// Returns the KV quota in tokens of each tenant that has one.
    pub fn kv_quotas(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        self.tenants.iter().filter_map(|tenant| Some((tenant.id, tenant.config.kv_tokens?)))
    }

    /// Refuses metrics to tenants that share the server, unless they have the right to them.
    pub(crate) fn check_metrics(&self, tenant: &Tenant) -> Result<(), ApiError> {
        if self.tenants.len() == 1 || tenant.config.metrics {
            return Ok(());
        }
        let message = "metrics are not allowed for this key, because they show the activity of other tenants; \
                       `metrics = true` in the keys file allows them";
        Err(ApiError::refused(StatusCode::FORBIDDEN, "metrics_not_allowed", message))
    }

    /// Refuses to load and unload models to tenants without the right to it: others may use these models.
    pub(crate) fn check_manage_models(&self, tenant: &Tenant) -> Result<(), ApiError> {
        if !self.has_keys() || tenant.config.manage_models {
            return Ok(());
        }
        let message = "loading and unloading models is not allowed for this key; `manage_models = true` in the keys \
                       file allows it";
        Err(ApiError::refused(StatusCode::FORBIDDEN, "manage_models_not_allowed", message))
    }

    /// Refuses to cancel the requests of other tenants to those without the right to it.
    pub(crate) fn check_manage_requests(&self, tenant: &Tenant) -> Result<(), ApiError> {
        if !self.has_keys() || tenant.config.manage_requests {
            return Ok(());
        }
        let message = "cancelling requests is not allowed for this key; `manage_requests = true` in the keys file \
                       allows it";
        Err(ApiError::refused(StatusCode::FORBIDDEN, "manage_requests_not_allowed", message))
    }

    fn hash(&self, digest: &[u8; 32]) -> KeyHash {
        KeyHash(*blake3::keyed_hash(&self.secret, digest).as_bytes())
    }

    /// Returns a pseudonym for a client's text, which differs with every start of the server.
    pub(crate) fn pseudonym(&self, words: &str) -> String {
        blake3::keyed_hash(&self.secret, words.as_bytes()).to_hex()[..16].to_owned()
    }

    /// Returns a tenant without rights, for requests to `/health` without a key.
    pub(crate) fn anonymous(&self) -> Arc<Tenant> {
        Arc::new(Tenant::new(0, TenantConfig { name: "anonymous".into(), ..TenantConfig::default() }, 1))
    }

    /// Returns the tenant of a key.
    pub(crate) fn find(&self, presented: Option<&[u8]>) -> Result<Arc<Tenant>, ApiError> {
        if self.keys.is_empty() {
            return Ok(self.tenants[0].clone());
        }
        let Some(presented) = presented else {
            return Err(ApiError::unauthorized(
                "missing API key: send it as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`",
            ));
        };
        self.find_hashed(&self.hash_of(presented))
    }

    /// Returns the hash under which a key is stored. It stays the same when the keys are reloaded.
    pub(crate) fn hash_of(&self, presented: &[u8]) -> KeyHash {
        self.hash(&Sha256::digest(presented).into())
    }

    /// Returns the tenant of a hashed key. Compares all keys, so that the time does not reveal which one matched.
    pub(crate) fn find_hashed(&self, hash: &KeyHash) -> Result<Arc<Tenant>, ApiError> {
        let mut found = None;
        for (known, index) in &self.keys {
            if bool::from(known.0.ct_eq(&hash.0)) {
                found = Some(*index);
            }
        }
        // LiteLLM recognizes this error by OpenAI's wording, not by its code.
        let index = found
            .ok_or_else(|| ApiError::unauthorized("Incorrect API key provided: it is none of this server's keys"))?;
        Ok(self.tenants[index].clone())
    }
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; 32];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

impl Tenant {
    fn new(id: u32, config: TenantConfig, num_threads: usize) -> Tenant {
        let budgets = Mutex::new(Budgets { requests: None, tokens: None, logprobs: None, probes: None });
        let tenant = Tenant {
            id: TenantId(id),
            config,
            usage: Arc::new(Usage { num_running: AtomicUsize::new(0), budgets }),
            num_threads,
            threads: Arc::new(Semaphore::new(num_threads)),
        };
        tenant.apply_limits();
        tenant
    }

    /// Returns the tenant with another configuration, and with the id and the usage of this one.
    fn with_config(&self, config: TenantConfig, num_threads: usize) -> Tenant {
        let threads =
            if num_threads == self.num_threads { self.threads.clone() } else { Arc::new(Semaphore::new(num_threads)) };
        Tenant { id: self.id, config, usage: self.usage.clone(), num_threads, threads }
    }

    /// Sets the rate limits to those of the configuration; what was used of them stays used.
    fn apply_limits(&self) {
        let now = Instant::now();
        let mut budgets = self.budgets();
        let Budgets { requests, tokens, logprobs, probes } = &mut *budgets;
        for (budget, limit) in [
            (requests, self.config.requests_per_minute),
            (tokens, self.config.tokens_per_minute),
            (logprobs, self.config.logprobs_per_minute),
            (probes, self.config.probes_per_minute),
        ] {
            *budget = limit.map(|limit| match *budget {
                Some(before) => before.with_limit(limit),
                None => RateLimit::new(limit, now),
            });
        }
    }

    /// Admits a request before any work is done for it, or names the limit that refuses it. The limit on tokens applies
    /// only to requests that use the model.
    pub(crate) fn admit(self: &Arc<Tenant>, uses_model: bool) -> Result<Permit, ApiError> {
        let permit = self.count_request()?;
        let mut budgets = self.budgets();
        let Budgets { requests, tokens, .. } = &mut *budgets;
        // Both are checked before one is charged, so that a refused request costs nothing.
        check(requests.as_mut(), "requests per minute", "requests_per_minute")?;
        check(tokens.as_mut().filter(|_| uses_model), "tokens per minute", "tokens_per_minute")?;
        if let Some(limit) = requests {
            limit.charge(1);
        }
        Ok(permit)
    }

    /// Charges a message to a running request like a request, or names the limit that refuses it.
    pub(crate) fn charge_message(&self) -> Result<(), ApiError> {
        let requests = &mut self.budgets().requests;
        check(requests.as_mut(), "requests per minute", "requests_per_minute")?;
        if let Some(limit) = requests {
            limit.charge(1);
        }
        Ok(())
    }

    /// Waits until the tenant may use another blocking thread.
    pub(crate) async fn thread(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        self.threads.clone().acquire_owned().await.ok()
    }

    pub(super) fn budgets(&self) -> MutexGuard<'_, Budgets> {
        self.usage.budgets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_request(self: &Arc<Tenant>) -> Result<Permit, ApiError> {
        let num_running = self.usage.num_running.fetch_add(1, Ordering::SeqCst);
        // Dropping the permit takes the count back, on the error path too.
        let permit = Permit::new(self.clone());
        match self.config.concurrent_requests {
            Some(limit) if num_running >= limit as usize => {
                let message =
                    format!("this tenant has reached its limit of {limit} concurrent requests; try again later");
                Err(ApiError::too_many("concurrent_requests", message, crate::http::error::RETRY_SOON_S))
            }
            _ => Ok(permit),
        }
    }

    pub(crate) fn charge_output(&self, num_tokens: usize, num_logprobs: usize) {
        let mut budgets = self.budgets();
        if let Some(limit) = &mut budgets.tokens {
            limit.charge(num_tokens);
        }
        if let Some(limit) = &mut budgets.logprobs {
            limit.charge(num_logprobs);
        }
    }
}

/// Refuses requests while a rate limit is used up.
pub(super) fn check(limit: Option<&mut RateLimit>, what: &str, code: &'static str) -> Result<(), ApiError> {
    let Some(limit) = limit else { return Ok(()) };
    let Some(wait_s) = limit.wait_s(Instant::now()) else { return Ok(()) };
    let message = format!("the limit of {} {what} is reached; try again in {wait_s} s", limit.limit());
    Err(ApiError::too_many(code, message, wait_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str, key: &str) -> TenantConfig {
        TenantConfig { name: name.into(), keys: vec![key.into()], ..TenantConfig::default() }
    }

    #[test]
    fn a_key_leads_to_its_tenant_and_nothing_else_does() {
        let digest: String = Sha256::digest(b"another-key").iter().map(|byte| format!("{byte:02x}")).collect();
        let hashed = TenantConfig { name: "b".into(), keys_sha256: vec![digest], ..TenantConfig::default() };
        let tenants = Tenants::new(vec![tenant("a", "first-key"), hashed]).unwrap();
        assert_eq!(tenants.find(Some(b"first-key")).unwrap().config.name, "a");
        assert_eq!(tenants.find(Some(b"another-key")).unwrap().id, TenantId(2));
        for wrong in [Some(&b"first-kez"[..]), Some(b""), Some(b"first-key "), None] {
            let error = tenants.find(wrong).unwrap_err();
            assert_eq!((error.status.as_u16(), error.detail.code), (401, Some("invalid_api_key")));
        }
        let shown = format!("{tenants:?} {:?}", tenants.keys[0]);
        assert_eq!(shown, "Tenants { names: [\"a\", \"b\"], num_keys: 2, .. } (KeyHash, 0)", "no secret and no hash");
    }

    #[test]
    fn a_refusal_names_its_limit() {
        let config = TenantConfig {
            requests_per_minute: Some(2),
            tokens_per_minute: Some(100),
            concurrent_requests: Some(1),
            logprobs_per_minute: Some(10),
            probes_per_minute: Some(2),
            ..tenant("a", "first-key")
        };
        let tenants = Tenants::new(vec![config]).unwrap();
        let tenant = tenants.find(Some(b"first-key")).unwrap();
        let code = |outcome: Result<Permit, ApiError>| outcome.map(drop).map_err(|error| error.detail.code.unwrap());
        // A request that uses the model: admitted, read, and charged for its prompt.
        let ask = |num_prompt: usize, reports_logprobs: bool| {
            let permit = tenant.admit(true)?;
            let charged = permit.charge_prompt(num_prompt, reports_logprobs, 0);
            charged.inspect_err(|error| permit.refuse(error)).map(|()| permit)
        };
        let first = ask(10, true).unwrap();
        assert_eq!(code(ask(10, false)), Err("concurrent_requests"));
        drop(first);
        tenant.charge_output(0, 11);
        assert_eq!(code(ask(10, true)), Err("logprob_budget"));
        let permit = ask(90, false).expect("a request refused by a limit costs nothing");
        let charge = || permit.charge_prompt(1, false, 0).map_err(|error| error.detail.code.unwrap());
        assert_eq!(charge(), Err("tokens_per_minute"));
        permit.refund_prompt(90, 0);
        assert_eq!(charge(), Ok(()));
        let probe = || permit.charge_prompt(1, false, 1).map_err(|error| error.detail.code.unwrap());
        assert_eq!([probe(), probe(), probe()], [Ok(()), Ok(()), Err("probe_budget")]);
        assert_eq!(charge(), Ok(()), "requests without a probe go on");
        permit.refuse(&ApiError::invalid("wrong"));
        drop(permit);
        assert_eq!(code(tenant.admit(false)), Err("requests_per_minute"), "a wrong request stays charged");
    }
}
