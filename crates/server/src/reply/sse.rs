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
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::parts::{self, Cut};
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
    cut: Cut,
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
            cut: Cut::default(),
        }
    }

    fn open(&mut self, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let num_choices = self.reply.as_ref().map_or(0, |reply| reply.generation.num_choices());
        for index in 0..num_choices {
            let start = frame.len();
            frame.push(DATA)?;
            if self.writer.opening(index, frame)? {
                frame.push(END)?;
            } else {
                frame.truncate(start);
            }
        }
        Ok(())
    }

    /// Writes a piece. The piece that ends a choice is held back, because the last one of a reply also carries usage.
    fn show(&mut self, delta: Delta, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if delta.finish.is_some() {
            match self.last.replace(delta) {
                Some(before) => self.write(&before, None, frame),
                None => Ok(()),
            }
        } else if self.writer.is_long(&delta) {
            frame.push(DATA)?;
            self.long = Some(self.writer.begin_long(delta, frame)?);
            Ok(())
        } else {
            self.write(&delta, None, frame)
        }
    }

    /// Continues a piece that is partly written, if there is one. Returns whether there was.
    fn write_long(&mut self, frame: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        let Some(mut long) = self.long.take() else { return Ok(false) };
        if self.writer.continue_long(&mut long, FRAME_BYTES, frame)? {
            frame.push(END)?;
        } else {
            self.long = Some(long);
        }
        Ok(true)
    }

    fn write(
        &mut self,
        delta: &Delta,
        extension: Option<&Extension>,
        frame: &mut ReplyBuffer,
    ) -> Result<(), OutOfMemory> {
        frame.push(DATA)?;
        self.writer.delta(delta, extension, frame)?;
        frame.push(END)
    }

    fn finish(&mut self, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let Some(reply) = &mut self.reply else { return Ok(()) };
        let summary = reply.generation.summary();
        let extension = Extension::new(&reply.sampling, &summary);
        if let Some(last) = self.last.take() {
            let own_chunk = self.writer.includes_usage();
            self.write(&last, (!own_chunk).then_some(&extension), frame)?;
        }
        if self.writer.includes_usage() {
            frame.push(DATA)?;
            self.writer.usage(&Usage::new(&summary), &extension, frame)?;
            frame.push(END)?;
        }
        event("[DONE]", frame)?;
        self.is_over = true;
        if let Some(reply) = &mut self.reply {
            reply.close();
        }
        Ok(())
    }

    /// Ends a stream that has begun with an error event instead of `[DONE]`.
    fn fail(&mut self, error: &ApiError, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.is_over = true;
        event(&error.to_json(), frame)
    }

    /// Writes all events that are ready, up to the size of a frame. Fails if there is no memory even for the event that
    /// reports the shortage, or if half of an event was sent.
    fn fill(&mut self, context: &mut Context<'_>, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if !self.has_opened {
            self.has_opened = true;
            self.open(frame)?;
        }
        while !self.is_over && frame.len() < FRAME_BYTES {
            if self.write_long(frame)? {
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
                Some(Ok(GenerationEvent::Delta(delta))) => self.show(delta, frame),
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

fn event(data: &str, frame: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    frame.push(DATA)?;
    frame.push(data)?;
    frame.push(END)
}

impl Body for SseBody {
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
            if frame.push(": still at work\n\n").is_err() {
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
