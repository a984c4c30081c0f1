//! Authentication middleware. Once keys are set, every path but `/health` and the pages for people needs one, unknown
//! paths included.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use axum::middleware::Next;

use super::drain::Phase;
use super::error::ApiError;
use super::fields::shown;
use crate::connection::client_address::{AddressKey, ClientAddress};
use crate::limits::permit::Permit;
use crate::limits::tenants::{KeyHash, Tenant, Tenants};
use crate::metrics::Outcome;
use crate::spans::request_trace::RequestTrace;
use crate::state::{App, SharedApp};

/// `Retry-After` while the server shuts down: long enough for another server to take over.
const DRAIN_RETRY_S: u64 = 10;

/// An authenticated request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) request_id: String,
    /// The spans of the request, if it has any.
    pub(crate) trace: Option<Arc<RequestTrace>>,
    /// The tenants among which `tenant` was found, and the hash of the key that led to it.
    tenants: Arc<Tenants>,
    key: Option<KeyHash>,
}

impl Caller {
    /// Admits the request within the tenant's limits, before any work is done for it. `uses_model` tells requests that
    /// generate tokens, which have further limits and are counted in the metrics.
    pub(crate) fn admit(&self, app: &App, uses_model: bool) -> Result<Permit, ApiError> {
        self.current_tenant(app)?.admit(uses_model).inspect_err(|_| {
            if uses_model {
                app.metrics.count(&self.tenant.config.name, None, Outcome::Limited);
            }
        })
    }

    /// Charges a message to a running request like a request, or names the limit that refuses it.
    pub(crate) fn charge_message(&self, app: &App) -> Result<(), ApiError> {
        self.current_tenant(app)?.charge_message()
    }

    /// Finds the tenant again if the keys were reloaded since the request was authenticated. A WebSocket may send its
    /// request long after it was opened, when its key is not valid any more.
    fn current_tenant(&self, app: &App) -> Result<Arc<Tenant>, ApiError> {
        let tenants = app.tenants.current();
        match &self.key {
            Some(key) if !Arc::ptr_eq(&tenants, &self.tenants) => tenants.find_hashed(key),
            _ => Ok(self.tenant.clone()),
        }
    }
}

/// The id of a request, set by the outermost middleware.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

pub(crate) async fn authenticate(
    State(app): State<SharedApp>,
    mut request: Request<Body>,
    next: Next,
) -> Response<Body> {
    // Counted as in flight until the handler returns; a streamed reply is counted by its account. Must precede the
    // check of the phase, so that a request that passes the check is waited for.
    let _in_flight = (!is_monitoring(&request)).then(|| app.drain.start_request());
    match check(&app, &request) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => error.into(),
    }
}

fn check(app: &SharedApp, request: &Request<Body>) -> Result<Caller, ApiError> {
    if app.loopback_hosts_only {
        check_host(request)?;
    }
    check_origin(app, request)?;
    let tenants = app.tenants.current();
    let key = key(request.headers()).filter(|_| tenants.has_keys()).map(|key| tenants.hash_of(key));
    let tenant = match &key {
        // Keys are not checked for these routes, which are answered to everyone alike.
        _ if is_public(request) => tenants.anonymous(),
        Some(key) => find_throttled(app, &tenants, key, request)?,
        None => tenants.find(None).inspect_err(|_| app.metrics.count_failed_key("missing"))?,
    };
    if app.drain.phase() != Phase::Serving && !is_monitoring(request) {
        return Err(draining());
    }
    let request_id = request.extensions().get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default();
    let trace = request.extensions().get::<Arc<RequestTrace>>().cloned();
    if let Some(trace) = &trace {
        trace.set("pellucid.tenant", tenant.config.name.as_str());
    }
    Ok(Caller { tenant, request_id, trace, tenants, key })
}

/// Returns the tenant of a key, unless the client's address has tried too many wrong ones.
fn find_throttled(
    app: &SharedApp,
    tenants: &Tenants,
    key: &KeyHash,
    request: &Request<Body>,
) -> Result<Arc<Tenant>, ApiError> {
    let address = request.extensions().get::<Option<ClientAddress>>().copied().flatten();
    let address = AddressKey::of(address.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |client| client.0));
    let now = Instant::now();
    app.failed_keys.check(address, key, now).inspect_err(|_| app.metrics.count_failed_key("throttled"))?;
    let found = tenants.find_hashed(key);
    app.failed_keys.record(address, key, found.is_ok(), now);
    found.inspect_err(|_| app.metrics.count_failed_key("wrong"))
}

/// Whether a request needs no key: health checks, and the pages for people.
fn is_public(request: &Request<Body>) -> bool {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    match request.uri().path() {
        "/health" => true,
        "/" | "/overview" | "/docs" | "/page/app.js" | "/page/app.css" => is_read,
        _ => false,
    }
}

/// Whether a request only monitors the server or ends another; such requests are answered during shutdown.
fn is_monitoring(request: &Request<Body>) -> bool {
    let path = request.uri().path();
    ["/health", "/ready", "/metrics", "/requests"].contains(&path) || path.starts_with("/requests/")
}

pub(crate) fn draining() -> ApiError {
    let message = "the server is shutting down and takes no new requests; try again later or on another server";
    ApiError::unavailable("draining", message, DRAIN_RETRY_S)
}

/// Returns the key of a request, from either header. If both are present they must agree, so that it is clear which one
/// counts.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    let plain = headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii());
    match (bearer, plain) {
        (Some(bearer), Some(plain)) if bearer != plain => None,
        (bearer, plain) => bearer.or(plain),
    }
}

/// Refuses hosts other than this machine's, against DNS rebinding: a web page can let its own name resolve to
/// 127.0.0.1.
fn check_host(request: &Request<Body>) -> Result<(), ApiError> {
    let Some(host) = request.headers().get(header::HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    if is_loopback(host) {
        return Ok(());
    }
    let message = format!("the host {} is not this machine; a server without keys accepts only localhost", shown(host));
    Err(ApiError::refused(StatusCode::FORBIDDEN, "host_not_allowed", message))
}

/// Whether a host, with or without a port, is `localhost` or a loopback address.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let is_address = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_address || name.eq_ignore_ascii_case("localhost")
}

/// Refuses WebSockets from pages of other origins: browsers do not apply CORS to WebSockets.
fn check_origin(app: &SharedApp, request: &Request<Body>) -> Result<(), ApiError> {
    let is_socket = request.headers().contains_key(header::UPGRADE);
    let Some(origin) = request.headers().get(header::ORIGIN).filter(|_| is_socket) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let own = origin.split_once("://").is_some_and(|(_, authority)| !host.is_empty() && authority == host);
    if own || app.cors_origins.iter().any(|allowed| allowed == origin || allowed == "*") {
        return Ok(());
    }
    let message = format!("the origin {} may not open a WebSocket on this server", shown(origin));
    Err(ApiError::refused(StatusCode::FORBIDDEN, "origin_not_allowed", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_pass() {
        for host in ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "[::1]", "LOCALHOST"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.0.0.1"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn keys_come_in_two_headers() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect::<HeaderMap>()
        };
        assert_eq!(key(&headers(&[("authorization", "Bearer abc")])), Some(&b"abc"[..]));
        assert_eq!(key(&headers(&[("authorization", "bearer  abc ")])), Some(&b"abc"[..]));
        assert_eq!(key(&headers(&[("x-api-key", "abc")])), Some(&b"abc"[..]));
        assert_eq!(key(&headers(&[("x-api-key", "abc"), ("authorization", "Bearer abc")])), Some(&b"abc"[..]));
        assert_eq!(key(&headers(&[("x-api-key", "abc"), ("authorization", "Bearer abd")])), None);
        assert_eq!(key(&headers(&[("authorization", "Basic abc")])), None);
        assert_eq!(key(&headers(&[("authorization", "abc")])), None);
        assert_eq!(key(&headers(&[])), None);
    }
}
