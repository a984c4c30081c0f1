//! The opening handshake of a WebSocket: checks the headers of the request, and returns the response that switches
//! protocols.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::upgrade::OnUpgrade;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use crate::http::error::ApiError;

/// Appended to the client's key before it is hashed. The protocol fixes this text.
const KEY_SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/// Characters of a key: 16 bytes in base64.
const KEY_LEN: usize = 24;

/// Returns the response to a valid handshake, and the connection once the response has been sent.
pub(super) fn accept(request: &mut Request<Body>) -> Result<(Response<Body>, OnUpgrade), ApiError> {
    let headers = request.headers();
    let is_upgrade = request.method() == Method::GET
        && request.version() == Version::HTTP_11
        && has_word(headers, &header::CONNECTION, "upgrade")
        && has_word(headers, &header::UPGRADE, "websocket")
        && headers.get(header::SEC_WEBSOCKET_VERSION).is_some_and(|version| version == "13");
    let accept = key(headers).map(|key| accept_of(key.as_bytes()));
    let upgrade = request.extensions_mut().remove::<OnUpgrade>().filter(|_| is_upgrade);
    let Some(upgrade) = upgrade else {
        let message = "this route accepts only WebSockets: connect with a WebSocket client";
        return Err(ApiError::refused(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message));
    };
    let accept = accept
        .ok_or_else(|| ApiError::invalid("Sec-WebSocket-Key: expected this header once, with 16 bytes in base64"))?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, HeaderValue::from_str(&accept).map_err(|_| ApiError::internal())?);
    Ok((response, upgrade))
}

/// Whether a header lists `word`, in any case.
fn has_word(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|given| given.trim().eq_ignore_ascii_case(word))
}

/// Returns the client's key if there is exactly one, and it is 16 bytes in base64.
fn key(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut keys = headers.get_all(header::SEC_WEBSOCKET_KEY).iter();
    let (key, None) = (keys.next()?, keys.next()) else { return None };
    let (digits, padding) = key.as_bytes().split_at_checked(KEY_LEN - 2)?;
    (padding == b"==" && digits.iter().all(|digit| BASE64.contains(digit))).then_some(key)
}

/// Returns the value of `Sec-WebSocket-Accept` for a key.
fn accept_of(key: &[u8]) -> String {
    let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, &[key, KEY_SUFFIX].concat());
    // 20 bytes are 160 bits: 26 digits of 6 bits, one of the last 4 bits, and one character of padding.
    let bits = |at: usize| hash.as_ref().get(at / 8).map_or(0, |byte| byte >> (7 - at % 8) & 1);
    let digit = |index: usize| (0..6).fold(0, |digit, bit| digit << 1 | bits(6 * index + bit));
    (0..27).map(|index| char::from(BASE64[usize::from(digit(index))])).chain(['=']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_answered_as_the_protocol_says() {
        // The example of RFC 6455, section 1.3.
        assert_eq!(accept_of(b"dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn keys_must_be_sixteen_bytes() {
        let headers = |keys: &[&'static str]| {
            keys.iter().map(|key| (header::SEC_WEBSOCKET_KEY, HeaderValue::from_static(key))).collect::<HeaderMap>()
        };
        let good = "dGhlIHNhbXBsZSBub25jZQ==";
        assert!(key(&headers(&[good])).is_some());
        for bad in ["", "x", "dGhlIHNhbXBsZSBub25jZQ", "dGhlIHNhbXBsZSBub25jZQ==A", "dGhlIHNhbXBsZSBub25j===="] {
            assert_eq!(key(&headers(&[bad])), None, "{bad}");
        }
        let twice: HeaderMap = {
            let mut twice = headers(&[good]);
            twice.append(header::SEC_WEBSOCKET_KEY, HeaderValue::from_static(good));
            twice
        };
        assert_eq!(key(&twice), None);
    }
}
