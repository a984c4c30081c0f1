//! A reply as server-sent events: `data: {...}` for each piece, `data: [DONE]` at the end, an error in place of that when it failed.
//!
//! The body is pulled by the connection: nothing is made before the client has taken what came before, beyond the connection's own
//! buffer and the bound in `generation.rs`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame};
use pellucid_generate::{Delta, GenerationEvent};
use tokio::time::{Instant, Sleep, sleep};

use crate::drain::Phase;
use crate::error::ApiError;
use crate::openai::usage::{Extension, Usage};
use crate::reply::Reply;
use crate::respond::cut_short;
use crate::state::App;
use crate::wire::ChunkWriter;

/// A comment goes out after so much silence, so that nobody between takes the connection for dead.
const QUIET: Duration = Duration::from_secs(15);
/// Bytes that one frame collects before it leaves.
const FRAME_BYTES: usize = 16 << 10;

pub(crate) struct SseBody {
    reply: Reply,
    writer: ChunkWriter,
    /// Complete when the server ends at once.
    ending: Pin<Box<dyn Future<Output = ()> + Send>>,
    quiet: Pin<Box<Sleep>>,
    /// The piece that ended the last choice, until the numbers are known.
    last: Option<Delta>,
    has_opened: bool,
    is_over: bool,
}

impl SseBody {
    pub(crate) fn new(reply: Reply, writer: ChunkWriter, app: &Arc<App>) -> SseBody {
        SseBody {
            reply,
            writer,
            ending: Box::pin(app.drain.reached(Phase::Ending)),
            quiet: Box::pin(sleep(QUIET)),
            last: None,
            has_opened: false,
            is_over: false,
        }
    }

    fn open(&mut self, frame: &mut String) {
        for index in 0..self.reply.generation.num_choices() {
            let mut chunk = String::new();
            if self.writer.opening(index, &mut chunk) {
                event(&chunk, frame);
            }
        }
    }

    /// Writes a piece, and keeps the latest ending back for the numbers to go with it.
    fn show(&mut self, delta: Delta, frame: &mut String) {
        if delta.finish.is_some() {
            if let Some(before) = self.last.replace(delta) {
                self.write(&before, None, frame);
            }
        } else {
            self.write(&delta, None, frame);
        }
    }

    fn write(&mut self, delta: &Delta, extension: Option<&Extension>, frame: &mut String) {
        let mut chunk = String::new();
        self.writer.delta(delta, extension, &mut chunk);
        event(&chunk, frame);
    }

    fn finish(&mut self, frame: &mut String) {
        let summary = self.reply.close();
        let extension = Extension::new(&self.reply.sampling, &summary);
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

    /// An error after the stream began: an event, and the end without `[DONE]`.
    fn fail(&mut self, error: &ApiError, frame: &mut String) {
        event(&error.to_json(), frame);
        self.is_over = true;
    }
}

fn event(data: &str, frame: &mut String) {
    frame.push_str("data: ");
    frame.push_str(data);
    frame.push_str("\n\n");
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
        // Take whatever has come: one write for all of it.
        while !this.is_over && frame.len() < FRAME_BYTES {
            let event = match this.reply.poll_event(context) {
                Poll::Ready(event) => event,
                Poll::Pending if this.ending.as_mut().poll(context).is_ready() => {
                    this.reply.fail();
                    Some(Err(cut_short()))
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
            if this.quiet.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            frame.push_str(": still at work\n\n");
        }
        if frame.is_empty() {
            return Poll::Ready(None);
        }
        this.quiet.as_mut().reset(Instant::now() + QUIET);
        // Registers the timer with this task, for when there is nothing to send.
        let _ = this.quiet.as_mut().poll(context);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(frame)))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}
