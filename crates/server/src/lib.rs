//! HTTP and JSON live here and nowhere else: OpenAI's routes over the engine, streams, tenants, metrics.
//!
//! The path of a request: `listen` (a connection) -> `app` (an id, the guards of `caller`) -> `routes` -> `body` and `openai` (read field
//! by field, checked once) -> `respond` (let in by its tenant, submitted to the engine) -> `reply` and `choice` (ids become text) -> `wire`
//! (JSON), whole or through `sse` or `websocket`. It knows no device and no file: the program hands it a loaded model and its options.
#![forbid(unsafe_code)]

mod account;
mod app;
mod body;
mod buckets;
mod caller;
mod drain;
mod error;
mod fields;
mod json;
mod listen;
mod logprobs;
mod metrics;
mod native;
mod openai;
mod openapi;
mod random;
mod reply;
mod respond;
mod routes;
mod schemas;
mod sse;
mod state;
mod tenants;
mod websocket;
mod wire;

use std::io;
use std::sync::Arc;

use pellucid_generate::LoadedModel;

pub use drain::Drain;
pub use listen::{Ended, Tls, TlsError};
pub use random::secret;
pub use state::{Limits, Options};
pub use tenants::{KeysError, KeysFile, TenantConfig, Tenants};

/// Threads that serve connections at most. They parse, encode and write; the arithmetic has threads of its own.
const MAX_WORKERS: usize = 4;
/// Threads for long texts.
const MAX_BLOCKING: usize = 8;

/// Serves until told to leave.
pub fn run(
    model: LoadedModel,
    options: Options,
    listener: std::net::TcpListener,
    tls: Option<Tls>,
    drain: Drain,
) -> io::Result<Ended> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.clamp(1, MAX_WORKERS))
        .max_blocking_threads(MAX_BLOCKING)
        .thread_name("http")
        .enable_io()
        .enable_time()
        .build()?;
    let app = Arc::new(state::App::new(model, options, drain));
    let router = app::router(&app);
    runtime.block_on(async move {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok(listen::serve(listener, tls, router, app).await)
    })
}
