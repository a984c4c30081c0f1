//! The server: OpenAI's API over HTTP, with streams, WebSockets, tenants and metrics. HTTP and JSON exist in this crate
//! only.
//!
//! The path of a request: `http::listen` accepts the connection, `http::router` gives the request an id, `http::caller`
//! authenticates it, `http::routes` calls its handler. `http::body` and `openai` read it field by field and check it,
//! `limits` applies the tenant's limits, `reply::respond` submits it. `pellucid_generate` turns tokens into text, and
//! `openai::reply_json` writes that as JSON, whole or through `reply::sse` or `reply::websocket`.
//!
//! The crate knows no device and no model file: the program passes a loaded model and options.
#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod anthropic;
mod connection;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod http;
mod kv_events;
mod limits;
mod llama_cpp;
mod log_losses;
mod metrics;
mod models;
mod ollama;
mod openai;
mod pages;
mod random;
mod reply;
mod responses;
mod running;
mod spans;
mod state;
mod translation;

use std::io;
use std::sync::Arc;

pub use connection::client_address::{ForwardedHeader, Network, Proxies};
pub use connection::tls::{PemFile, Tls, TlsError};
pub use http::drain::Drain;
pub use http::listen::Ended;
pub use kv_events::KvEventPublisher;
pub use limits::keys_file::{KeysError, KeysFile, TenantConfig};
pub use limits::shared_tenants::{Reloaded, SharedTenants};
pub use limits::tenants::Tenants;
pub use log_losses::LogLosses;
pub use models::{FindModels, KeepAlive, LoadModel, ModelSource, OpenModel, Purpose, ServedModel, ServedModels};
pub use ollama::pull::{ModelPuller, PullProgress, PullReport};
pub use responses::database::ResponseDatabase;
pub use spans::exporter::{SinkError, SpanExporter, SpanSink};
pub use state::{Limits, Options};

/// Maximum threads that serve connections. They parse, encode and write; the model's arithmetic has its own threads.
const MAX_WORKERS: usize = 4;

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Serves models until `drain` shuts the server down or the engine stops.
pub fn run(
    models: impl Into<ServedModels>,
    options: Options,
    listener: std::net::TcpListener,
    tls: Option<Tls>,
    drain: Drain,
) -> io::Result<Ended> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(num_cores().clamp(1, MAX_WORKERS))
        .max_blocking_threads(http::blocking::num_threads(num_cores()))
        // A pool that has a thread never fails to start one, so its first thread stays for good.
        .thread_keep_alive(std::time::Duration::from_secs(365 * 86_400))
        .thread_name("http")
        .enable_io()
        .enable_time()
        .build()?;
    let app = Arc::new(state::App::new(models.into(), options, drain, listener.local_addr().ok(), tls.is_some()));
    let router = http::router::router(&app);
    runtime.block_on(async move {
        let _ = http::blocking::run(|_| Ok(())).await;
        app.models.load_at_start();
        tokio::spawn(app.models.clone().unload_expired());
        tokio::spawn(app.models.clone().keep_looking());
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok(http::listen::serve(listener, tls, router, app).await)
    })
}
