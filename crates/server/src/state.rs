//! State that all routes share: models, tenants, limits, metrics and the phase of shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use pellucid_engine::Liveness;

use crate::connection::client_address::Proxies;
use crate::http::drain::Drain;
use crate::http::error::ApiError;
use crate::kv_events::KvEventPublisher;
use crate::limits::client_memory::ClientMemory;
use crate::limits::failed_keys::FailedKeys;
use crate::limits::shared_tenants::SharedTenants;
use crate::limits::tenants::Tenant;
use crate::log_losses::LogLosses;
use crate::metrics::Metrics;
use crate::models::lease::TextLease;
use crate::models::registry::Models;
use crate::models::{Purpose, ServedModel, ServedModels};
use crate::ollama::pull::ModelPuller;
use crate::pages::base_url::own_url;
use crate::responses::database::ResponseDatabase;
use crate::responses::store::ResponseStore;
use crate::running::RunningRequests;
use crate::spans::exporter::SpanExporter;

/// Limits on what clients may use.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum bytes of a request's body.
    pub max_body_bytes: usize,
    /// Maximum bytes that clients make the server hold: bodies, messages, and replies that are not read yet.
    pub max_client_memory: usize,
    /// Maximum bytes of stored responses, which tenants share.
    pub max_stored_bytes: usize,
    /// Maximum time for the whole body to arrive.
    pub body_timeout: Duration,
    /// Maximum time until a connection's next request begins and its headers have arrived.
    pub header_timeout: Duration,
    /// Maximum time that a client may accept no byte of a response.
    pub write_timeout: Duration,
    /// Minimum bytes per second at which a body must arrive and a reply must be read, on average over `write_timeout`
    /// for replies and a third of `body_timeout` for bodies; 0 is no minimum.
    pub min_transfer_rate: u32,
    /// Maximum time until a reply is complete.
    pub request_timeout: Duration,
    /// Maximum open connections. The limit of open files may allow fewer.
    pub max_connections: usize,
    /// Maximum open connections of one address, in addition to the rule that an address may not have more than are
    /// free. Neither applies to loopback addresses and declared proxies.
    pub max_connections_per_address: Option<usize>,
    /// Maximum wrong keys per minute and address.
    pub max_wrong_keys: u32,
    /// `/ready` fails when a step of the engine takes longer.
    pub watchdog: Duration,
    /// Maximum time for replies in flight to complete at shutdown.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_body_bytes: 4 << 20,
            max_client_memory: 256 << 20,
            max_stored_bytes: 64 << 20,
            body_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            min_transfer_rate: 1024,
            request_timeout: Duration::from_secs(600),
            max_connections: 16_384,
            max_connections_per_address: None,
            max_wrong_keys: 20,
            watchdog: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(120),
        }
    }
}

impl Limits {
    /// Time over which the rate of a body is averaged.
    pub(crate) fn body_grace(&self) -> Duration {
        if self.min_transfer_rate == 0 { self.body_timeout } else { self.body_timeout / 3 }
    }
}

/// Options of a server.
#[derive(Debug)]
pub struct Options {
    /// Limits for all clients together.
    pub limits: Limits,
    /// Keys, and limits by tenant. A clone can replace them while the server runs.
    pub tenants: SharedTenants,
    /// Proxies in front of the server.
    pub proxies: Proxies,
    /// Web pages of these origins may send requests (CORS); `*` allows all.
    pub cors_origins: Vec<String>,
    /// Whether to refuse requests whose `Host` is not this machine. Protects servers without keys against DNS
    /// rebinding, in which a web page lets its own name resolve to 127.0.0.1.
    pub loopback_hosts_only: bool,
    /// Whether to export metrics under vLLM's names too, which inference gateways read.
    pub vllm_metrics: bool,
    /// The device that computes, in words, for the page of a server without keys.
    pub device: String,
    /// Lines of the log that were lost, which the program counts and the metrics report.
    pub log_losses: Arc<LogLosses>,
    /// Exports spans of requests to OpenTelemetry; `None` records none.
    pub spans: Option<Arc<SpanExporter>>,
    /// Publishes changes of the prefix cache, of which the metrics report counts.
    pub kv_events: Option<Arc<KvEventPublisher>>,
    /// Downloads models for `/api/pull`; without it, the route is refused.
    pub puller: Option<Arc<dyn ModelPuller>>,
    /// Keeps stored responses beyond the life of the process.
    pub responses_db: Option<ResponseDatabase>,
}

/// State shared by all routes.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) models: Arc<Models>,
    pub(crate) tenants: SharedTenants,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) drain: Drain,
    pub(crate) proxies: Proxies,
    pub(crate) failed_keys: FailedKeys,
    /// Budget for all bytes that clients make the server hold.
    pub(crate) client_memory: Arc<ClientMemory>,
    /// Responses that clients can continue.
    pub(crate) responses: ResponseStore,
    /// Requests that are being generated, for operators.
    pub(crate) running: RunningRequests,
    pub(crate) spans: Option<Arc<SpanExporter>>,
    pub(crate) puller: Option<Arc<dyn ModelPuller>>,
    /// Locked while a model is pulled: one at a time.
    pub(crate) pulling: Arc<tokio::sync::Mutex<()>>,
    pub(crate) cors_origins: Vec<String>,
    pub(crate) loopback_hosts_only: bool,
    pub(crate) device: String,
    /// Scheme, host and port at which the server listens.
    pub(crate) own_url: String,
    /// Whether connections are encrypted.
    pub(crate) has_tls: bool,
}

pub(crate) type SharedApp = Arc<App>;

impl App {
    pub(crate) fn new(
        models: ServedModels,
        options: Options,
        drain: Drain,
        address: Option<SocketAddr>,
        has_tls: bool,
    ) -> App {
        let Options {
            limits,
            tenants,
            proxies,
            cors_origins,
            loopback_hosts_only,
            vllm_metrics,
            device,
            log_losses,
            spans,
            kv_events,
            puller,
            responses_db,
        } = options;
        let names = models.models.iter().map(|model| model.id.clone()).collect();
        let mut metrics = Metrics::new(names, models.finder.is_some(), vllm_metrics, log_losses);
        if let Some(exporter) = &spans {
            metrics.add_spans(exporter.clone());
        }
        if let Some(publisher) = kv_events {
            metrics.add_kv_events(publisher);
        }
        let models = Arc::new(Models::new(models, metrics.models.clone()));
        let held = metrics.client_memory.clone();
        let client_memory = Arc::new(ClientMemory::new(limits.max_client_memory, tenants.current().len(), held));
        let stored = metrics.stored_bytes.clone();
        let mut responses = ResponseStore::new(limits.max_stored_bytes, tenants.current().len(), stored);
        if let Some(database) = responses_db {
            responses = responses.with_database(database, &tenants);
        }
        let resized = [client_memory.clone(), responses.memory().clone()];
        models.set_num_tenants(tenants.current().len());
        let served = models.clone();
        tenants.on_change(move |num_tenants| {
            resized.iter().for_each(|memory| memory.set_num_tenants(num_tenants));
            served.set_num_tenants(num_tenants);
        });
        App {
            failed_keys: FailedKeys::new(limits.max_wrong_keys),
            metrics,
            client_memory,
            models,
            responses,
            running: RunningRequests::default(),
            spans,
            puller,
            pulling: Arc::default(),
            tenants,
            limits,
            drain,
            proxies,
            cors_origins,
            loopback_hosts_only,
            device,
            own_url: own_url(address, has_tls),
            has_tls,
        }
    }

    /// Returns the state of the loops that compute.
    pub(crate) fn liveness(&self) -> Liveness {
        self.models.liveness()
    }

    /// Returns every name of every model, as requests use them.
    pub(crate) fn model_names(&self) -> Vec<&str> {
        self.models.entries().iter().flat_map(ServedModel::names).collect()
    }

    /// Whether a tenant may see what other tenants do.
    pub(crate) fn sees_activity(&self, tenant: &Tenant) -> bool {
        self.tenants.current().check_metrics(tenant).is_ok()
    }

    /// Returns the first model that generates text, for routes whose requests name none. Waits until it is loaded.
    pub(crate) async fn first_text(&self, tenant: &Tenant) -> Result<TextLease, ApiError> {
        match self.models.first(Purpose::Text, tenant) {
            Some(index) => self.models.acquire(index, tenant.id, self.limits.request_timeout).await,
            None => {
                let message = "no model that generates text exists for this key";
                Err(ApiError::refused(StatusCode::NOT_FOUND, "model_not_found", message))
            }
        }
    }
}
