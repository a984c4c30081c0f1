//! Who asks: every request passes here before any route. Default-deny once keys are set, for every path but `/health`, known or not.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Request, Response, StatusCode, header};
use axum::middleware::Next;

use crate::drain::Phase;
use crate::error::ApiError;
use crate::fields::shown;
use crate::metrics::Outcome;
use crate::state::{App, SharedApp};
use crate::tenants::{Permit, Tenant};

/// Seconds that a client is told to wait while the server leaves: long enough for another to take its place.
const DRAIN_RETRY_S: u64 = 10;

/// An authenticated request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) request_id: String,
}

impl Caller {
    /// Lets the request in, before any work is done for it; `asks_model` where it is one to the model and counted as such.
    pub(crate) fn enter(&self, app: &App, asks_model: bool) -> Result<Permit, ApiError> {
        self.tenant.enter(asks_model).inspect_err(|_| {
            if asks_model {
                app.metrics.count(&self.tenant.config.name, Outcome::Limited);
            }
        })
    }
}

/// The id that a request was given when it came.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

pub(crate) async fn admit(State(app): State<SharedApp>, mut request: Request<Body>, next: Next) -> Response<Body> {
    // In flight until the route has answered, or a reply with a flight of its own is under way; taken before the look at the phase.
    let _flight = (!watches(&request)).then(|| app.drain.take_off());
    match check(&app, &request) {
        Ok(tenant) => {
            let request_id = request.extensions().get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default();
            request.extensions_mut().insert(Caller { tenant, request_id });
            next.run(request).await
        }
        Err(error) => error.into(),
    }
}

fn check(app: &SharedApp, request: &Request<Body>) -> Result<Arc<Tenant>, ApiError> {
    if app.loopback_hosts_only {
        check_host(request)?;
    }
    check_origin(app, request)?;
    let path = request.uri().path();
    let tenant = match app.tenants.find(key(request.headers())) {
        Err(error) if path != "/health" => return Err(error),
        Err(_) => app.tenants.nobody(),
        Ok(tenant) => tenant,
    };
    if app.drain.phase() != Phase::Serving && !watches(request) {
        return Err(draining());
    }
    Ok(tenant)
}

/// Whether a request looks at the server and asks nothing of it.
fn watches(request: &Request<Body>) -> bool {
    ["/health", "/ready", "/metrics"].contains(&request.uri().path())
}

pub(crate) fn draining() -> ApiError {
    let message = "the server is about to leave and takes no new requests; ask another, or try again";
    ApiError::unavailable("draining", message, DRAIN_RETRY_S)
}

/// The key that a request presents, in either header. Both together must be the same: nobody should have to guess which one counts.
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

/// A page in a browser can give its own name the address 127.0.0.1; its requests then carry that name.
fn check_host(request: &Request<Body>) -> Result<(), ApiError> {
    let Some(host) = request.headers().get(header::HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    if is_loopback(host) {
        return Ok(());
    }
    let message =
        format!("the host {} is not this machine's own; a server without keys answers to localhost only", shown(host));
    Err(ApiError::refused(StatusCode::FORBIDDEN, "host_not_allowed", message))
}

/// Whether a host, with or without a port, is this machine by a name that nobody else can give.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let is_address = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_address || name.eq_ignore_ascii_case("localhost")
}

/// Browsers say which page asks. A WebSocket is open to every page unless the server looks, so it does.
fn check_origin(app: &SharedApp, request: &Request<Body>) -> Result<(), ApiError> {
    let is_socket = request.headers().contains_key(header::UPGRADE);
    let Some(origin) = request.headers().get(header::ORIGIN).filter(|_| is_socket) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let own = origin.split_once("://").is_some_and(|(_, authority)| !host.is_empty() && authority == host);
    if own || app.cors_origins.iter().any(|allowed| allowed == origin || allowed == "*") {
        return Ok(());
    }
    let message = format!("pages of {} may not open a WebSocket here", shown(origin));
    Err(ApiError::refused(StatusCode::FORBIDDEN, "origin_not_allowed", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_are_told_from_others() {
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
