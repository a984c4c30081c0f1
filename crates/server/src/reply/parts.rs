//! JSON replies that are written in pieces while the client reads them.
//!
//! A reply is a list of parts: fixed text, the characters of a string, the items of a list. Each part keeps its content
//! in its compact form and writes JSON only for the next piece, so that a reply with a million log probabilities never
//! exists as one text. The response owns what the request holds (its permit, its memory, its place in the count of
//! requests in flight), and so does every piece, until the last byte is handed to the socket.
//!
//! If the system refuses memory for the first piece, the request gets a 503. Later the reply has begun, so the
//! connection is cut: the client sees that the body is not complete.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use http_body::Frame;
use serde::Serialize;

use super::buffer::{OutOfMemory, ReplyBuffer};
use crate::http::error::ApiError;

/// Bytes after which a piece ends. The HTTP library asks for another one while it has fewer than 64 KiB to write.
pub(crate) const PIECE_BYTES: usize = 32 << 10;
/// Maximum bytes of a string that are escaped at once.
const TEXT_STEP: usize = 4 << 10;
/// Memory that a reply of several pieces takes besides its content: a piece, and those that wait to be written.
pub(crate) const PIECES_IN_FLIGHT: usize = 3 * PIECE_BYTES;

/// A part of a reply.
trait Part: Send {
    /// Writes to `out` until it has `limit` bytes or a little more. Returns whether the part is complete.
    fn write(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory>;
}

/// The parts of a JSON text that are not written yet.
#[derive(Default)]
pub(crate) struct JsonParts {
    parts: VecDeque<Box<dyn Part>>,
    /// Fixed text that follows the last part.
    tail: ReplyBuffer,
    /// Whether there was no memory for a part. Writing fails then.
    is_incomplete: bool,
}

impl std::fmt::Debug for JsonParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JsonParts({} parts)", self.parts.len())
    }
}

impl JsonParts {
    /// Adds fixed text.
    pub(crate) fn literal(&mut self, text: &str) {
        self.is_incomplete |= self.tail.push(text).is_err();
    }

    /// Adds a small value.
    pub(crate) fn value(&mut self, value: &impl Serialize) {
        self.is_incomplete |= self.tail.json(value).is_err();
    }

    /// Adds the characters of a string, without quotation marks.
    pub(crate) fn text(&mut self, text: impl AsRef<str> + Send + 'static) {
        self.push(Text { text, start: 0 });
    }

    /// Adds JSON that is already written, from the byte `start` on.
    pub(crate) fn raw(&mut self, json: impl AsRef<str> + Send + 'static, start: usize) {
        self.push(Raw { json, start });
    }

    /// Adds the items of a list, separated by commas and without brackets. `write` writes one small item.
    pub(crate) fn list<I, W>(&mut self, items: I, write: W)
    where
        I: Iterator + Send + 'static,
        W: FnMut(I::Item, &mut ReplyBuffer) -> Result<(), OutOfMemory> + Send + 'static,
    {
        self.push(List { items, write, is_first: true });
    }

    fn push(&mut self, part: impl Part + 'static) {
        self.end_literal();
        self.push_part(Box::new(part));
    }

    fn end_literal(&mut self) {
        if !self.tail.is_empty() {
            let literal = std::mem::take(&mut self.tail);
            self.push_part(Box::new(Literal(literal)));
        }
    }

    fn push_part(&mut self, part: Box<dyn Part>) {
        match self.parts.try_reserve(1) {
            Ok(()) => self.parts.push_back(part),
            Err(_) => self.is_incomplete = true,
        }
    }

    /// Whether there is nothing left to write.
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.tail.is_empty() && !self.is_incomplete
    }

    /// Returns all parts as one text.
    pub(crate) fn into_text(mut self) -> Result<String, OutOfMemory> {
        let mut text = ReplyBuffer::default();
        self.write(usize::MAX, &mut text)?;
        String::from_utf8(text.into_bytes()).map_err(|_| OutOfMemory)
    }

    /// Writes to `out` until it has `limit` bytes or a little more. Returns whether all parts are written.
    pub(crate) fn write(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        self.end_literal();
        if self.is_incomplete {
            return Err(OutOfMemory);
        }
        while let Some(part) = self.parts.front_mut() {
            if !part.write(limit, out)? {
                return Ok(false);
            }
            self.parts.pop_front();
        }
        Ok(true)
    }
}

struct Literal(ReplyBuffer);

impl Part for Literal {
    fn write(&mut self, _: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        out.push_bytes(self.0.as_bytes()).map(|()| true)
    }
}

struct Text<T> {
    text: T,
    /// Offset of the first byte that is not written.
    start: usize,
}

impl<T: AsRef<str> + Send> Part for Text<T> {
    fn write(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        let text = self.text.as_ref();
        while self.start < text.len() {
            if out.len() >= limit {
                return Ok(false);
            }
            let end = text.floor_char_boundary(self.start + TEXT_STEP);
            out.json_text(&text[self.start..end])?;
            self.start = end;
        }
        Ok(true)
    }
}

struct Raw<T> {
    json: T,
    /// Offset of the first byte that is not written.
    start: usize,
}

impl<T: AsRef<str> + Send> Part for Raw<T> {
    fn write(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        let json = self.json.as_ref();
        while self.start < json.len() {
            if out.len() >= limit {
                return Ok(false);
            }
            let end = json.floor_char_boundary(self.start + TEXT_STEP);
            out.push(&json[self.start..end])?;
            self.start = end;
        }
        Ok(true)
    }
}

struct List<I, W> {
    items: I,
    write: W,
    is_first: bool,
}

impl<I, W> Part for List<I, W>
where
    I: Iterator + Send,
    W: FnMut(I::Item, &mut ReplyBuffer) -> Result<(), OutOfMemory> + Send,
{
    fn write(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        while out.len() < limit {
            let Some(item) = self.items.next() else { return Ok(true) };
            if !std::mem::take(&mut self.is_first) {
                out.push(",")?;
            }
            (self.write)(item, out)?;
        }
        Ok(false)
    }
}

/// Bytes on their way to the socket, with what the request holds until they are written.
struct Piece<H> {
    bytes: ReplyBuffer,
    _held: Arc<H>,
}

impl<H> AsRef<[u8]> for Piece<H> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_bytes()
    }
}

/// Returns bytes that own `held` until they are written.
pub(crate) fn holding<H: Send + Sync + 'static>(bytes: ReplyBuffer, held: &Arc<H>) -> Bytes {
    Bytes::from_owner(Piece { bytes, _held: held.clone() })
}

/// Returns a JSON response that owns `held` until its last byte is handed to the socket or the connection ends. A reply
/// of one piece has a `Content-Length`.
pub(crate) fn response<H: Send + Sync + 'static>(mut parts: JsonParts, held: H) -> Result<Response<Body>, ApiError> {
    let held = Arc::new(held);
    let mut piece = ReplyBuffer::default();
    let body = if parts.write(PIECE_BYTES, &mut piece)? {
        Body::from(holding(piece, &held))
    } else {
        Body::new(PartsBody { first: Some(holding(piece, &held)), parts, held: Some(held), cut: Cut::default() })
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// The body of a reply of several pieces.
struct PartsBody<H> {
    first: Option<Bytes>,
    parts: JsonParts,
    /// `None` after the last piece.
    held: Option<Arc<H>>,
    cut: Cut,
}

impl<H: Send + Sync + 'static> http_body::Body for PartsBody<H> {
    type Data = Bytes;
    type Error = OutOfMemory;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, OutOfMemory>>> {
        let this = &mut *self;
        if this.cut.is_set() {
            return this.cut.poll(context);
        }
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(held) = &this.held else { return Poll::Ready(None) };
        let piece = ReplyBuffer::with_capacity(PIECE_BYTES + TEXT_STEP).and_then(|mut piece| {
            let is_last = this.parts.write(PIECE_BYTES, &mut piece)?;
            Ok((holding(piece, held), is_last))
        });
        let Ok((piece, is_last)) = piece else { return this.cut.poll(context) };
        if is_last {
            this.held = None;
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_none()
    }
}

impl<H> Unpin for PartsBody<H> {}

/// The end of a reply that has begun and for which there is no more memory.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    is_set: bool,
}

impl Cut {
    pub(crate) fn is_set(&self) -> bool {
        self.is_set
    }

    /// Ends the body with an error, which closes the connection. The HTTP library first gets a turn to send what it
    /// has, so that the client sees a reply that breaks off and not a connection without a reply.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, OutOfMemory>>> {
        if self.is_set {
            return Poll::Ready(Some(Err(OutOfMemory)));
        }
        tracing::warn!("the system has no memory for the rest of a reply, so its connection is closed");
        self.is_set = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the JSON, and the size of the largest piece.
    fn pieces(mut parts: JsonParts, limit: usize) -> (String, usize) {
        let (mut text, mut largest) = (Vec::new(), 0);
        loop {
            let mut piece = ReplyBuffer::default();
            let is_last = parts.write(limit, &mut piece).unwrap();
            largest = largest.max(piece.len());
            text.extend(piece.into_bytes());
            if is_last {
                return (String::from_utf8(text).unwrap(), largest);
            }
        }
    }

    /// The request lasts until its last byte is written: the piece that the connection still has owns it.
    #[test]
    fn the_last_piece_owns_the_request() {
        for num_pieces in [1, 3] {
            let token = Arc::new(());
            let mut parts = JsonParts::default();
            parts.text("a".repeat(num_pieces * PIECE_BYTES - TEXT_STEP));
            let mut body = response(parts, token.clone()).unwrap().into_body();
            let mut context = Context::from_waker(std::task::Waker::noop());
            let mut pieces = Vec::new();
            while let Poll::Ready(Some(frame)) = http_body::Body::poll_frame(Pin::new(&mut body), &mut context) {
                pieces.push(frame.unwrap().into_data().unwrap());
            }
            assert_eq!(pieces.len(), num_pieces);
            drop(body);
            let last = pieces.pop();
            drop(pieces);
            assert_eq!(Arc::strong_count(&token), 2, "{num_pieces} pieces, of which the last is not written");
            drop(last);
            assert_eq!(Arc::strong_count(&token), 1);
        }
    }

    #[test]
    fn pieces_join_to_the_same_json() {
        let text = "é\u{1F600}\"\\\n\u{0}".repeat(3000);
        let numbers: Vec<u32> = (0..20_000).collect();
        let expected = serde_json::json!({ "text": text, "numbers": numbers, "none": [], "end": null }).to_string();
        for limit in [1, 100, 5000, 1 << 30] {
            let mut parts = JsonParts::default();
            parts.literal("{\"text\":\"");
            parts.text(text.clone());
            parts.literal("\",\"numbers\":[");
            parts.list(numbers.clone().into_iter(), |number, out| out.json(&number));
            parts.literal("],\"none\":[");
            parts.list(std::iter::empty::<u32>(), |number, out| out.json(&number));
            parts.literal("],\"end\":");
            parts.value(&None::<u32>);
            parts.literal("}");
            let (joined, largest) = pieces(parts, limit);
            assert!(joined == expected, "limit {limit}");
            assert!(limit > 5000 || largest <= limit + 6 * TEXT_STEP + 64, "a piece of {largest} bytes");
        }
    }
}
