//! The address under which a client reached the server, for the examples of a page.

use std::net::SocketAddr;

use axum::body::Body;
use axum::http::{HeaderMap, Request, header};

use crate::http::listen::Connection;
use crate::state::App;

/// Maximum bytes of a host that a page shows.
const MAX_HOST_LEN: usize = 255;

/// Returns scheme, host and port as the client used them, such as `http://127.0.0.1:8000`.
pub(super) fn base_url(app: &App, request: &Request<Body>) -> String {
    let peer = request.extensions().get::<Connection>().map(Connection::peer);
    let is_proxied = peer.is_some_and(|peer| app.proxies.is_trusted(peer));
    let is_encrypted = app.has_tls || (is_proxied && forwarded_https(request.headers()));
    let scheme = if is_encrypted { "https" } else { "http" };
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.or_else(|| request.uri().authority().map(|authority| authority.as_str()));
    match host.filter(|host| is_host(host)) {
        Some(host) => format!("{scheme}://{host}"),
        None => app.own_url.clone(),
    }
}

/// Returns the address at which the server listens, as a client on the same machine can use it.
pub(crate) fn own_url(address: Option<SocketAddr>, has_tls: bool) -> String {
    let scheme = if has_tls { "https" } else { "http" };
    match address {
        Some(address) if address.ip().is_unspecified() => format!("{scheme}://localhost:{}", address.port()),
        Some(address) => format!("{scheme}://{address}"),
        None => format!("{scheme}://localhost"),
    }
}

/// Whether a proxy reports that the client's connection is encrypted.
fn forwarded_https(headers: &HeaderMap) -> bool {
    headers.get("x-forwarded-proto").is_some_and(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"))
}

/// Whether a text has the form of a host with or without a port. Others are not shown: a client chooses the header, and
/// examples are copied into shells.
fn is_host(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
    (1..=MAX_HOST_LEN).contains(&text.len()) && text.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        for host in ["localhost", "127.0.0.1:8000", "[::1]:8000", "inference.example", "a_b-c.example:1"] {
            assert!(is_host(host), "{host}");
        }
        for host in ["", "a b", "a';rm", "a\"", "<b>", "a/b", "user@host", "$(a)", "`a`", &"a".repeat(256)] {
            assert!(!is_host(host), "{host}");
        }
    }
}
