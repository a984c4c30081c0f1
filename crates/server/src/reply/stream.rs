//! A reply that is sent while it is generated, in the form of the API that was called.
//!
//! The connection polls the body, so nothing is generated beyond what the client accepts, the connection's buffer and
//! the bounded channel of `pellucid_generate`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use http_body::{Body, Frame};
use pellucid_generate::GenerationEvent;
use tokio::time::{Instant, Sleep, sleep};

use crate::http::drain::Phase;
use crate::http::error::ApiError;
use crate::reply::Reply;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::StreamWriter;
use crate::reply::parts::{self, Cut};
use crate::reply::respond::shutting_down;
use crate::state::App;

/// After this time without data, something that clients ignore is sent, so that proxies do not close the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Maximum bytes collected before a frame is sent.
const FRAME_BYTES: usize = 16 << 10;

/// The response body of a streamed reply.
pub(crate) struct StreamBody {
    /// `None` after the end.
    reply: Option<Reply>,
    writer: Box<dyn StreamWriter>,
    /// Completes when the server stops all replies.
    stopping: Pin<Box<dyn Future<Output = ()> + Send>>,
    keep_alive: Pin<Box<Sleep>>,
    has_opened: bool,
    /// Whether the writer was told that the reply is complete.
    has_finished: bool,
    is_over: bool,
    cut: Cut,
}

impl StreamBody {
    pub(crate) fn new(reply: Reply, writer: Box<dyn StreamWriter>, app: &Arc<App>) -> StreamBody {
        StreamBody {
            reply: Some(reply),
            writer,
            stopping: Box::pin(app.drain.reached(Phase::Stopping)),
            keep_alive: Box::pin(sleep(KEEP_ALIVE)),
            has_opened: false,
            has_finished: false,
            is_over: false,
            cut: Cut::default(),
        }
    }

    fn finish(&mut self, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let Some(reply) = &mut self.reply else { return Ok(()) };
        self.writer.finish(&reply.sampling, &reply.generation.summary(), frame)?;
        self.has_finished = true;
        self.is_over = !self.writer.has_rest();
        reply.close();
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.is_over = true;
        self.writer.fail(error, frame)
    }

    /// Writes all events that are ready, up to the size of a frame. Fails if there is no memory even for the event that
    /// reports the shortage, or if half of an event was sent.
    fn fill(&mut self, context: &mut Context<'_>, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if !self.has_opened {
            self.has_opened = true;
            let num_choices = self.reply.as_ref().map_or(0, |reply| reply.generation.num_choices());
            self.writer.open(num_choices, frame)?;
        }
        while !self.is_over && frame.len() < FRAME_BYTES {
            if self.writer.continue_long(FRAME_BYTES, frame)? {
                self.is_over = self.has_finished && !self.writer.has_rest();
                continue;
            }
            let Some(reply) = &mut self.reply else { break };
            let event = match reply.poll_event(context) {
                Poll::Ready(event) => event,
                Poll::Pending if self.stopping.as_mut().poll(context).is_ready() => {
                    reply.fail();
                    Some(Err(shutting_down()))
                }
                Poll::Pending => break,
            };
            let start = frame.len();
            let written = match event {
                Some(Ok(GenerationEvent::Delta(delta))) => self.writer.delta(delta, frame),
                Some(Ok(_)) => Ok(()),
                Some(Err(error)) => self.fail(&error, frame),
                None => self.finish(frame),
            };
            if written.is_err() {
                frame.truncate(start);
                if let Some(reply) = &mut self.reply {
                    reply.fail();
                }
                self.fail(&OutOfMemory.into(), frame)?;
            }
        }
        Ok(())
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = OutOfMemory;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let mut frame = ReplyBuffer::default();
        // All events that are ready go into one write.
        if this.cut.is_set() || this.fill(context, &mut frame).is_err() {
            if let Some(mut reply) = this.reply.take() {
                reply.fail();
            }
            return this.cut.poll(context);
        }
        if frame.is_empty() && !this.is_over {
            if this.keep_alive.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            if frame.push(this.writer.keep_alive()).is_err() {
                return this.cut.poll(context);
            }
        }
        if frame.is_empty() {
            return Poll::Ready(None);
        }
        this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        // Polling registers the timer with this task.
        let _ = this.keep_alive.as_mut().poll(context);
        // The last bytes own the account, so that the request lasts until they are written.
        let account = if this.is_over { this.reply.take().map(|reply| reply.account) } else { None };
        let bytes = parts::holding(frame, &Arc::new(account));
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over && !self.cut.is_set()
    }
}
