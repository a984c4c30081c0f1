//! Text as HTML, the frame of a page, and the headers of its response.

use std::sync::LazyLock;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, Response, header};
use sha2::{Digest, Sha256};

const STYLE: &str = include_str!("style.css");

/// A lens, as a data URL: the policy allows no image from elsewhere.
const ICON: &str = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E\
                    %3Ccircle cx='16' cy='16' r='11' fill='none' stroke='%230b7a75' stroke-width='5'/%3E%3C/svg%3E";

/// Allows the page's own style and icon, and nothing else: no script, no frame, no form, no request.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = base64(&Sha256::digest(STYLE));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{hash}'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    );
    HeaderValue::from_str(&policy).expect("the policy is ASCII")
});

/// Returns text with the characters replaced that have a meaning in HTML, in content and in quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Control characters are not allowed in HTML, and marks that change the direction of text could disguise
            // what a line of an example says.
            '\u{0}'..='\u{8}' | '\u{b}'..='\u{1f}' | '\u{7f}'..='\u{9f}' => escaped.push('\u{fffd}'),
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns a description as HTML: escaped, with text between backticks as code.
pub(super) fn prose(text: &str) -> String {
    let mut html = String::new();
    for (i, part) in text.split('`').enumerate() {
        match i % 2 {
            0 => html += &escape(part),
            _ => html += &format!("<code>{}</code>", escape(part)),
        }
    }
    html
}

/// Returns a block of code, which a click selects as a whole.
pub(super) fn code_block(label: &str, code: &str) -> String {
    format!(
        "<figure><figcaption>{}</figcaption><pre tabindex=\"0\"><code>{}</code></pre></figure>\n",
        escape(label),
        escape(code)
    )
}

/// Returns a whole page. `title` is text, `body` is HTML.
pub(super) fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{}</title>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"robots\" content=\"noindex\">\n\
         <link rel=\"icon\" href=\"{ICON}\">\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n",
        escape(title),
    )
}

/// Returns the response with a page.
pub(super) fn respond(page: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(page));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(group.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(escape("<a href=\"x\" b='y'>&"), "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
        assert_eq!(escape("a\u{0}b\u{1b}[31m\u{202e}c\n\t"), "a\u{fffd}b\u{fffd}[31m\u{fffd}c\n\t");
        assert_eq!(prose("use `<b>` & `c`"), "use <code>&lt;b&gt;</code> &amp; <code>c</code>");
        assert_eq!(prose("an odd ` mark"), "an odd <code> mark</code>");
        assert!(page("</title><b>", "").contains("<title>&lt;/title&gt;&lt;b&gt;</title>"));
    }

    #[test]
    fn base64_has_padding() {
        for (text, expected) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(text.as_bytes()), expected);
        }
    }

    #[test]
    fn the_style_cannot_end_its_element() {
        assert!(!STYLE.contains("</"), "the style would end early");
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"), "the style loads nothing");
    }
}
