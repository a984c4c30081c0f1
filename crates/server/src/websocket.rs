//! `/v1/stream`: a chat request as the first message, the chunks of its stream back, and messages about it while it is under way.

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

use crate::body::ReadBody;
use crate::caller::{self, Caller};
use crate::drain::Phase;
use crate::error::{ApiError, ErrorBody};
use crate::fields::{self, Fields, shown};
use crate::json::Json;
use crate::listen::Connection;
use crate::metrics::Outcome;
use crate::openai::chat::ChatRequest;
use crate::openai::common::Streaming;
use crate::openai::sampling::SamplingFields;
use crate::openai::usage::{Extension as Numbers, Usage};
use crate::reply::{Reply, Sampling, Spec};
use crate::respond::{begin, cut_short};
use crate::routes::Refusals;
use crate::state::SharedApp;
use crate::tenants::Permit;
use crate::wire::ChunkWriter;

/// Wishes that may be on their way to the engine; a client that sends more is told so.
const MAX_WISHES: usize = 16;

/// Converse with control in flight
///
/// A WebSocket. The first message is a chat request; chunks come back as with `stream`, and `[DONE]` at the end. Meanwhile
/// `{"type": "cancel"}`, `{"type": "pause"}`, `{"type": "resume"}` and `{"type": "update", ...}` with sampling fields are heeded.
#[utoipa::path(get, path = "/v1/stream", tag = "OpenAI", responses(
    (status = 101, description = "The connection is a WebSocket now"),
    (status = 400, description = "Not a valid request for a WebSocket", body = ErrorBody),
    (status = 426, description = "This route speaks WebSocket alone", body = ErrorBody), Refusals))]
pub(crate) async fn stream(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    Extension(connection): Extension<Connection>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response<Body> {
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(_) => {
            let message = "this route speaks WebSocket: connect with a client for it";
            return ApiError::refused(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message).into();
        }
    };
    let limit = app.limits.max_body_bytes;
    upgrade
        .max_message_size(limit)
        .max_frame_size(limit)
        .on_upgrade(async move |socket| {
            converse(socket, app, caller).await;
            // One of the server's connections, up to here.
            drop(connection);
        })
        .into_response()
}

async fn converse(mut socket: WebSocket, app: SharedApp, caller: Caller) {
    let outcome = match first_message(&mut socket, &app, &caller).await {
        // The socket may have been opened long before.
        Ok(Some((_, permit))) if app.drain.phase() != Phase::Serving => {
            let error = caller::draining();
            permit.refuse(&error);
            Err(error)
        }
        Ok(Some(((spec, streaming), permit))) => match begin(&app, &caller, permit, spec) {
            Ok((reply, envelope)) => {
                let writer = ChunkWriter::new(envelope, streaming);
                Exchange { reply, writer, wishes: VecDeque::new() }.run(&mut socket, &app).await
            }
            Err(error) => Err(error),
        },
        Ok(None) => return,
        Err(error) => Err(error),
    };
    if let Err(error) = outcome {
        // Whoever has gone need not be told.
        let _ = socket.send(Message::text(error.to_json())).await;
    }
    let _ = socket.send(Message::Close(None)).await;
}

/// The request, how its chunks are to be written, and its place among its tenant's; `None` when the client has gone.
async fn first_message(
    socket: &mut WebSocket,
    app: &SharedApp,
    caller: &Caller,
) -> Result<Option<((Spec, Streaming), Permit)>, ApiError> {
    let message = timeout(app.limits.header_timeout, text_message(socket)).await;
    let late = |_| ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", "no request came in time");
    let Some(text) = message.map_err(late)?? else { return Ok(None) };
    let permit = caller.enter(app, true)?;
    let body = ReadBody::of_message(app, text.into_bytes()).inspect_err(|error| permit.refuse(error))?;
    let (app, caller) = (app.clone(), caller.clone());
    let work = move |mut value| {
        if let Json::Object(entries) = &mut value
            && !entries.iter().any(|(name, _)| name == "stream")
        {
            entries.push(("stream".into(), Json::Bool(true)));
        }
        let request = ChatRequest::read(value, &app.model)?;
        let Some(streaming) = request.common.streaming() else {
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

/// The next message of text; `None` when the client has gone.
async fn text_message(socket: &mut WebSocket) -> Result<Option<String>, ApiError> {
    loop {
        match socket.recv().await {
            None | Some(Err(_)) | Some(Ok(Message::Close(_))) => return Ok(None),
            Some(Ok(Message::Text(text))) => return Ok(Some(text.as_str().to_owned())),
            Some(Ok(Message::Binary(_))) => {
                return Err(ApiError::invalid("expected a message of text, found a binary one"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
        }
    }
}

/// A reply under way over a socket.
struct Exchange {
    reply: Reply,
    writer: ChunkWriter,
    /// Names of the wishes that the engine has not heeded yet, oldest first.
    wishes: VecDeque<&'static str>,
}

/// What a message of the client asks for.
enum Wish {
    Cancel,
    Control(&'static str, Control),
}

impl Exchange {
    async fn run(mut self, socket: &mut WebSocket, app: &SharedApp) -> Result<(), ApiError> {
        let mut ending = std::pin::pin!(app.drain.reached(Phase::Ending));
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
                    // Dropping what is under way cancels it.
                    Ok(None) => return Ok(()),
                    Ok(Some(text)) => match self.wish(&text, app) {
                        Ok(Wish::Cancel) => {
                            let summary = self.reply.generation.summary();
                            self.reply.account.close(Outcome::Cancelled, &summary);
                            let _ = send(socket, json!({ "type": "cancelled" }).to_string(), app).await;
                            return Ok(());
                        }
                        Ok(Wish::Control(name, control)) => {
                            self.wishes.push_back(name);
                            self.reply.generation.control(0, control);
                            None
                        }
                        // A message that cannot be heeded changes nothing.
                        Err(error) => Some(error.to_json()),
                    },
                    Err(error) => Some(error.to_json()),
                },
                event = self.reply.next_event() => match event.transpose()? {
                    Some(event) => self.text_of(event),
                    None => None,
                },
                () = &mut ending => {
                    self.reply.fail();
                    return Err(cut_short());
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
                let name = self.wishes.pop_front()?;
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

    fn wish(&mut self, text: &str, app: &SharedApp) -> Result<Wish, ApiError> {
        if self.wishes.len() >= MAX_WISHES {
            return Err(ApiError::too_many("too_many_messages", "messages come faster than they can be heeded", 1));
        }
        let mut fields = Fields::of(parse(text)?)?;
        let kind = fields::string("type", fields.required("type")?, 64)?;
        let wish = match kind.as_str() {
            "cancel" => Wish::Cancel,
            "pause" => Wish::Control("paused", Control::Pause),
            "resume" => Wish::Control("resumed", Control::Resume),
            "update" => {
                let changes = SamplingFields::read(&mut fields)?;
                if let Some(name) = FIXED.into_iter().find(|name| fields.take(name).is_some()) {
                    return Err(fixed(name));
                }
                fields.finish()?;
                return Ok(Wish::Control("updated", self.update(changes, app)?));
            }
            _ => {
                let message = format!("type: expected cancel, pause, resume or update, found {}", shown(&kind));
                return Err(ApiError::field("type", message));
            }
        };
        fields.finish()?;
        Ok(wish)
    }

    /// Other parameters from the next token on: what the message gives, over what was given before.
    fn update(&mut self, changes: SamplingFields, app: &SharedApp) -> Result<Control, ApiError> {
        if self.reply.sampling.is_beam_search {
            return Err(ApiError::invalid(
                "update: a beam search draws nothing, so no parameter of the draw can change it",
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
        // As if the request had said so from the beginning: what is set by default follows what is given.
        let SamplingParams { seed, logprobs, .. } = self.reply.sampling.params;
        let params = SamplingParams { seed, logprobs, ..fields.params(&app.model)? };
        app.model.engine.check_sampling(&params)?;
        self.reply.sampling = Sampling { fields, params: params.clone(), is_beam_search: false };
        Ok(Control::Update(Box::new(params)))
    }
}

/// Fields of a request beside those of the draw.
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
    ApiError::field(name, format!("{name} cannot be changed in flight"))
}

/// Sends a message, unless the client does not take it in time.
async fn send(socket: &mut WebSocket, text: String, app: &SharedApp) -> Result<(), ()> {
    match timeout(app.limits.write_timeout, socket.send(Message::text(text))).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(()),
    }
}
