//! Writes spans in the protocol of OpenTelemetry (OTLP 1, `ExportTraceServiceRequest` in protocol buffers).
//!
//! Names and numbers of the fields are those of `opentelemetry/proto/trace/v1/trace.proto`, which are stable. They are
//! few, so that they are written here and not by a library.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{Attribute, Kind, Span};

/// A message of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// Begins a field. `wire` is its encoding: 0 a varint, 1 eight bytes, 2 bytes after their number.
    fn tag(&mut self, field: u32, wire: u32) {
        self.varint(u64::from(field << 3 | wire));
    }

    fn number(&mut self, field: u32, value: u64) {
        self.tag(field, 0);
        self.varint(value);
    }

    fn fixed(&mut self, field: u32, value: u64) {
        self.tag(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.tag(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u32, write: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        write(&mut inner);
        self.bytes(field, &inner.0);
    }

    fn attribute(&mut self, field: u32, key: &str, value: &Attribute) {
        self.message(field, |pair| {
            pair.bytes(1, key.as_bytes());
            pair.message(2, |any| match value {
                Attribute::Text(text) => any.bytes(1, text.as_bytes()),
                // A negative number takes ten bytes, as its 64 bits.
                Attribute::Count(count) => any.number(3, *count as u64),
            });
        });
    }
}

/// Returns one request with all spans, as coming from the service of this name.
pub(super) fn request(service: &str, spans: &[Span]) -> Vec<u8> {
    let mut request = Message::default();
    request.message(1, |of_resource| {
        of_resource.message(1, |resource| resource.attribute(1, "service.name", &service.into()));
        of_resource.message(2, |of_scope| {
            of_scope.message(1, |scope| {
                scope.bytes(1, b"pellucid");
                scope.bytes(2, env!("CARGO_PKG_VERSION").as_bytes());
            });
            spans.iter().for_each(|span| of_scope.message(2, |message| write_span(span, message)));
        });
    });
    request.0
}

fn write_span(span: &Span, message: &mut Message) {
    const STATUS_ERROR: u64 = 2;
    message.bytes(1, &span.trace_id);
    message.bytes(2, &span.span_id);
    if let Some(parent) = span.parent {
        message.bytes(4, &parent);
    }
    message.bytes(5, span.name.as_bytes());
    message.number(
        6,
        match span.kind {
            Kind::Internal => 1,
            Kind::Server => 2,
        },
    );
    message.fixed(7, nanoseconds(span.start));
    message.fixed(8, nanoseconds(span.end));
    span.attributes.iter().for_each(|(key, value)| message.attribute(9, key, value));
    if let Some(failure) = &span.failure {
        message.message(15, |status| {
            status.bytes(2, failure.as_bytes());
            status.number(3, STATUS_ERROR);
        });
    }
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Bytes that the package `opentelemetry-proto` 1.45 writes for the same span; `tests/test_spans.py` reads ours
    /// with it.
    #[test]
    fn a_span_has_the_bytes_of_the_protocol() {
        let start = UNIX_EPOCH + Duration::from_nanos(0x0102_0304_0506_0708);
        let span = Span {
            trace_id: [0xaa; 16],
            span_id: [0xbb; 8],
            parent: Some([0xcc; 8]),
            name: "decode".into(),
            kind: Kind::Internal,
            start,
            end: start + Duration::from_nanos(1),
            attributes: vec![("n", Attribute::Count(300)), ("s", "x".into())],
            failure: Some("lost".into()),
        };
        let mut expected = vec![0x0a, 0x10];
        expected.extend([0xaa; 16]);
        expected.extend([0x12, 0x08]);
        expected.extend([0xbb; 8]);
        expected.extend([0x22, 0x08]);
        expected.extend([0xcc; 8]);
        expected.extend(b"\x2a\x06decode\x30\x01");
        expected.extend([0x39, 8, 7, 6, 5, 4, 3, 2, 1, 0x41, 9, 7, 6, 5, 4, 3, 2, 1]);
        expected.extend(b"\x4a\x08\x0a\x01n\x12\x03\x18\xac\x02\x4a\x08\x0a\x01s\x12\x03\x0a\x01x");
        expected.extend(b"\x7a\x08\x12\x04lost\x18\x02");
        let mut message = Message::default();
        write_span(&span, &mut message);
        assert_eq!(message.0, expected);
        let whole = request("svc", &[span]);
        assert!(whole.ends_with(&expected) && whole.windows(12).any(|window| window == b"service.name"));
    }
}
