//! HTTP requests to the hub, with time limits and redirects.
//!
//! `listing.rs` and `download.rs` call [`Client::get`]. Redirects are followed here and not by the HTTP library,
//! because the hub's first response has the hash of the file, and because the token must be sent to the hub's origin
//! only.

use super::failure::Failure;
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::http_error::sentence;
use std::fmt;
use std::io;
use std::time::Duration;
use ureq::http::{HeaderMap, Response, Uri, header, uri::PathAndQuery};
use ureq::{Agent, Body};

/// Maximum time to resolve a name, and maximum time to connect, so that an unreachable hub fails soon.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 5;

/// A secret that is never printed.
#[derive(Clone)]
pub(crate) struct Token(String);

impl Token {
    pub(crate) fn new(text: String) -> Token {
        Token(text)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    agent: Agent,
    endpoint: Uri,
    token: Option<Token>,
}

/// A response after redirects.
#[derive(Debug)]
pub(crate) struct HubResponse {
    pub(crate) response: Response<Body>,
    /// The hub's headers about the file, from the response before the redirect.
    pub(crate) linked: Linked,
    /// Host that answered, for messages.
    pub(crate) host: String,
}

/// The hub's headers about a file in Git LFS.
#[derive(Debug, Default)]
pub(crate) struct Linked {
    pub(crate) etag: Option<String>,
    pub(crate) bytes: Option<u64>,
}

impl Client {
    /// Returns a client. `stall` is the maximum time without data on a connection.
    pub(crate) fn new(endpoint: &str, token: Option<Token>, stall: Duration) -> anyhow::Result<Client> {
        let uri: Uri = endpoint.trim_end_matches('/').parse().map_err(|_| {
            UsageError::because(format!(
                "the endpoint `{endpoint}` is not a URL; expected one such as https://huggingface.co"
            ))
        })?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            bail_usage!("the endpoint `{endpoint}` must begin with https:// or http:// and contain a host");
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("pellucid/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(CONNECT_LIMIT))
            .timeout_connect(Some(CONNECT_LIMIT))
            .timeout_send_request(Some(stall))
            .timeout_recv_response(Some(stall))
            .timeout_per_read(Some(stall))
            .build();
        Ok(Client { agent: config.new_agent(), endpoint: uri, token })
    }

    /// Returns the URL of an escaped path that begins with `/`.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.to_string().trim_end_matches('/'))
    }

    pub(crate) fn host(&self) -> &str {
        self.endpoint.host().unwrap_or_default()
    }

    /// Gets a URL from byte `start` on and follows redirects. Any status is returned as a response.
    pub(crate) fn get(&self, url: &str, start: u64) -> Result<HubResponse, Failure> {
        let mut uri: Uri = url.parse().map_err(|_| Failure::remote(format!("`{url}` is not a URL")))?;
        let mut linked = Linked::default();
        for _ in 0..=MAX_REDIRECTS {
            let host = uri.host().unwrap_or_default().to_owned();
            let response = loop {
                match self.request(&uri, start) {
                    // By a signal. If that ends the program, another thread does so.
                    Err(ureq::Error::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                    outcome => break outcome.map_err(|error| Failure::remote(sentence(&error, &host)))?,
                }
            };
            if linked.etag.is_none() {
                linked = Linked::of(response.headers());
            }
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(HubResponse { response, linked, host });
            }
            uri = redirected(&uri, response.headers())?;
        }
        Err(Failure::remote(format!("{} redirected more than {MAX_REDIRECTS} times", self.host())))
    }

    fn request(&self, uri: &Uri, start: u64) -> Result<Response<Body>, ureq::Error> {
        // Lengths are checked, so the body must not be compressed.
        let mut request = self.agent.get(uri).header(header::ACCEPT_ENCODING, "identity");
        if start > 0 {
            request = request.header(header::RANGE, format!("bytes={start}-"));
        }
        if let Some(Token(token)) = &self.token
            && origin(uri) == origin(&self.endpoint)
            && is_private(uri)
        {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        request.call()
    }

    /// Whether requests to the endpoint carry a token.
    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }
}

impl Linked {
    fn of(headers: &HeaderMap) -> Linked {
        Linked {
            etag: text(headers, "x-linked-etag").map(|etag| bare_etag(etag).to_owned()),
            bytes: text(headers, "x-linked-size").and_then(|size| size.parse().ok()),
        }
    }
}

/// Returns the text of a header, if it is present and valid.
pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Removes the quotes and the weakness mark of an entity tag.
pub(crate) fn bare_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Escapes a path for a URL, keeping its slashes.
pub(crate) fn escaped(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Returns scheme, host and port: the token is sent only if all are equal.
pub(crate) fn origin(uri: &Uri) -> (String, String, u16) {
    let scheme = uri.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    (scheme, uri.host().unwrap_or_default().to_ascii_lowercase(), port)
}

/// Whether the request is private: encrypted, or to this machine.
fn is_private(uri: &Uri) -> bool {
    uri.scheme_str() == Some("https") || matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]"))
}

/// Returns the target of a redirect: an absolute URL, or a path on the same host.
fn redirected(from: &Uri, headers: &HeaderMap) -> Result<Uri, Failure> {
    let host = from.host().unwrap_or_default();
    let bad = |why: &str| Failure::remote(format!("{host} sent a redirect that {why}"));
    let location = text(headers, "location").ok_or_else(|| bad("has no location"))?;
    let to = if location.starts_with('/') && !location.starts_with("//") {
        let path: PathAndQuery = location.parse().map_err(|_| bad("is not a URL"))?;
        let mut parts = from.clone().into_parts();
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).map_err(|_| bad("is not a URL"))?
    } else {
        location.parse::<Uri>().map_err(|_| bad("is not a URL"))?
    };
    match (from.scheme_str(), to.scheme_str()) {
        (_, Some("https")) | (Some("http"), Some("http")) => Ok(to),
        (Some("https"), Some("http")) => Err(bad("leads from https to plain http")),
        _ => Err(bad("is neither http nor https")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirect(from: &str, location: &str) -> Result<String, String> {
        let mut headers = HeaderMap::new();
        headers.insert("location", location.parse().unwrap());
        match redirected(&from.parse().unwrap(), &headers) {
            Ok(uri) => Ok(uri.to_string()),
            Err(Failure::Remote(error) | Failure::Local(error)) => Err(error.to_string()),
        }
    }

    #[test]
    fn redirects_never_lose_encryption() {
        assert_eq!(redirect("https://a/x", "https://b/y?z=1").unwrap(), "https://b/y?z=1");
        assert_eq!(redirect("https://a:8/x", "/y").unwrap(), "https://a:8/y");
        assert!(redirect("https://a/x", "http://a/x").unwrap_err().contains("plain http"));
        for location in ["ftp://a/x", "//b/x", "x/y", ""] {
            assert!(redirect("https://a/x", location).is_err(), "{location:?} was followed");
        }
    }

    #[test]
    fn a_token_is_for_one_origin() {
        let origin_of = |uri: &str| origin(&uri.parse().unwrap());
        assert_eq!(origin_of("https://Hub.example"), origin_of("https://hub.example:443/x"));
        assert_ne!(origin_of("https://hub.example"), origin_of("http://hub.example"));
        assert_ne!(origin_of("https://hub.example"), origin_of("https://hub.example:444"));
        assert_ne!(origin_of("https://hub.example"), origin_of("https://cdn.hub.example"));
        assert!(!is_private(&"http://hub.example".parse().unwrap()));
        assert!(!format!("{:?}", Token::new("secret".into())).contains("secret"));
    }
}
