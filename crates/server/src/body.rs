//! A request's body: read within its bounds of size and time, then parsed and worked on where that does not hold up other clients.

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::error::{ApiError, RETRY_SOON_S};
use crate::json::Json;
use crate::state::{App, BODY_UNIT};
use crate::tenants::Permit;

/// Bodies from this size on are worked on apart: a template and a tokenizer take a while over a long text.
const LONG: usize = 16 << 10;
/// A body that is too large is read and thrown away up to so many times the limit, so that the client gets to hear why.
const DRAINED: usize = 16;

/// Bytes of a body, and the part of the common budget that they take until they have been worked on, whoever still waits for that.
#[derive(Debug)]
pub(crate) struct ReadBody {
    /// What it is, in a sentence.
    name: &'static str,
    bytes: Vec<u8>,
    room: Room,
}

/// A part of the memory for all bodies; given back when dropped.
#[derive(Debug, Default)]
struct Room(Option<OwnedSemaphorePermit>);

impl Room {
    /// Takes what a body needs that grows from so many bytes to so many.
    fn grow(&mut self, app: &App, before: usize, after: usize) -> Result<(), ApiError> {
        let units = after.div_ceil(BODY_UNIT) - before.div_ceil(BODY_UNIT);
        if units == 0 {
            return Ok(());
        }
        let more = app.bodies.clone().try_acquire_many_owned(units as u32).map_err(|_| {
            let message = "requests with long bodies take all the memory there is for them; try again later";
            ApiError::too_many("bodies_in_flight", message, RETRY_SOON_S)
        })?;
        match &mut self.0 {
            Some(permit) => permit.merge(more),
            None => self.0 = Some(more),
        }
        Ok(())
    }
}

/// Reads a JSON body.
pub(crate) async fn read(app: &App, request: Request<Body>) -> Result<ReadBody, ApiError> {
    check_type(request.headers())?;
    let limit = app.limits.max_body_bytes;
    let deadline = Instant::now() + app.limits.body_timeout;
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let mut body = request.into_body();
    if announced.is_some_and(|length: usize| length > limit) {
        return Err(too_large(body, limit, deadline).await);
    }
    let mut bytes = Vec::with_capacity(announced.unwrap_or(0));
    let mut room = Room::default();
    loop {
        let late = || ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", "the body did not arrive in time");
        let frame = match timeout_at(deadline, body.frame()).await.map_err(|_| late())? {
            None => return Ok(ReadBody { name: "body", bytes, room }),
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return Err(ApiError::invalid("the body ended before its end")),
        };
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(too_large(body, limit, deadline).await);
        }
        room.grow(app, bytes.len(), bytes.len() + data.len())?;
        bytes.extend_from_slice(&data);
    }
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body must be JSON, with the header `Content-Type: application/json`";
    Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

async fn too_large(body: Body, limit: usize, deadline: Instant) -> ApiError {
    throw_away(body, limit.saturating_mul(DRAINED), deadline).await;
    let message = format!("the body is larger than {limit} bytes");
    ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}

/// Reads the body of a request that is refused whatever it says, and keeps nothing of it.
pub(crate) async fn discard(app: &App, request: Request<Body>) {
    throw_away(request.into_body(), app.limits.max_body_bytes, Instant::now() + app.limits.body_timeout).await;
}

/// A connection that is closed while the client still sends loses the reply on its way, so up to `left` bytes are read.
async fn throw_away(mut body: Body, mut left: usize, deadline: Instant) {
    while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
        let len = frame.data_ref().map_or(0, |data| data.len());
        match left.checked_sub(len) {
            Some(rest) => left = rest,
            None => break,
        }
    }
}

impl ReadBody {
    /// A message of a WebSocket, which is read by then.
    pub(crate) fn of_message(app: &App, bytes: Vec<u8>) -> Result<ReadBody, ApiError> {
        let mut room = Room::default();
        room.grow(app, 0, bytes.len())?;
        Ok(ReadBody { name: "message", bytes, room })
    }

    /// Parses the body and hands it to `work`, beside the threads that serve connections when it is long. Both the memory and the tenant's
    /// place are held until the work is done, even where nobody waits for it any more.
    pub(crate) async fn parse<T: Send + 'static>(
        self,
        permit: Permit,
        work: impl FnOnce(Json) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Permit), ApiError> {
        let ReadBody { name, bytes, room } = self;
        // The tenant's own turn: others' long texts need not wait behind all of its.
        let is_long = bytes.len() >= LONG;
        let thread = if is_long { permit.thread().await } else { None };
        let whole = move || {
            let _held = (room, thread);
            let value = Json::parse(&bytes).map_err(|error| {
                ApiError::invalid(format!("the {name} is not valid JSON: {error}")).code("invalid_json")
            });
            match value.and_then(work) {
                Ok(outcome) => Ok((outcome, permit)),
                Err(error) => {
                    permit.refuse(&error);
                    Err(error)
                }
            }
        };
        if !is_long {
            return whole();
        }
        match tokio::task::spawn_blocking(whole).await {
            Ok(outcome) => outcome,
            Err(error) => {
                tracing::error!(%error, "work on a request's body ended in a fault");
                Err(ApiError::fault())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;
    use crate::MAX_BLOCKING;
    use crate::tenants::{TenantConfig, Tenants};

    fn long_body() -> ReadBody {
        ReadBody { name: "body", bytes: [b"{}".to_vec(), vec![b' '; LONG]].concat(), room: Room::default() }
    }

    #[test]
    fn long_texts_of_one_tenant_leave_threads_for_another() {
        let config = |name: &str| TenantConfig {
            name: name.into(),
            keys: vec![format!("key-of-{name}")],
            ..TenantConfig::default()
        };
        let tenants = Tenants::new(vec![config("a"), config("b")]).unwrap();
        let [a, b] = ["key-of-a", "key-of-b"].map(|key| tenants.find(Some(key.as_bytes())).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(MAX_BLOCKING)
            .build()
            .unwrap();
        runtime.block_on(async move {
            // Texts of the first tenant that take as long as this test lets them, more than there are threads.
            let (finish, held) = channel::<()>();
            let held = Arc::new(Mutex::new(held));
            let flood: Vec<_> = (0..2 * MAX_BLOCKING)
                .map(|_| {
                    let (permit, held) = (a.enter(false).unwrap(), held.clone());
                    let work = move |_| Ok(held.lock().unwrap().recv().is_err());
                    tokio::spawn(async move { long_body().parse(permit, work).await.map(drop) })
                })
                .collect();
            tokio::task::yield_now().await;
            let permit = b.enter(false).unwrap();
            let soon = tokio::time::timeout(Duration::from_secs(60), long_body().parse(permit, |_| Ok(5)));
            let (answer, _) = soon.await.expect("a thread for the second tenant").unwrap();
            assert_eq!(answer, 5);
            assert!(!flood.iter().any(|one| one.is_finished()), "the control: the others are still at work");
            drop(finish);
            for one in flood {
                assert_eq!(one.await.unwrap(), Ok(()));
            }
        });
    }
}
