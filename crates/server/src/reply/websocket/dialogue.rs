//! A reply that is sent over a WebSocket, and the control messages that arrive meanwhile.
//!
//! Control messages are processed one after another, apart from the threads that serve connections. The next one is
//! read when the one before it was applied or refused.

use std::collections::VecDeque;
use std::future::{pending, ready};
use std::pin::Pin;

use pellucid_generate::GenerationEvent;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::assembler::TextMessage;
use super::close_reason::CloseReason;
use super::control::ControlMessage;
use super::socket::Socket;
use crate::http::body::ReadBody;
use crate::http::caller::Caller;
use crate::http::drain::Phase;
use crate::http::error::ApiError;
use crate::metrics::Outcome;
use crate::openai::reply_json::ChunkWriter;
use crate::openai::usage::{Extension as Numbers, Usage};
use crate::reply::Reply;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::respond::shutting_down;
use crate::state::SharedApp;

/// Maximum bytes of a control message.
pub(super) const MAX_CONTROL_MESSAGE: usize = 64 << 10;
/// Maximum bytes of a cancellation that is recognized on the connection's own thread. A longer one is parsed apart and
/// charged, like any message.
const MAX_CANCEL_BYTES: usize = 128;
/// Maximum control messages that the engine has not applied yet; further ones are refused.
const MAX_PENDING_CONTROLS: usize = 16;

/// A control message that is being processed.
type Processing = Pin<Box<dyn Future<Output = Result<ControlMessage, ApiError>> + Send>>;

/// A reply that is sent over a socket.
pub(super) struct Dialogue<'a> {
    app: &'a SharedApp,
    caller: &'a Caller,
    reply: Reply,
    writer: ChunkWriter,
    processing: Option<Processing>,
    /// Acknowledgements to send when the engine has applied the control messages, oldest first.
    pending: VecDeque<&'static str>,
}

impl<'a> Dialogue<'a> {
    pub(super) fn new(app: &'a SharedApp, caller: &'a Caller, reply: Reply, writer: ChunkWriter) -> Dialogue<'a> {
        Dialogue { app, caller, reply, writer, processing: None, pending: VecDeque::new() }
    }

    /// Sends the reply. Dropping the dialogue before its end cancels the reply. It is borrowed because a future that
    /// owned it would hold it twice, and futures of tasks must stay below 8 KiB.
    pub(super) async fn run<S>(&mut self, socket: &mut Socket<S>) -> Result<(), CloseReason>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut stopping = std::pin::pin!(self.app.drain.reached(Phase::Stopping));
        for index in 0..self.reply.generation.num_choices() {
            let mut chunk = ReplyBuffer::default();
            self.writer.opening(index, &mut chunk).map_err(ApiError::from)?;
            socket.send(chunk.as_bytes()).await?;
        }
        while !self.reply.generation.is_over() {
            let is_busy = self.processing.is_some();
            let outgoing = tokio::select! {
                biased;
                processed = finished(&mut self.processing) => {
                    self.processing = None;
                    match processed.map(|message| self.apply(message)) {
                        Ok(true) => None,
                        Ok(false) => {
                            let summary = self.reply.generation.summary();
                            self.reply.account.close(Outcome::Cancelled, &summary);
                            return socket.send(json!({ "type": "cancelled" }).to_string().as_bytes()).await;
                        }
                        // A message that is refused changes nothing.
                        Err(error) => Some(error.to_json().into_bytes()),
                    }
                }
                message = next_message(socket, is_busy) => match self.admit(message?) {
                    Ok(processing) => {
                        self.processing = Some(processing);
                        None
                    }
                    Err(error) => Some(error.to_json().into_bytes()),
                },
                event = self.reply.next_event() => match event.transpose()? {
                    Some(event) => self.text_of(event).map_err(|_| self.out_of_memory())?,
                    None => None,
                },
                () = &mut stopping => {
                    self.reply.fail();
                    return Err(shutting_down().into());
                }
            };
            if let Some(text) = outgoing {
                socket.send(&text).await?;
            }
        }
        self.finish(socket).await
    }

    /// Charges a control message like a request and begins to process it. A cancellation costs nothing and is always
    /// admitted: it ends the reply, so there is at most one, and refusing it would go on with work that nobody wants.
    fn admit(&self, message: TextMessage) -> Result<Processing, ApiError> {
        if message.bytes.len() <= MAX_CANCEL_BYTES && ControlMessage::is_cancel(&message.bytes) {
            return Ok(Box::pin(ready(Ok(ControlMessage::Cancel))));
        }
        if self.pending.len() >= MAX_PENDING_CONTROLS {
            let message = "control messages arrive faster than they are applied; wait for acknowledgements";
            return Err(ApiError::too_many("too_many_messages", message, 1));
        }
        self.caller.charge_message(self.app)?;
        let (model, sampling) = (self.reply.model.clone(), self.reply.sampling.clone());
        let body = ReadBody::of_message(message.bytes, message.memory);
        let work = move |value| ControlMessage::read(value, &sampling, &model);
        Ok(Box::pin(body.parse_apart(self.caller.tenant.clone(), work)))
    }

    /// Passes a control message to the engine; `false` if it cancels the reply.
    fn apply(&mut self, message: ControlMessage) -> bool {
        let Some((name, control)) = message.for_engine() else { return false };
        if let ControlMessage::Update(sampling) = message {
            self.reply.sampling = *sampling;
        }
        self.pending.push_back(name);
        self.reply.generation.control(0, control);
        true
    }

    /// Returns the message that reports an event.
    fn text_of(&mut self, event: GenerationEvent) -> Result<Option<Vec<u8>>, OutOfMemory> {
        Ok(match event {
            GenerationEvent::Delta(delta) => {
                let mut chunk = ReplyBuffer::default();
                self.writer.delta(&delta, None, &mut chunk)?;
                Some(chunk.into_bytes())
            }
            GenerationEvent::ControlApplied { output_tokens, .. } => self
                .pending
                .pop_front()
                .map(|name| json!({ "type": name, "output_tokens": output_tokens }).to_string().into_bytes()),
            GenerationEvent::PromptProgress { .. } => None,
        })
    }

    /// Ends the reply because there is no memory for its next chunk.
    fn out_of_memory(&mut self) -> ApiError {
        self.reply.fail();
        OutOfMemory.into()
    }

    async fn finish<S: AsyncRead + AsyncWrite + Unpin>(&mut self, socket: &mut Socket<S>) -> Result<(), CloseReason> {
        let summary = self.reply.close();
        let mut chunk = ReplyBuffer::default();
        let numbers = Numbers::new(&self.reply.sampling, &summary);
        self.writer.usage(&Usage::new(&summary), &numbers, &mut chunk).map_err(ApiError::from)?;
        socket.send(chunk.as_bytes()).await?;
        socket.send(b"[DONE]").await
    }
}

/// Waits for the control message that is being processed; forever if there is none.
async fn finished(processing: &mut Option<Processing>) -> Result<ControlMessage, ApiError> {
    match processing {
        Some(processing) => processing.await,
        None => pending().await,
    }
}

/// Returns the next control message. While another one `is_busy`, only notices that the client closes or disconnects.
async fn next_message<S>(socket: &mut Socket<S>, is_busy: bool) -> Result<TextMessage, CloseReason>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if is_busy {
        socket.begun().await?;
        return pending().await;
    }
    socket.next().await
}
