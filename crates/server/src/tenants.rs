//! Who may ask, and how much: keys name tenants, tenants have limits.
//!
//! Keys are kept as keyed hashes. A presented key is hashed and compared with every one of them in constant time, so that neither the
//! time of a refusal nor a look into memory tells a key. A tenant comes from its key alone; nothing in a request's body changes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::http::StatusCode;
use pellucid_engine::TenantId;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::MAX_BLOCKING;
use crate::buckets::Bucket;
use crate::error::ApiError;
use crate::random;

/// Keys a file may hold.
const MAX_KEYS: usize = 10_000;
/// Bytes of a key.
const KEY_LENGTHS: std::ops::RangeInclusive<usize> = 8..=512;

/// A keys file: a list of tenants.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeysFile {
    #[serde(default)]
    pub tenant: Vec<TenantConfig>,
}

/// One tenant, as the operator describes it. A limit that is absent does not exist.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// For logs and metrics.
    pub name: String,
    /// Keys in clear text.
    #[serde(default)]
    pub keys: Vec<String>,
    /// SHA-256 of keys, as 64 hexadecimal digits.
    #[serde(default)]
    pub keys_sha256: Vec<String>,
    pub requests_per_minute: Option<u32>,
    /// Prompt and output together.
    pub tokens_per_minute: Option<u32>,
    pub concurrent_requests: Option<u32>,
    /// Tokens of KV memory, in use and remembered together.
    pub kv_tokens: Option<u32>,
    /// Log probabilities that may be reported.
    pub logprobs_per_minute: Option<u32>,
    /// Whether `trace` may be asked for: it shows more of the model than log probabilities do.
    #[serde(default)]
    pub trace: bool,
    /// Whether `/metrics` may be read where there are other tenants: it shows what they do.
    #[serde(default)]
    pub metrics: bool,
}

/// Why keys were refused at the start. Never holds a key, nor any word of the file that may be one typed at the wrong place: only names of
/// tenants, which logs and metrics tell as well.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeysError {
    #[error("the keys file is not valid at line {line}, column {column}: {reason}")]
    Syntax { line: usize, column: usize, reason: String },
    #[error("tenant {number} of the keys file: a name has 1 to 64 letters, digits and the marks - _ .")]
    Name { number: usize },
    #[error("tenant {tenant:?}: {reason}")]
    Tenant { tenant: String, reason: String },
    #[error("two tenants are called {0:?}")]
    NamedTwice(String),
    #[error("the same key stands at tenant {first:?} and at tenant {second:?}")]
    KeyTwice { first: String, second: String },
    #[error("the keys file names no tenant")]
    NoTenant,
    #[error("more than {MAX_KEYS} keys")]
    TooMany,
}

/// A tenant at work.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) config: TenantConfig,
    num_running: AtomicUsize,
    budgets: Mutex<Budgets>,
    /// Threads for long texts that it may take at once; the next waits, in the order of arrival.
    threads: Arc<Semaphore>,
}

#[derive(Debug)]
struct Budgets {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    logprobs: Option<Bucket>,
}

/// Everybody who may ask.
#[derive(Debug)]
pub struct Tenants {
    /// Without keys there is one, for everybody.
    tenants: Vec<Arc<Tenant>>,
    /// Hash and index of its tenant.
    keys: Vec<([u8; 32], usize)>,
    /// Keys the hashes.
    secret: [u8; 32],
}

impl KeysFile {
    /// Reads TOML, or JSON where the text begins like it.
    pub fn parse(text: &str) -> Result<KeysFile, KeysError> {
        let file = if text.trim_start().starts_with('{') { from_json(text)? } else { from_toml(text)? };
        if file.tenant.is_empty() {
            return Err(KeysError::NoTenant);
        }
        Ok(file)
    }
}

fn from_json(text: &str) -> Result<KeysFile, KeysError> {
    serde_json::from_str(text).map_err(|error| {
        let reason = if error.is_data() { expected(&error.to_string()) } else { "this is not JSON".into() };
        KeysError::Syntax { line: error.line(), column: error.column(), reason }
    })
}

fn from_toml(text: &str) -> Result<KeysFile, KeysError> {
    let refused = |error: toml::de::Error, reason: String| {
        let start = error.span().map_or(0, |span| span.start);
        let before = text.get(..start).unwrap_or_default();
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        KeysError::Syntax { line: before.matches('\n').count() + 1, column, reason }
    };
    // What is wrong with the text is told apart from what is wrong with its contents, whose messages are known.
    let read: Result<toml::Table, _> = toml::from_str(text);
    read.map_err(|error| refused(error, "this is not TOML".into()))?;
    toml::from_str(text).map_err(|error| {
        let reason = expected(error.message());
        refused(error, reason)
    })
}

/// What stood in the place of what was found, from a message that ends with it. What was found may be a key, and is not repeated.
fn expected(message: &str) -> String {
    match message.rsplit_once(", expected ") {
        // `serde_json` adds the place, which is told already.
        Some((_, wanted)) => format!("expected {}", wanted.split(" at line ").next().unwrap_or_default()),
        None if message.starts_with("missing field `name`") => "a tenant without a name".into(),
        None => "not what a keys file holds here".into(),
    }
}

impl Tenants {
    /// No keys: everybody is one tenant without limits.
    pub fn open() -> Tenants {
        let config = TenantConfig { name: "everybody".into(), trace: true, ..TenantConfig::default() };
        Tenants {
            tenants: vec![Arc::new(Tenant::new(0, config, MAX_BLOCKING))],
            keys: Vec::new(),
            secret: random::secret(),
        }
    }

    /// The tenants of a list. Numbers are given in its order, from 1.
    pub fn new(configs: Vec<TenantConfig>) -> Result<Tenants, KeysError> {
        let mut tenants = Tenants { tenants: Vec::new(), keys: Vec::new(), secret: random::secret() };
        // One tenant's long texts leave threads for the others'.
        let num_threads = if configs.len() == 1 { MAX_BLOCKING } else { MAX_BLOCKING / 2 };
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
                    return Err(refused(format!("a key has {least} to {most} visible ASCII characters")));
                }
                digests.push(<[u8; 32]>::from(Sha256::digest(key.as_bytes())));
            }
            for digest in &config.keys_sha256 {
                digests.push(
                    from_hex(digest).ok_or_else(|| refused("keys_sha256: expected 64 hexadecimal digits".into()))?,
                );
            }
            if digests.is_empty() {
                return Err(refused("it has no key".into()));
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
            // From here on only hashes are known.
            config.keys.clear();
            tenants.tenants.push(Arc::new(Tenant::new(index as u32 + 1, config, num_threads)));
        }
        Ok(tenants)
    }

    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Tenants with a quota of KV memory, in tokens.
    pub fn kv_quotas(&self) -> impl Iterator<Item = (TenantId, u32)> + '_ {
        self.tenants.iter().filter_map(|tenant| Some((tenant.id, tenant.config.kv_tokens?)))
    }

    /// Refuses the numbers of the whole server to a tenant that shares it, unless the operator gave it the right to them.
    pub(crate) fn check_metrics(&self, tenant: &Tenant) -> Result<(), ApiError> {
        if self.tenants.len() == 1 || tenant.config.metrics {
            return Ok(());
        }
        let message = "metrics are not allowed for this key: they show what other tenants do; `metrics = true` in the keys file allows them";
        Err(ApiError::refused(StatusCode::FORBIDDEN, "metrics_not_allowed", message))
    }

    fn hash(&self, digest: &[u8; 32]) -> [u8; 32] {
        *blake3::keyed_hash(&self.secret, digest).as_bytes()
    }

    /// A name for a client's own words that says nothing of them, and changes with every start.
    pub(crate) fn pseudonym(&self, words: &str) -> String {
        blake3::keyed_hash(&self.secret, words.as_bytes()).to_hex()[..16].to_owned()
    }

    /// A tenant without rights, for the route that needs none.
    pub(crate) fn nobody(&self) -> Arc<Tenant> {
        Arc::new(Tenant::new(0, TenantConfig { name: "nobody".into(), ..TenantConfig::default() }, 1))
    }

    /// The tenant of a key; every key is compared, whatever is found.
    pub(crate) fn find(&self, presented: Option<&[u8]>) -> Result<Arc<Tenant>, ApiError> {
        if self.keys.is_empty() {
            return Ok(self.tenants[0].clone());
        }
        let Some(presented) = presented else {
            return Err(ApiError::unauthorized(
                "an API key is needed: send it as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`",
            ));
        };
        let hash = self.hash(&Sha256::digest(presented).into());
        let mut found = None;
        for (known, index) in &self.keys {
            if bool::from(known.ct_eq(&hash)) {
                found = Some(*index);
            }
        }
        // Libraries above the clients (LiteLLM) know this error by OpenAI's words, not by its code.
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
        let now = Instant::now();
        let bucket = |limit: Option<u32>| limit.map(|limit| Bucket::new(limit, now));
        let budgets = Budgets {
            requests: bucket(config.requests_per_minute),
            tokens: bucket(config.tokens_per_minute),
            logprobs: bucket(config.logprobs_per_minute),
        };
        Tenant {
            id: TenantId(id),
            config,
            num_running: AtomicUsize::new(0),
            budgets: Mutex::new(budgets),
            threads: Arc::new(Semaphore::new(num_threads)),
        }
    }

    /// Lets a request in before any work is done for it, or says which limit keeps it out. Tokens are looked at where the model is asked.
    pub(crate) fn enter(self: &Arc<Tenant>, asks_model: bool) -> Result<Permit, ApiError> {
        let permit = self.take_place()?;
        let mut budgets = self.budgets();
        let Budgets { requests, tokens, .. } = &mut *budgets;
        // Look at both before one is charged: a request that there is no room for costs nothing.
        check(requests.as_mut(), "requests a minute", "requests_per_minute")?;
        check(tokens.as_mut().filter(|_| asks_model), "tokens a minute", "tokens_per_minute")?;
        if let Some(bucket) = requests {
            bucket.charge(1);
        }
        Ok(permit)
    }

    fn budgets(&self) -> MutexGuard<'_, Budgets> {
        self.budgets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_place(self: &Arc<Tenant>) -> Result<Permit, ApiError> {
        let num_running = self.num_running.fetch_add(1, Ordering::SeqCst);
        // From here on the place is given back on every way out.
        let permit = Permit { tenant: self.clone() };
        match self.config.concurrent_requests {
            Some(limit) if num_running >= limit as usize => {
                let message =
                    format!("{limit} requests of this tenant are being served, which is its limit; try again later");
                Err(ApiError::too_many("concurrent_requests", message, crate::error::RETRY_SOON_S))
            }
            _ => Ok(permit),
        }
    }

    pub(crate) fn charge_output(&self, num_tokens: usize, num_logprobs: usize) {
        let mut budgets = self.budgets();
        if let Some(bucket) = &mut budgets.tokens {
            bucket.charge(num_tokens);
        }
        if let Some(bucket) = &mut budgets.logprobs {
            bucket.charge(num_logprobs);
        }
    }
}

/// Refuses while a budget is used up.
fn check(bucket: Option<&mut Bucket>, what: &str, code: &'static str) -> Result<(), ApiError> {
    let Some(bucket) = bucket else { return Ok(()) };
    let Some(wait_s) = bucket.wait_s(Instant::now()) else { return Ok(()) };
    let message = format!("the limit of {} {what} is reached; try again in {wait_s} s", bucket.limit());
    Err(ApiError::too_many(code, message, wait_s))
}

/// A place among a tenant's concurrent requests; given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    pub(crate) tenant: Arc<Tenant>,
}

impl Permit {
    /// Charges a request to the model for its prompt, once that is known, or says which limit keeps it out. Output is charged as it is made.
    pub(crate) fn charge_prompt(&self, num_prompt: usize, reports_logprobs: bool) -> Result<(), ApiError> {
        let mut budgets = self.tenant.budgets();
        let Budgets { tokens, logprobs, .. } = &mut *budgets;
        // Once more: other requests may have been charged since this one was let in.
        check(tokens.as_mut(), "tokens a minute", "tokens_per_minute")?;
        check(logprobs.as_mut().filter(|_| reports_logprobs), "log probabilities a minute", "logprob_budget")?;
        if let Some(bucket) = tokens {
            bucket.charge(num_prompt);
        }
        Ok(())
    }

    /// Waits for the tenant's turn on a thread for long texts.
    pub(crate) async fn thread(&self) -> Option<OwnedSemaphorePermit> {
        // It is never closed.
        self.tenant.threads.clone().acquire_owned().await.ok()
    }

    /// Takes back what a prompt was charged: nothing is made of it.
    pub(crate) fn refund_prompt(&self, num_prompt: usize, num_logprobs: usize) {
        let mut budgets = self.tenant.budgets();
        let Budgets { tokens, logprobs, .. } = &mut *budgets;
        for (bucket, amount) in [(tokens, num_prompt), (logprobs, num_logprobs)] {
            if let Some(bucket) = bucket {
                bucket.refund(amount);
            }
        }
    }

    /// The end of a request that was refused after it had been let in. What there was no room for costs nothing; what was wrong had to be
    /// looked at, and counts as a request.
    pub(crate) fn refuse(&self, error: &ApiError) {
        if error.status != StatusCode::TOO_MANY_REQUESTS && !error.status.is_server_error() {
            return;
        }
        if let Some(bucket) = &mut self.tenant.budgets().requests {
            bucket.refund(1);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.tenant.num_running.fetch_sub(1, Ordering::SeqCst);
    }
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
        assert!(!format!("{tenants:?}").contains("first-key"), "keys are kept hashed");
    }

    #[test]
    fn a_bad_file_is_a_sentence_without_keys() {
        let refused =
            |text: &str| KeysFile::parse(text).and_then(|file| Tenants::new(file.tenant)).unwrap_err().to_string();
        assert_eq!(refused(""), "the keys file names no tenant");
        let place = "the keys file is not valid at ";
        for (text, reason) in [
            ("[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\" x]", "line 3, column 22: this is not TOML"),
            ("[[tenant]]\nname = \"a\"\nsecret-key = 1\nsecret-key = 1", "line 4, column 1: this is not TOML"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret-key\"", "line 3, column 8: expected a sequence"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret, expected this-key\"", "line 3, column 8: expected a sequence"),
            ("[[tenant]]\nname = \"a\"\nkeys = [\"b\", 1234]", "line 3, column 14: expected a string"),
            ("[[tenant]]\nname = \"a\"\nkv_tokens = \"secret-key\"", "line 3, column 13: expected u32"),
            ("[[tenant]]\nkeys = [\"secret-key\"]", "line 1, column 1: a tenant without a name"),
            ("{\"tenant\": [{\"name\": \"a\", \"keys\": \"secret-key\"}]}", "line 1, column 46: expected a sequence"),
            ("{\"tenant\": [{\"name\": \"a\",\n\"kv_tokens\": \"secret-key\"}]}", "line 2, column 25: expected u32"),
            ("{\"tenant\": [{\"name\": secret-key}]}", "line 1, column 22: this is not JSON"),
            ("{\"tenant\": [{\"keys\": [\"secret-key\"]}]}", "line 1, column 36: a tenant without a name"),
        ] {
            assert_eq!(refused(text), format!("{place}{reason}"), "{text}");
        }
        for text in ["[[tenant]]\nname = \"a\"\nsecret-key = 1", "{\"tenant\": [{\"secret-key\": 1}]}"] {
            let told = refused(text);
            assert!(!told.contains("secret") && told.contains("expected one of `name`, `keys`"), "{told}");
        }
        assert!(refused("secret-key = 1").ends_with("line 1, column 1: expected `tenant`"));
        assert!(refused("[[tenant]]\nname = \"a\"").contains("no key"));
        assert!(
            refused("[[tenant]]\nname = \"secret key\"\nkeys = [\"b\"]")
                .starts_with("tenant 1 of the keys file: a name")
        );
        assert!(refused("[[tenant]]\nname = \"a\"\nkeys = [\"short\"]").contains("8 to 512"));
        let twice =
            "[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\"]\n[[tenant]]\nname = \"b\"\nkeys = [\"secret-key\"]";
        assert_eq!(refused(twice), "the same key stands at tenant \"a\" and at tenant \"b\"");
        let json = "{\"tenant\": [{\"name\": \"a\", \"keys\": [\"secret-key\"], \"requests_per_minute\": 5}]}";
        assert_eq!(KeysFile::parse(json).unwrap().tenant[0].requests_per_minute, Some(5));
    }

    #[test]
    fn limits_say_which_they_are() {
        let config = TenantConfig {
            requests_per_minute: Some(2),
            tokens_per_minute: Some(100),
            concurrent_requests: Some(1),
            logprobs_per_minute: Some(10),
            ..tenant("a", "first-key")
        };
        let tenants = Tenants::new(vec![config]).unwrap();
        let tenant = tenants.find(Some(b"first-key")).unwrap();
        let code = |outcome: Result<Permit, ApiError>| outcome.map(drop).map_err(|error| error.detail.code.unwrap());
        // A request to the model: let in, read, and charged for its prompt.
        let ask = |num_prompt: usize, reports_logprobs: bool| {
            let permit = tenant.enter(true)?;
            let charged = permit.charge_prompt(num_prompt, reports_logprobs);
            charged.inspect_err(|error| permit.refuse(error)).map(|()| permit)
        };
        let first = ask(10, true).unwrap();
        assert_eq!(code(ask(10, false)), Err("concurrent_requests"));
        drop(first);
        tenant.charge_output(0, 11);
        assert_eq!(code(ask(10, true)), Err("logprob_budget"));
        let permit = ask(90, false).expect("what there was no room for has cost nothing");
        let charge = || permit.charge_prompt(1, false).map_err(|error| error.detail.code.unwrap());
        assert_eq!(charge(), Err("tokens_per_minute"));
        permit.refund_prompt(90, 0);
        assert_eq!(charge(), Ok(()));
        permit.refuse(&ApiError::invalid("wrong"));
        drop(permit);
        assert_eq!(code(tenant.enter(false)), Err("requests_per_minute"), "what was wrong counts");
    }
}
