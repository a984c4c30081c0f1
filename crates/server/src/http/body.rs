//! Request bodies: read within limits of size, time and memory, then parsed on a thread that does not delay other
//! clients.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use super::blocking::{self, Cancel};
use super::error::ApiError;
use super::error::form::ErrorForm;
use super::json::{Json, MAX_VALUES};
use crate::connection::transfer_rate::TransferRate;
use crate::limits::client_memory::{HeldMemory, out_of_memory, working_for};
use crate::limits::permit::Permit;
use crate::limits::tenants::Tenant;
use crate::models::choice::Chosen;
use crate::models::lease::{Lease, Served};
use crate::models::registry::Models;
use crate::state::App;

/// Bodies of at least this size are processed on blocking threads: rendering and encoding a long text takes long.
const LONG_BODY_BYTES: usize = 4 << 10;
/// Ends of the names of fields, of every API, whose values are compiled to a grammar. That takes long however short the
/// body is.
const GRAMMAR_FIELDS: [&str; 5] = ["tools\"", "format\"", "structured_outputs\"", "grammar\"", "json_schema\""];
/// A body that is too large is read and discarded up to this multiple of the limit, so that the client receives the
/// error.
const DISCARD_FACTOR: usize = 16;
/// Minimum bytes by which the buffer of a body grows. A larger buffer grows by a quarter, so that bytes are copied few
/// times, and little memory is taken before bytes arrive.
const GROWTH_BYTES: usize = 64 << 10;

/// Bytes that a byte of text takes at most while it is processed: its copies in the parsed body and in the rendered
/// conversation, and twice an id of 4 bytes, if every byte is a token. Encoding 4 MB of words with one token for two
/// bytes takes 8 (measured).
const TEXT_FACTOR: usize = 12;
/// Bytes that a parsed JSON value takes at most, with its entry in an object and the growth of its list.
const VALUE_BYTES: usize = 64;

/// A body with the client memory that it takes, held until the body is processed even if the client disconnects.
#[derive(Debug)]
pub(crate) struct ReadBody {
    /// `body` or `message`, for error texts.
    name: &'static str,
    bytes: Vec<u8>,
    memory: HeldMemory,
}

/// A request that was admitted within its tenant's limits, and whose model is loaded.
#[derive(Debug)]
pub(crate) struct Admission<M: Served> {
    pub(crate) permit: Permit,
    pub(crate) model: Lease<M>,
}

/// The models among which a request chooses, and the time that it may wait for one to be loaded.
#[derive(Debug, Clone)]
pub(crate) struct ModelChoice {
    pub(crate) models: Arc<Models>,
    pub(crate) timeout: Duration,
}

impl ModelChoice {
    pub(crate) fn of(app: &App) -> ModelChoice {
        ModelChoice { models: app.models.clone(), timeout: app.limits.request_timeout }
    }
}

/// The outcome of parsing: a request that was read, or one whose model has to be loaded first.
enum Parsed<T, M: Served, W> {
    Done(T, Admission<M>),
    Absent { index: usize, value: Json, memory: HeldMemory, permit: Permit, work: W },
}

/// Reads a JSON body.
pub(crate) async fn read(app: &App, tenant: &Tenant, request: Request<Body>) -> Result<ReadBody, ApiError> {
    check_type(&request)?;
    let limit = app.limits.max_body_bytes;
    let deadline = Instant::now() + app.limits.body_timeout;
    let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let mut body = request.into_body();
    if announced.is_some_and(|length: usize| length > limit) {
        return Err(too_large(body, limit, deadline).await);
    }
    // The announced length is not reserved: many clients can announce much and send nothing.
    let mut read = ReadBody { name: "body", bytes: Vec::new(), memory: HeldMemory::none(&app.client_memory, tenant) };
    let max_len = announced.unwrap_or(limit);
    let mut rate = TransferRate::new(app.limits.min_transfer_rate, app.limits.body_grace());
    loop {
        let too_slow = rate.wait(Instant::now());
        let late = || late(app, too_slow < deadline);
        let frame = match timeout_at(deadline.min(too_slow), body.frame()).await.map_err(|_| late())? {
            None => return Ok(read),
            Some(Ok(frame)) => frame,
            Some(Err(_)) => return Err(ApiError::invalid("the connection closed before the whole body arrived")),
        };
        let Ok(data) = frame.into_data() else { continue };
        if read.bytes.len() + data.len() > limit {
            return Err(too_large(body, limit, deadline).await);
        }
        rate.moved(data.len(), Instant::now());
        read.append(&data, max_len)?;
    }
}

/// Returns the error of a body that arrives too slowly, or not in time.
fn late(app: &App, is_slow: bool) -> ApiError {
    if !is_slow {
        return ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", "the body did not arrive in time");
    }
    let message = format!("the body arrives more slowly than {} bytes per second", app.limits.min_transfer_rate);
    ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
}

/// Refuses a body that is not declared as JSON, which a web page could send to this server without asking it first.
///
/// Ollama's clients declare none or that of a form, so on its routes any will do if no page sends the request: browsers
/// name the origin of every POST.
fn check_type(request: &Request<Body>) -> Result<(), ApiError> {
    let headers = request.headers();
    let is_from_page = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    if ErrorForm::of(request.uri().path()) == ErrorForm::Ollama && !is_from_page {
        return Ok(());
    }
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body must be JSON, with the header `Content-Type: application/json`";
    Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

async fn too_large(body: Body, limit: usize, deadline: Instant) -> ApiError {
    read_and_discard(body, limit.saturating_mul(DISCARD_FACTOR), deadline).await;
    let message = format!("the body is larger than {limit} bytes");
    ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}

/// Reads and discards the body of a request that was refused before its body was needed.
pub(crate) async fn discard(app: &App, request: Request<Body>) {
    read_and_discard(request.into_body(), app.limits.max_body_bytes, Instant::now() + app.limits.body_timeout).await;
}

/// Reads and discards up to `left` bytes: closing a connection while the client still sends would lose the reply.
async fn read_and_discard(mut body: Body, mut left: usize, deadline: Instant) {
    while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
        let len = frame.data_ref().map_or(0, |data| data.len());
        match left.checked_sub(len) {
            Some(rest) => left = rest,
            None => break,
        }
    }
}

impl ReadBody {
    /// Adds bytes of a body that will have at most `max_len`. Memory is charged before it is allocated.
    fn append(&mut self, data: &[u8], max_len: usize) -> Result<(), ApiError> {
        let (len, capacity) = (self.bytes.len() + data.len(), self.bytes.capacity());
        if len > capacity {
            let roomy = (capacity + GROWTH_BYTES.max(capacity / 4)).min(max_len);
            self.memory.grow_to(roomy.max(len))?;
            let more = roomy.max(len) - self.bytes.len();
            self.bytes.try_reserve_exact(more).map_err(|_| out_of_memory())?;
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Wraps a WebSocket message that was already read, with the memory that it holds.
    pub(crate) fn of_message(bytes: Vec<u8>, memory: HeldMemory) -> ReadBody {
        ReadBody { name: "message", bytes, memory }
    }

    /// Whether the body could contain one of `words`: it does, an escape could stand for a part of one, or it is long.
    pub(crate) fn may_contain(&self, words: &[&str]) -> bool {
        let has = |text: &str| text.contains("\\u") || words.iter().any(|word| text.contains(word));
        self.bytes.len() >= LONG_BODY_BYTES || std::str::from_utf8(&self.bytes).map_or(true, has)
    }

    /// Whether processing the body may take long: it is long, or has a grammar to be compiled.
    fn takes_long(&self) -> bool {
        self.may_contain(&GRAMMAR_FIELDS)
    }

    /// Parses the body, chooses the model that it names, and passes both to `work`, on a blocking thread if that
    /// may take long: whatever its length, once a template has taken long for a short text. Waits before that until
    /// the model is loaded. The tenant's permit owns the memory from then on; both are held until the work is done,
    /// even if the client disconnects meanwhile.
    pub(crate) async fn parse<T: Send + 'static, M: Served>(
        self,
        permit: Permit,
        choice: ModelChoice,
        work: impl FnOnce(Json, &Lease<M>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Admission<M>), ApiError> {
        let is_long = self.takes_long() || choice.models.have_costly_template();
        self.parse_on(is_long, permit, choice, work).await
    }

    /// Parses a body like [`ReadBody::parse`], but on a blocking thread whatever its length: a short body may name a
    /// long text that is stored.
    pub(crate) async fn parse_blocking<T: Send + 'static, M: Served>(
        self,
        permit: Permit,
        choice: ModelChoice,
        work: impl FnOnce(Json, &Lease<M>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Admission<M>), ApiError> {
        self.parse_on(true, permit, choice, work).await
    }

    /// Parses a body like [`ReadBody::parse`], on a blocking thread if it `is_long`.
    async fn parse_on<T: Send + 'static, M: Served>(
        self,
        is_long: bool,
        permit: Permit,
        choice: ModelChoice,
        work: impl FnOnce(Json, &Lease<M>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Admission<M>), ApiError> {
        let (tenant, models) = (permit.tenant.clone(), choice.models.clone());
        let read = move |value: Result<Json, ApiError>, memory| {
            let chosen = value.and_then(|value| Ok((models.choose::<M>(&value, &permit.tenant)?, value)));
            match chosen.inspect_err(|error| permit.refuse(error))? {
                (Chosen::Ready(model), value) => finish(value, model, memory, permit, work),
                (Chosen::Absent(index), value) => Ok(Parsed::Absent { index, value, memory, permit, work }),
            }
        };
        match self.process(tenant.clone(), is_long, read).await? {
            Parsed::Done(outcome, admission) => Ok((outcome, admission)),
            Parsed::Absent { index, value, memory, permit, work } => {
                let timeout = choice.timeout.min(own_timeout(&value));
                let acquired = choice.models.acquire::<M>(index, tenant.id, timeout).await;
                let model = acquired.inspect_err(|error| permit.refuse(error))?;
                let read = move |_: &Cancel| {
                    let account = memory.empty();
                    working_for(account, || finish(value, model, memory, permit, work))
                };
                let thread = if is_long { tenant.thread().await } else { None };
                let parsed = match is_long {
                    true => {
                        blocking::run(move |cancel| {
                            let _thread = thread;
                            read(cancel)
                        })
                        .await?
                    }
                    false => read(&Cancel::default())?,
                };
                match parsed {
                    Parsed::Done(outcome, admission) => Ok((outcome, admission)),
                    Parsed::Absent { .. } => Err(ApiError::internal()),
                }
            }
        }
    }

    /// Parses a message of a running request and passes it to `work`, on a blocking thread whatever its length. The
    /// memory is held until the work is done.
    pub(crate) async fn parse_apart<T: Send + 'static>(
        self,
        tenant: Arc<Tenant>,
        work: impl FnOnce(Json) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.process(tenant, true, move |value, _held| value.and_then(work)).await
    }

    /// Parses the body and passes it to `work` with the memory that it holds, on a blocking thread if it `is_long`.
    async fn process<T: Send + 'static>(
        self,
        tenant: Arc<Tenant>,
        is_long: bool,
        work: impl FnOnce(Result<Json, ApiError>, HeldMemory) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let ReadBody { name, bytes, mut memory } = self;
        // Each tenant has a bounded number of these threads, so that one tenant's long texts do not delay another's.
        let thread = if is_long { tenant.thread().await } else { None };
        let process = move |cancel: &Cancel| {
            let _thread = thread;
            let value = cancel.check().and_then(|()| memory.grow_to(bytes.capacity() + work_bytes(&bytes)));
            let value = value.and_then(|()| Json::parse(&bytes).map_err(|error| error.of(name)));
            drop(bytes);
            let value = value.and_then(|value| cancel.check().map(|()| value));
            working_for(memory.empty(), || work(value, memory))
        };
        if is_long { blocking::run(process).await } else { process(&Cancel::default()) }
    }
}

/// Returns the time that a request gives itself (`timeout_ms`); a wrong value is reported when the request is read.
fn own_timeout(body: &Json) -> Duration {
    let Json::Object(entries) = body else { return Duration::MAX };
    let given = entries.iter().find_map(|(name, value)| match value {
        Json::Integer(time) if name == "timeout_ms" => u64::try_from(*time).ok(),
        _ => None,
    });
    given.map_or(Duration::MAX, Duration::from_millis)
}

/// Passes a parsed body and its model to `work`.
fn finish<T, M: Served, W: FnOnce(Json, &Lease<M>) -> Result<T, ApiError>>(
    value: Json,
    model: Lease<M>,
    memory: HeldMemory,
    mut permit: Permit,
    work: W,
) -> Result<Parsed<T, M, W>, ApiError> {
    let outcome = work(value, &model).inspect_err(|error| permit.refuse(error))?;
    permit.keep(memory);
    Ok(Parsed::Done(outcome, Admission { permit, model }))
}

/// Memory that is taken at most while a body is parsed and its text is rendered and encoded.
fn work_bytes(json: &[u8]) -> usize {
    let (mut in_string, mut num_values, mut text_len) = (false, 1_usize, 0_usize);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => {
                bytes.next();
                text_len += 2;
            }
            _ if in_string => text_len += 1,
            // Every value but the first follows one of these, or is the name of an entry.
            b',' | b'[' | b'{' => num_values += 1,
            _ => {}
        }
    }
    TEXT_FACTOR * text_len + VALUE_BYTES * num_values.min(MAX_VALUES)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use prometheus_client::metrics::gauge::Gauge;

    use super::*;
    use crate::limits::client_memory::ClientMemory;
    use crate::limits::keys_file::TenantConfig;
    use crate::limits::tenants::Tenants;

    fn body(tenant: &Tenant, bytes: Vec<u8>) -> ReadBody {
        let memory = Arc::new(ClientMemory::new(1 << 30, 2, Gauge::default()));
        ReadBody { name: "body", bytes, memory: HeldMemory::none(&memory, tenant) }
    }

    fn long_body(tenant: &Tenant) -> ReadBody {
        body(tenant, [b"{}".to_vec(), vec![b' '; LONG_BODY_BYTES]].concat())
    }

    /// Compiling a grammar takes long, so it must not run on a thread that serves other clients.
    #[test]
    fn grammars_are_compiled_on_blocking_threads() {
        let tenants = Tenants::open();
        let tenant = tenants.find(None).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let leaves_thread = |text: &str| {
            let body = body(&tenant, text.into());
            let is_long = body.takes_long();
            let here = std::thread::current().id();
            let work = move |_, _| Ok(std::thread::current().id() != here);
            runtime.block_on(body.process(tenant.clone(), is_long, work)).unwrap()
        };
        for text in [
            r#"{"response_format":{"type":"json_object"}}"#,
            r#"{"structured_outputs":{"regex":"a"}}"#,
            r#"{"tools":[]}"#,
            r#"{"tool\u0073":[]}"#,
            r#"{"text":{"format":{"type":"json_schema"}}}"#,
            r#"{"output_format":{}}"#,
            r#"{"output_config":{"format":{}}}"#,
            r#"{"format":"json"}"#,
            r#"{"json_schema":{}}"#,
            r#"{"grammar":"root ::= \"a\""}"#,
        ] {
            assert!(leaves_thread(text), "{text}");
        }
        assert!(!leaves_thread(
            r#"{"messages":[{"role":"user","content":"format these tools, please"}],"max_tokens":5}"#
        ));
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
        let num_threads = blocking::num_threads(crate::num_cores());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .max_blocking_threads(num_threads)
            .build()
            .unwrap();
        runtime.block_on(async move {
            // More texts of the first tenant than there are threads, each of which waits until `finish` is dropped.
            let (finish, held) = channel::<()>();
            let held = Arc::new(Mutex::new(held));
            let flood: Vec<_> = (0..2 * num_threads)
                .map(|_| {
                    let (tenant, held) = (a.clone(), held.clone());
                    let body = long_body(&a);
                    let work = move |_| Ok(held.lock().unwrap().recv().is_err());
                    tokio::spawn(async move { body.parse_apart(tenant, work).await.map(drop) })
                })
                .collect();
            tokio::task::yield_now().await;
            let soon = long_body(&b).parse_apart(b.clone(), |_| Ok(5));
            let soon = tokio::time::timeout(Duration::from_secs(60), soon);
            let answer = soon.await.expect("a thread for the second tenant").unwrap();
            assert_eq!(answer, 5);
            assert!(!flood.iter().any(|one| one.is_finished()), "the first tenant's texts must still be waiting");
            drop(finish);
            for one in flood {
                assert_eq!(one.await.unwrap(), Ok(()));
            }
        });
    }
}
