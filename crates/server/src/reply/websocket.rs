//! `/v1/stream`: a WebSocket that takes a chat request, returns the chunks of its stream, and accepts control messages.

use std::collections::VecDeque;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use pellucid_engine::Control;
use pellucid_generate::GenerationEvent;
use pellucid_sampling::SamplingParams;
use serde_json::json;
use tokio::time::timeout;

use crate::http::body::ReadBody;
use crate::http::caller::{self, Caller};
use crate::http::drain::Phase;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::http::listen::Connection;
use crate::http::routes::Refusals;
use crate::limits::tenants::Permit;
use crate::metrics::Outcome;
use crate::openai::chat::ChatRequest;
use crate::openai::reply_json::ChunkWriter;
use crate::openai::sampling::SamplingFields;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::{Extension as Numbers, Usage};
use crate::reply::respond::{shutting_down, submit};
use crate::reply::{Reply, Sampling, Spec};
use crate::state::SharedApp;

/// Maximum control messages that the engine has not applied yet; further ones are refused.
const MAX_PENDING_CONTROLS: usize = 16;

/// Chat over a WebSocket, with control of the reply
///
/// The first message is a chat request; chunks come back as with `stream`, and `[DONE]` at the end. Meanwhile messages
/// control the reply: `{"type": "cancel"}`, `{"type": "pause"}`, `{"type": "resume"}`, and `{"type": "update", ...}`
/// with sampling fields.
#[utoipa::path(get, path = "/v1/stream", tag = "OpenAI", responses(
    (status = 101, description = "The connection becomes a WebSocket"),
    (status = 400, description = "Not a valid request for a WebSocket", body = ErrorBody),
    (status = 426, description = "This route accepts only WebSockets", body = ErrorBody), Refusals))]
pub(crate) async fn stream(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Connection>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response<Body> {
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(_) => {
            let message = "this route accepts only WebSockets: connect with a WebSocket client";
            return ApiError::refused(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message).into();
        }
    };
    let limit = app.limits.max_body_bytes;
    upgrade
        .max_message_size(limit)
        .max_frame_size(limit)
        .on_upgrade(async move |socket| {
            serve(socket, app, caller).await;
            // Counts as a connection until here.
            drop(connection);
        })
        .into_response()
}

async fn serve(mut socket: WebSocket, app: SharedApp, caller: Caller) {
    let outcome = match first_message(&mut socket, &app, &caller).await {
        // The phase was checked when the socket was opened, which may be long ago.
        Ok(Some((_, permit))) if app.drain.phase() != Phase::Serving => {
            let error = caller::draining();
            permit.refuse(&error);
            Err(error)
        }
        Ok(Some(((spec, streaming), permit))) => match submit(&app, &caller, permit, spec) {
            Ok((reply, envelope)) => {
                let writer = ChunkWriter::new(envelope, streaming);
                Exchange { reply, writer, pending: VecDeque::new() }.run(&mut socket, &app).await
            }
            Err(error) => Err(error),
        },
        Ok(None) => return,
        Err(error) => Err(error),
    };
    if let Err(error) = outcome {
        // Fails if the client has disconnected, which needs no handling.
        let _ = socket.send(Message::text(error.to_json())).await;
    }
    let _ = socket.send(Message::Close(None)).await;
}

/// Reads the chat request from the first message; `None` when the client has disconnected.
async fn first_message(
    socket: &mut WebSocket,
    app: &SharedApp,
    caller: &Caller,
) -> Result<Option<((Spec, Streaming), Permit)>, ApiError> {
    let message = timeout(app.limits.header_timeout, text_message(socket)).await;
    let late = |_| ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", "no request arrived in time");
    let Some(text) = message.map_err(late)?? else { return Ok(None) };
    let permit = caller.admit(app, true)?;
    let body =
        ReadBody::of_message(app, &caller.tenant, text.into_bytes()).inspect_err(|error| permit.refuse(error))?;
    let (app, caller) = (app.clone(), caller.clone());
    let work = move |mut value| {
        if let Json::Object(entries) = &mut value
            && !entries.iter().any(|(name, _)| name == "stream")
        {
            entries.push(("stream".into(), Json::Bool(true)));
        }
        let request = ChatRequest::read(value, &app.model)?;
        let Some(streaming) = request.shared.streaming() else {
            return Err(ApiError::field("stream", "a WebSocket always streams: leave stream out or set it to true"));
        };
        Ok((request.spec(&app.model, &app.limits, &caller.tenant)?, streaming))
    };
    body.parse(permit, work).await.map(Some)
}

fn parse(text: &str) -> Result<Json, ApiError> {
    Json::parse(text.as_bytes())
        .map_err(|error| ApiError::invalid(format!("the message is not valid JSON: {error}")).code("invalid_json"))
}

/// Returns the next text message; `None` when the client has disconnected.
async fn text_message(socket: &mut WebSocket) -> Result<Option<String>, ApiError> {
    loop {
        match socket.recv().await {
            None | Some(Err(_)) | Some(Ok(Message::Close(_))) => return Ok(None),
            Some(Ok(Message::Text(text))) => return Ok(Some(text.as_str().to_owned())),
            Some(Ok(Message::Binary(_))) => {
                return Err(ApiError::invalid("expected a text message, found a binary message"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
        }
    }
}

/// A reply that is sent over a socket.
struct Exchange {
    reply: Reply,
    writer: ChunkWriter,
    /// Acknowledgements to send when the engine has applied the control messages, oldest first.
    pending: VecDeque<&'static str>,
}

/// A message from the client.
enum ClientMessage {
    Cancel,
    /// A control message for the engine, with the `type` of its acknowledgement.
    Control(&'static str, Control),
}

impl Exchange {
    async fn run(mut self, socket: &mut WebSocket, app: &SharedApp) -> Result<(), ApiError> {
        let mut stopping = std::pin::pin!(app.drain.reached(Phase::Stopping));
        for index in 0..self.reply.generation.num_choices() {
            let mut chunk = String::new();
            self.writer.opening(index, &mut chunk);
            if send(socket, chunk, app).await.is_err() {
                return Ok(());
            }
        }
        while !self.reply.generation.is_over() {
            let outgoing = tokio::select! {
                biased;
                message = text_message(socket) => match message {
                    // Dropping the reply cancels it.
                    Ok(None) => return Ok(()),
                    Ok(Some(text)) => match self.read_message(&text, app) {
                        Ok(ClientMessage::Cancel) => {
                            let summary = self.reply.generation.summary();
                            self.reply.account.close(Outcome::Cancelled, &summary);
                            let _ = send(socket, json!({ "type": "cancelled" }).to_string(), app).await;
                            return Ok(());
                        }
                        Ok(ClientMessage::Control(name, control)) => {
                            self.pending.push_back(name);
                            self.reply.generation.control(0, control);
                            None
                        }
                        // A message that is refused changes nothing.
                        Err(error) => Some(error.to_json()),
                    },
                    Err(error) => Some(error.to_json()),
                },
                event = self.reply.next_event() => match event.transpose()? {
                    Some(event) => self.text_of(event),
                    None => None,
                },
                () = &mut stopping => {
                    self.reply.fail();
                    return Err(shutting_down());
                }
            };
            if let Some(text) = outgoing
                && send(socket, text, app).await.is_err()
            {
                return Ok(());
            }
        }
        self.finish(socket, app).await;
        Ok(())
    }

    /// Returns the message that reports an event.
    fn text_of(&mut self, event: GenerationEvent) -> Option<String> {
        match event {
            GenerationEvent::Delta(delta) => {
                let mut chunk = String::new();
                self.writer.delta(&delta, None, &mut chunk);
                Some(chunk)
            }
            GenerationEvent::ControlApplied { output_tokens, .. } => {
                let name = self.pending.pop_front()?;
                Some(json!({ "type": name, "output_tokens": output_tokens }).to_string())
            }
            GenerationEvent::PromptProgress { .. } => None,
        }
    }

    async fn finish(mut self, socket: &mut WebSocket, app: &SharedApp) {
        let summary = self.reply.close();
        let mut chunk = String::new();
        self.writer.usage(&Usage::new(&summary), &Numbers::new(&self.reply.sampling, &summary), &mut chunk);
        let _ = send(socket, chunk, app).await;
        let _ = send(socket, "[DONE]".to_owned(), app).await;
    }

    fn read_message(&mut self, text: &str, app: &SharedApp) -> Result<ClientMessage, ApiError> {
        if self.pending.len() >= MAX_PENDING_CONTROLS {
            return Err(ApiError::too_many(
                "too_many_messages",
                "control messages arrive faster than they are applied; wait for acknowledgements",
                1,
            ));
        }
        let mut fields = Fields::of(parse(text)?)?;
        let kind = fields::string("type", fields.required("type")?, 64)?;
        let message = match kind.as_str() {
            "cancel" => ClientMessage::Cancel,
            "pause" => ClientMessage::Control("paused", Control::Pause),
            "resume" => ClientMessage::Control("resumed", Control::Resume),
            "update" => {
                let changes = SamplingFields::read(&mut fields)?;
                if let Some(name) = FIXED.into_iter().find(|name| fields.take(name).is_some()) {
                    return Err(fixed(name));
                }
                fields.finish()?;
                return Ok(ClientMessage::Control("updated", self.update(changes, app)?));
            }
            _ => {
                let message = format!("type: expected cancel, pause, resume or update, found {}", shown(&kind));
                return Err(ApiError::field("type", message));
            }
        };
        fields.finish()?;
        Ok(message)
    }

    /// Returns the control message that changes the sampling from the next token on: `changes` over the fields given
    /// before.
    fn update(&mut self, changes: SamplingFields, app: &SharedApp) -> Result<Control, ApiError> {
        if self.reply.sampling.is_beam_search {
            return Err(ApiError::invalid(
                "update: beam search does not sample, so sampling fields have no effect on it",
            ));
        }
        if changes.is_empty() {
            return Err(ApiError::invalid("update: expected at least one sampling field, found none"));
        }
        for (name, given) in [
            ("preset", changes.preset.is_some()),
            ("ignore_eos", changes.ignore_eos.is_some()),
            ("seed", changes.seed().is_some()),
        ] {
            if given {
                return Err(fixed(name));
            }
        }
        let fields = self.reply.sampling.fields.clone().changed(changes);
        // Defaults are derived again from all given fields, as if the request had contained the changes.
        let SamplingParams { seed, logprobs, .. } = self.reply.sampling.params;
        let params = SamplingParams { seed, logprobs, ..fields.params(&app.model)? };
        app.model.engine.check_sampling(&params)?;
        self.reply.sampling = Sampling { fields, params: params.clone(), is_beam_search: false };
        Ok(Control::Update(Box::new(params)))
    }
}

/// Request fields that are known but cannot be changed in flight.
const FIXED: [&str; 15] = [
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "beam_width",
    "priority",
    "cache_salt",
    "trace",
    "timeout_ms",
    "chat_template_kwargs",
];

fn fixed(name: &str) -> ApiError {
    ApiError::field(name, format!("{name} cannot be changed while the reply is generated"))
}

/// Sends a message; `Err` when the client has disconnected or accepts nothing for too long.
async fn send(socket: &mut WebSocket, text: String, app: &SharedApp) -> Result<(), ()> {
    match timeout(app.limits.write_timeout, socket.send(Message::text(text))).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(()),
    }
}
