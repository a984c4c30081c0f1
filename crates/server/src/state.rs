//! State that all routes share: models, tenants, limits, metrics and the phase of shutdown.

use pellucid_engine::{EngineStats, Liveness};
use pellucid_generate::{LoadedEmbedder, LoadedModel};

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::connection::client_address::Proxies;
use crate::http::drain::Drain;
use crate::limits::client_memory::ClientMemory;
use crate::limits::failed_keys::FailedKeys;
use crate::limits::shared_tenants::SharedTenants;
use crate::log_losses::LogLosses;
use crate::metrics::Metrics;
use crate::pages::base_url::own_url;
use crate::responses::store::ResponseStore;

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
}

/// The models of a server.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one exists for each server")]
pub enum ServedModels {
    /// A model that generates text.
    Generator(LoadedModel),
    /// A model that computes vectors.
    Embedder(LoadedEmbedder),
    /// One of each.
    Both(LoadedModel, LoadedEmbedder),
}

impl From<LoadedModel> for ServedModels {
    fn from(model: LoadedModel) -> ServedModels {
        ServedModels::Generator(model)
    }
}

/// The model that generates text. `http::router` refuses every route that needs it on a server that has none.
#[derive(Debug)]
pub(crate) struct Generator(Option<LoadedModel>);

impl Generator {
    pub(crate) fn get(&self) -> Option<&LoadedModel> {
        self.0.as_ref()
    }
}

impl Deref for Generator {
    type Target = LoadedModel;

    fn deref(&self) -> &LoadedModel {
        self.0.as_ref().expect("the router refuses routes that need a generator on a server without one")
    }
}

/// State shared by all routes.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) model: Generator,
    /// The model that computes vectors.
    pub(crate) embedder: Option<Arc<LoadedEmbedder>>,
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
        let Options { limits, tenants, proxies, cors_origins, loopback_hosts_only, vllm_metrics, device, log_losses } =
            options;
        let (model, embedder) = match models {
            ServedModels::Generator(model) => (Some(model), None),
            ServedModels::Embedder(embedder) => (None, Some(Arc::new(embedder))),
            ServedModels::Both(model, embedder) => (Some(model), Some(Arc::new(embedder))),
        };
        let names = model.iter().map(|model| &model.id).chain(embedder.iter().map(|embedder| &embedder.id));
        let metrics = Metrics::new(names.into_iter().next().map_or("", String::as_str), vllm_metrics, log_losses);
        let held = metrics.client_memory.clone();
        let client_memory = Arc::new(ClientMemory::new(limits.max_client_memory, tenants.current().len(), held));
        let stored = metrics.stored_bytes.clone();
        let responses = ResponseStore::new(limits.max_stored_bytes, tenants.current().len(), stored);
        let resized = [client_memory.clone(), responses.memory().clone()];
        let of_generator = model.as_ref().map(|model| model.engine.num_tenants_setter());
        let of_embedder = embedder.as_ref().map(|embedder| embedder.handle.num_tenants_setter());
        let set_num_tenants = move |num_tenants: usize| {
            of_generator.iter().for_each(|set| set(num_tenants));
            of_embedder.iter().for_each(|set| set(num_tenants));
        };
        set_num_tenants(tenants.current().len());
        tenants.on_change(move |num_tenants| {
            resized.iter().for_each(|memory| memory.set_num_tenants(num_tenants));
            set_num_tenants(num_tenants);
        });
        App {
            failed_keys: FailedKeys::new(limits.max_wrong_keys),
            metrics,
            client_memory,
            model: Generator(model),
            embedder,
            responses,
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

    /// Returns the state of the loops that compute: stopped if one is, else that of the longest step.
    pub(crate) fn liveness(&self) -> Liveness {
        let generator = self.model.get().map(|model| model.engine.liveness());
        let embedder = self.embedder.as_ref().map(|embedder| embedder.handle.liveness());
        let all = [generator, embedder];
        if all.contains(&Some(Liveness::Stopped)) {
            return Liveness::Stopped;
        }
        let steps = all.into_iter().flatten().filter_map(|liveness| match liveness {
            Liveness::Stepping(time) => Some(time),
            _ => None,
        });
        steps.max().map_or(Liveness::Idle, Liveness::Stepping)
    }

    /// Returns the statistics of the engine; zeros on a server that generates no text.
    pub(crate) fn engine_stats(&self) -> EngineStats {
        self.model.get().map_or_else(EngineStats::default, |model| model.engine.last_stats())
    }

    /// Returns every name of every model, as requests use them.
    pub(crate) fn model_names(&self) -> Vec<&str> {
        let generator = self.model.get().into_iter().flat_map(LoadedModel::names);
        generator.chain(self.embedder.iter().flat_map(|embedder| embedder.names())).collect()
    }
}
