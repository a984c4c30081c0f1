//! W3C Trace Context: the header `traceparent`, by which a request belongs to a trace of its client.

use axum::http::{HeaderMap, HeaderName};

/// The header that names the trace and the span which calls.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The flag of a trace that is recorded.
const SAMPLED: u8 = 1;

/// A trace, and the span in it that calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace_id: [u8; 16],
    pub(crate) span_id: [u8; 8],
    pub(crate) flags: u8,
}

impl TraceContext {
    /// Reads the context of a request; `None` if it has none, or one that the standard calls invalid.
    pub(crate) fn of(headers: &HeaderMap) -> Option<TraceContext> {
        let mut given = headers.get_all(TRACEPARENT).iter();
        let (text, None) = (given.next()?.to_str().ok()?, given.next()) else { return None };
        TraceContext::parse(text.trim_ascii())
    }

    fn parse(text: &str) -> Option<TraceContext> {
        let mut fields = text.split('-');
        let version: [u8; 1] = hex(fields.next()?)?;
        let trace_id = hex(fields.next()?)?;
        let span_id = hex(fields.next()?)?;
        let [flags] = hex(fields.next()?)?;
        // Later versions may have further fields; this one has not.
        let is_known = match version {
            [0] => fields.next().is_none(),
            [version] => version != 0xff,
        };
        let is_set = trace_id != [0; 16] && span_id != [0; 8];
        (is_known && is_set).then_some(TraceContext { trace_id, span_id, flags })
    }

    pub(crate) fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the context in which a span of this trace calls another service.
    pub(crate) fn with_span(self, span_id: [u8; 8]) -> TraceContext {
        TraceContext { span_id, ..self }
    }

    /// Returns the context of a new trace that is recorded.
    pub(crate) fn new_trace(trace_id: [u8; 16], span_id: [u8; 8]) -> TraceContext {
        TraceContext { trace_id, span_id, flags: SAMPLED }
    }

    /// Returns the value of the header.
    pub(crate) fn header(self) -> String {
        format!("00-{}-{}-{:02x}", text(&self.trace_id), text(&self.span_id), self.flags)
    }
}

/// Returns bytes as small hexadecimal digits.
pub(crate) fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads exactly `N` bytes of small hexadecimal digits.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let mut bytes = [0; N];
    if pairs.len() != N {
        return None;
    }
    for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(high)? << 4 | digit(low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_header_is_read_and_written() {
        let context = TraceContext::parse(VALID).unwrap();
        assert_eq!((context.trace_id[0], context.span_id[7], context.is_sampled()), (0x0a, 0x31, true));
        assert_eq!(context.header(), VALID);
        assert_eq!(context.with_span([1; 8]).header(), VALID.replace("b7ad6b7169203331", "0101010101010101"));
        assert!(!TraceContext::parse(&VALID.replace("-01", "-00")).unwrap().is_sampled());
        let later = TraceContext::parse(&(VALID.replacen("00", "cc", 1) + "-more")).unwrap();
        assert_eq!(later.trace_id, context.trace_id, "a later version may have more fields");
    }

    #[test]
    fn an_invalid_header_is_none() {
        let zeros = [("0af7651916cd43dd8448eb211c80319c", 32), ("b7ad6b7169203331", 16)];
        for text in zeros.map(|(id, len)| VALID.replace(id, &"0".repeat(len))) {
            assert_eq!(TraceContext::parse(&text), None, "{text}");
        }
        for text in [
            "",
            "00",
            &VALID.to_uppercase(),
            &VALID[..54],
            &format!("{VALID}0"),
            &format!("{VALID}-more"),
            &VALID.replacen("00", "ff", 1),
            &VALID.replace('-', "_"),
            &VALID.replace("b7", "é"),
        ] {
            assert_eq!(TraceContext::parse(text), None, "{text}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, VALID.parse().unwrap());
        assert!(TraceContext::of(&headers).is_some());
        headers.append(TRACEPARENT, VALID.parse().unwrap());
        assert_eq!(TraceContext::of(&headers), None, "two headers");
    }
}
