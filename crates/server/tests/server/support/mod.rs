//! A server in this process with the tiny model, and an HTTP client that shows the exact bytes of responses.

// Each of the two test programs uses a part of this file.
#![allow(dead_code, unused_imports, unreachable_pub, missing_debug_implementations)]

pub mod embedder;
mod error;
mod faulty_model;
pub mod socket;
pub mod stream;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

pub use error::check_error;
use faulty_model::FaultyModel;
pub use faulty_model::{Faults, LOST_DEVICE, NO_MEMORY};
use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{Drafter, Engine, EngineHandle, EngineOptions, Overcommit, SpeculationOptions};
use pellucid_generate::{Guards, LoadedModel, ModelDetails};
use pellucid_model::{BLOCK_LEN, Decoder, LoadOptions, Model};
use pellucid_sampling::SamplingDefaults;
use pellucid_server::{
    Drain, Ended, Limits, Options, Proxies, ResponseDatabase, ServedModels, SharedTenants, TenantConfig, Tenants,
};
use pellucid_testing::{TINY_TEMPLATE, TinyModel, cpu};
use pellucid_tokenizer::{ChatTemplate, DateTime, Tokenizer};
use serde_json::Value;
use stream::Stream;

pub const MODEL: &str = "tiny";
pub const CONTEXT: usize = 256;

/// Options of a test's server.
pub struct Setup {
    pub tenants: Vec<TenantConfig>,
    pub limits: Limits,
    pub proxies: Proxies,
    pub max_sequences: usize,
    pub max_waiting: usize,
    pub cors_origins: Vec<String>,
    pub loopback_hosts_only: bool,
    pub has_template: bool,
    pub template: &'static str,
    pub context_len: usize,
    pub tiny: TinyModel<'static>,
    pub model_id: &'static str,
    pub aliases: Vec<String>,
    pub sampling: SamplingDefaults,
    pub drafter: Option<Box<dyn Drafter>>,
    pub guards: Guards,
    pub purpose: Purpose,
    pub puller: Option<Arc<dyn pellucid_server::ModelPuller>>,
    pub responses_db: Option<std::path::PathBuf>,
}

/// The models of a test's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Text,
    Vectors,
    Both,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            tenants: Vec::new(),
            limits: Limits::default(),
            proxies: Proxies::default(),
            max_sequences: 8,
            max_waiting: 32,
            cors_origins: Vec::new(),
            loopback_hosts_only: true,
            has_template: true,
            template: TINY_TEMPLATE,
            context_len: CONTEXT,
            tiny: TinyModel::default(),
            model_id: MODEL,
            aliases: Vec::new(),
            sampling: SamplingDefaults::default(),
            drafter: None,
            guards: Guards::default(),
            purpose: Purpose::Text,
            puller: None,
            responses_db: None,
        }
    }
}

impl Setup {
    /// Returns the tenants, or one for everybody.
    pub fn shared_tenants(&mut self) -> SharedTenants {
        let tenants = std::mem::take(&mut self.tenants);
        SharedTenants::from(if tenants.is_empty() { Tenants::open() } else { Tenants::new(tenants).unwrap() })
    }

    /// Returns the options of the server.
    pub fn options(&self, tenants: &SharedTenants) -> Options {
        Options {
            limits: self.limits.clone(),
            tenants: tenants.clone(),
            proxies: self.proxies.clone(),
            cors_origins: self.cors_origins.clone(),
            loopback_hosts_only: self.loopback_hosts_only,
            vllm_metrics: true,
            puller: self.puller.clone(),
            responses_db: self.responses_db.as_deref().map(|path| ResponseDatabase::open(path).unwrap()),
            device: "a device for tests".into(),
            log_losses: Arc::default(),
            spans: None,
            kv_events: None,
        }
    }

    /// Loads the tiny model.
    pub fn load(self, tenants: &SharedTenants, faults: Arc<Faults>) -> LoadedModel {
        let (setup, folder) = (self, tempfile::tempdir().unwrap());
        let (template, context_len) = (setup.has_template.then_some(setup.template), setup.context_len);
        let model = TinyModel { template, context_len: Some(context_len), ..setup.tiny };
        model.write(folder.path()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
        let template = checkpoint.chat_template().map(|source| ChatTemplate::compile(source, &tokenizer).unwrap());
        let backend = cpu(Isa::best(), 1).unwrap();
        let options = LoadOptions { context_len: Some(context_len), ..LoadOptions::default() };
        let model = Decoder::load(&checkpoint, backend.clone(), options, &mut |_, _| ()).unwrap();
        let model = FaultyModel { model, faults };
        let vocab_size = model.config().vocab_size;
        let options = EngineOptions {
            num_blocks: context_len / BLOCK_LEN * setup.max_sequences,
            block_len: BLOCK_LEN,
            kv_dtype: pellucid_tensor::DType::F32,
            max_sequences: setup.max_sequences,
            step_tokens: 64,
            chunk_len: 32,
            max_waiting: setup.max_waiting,
            overcommit: Overcommit::Unbounded { growth: 2 * BLOCK_LEN },
            secret: [7; 32],
            snapshot_distance: None,
        };
        let mut engine = Engine::new(Box::new(model), backend, options).unwrap();
        // Without a length, the engine would choose one by the time that steps take.
        engine.set_speculation(SpeculationOptions { fixed_draft_len: Some(8), ..SpeculationOptions::OFF });
        setup.drafter.into_iter().for_each(|drafter| engine.add_drafter(drafter));
        for (tenant, tokens) in tenants.kv_quotas() {
            let blocks = engine.cache().blocks_for(tokens as usize);
            engine.cache_mut().set_quota(tenant, blocks);
        }
        LoadedModel {
            id: setup.model_id.into(),
            aliases: setup.aliases,
            fingerprint: "pellucid-test".into(),
            tokenizer: Arc::new(tokenizer),
            template,
            template_error: None,
            context_len,
            vocab_size,
            sampling: setup.sampling,
            details: ModelDetails { format: "safetensors", family: "llama".into(), ..ModelDetails::default() },
            created: 1_700_000_000,
            grammars: Default::default(),
            thinking: Default::default(),
            guards: setup.guards,
            calling: Default::default(),
            engine: EngineHandle::start(engine),
            now: some_day,
        }
    }
}

pub struct Server {
    pub address: SocketAddr,
    pub drain: Drain,
    pub tenants: SharedTenants,
    faults: Arc<Faults>,
    thread: Option<JoinHandle<Ended>>,
}

pub fn tenant(name: &str, key: &str) -> TenantConfig {
    TenantConfig { name: name.into(), keys: vec![key.into()], ..TenantConfig::default() }
}

fn some_day() -> DateTime {
    DateTime { year: 2026, month: 11, day: 15, hour: 6, minute: 0, second: 0 }
}

impl Server {
    pub fn start() -> Server {
        Server::with(Setup::default())
    }

    pub fn with(mut setup: Setup) -> Server {
        let tenants = setup.shared_tenants();
        let faults = Arc::<Faults>::default();
        let (max_waiting, purpose) = (setup.max_waiting, setup.purpose);
        let options = setup.options(&tenants);
        let model = || setup.load(&tenants, faults.clone());
        let models = match purpose {
            Purpose::Text => ServedModels::from(model()),
            Purpose::Vectors => ServedModels::from(embedder::load(max_waiting)),
            Purpose::Both => ServedModels::new(vec![model().into(), embedder::load(max_waiting).into()]),
        };
        Server::run(models, options, tenants, faults)
    }

    /// Starts a server with any models, whose steps `faults` can hold up.
    pub fn run(models: ServedModels, options: Options, tenants: SharedTenants, faults: Arc<Faults>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let drain = Drain::default();
        let signalled = drain.clone();
        let thread =
            std::thread::spawn(move || pellucid_server::run(models, options, listener, None, signalled).unwrap());
        Server { address, drain, tenants, faults, thread: Some(thread) }
    }

    /// Makes every step of the engine take at least `delay_ms`.
    pub fn slow_down(&self, delay_ms: u64) {
        self.faults.delay_ms.store(delay_ms, Ordering::Relaxed);
    }

    /// Makes the logits of `position` and later positions NaN.
    pub fn fail_from(&self, position: u32) {
        self.faults.nan_from.store(position, Ordering::Relaxed);
    }

    /// Makes every step fail with [`NO_MEMORY`] or [`LOST_DEVICE`]; 0 lets steps succeed again.
    pub fn fail_with(&self, failure: u32) {
        self.faults.failure.store(failure, Ordering::Relaxed);
    }

    /// Holds every step of the engine until [`Server::release_steps`].
    pub fn hold_steps(&self) {
        *self.faults.is_held.lock().unwrap() = true;
    }

    pub fn release_steps(&self) {
        *self.faults.is_held.lock().unwrap() = false;
        self.faults.released.notify_all();
    }

    /// Waits until the server has shut down.
    pub fn ended(mut self) -> Ended {
        self.thread.take().unwrap().join().unwrap()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        // A reply to ten thousand tokens takes half a minute in a debug build on a slow machine.
        stream.set_read_timeout(Some(Duration::from_secs(240))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Sends a request with exactly these headers, and keeps the connection open.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n", self.address);
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if !body.is_empty() || method == "POST" {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // A server that refuses early may close the connection before the body is written.
        let _ = stream.write_all(body);
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        Response::read(&mut BufReader::new(self.send(method, path, headers, body)))
    }

    pub fn get(&self, path: &str) -> Response {
        self.request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &str) -> Response {
        self.request("POST", path, &[("Content-Type", "application/json")], body.as_bytes())
    }

    pub fn post_as(&self, key: &str, path: &str, body: &str) -> Response {
        let bearer = format!("Bearer {key}");
        self.request("POST", path, &[("Content-Type", "application/json"), ("Authorization", &bearer)], body.as_bytes())
    }

    pub fn chat(&self, fields: &str) -> Response {
        self.post("/v1/chat/completions", &chat_body(fields))
    }

    pub fn complete(&self, fields: &str) -> Response {
        self.post("/v1/completions", &completion_body(fields))
    }

    /// Starts a stream and reads its headers.
    pub fn stream(&self, path: &str, body: &str) -> Stream {
        self.stream_with(&[], path, body)
    }

    pub fn stream_with(&self, headers: &[(&str, &str)], path: &str, body: &str) -> Stream {
        let headers = [&[("Content-Type", "application/json")], headers].concat();
        let connection = self.send("POST", path, &headers, body.as_bytes());
        let mut reader = BufReader::new(connection);
        let (status, headers) = read_head(&mut reader);
        assert_eq!(status, 200, "{headers:?}");
        Stream::new(reader)
    }

    /// Returns the value of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        self.metric_as(name, &[])
    }

    pub fn metric_as(&self, name: &str, headers: &[(&str, &str)]) -> f64 {
        let text = self.request("GET", "/metrics", headers, b"").text();
        let line = text.lines().find(|line| line.split([' ', '{']).next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a metric has a value; fails after 10 seconds.
    #[track_caller]
    pub fn until(&self, name: &str, expected: f64) {
        for _ in 0..1000 {
            if self.metric(name) == expected {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{name} is still {}", self.metric(name));
    }

    /// Waits until a path is answered with a status; fails after 10 seconds.
    #[track_caller]
    pub fn until_status(&self, path: &str, expected: u16) {
        for _ in 0..1000 {
            if self.get(path).status == expected {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{path} is still answered with {}", self.get(path).status);
    }

    /// Waits until no sequence runs and no block is in use; fails after 5 seconds.
    pub fn settles(&self) {
        for _ in 0..500 {
            if self.metric("pellucid_kv_blocks_in_use") == 0.0 && self.metric("pellucid_sequences_running") == 0.0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} blocks are still held", self.metric("pellucid_kv_blocks_in_use"));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.release_steps();
            self.drain.signal();
            self.drain.signal();
            let _ = thread.join();
        }
    }
}

/// Returns a chat request with `fields`, which replace the default ones of the same name.
pub fn chat_body(fields: &str) -> String {
    body(
        serde_json::json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 8 }),
        fields,
    )
}

pub fn completion_body(fields: &str) -> String {
    body(serde_json::json!({ "model": MODEL, "prompt": "hello", "max_tokens": 8 }), fields)
}

fn body(usual: Value, fields: &str) -> String {
    let Value::Object(usual) = usual else { unreachable!() };
    let given = if fields.is_empty() { Vec::new() } else { vec![fields.to_owned()] };
    let is_given = |name: &str| fields.contains(&format!("\"{name}\":"));
    let kept = usual.iter().filter(|(name, _)| !is_given(name)).map(|(name, value)| format!("\"{name}\":{value}"));
    format!("{{{}}}", kept.chain(given).collect::<Vec<_>>().join(","))
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    /// Header names are in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Whether the body has arrived to its end; false if the server cut the connection before.
    pub is_complete: bool,
}

fn read_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => return (status, headers),
        }
    }
}

/// Reads one chunk of a chunked body; `None` at the end, or when the connection ends.
fn read_chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    read_chunk_or_end(reader).filter(|chunk| !chunk.is_empty())
}

/// Reads one chunk of a chunked body, which is empty at the end; `None` if the connection ends before.
fn read_chunk_or_end(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let length = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut chunk = vec![0; length + 2];
    reader.read_exact(&mut chunk).ok()?;
    chunk.truncate(length);
    Some(chunk)
}

impl Response {
    pub fn read(reader: &mut impl BufRead) -> Response {
        let (status, headers) = read_head(reader);
        let header = |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let mut body = Vec::new();
        let mut is_complete = true;
        if header("transfer-encoding") == Some("chunked") {
            is_complete = loop {
                match read_chunk_or_end(reader) {
                    None => break false,
                    Some(chunk) if chunk.is_empty() => break true,
                    Some(chunk) => body.extend(chunk),
                }
            };
        } else if let Some(length) = header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            reader.read_exact(&mut body).unwrap();
        } else if status >= 200 {
            let _ = reader.read_to_end(&mut body);
        }
        Response { status, headers, body, is_complete }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Returns the JSON of a reply with status 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Checks the status and the error object of a refusal, and that it reveals no internals. Returns `param` and
    /// `code`.
    #[track_caller]
    pub fn refused(&self, status: u16) -> (Option<String>, Option<String>) {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"), "{}", self.text());
        assert!(self.header("x-request-id").is_some());
        check_error(&self.json())
    }
}
