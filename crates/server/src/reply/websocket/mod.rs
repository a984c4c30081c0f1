//! `/v1/stream`: a WebSocket that takes a chat request, returns the chunks of its stream, and accepts control messages.
//!
//! `handshake` switches protocols, `frame` reads and writes frames, `assembler` joins them to messages, `socket` is the
//! connection with its bounds, `dialogue` the messages during a reply, `control` the client's part of it, and
//! `close_reason` says how it ended.

mod assembler;
mod close_reason;
mod control;
mod dialogue;
mod frame;
mod handshake;
mod socket;
#[cfg(test)]
mod tests;

use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use pellucid_generate::LoadedModel;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use self::assembler::Assembler;
use self::close_reason::CloseReason;
use self::dialogue::{Dialogue, MAX_CONTROL_MESSAGE};
use self::socket::{Socket, SocketTimes};
use crate::http::body::{Admission, ModelChoice, ReadBody};
use crate::http::caller::{self, Caller};
use crate::http::drain::Phase;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::json::Json;
use crate::http::listen::Connection;
use crate::http::routes::Refusals;
use crate::models::lease::TextLease;
use crate::openai::chat::ChatRequest;
use crate::openai::reply_json::{ChunkWriter, Envelope};
use crate::openai::shared_fields::Streaming;
use crate::reply::respond::submit;
use crate::reply::{Spec, guard};
use crate::state::SharedApp;

/// A ping is sent after this time of silence, or after the write timeout if that is shorter.
const PING_INTERVAL: Duration = Duration::from_secs(20);

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
    mut request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (response, upgrade) = handshake::accept(&mut request)?;
    let counted = CountedSocket::new(app.clone(), connection);
    tokio::spawn(async move {
        serve(upgrade, &counted.app, &caller).await;
        drop(counted);
    });
    Ok(response)
}

/// Counts as an open WebSocket and as an open connection until it is dropped.
struct CountedSocket {
    app: SharedApp,
    _connection: Connection,
}

impl CountedSocket {
    fn new(app: SharedApp, connection: Connection) -> CountedSocket {
        app.metrics.websockets.inc();
        CountedSocket { app, _connection: connection }
    }
}

impl Drop for CountedSocket {
    fn drop(&mut self) {
        self.app.metrics.websockets.dec();
    }
}

async fn serve(upgrade: OnUpgrade, app: &SharedApp, caller: &Caller) {
    // Fails if the client has disconnected.
    let Ok(stream) = upgrade.await else { return };
    let times = SocketTimes {
        ping: PING_INTERVAL.min(app.limits.write_timeout),
        pong: app.limits.write_timeout,
        message: app.limits.body_timeout,
        bytes_per_s: app.limits.min_transfer_rate,
        grace: app.limits.body_grace(),
    };
    let assembler = Assembler::new(app.client_memory.clone(), caller.tenant.clone(), app.limits.max_body_bytes);
    let mut socket = Socket::new(TokioIo::new(stream), times, assembler);
    let reason = converse(&mut socket, app, caller).await.err().unwrap_or(CloseReason::Completed);
    app.metrics.count_websocket(reason.label());
    tracing::debug!(request_id = caller.request_id, reason = reason.label(), "a WebSocket closes");
    socket.close(&reason).await;
}

/// Reads the request and sends its reply.
async fn converse<S>(socket: &mut Socket<S>, app: &SharedApp, caller: &Caller) -> Result<(), CloseReason>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ((spec, streaming), admission) = tokio::select! {
        biased;
        request = read_request(socket, app, caller) => request?,
        () = app.drain.reached(Phase::Draining) => return Err(caller::draining().into()),
    };
    // Reading the request may have ended at the same time as the server began to drain.
    if app.drain.phase() != Phase::Serving {
        let error = caller::draining();
        admission.permit.refuse(&error);
        return Err(error.into());
    }
    let spec = socket.during(guard::judge(caller, &admission, spec)).await??;
    let envelope = Envelope::of(&spec, &admission.model)?;
    let reply = submit(app, caller, admission, spec)?;
    Dialogue::new(app, caller, reply, ChunkWriter::new(envelope, streaming)).run(socket).await
}

/// Reads the chat request from the first message.
async fn read_request<S>(
    socket: &mut Socket<S>,
    app: &SharedApp,
    caller: &Caller,
) -> Result<((Spec, Streaming), Admission<LoadedModel>), CloseReason>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let begun = timeout(app.limits.header_timeout, socket.begun()).await;
    begun.map_err(|_| CloseReason::Late("no request arrived in time"))??;
    // As over HTTP, limits of the tenant apply before the request is read.
    let permit = caller.admit(app, true)?;
    let message = socket.next().await.inspect_err(|reason| {
        if let CloseReason::Refused(error) = reason {
            permit.refuse(error);
        }
    })?;
    socket.set_max_message(MAX_CONTROL_MESSAGE);
    let choice = ModelChoice::of(app);
    let (app, caller) = (app.clone(), caller.clone());
    let work = move |mut value, model: &TextLease| {
        if let Json::Object(entries) = &mut value
            && !entries.iter().any(|(name, _)| name == "stream")
        {
            entries.push(("stream".into(), Json::Bool(true)));
        }
        let request = ChatRequest::read(value, model)?;
        let Some(streaming) = request.shared.streaming() else {
            return Err(ApiError::field("stream", "a WebSocket always streams: leave stream out or set it to true"));
        };
        Ok((request.spec(model, &app.limits, &caller.tenant)?, streaming))
    };
    let parsing = ReadBody::of_message(message.bytes, message.memory).parse(permit, choice, work);
    Ok(socket.during(parsing).await??)
}
