//! The page for browsers: the files of `web/dist`, which are embedded, with the policy that confines them.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use sha2::{Digest, Sha256};

/// A file of the page.
#[derive(Debug)]
pub(crate) struct PageFile {
    kind: &'static str,
    bytes: &'static [u8],
}

/// The document at `/`.
pub(crate) const INDEX: PageFile =
    PageFile { kind: "text/html; charset=utf-8", bytes: include_bytes!("../../../../web/dist/index.html") };
/// The script at `/page/app.js`.
pub(crate) const SCRIPT: PageFile =
    PageFile { kind: "text/javascript; charset=utf-8", bytes: include_bytes!("../../../../web/dist/app.js") };
/// The style at `/page/app.css`.
pub(crate) const STYLE: PageFile =
    PageFile { kind: "text/css; charset=utf-8", bytes: include_bytes!("../../../../web/dist/app.css") };

/// Allows scripts, styles and requests of this server alone, no inline script or style, and no text that becomes
/// markup: the script never parses HTML.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

impl PageFile {
    /// Returns the file, or 304 if the browser has this version of it.
    pub(crate) fn respond(&self, request: &HeaderMap) -> Response<Body> {
        let tag = Sha256::digest(self.bytes)[..12].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let tag = format!("\"{tag}\"");
        let is_known = request.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
        let mut response = match is_known {
            true => Response::new(Body::empty()),
            false => Response::new(Body::from(Bytes::from_static(self.bytes))),
        };
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, self.kind),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::X_FRAME_OPTIONS, "DENY"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
            (
                HeaderName::from_static("permissions-policy"),
                "camera=(), microphone=(), geolocation=(), display-capture=()",
            ),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            headers.insert(header::ETAG, tag);
        }
        response
    }
}
