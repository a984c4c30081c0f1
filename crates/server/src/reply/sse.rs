//! A reply as server-sent events: `data: {...}` for each piece, then `data: [DONE]`, or an error event if it failed.
//!
//! The connection polls the body, so nothing is generated beyond what the client accepts, the connection's buffer and
//! the bounded channel of `pellucid_generate`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame};
use pellucid_generate::{Delta, GenerationEvent};
use tokio::time::{Instant, Sleep, sleep};

use crate::http::drain::Phase;
use crate::http::error::ApiError;
use crate::openai::reply_json::{ChunkWriter, LongPiece};
use crate::openai::usage::{Extension, Usage};
use crate::reply::Reply;
use crate::reply::parts;
use crate::reply::respond::shutting_down;
use crate::state::App;

/// A comment is sent after this time without data, so that proxies do not close the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Maximum bytes collected before a frame is sent.
const FRAME_BYTES: usize = 16 << 10;

/// Bytes before and after the data of an event.
const DATA: &str = "data: ";
const END: &str = "\n\n";

/// The response body of a streamed reply.
pub(crate) struct SseBody {
    /// `None` after the end.
    reply: Option<Reply>,
    writer: ChunkWriter,
    /// A piece that is partly written.
    long: Option<LongPiece>,
    /// Completes when the server stops all replies.
    stopping: Pin<Box<dyn Future<Output = ()> + Send>>,
    keep_alive: Pin<Box<Sleep>>,
    /// The last piece of the choice that ended most recently, held back until usage is known.
    last: Option<Delta>,
    has_opened: bool,
    is_over: bool,
}

impl SseBody {
    pub(crate) fn new(reply: Reply, writer: ChunkWriter, app: &Arc<App>) -> SseBody {
        SseBody {
            reply: Some(reply),
            writer,
            long: None,
            stopping: Box::pin(app.drain.reached(Phase::Stopping)),
            keep_alive: Box::pin(sleep(KEEP_ALIVE)),
            last: None,
            has_opened: false,
            is_over: false,
        }
    }

    fn open(&mut self, frame: &mut String) {
        let num_choices = self.reply.as_ref().map_or(0, |reply| reply.generation.num_choices());
        for index in 0..num_choices {
            let mut chunk = String::new();
            if self.writer.opening(index, &mut chunk) {
                event(&chunk, frame);
            }
        }
    }

    /// Writes a piece. The piece that ends a choice is held back, because the last one of a reply also carries usage.
    fn show(&mut self, delta: Delta, frame: &mut String) {
        if delta.finish.is_some() {
            if let Some(before) = self.last.replace(delta) {
                self.write(&before, None, frame);
            }
        } else if self.writer.is_long(&delta) {
            frame.push_str(DATA);
            self.long = Some(self.writer.begin_long(delta, frame));
        } else {
            self.write(&delta, None, frame);
        }
    }

    /// Continues a piece that is partly written, if there is one. Returns whether there was.
    fn write_long(&mut self, frame: &mut String) -> bool {
        let Some(mut long) = self.long.take() else { return false };
        if self.writer.continue_long(&mut long, FRAME_BYTES, frame) {
            frame.push_str(END);
        } else {
            self.long = Some(long);
        }
        true
    }

    fn write(&mut self, delta: &Delta, extension: Option<&Extension>, frame: &mut String) {
        let mut chunk = String::new();
        self.writer.delta(delta, extension, &mut chunk);
        event(&chunk, frame);
    }

    fn finish(&mut self, frame: &mut String) {
        let Some(reply) = &mut self.reply else { return };
        let summary = reply.close();
        let extension = Extension::new(&reply.sampling, &summary);
        if let Some(last) = self.last.take() {
            let own_chunk = self.writer.includes_usage();
            self.write(&last, (!own_chunk).then_some(&extension), frame);
        }
        if self.writer.includes_usage() {
            let mut chunk = String::new();
            self.writer.usage(&Usage::new(&summary), &extension, &mut chunk);
            event(&chunk, frame);
        }
        event("[DONE]", frame);
        self.is_over = true;
    }

    /// Ends a stream that has begun with an error event instead of `[DONE]`.
    fn fail(&mut self, error: &ApiError, frame: &mut String) {
        event(&error.to_json(), frame);
        self.is_over = true;
    }
}

fn event(data: &str, frame: &mut String) {
    frame.push_str(DATA);
    frame.push_str(data);
    frame.push_str(END);
}

impl Body for SseBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let mut frame = String::new();
        if !this.has_opened {
            this.has_opened = true;
            this.open(&mut frame);
        }
        // All events that are ready go into one write.
        while !this.is_over && frame.len() < FRAME_BYTES {
            if this.write_long(&mut frame) {
                continue;
            }
            let Some(reply) = &mut this.reply else { break };
            let event = match reply.poll_event(context) {
                Poll::Ready(event) => event,
                Poll::Pending if this.stopping.as_mut().poll(context).is_ready() => {
                    reply.fail();
                    Some(Err(shutting_down()))
                }
                Poll::Pending => break,
            };
            match event {
                Some(Ok(GenerationEvent::Delta(delta))) => this.show(delta, &mut frame),
                Some(Ok(_)) => {}
                Some(Err(error)) => this.fail(&error, &mut frame),
                None => this.finish(&mut frame),
            }
        }
        if frame.is_empty() && !this.is_over {
            if this.keep_alive.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            frame.push_str(": still at work\n\n");
        }
        if frame.is_empty() {
            return Poll::Ready(None);
        }
        this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        // Polling registers the timer with this task.
        let _ = this.keep_alive.as_mut().poll(context);
        // The last bytes own the account, so that the request lasts until they are written.
        let account = if this.is_over { this.reply.take().map(|reply| reply.account) } else { None };
        let bytes = parts::holding(frame.into_bytes(), &Arc::new(account));
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}
