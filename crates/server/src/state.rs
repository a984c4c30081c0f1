//! What every route shares: the model, the tenants, the limits, the numbers, and whether the server is leaving.

use pellucid_generate::LoadedModel;

use std::sync::Arc;
use std::time::Duration;

use crate::drain::Drain;
use crate::metrics::Metrics;
use crate::tenants::Tenants;

/// Bounds on what clients may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being read or waited with, together.
    pub max_bodies_bytes: usize,
    /// For the whole body to arrive.
    pub body_timeout: Duration,
    /// For a connection's next request to begin and its headers to arrive.
    pub header_timeout: Duration,
    /// For a client to take what was written to it.
    pub write_timeout: Duration,
    /// For a reply to be complete.
    pub request_timeout: Duration,
    /// Connections at once.
    pub max_connections: usize,
    /// A step of the engine that takes longer makes `/ready` fail.
    pub watchdog: Duration,
    /// For replies in flight to end when the server is told to leave.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_body_bytes: 4 << 20,
            max_bodies_bytes: 256 << 20,
            body_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
            max_connections: 16_384,
            watchdog: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(120),
        }
    }
}

/// How a server answers.
#[derive(Debug)]
pub struct Options {
    pub limits: Limits,
    pub tenants: Tenants,
    /// Web pages of these origins may ask; without any, browsers keep other pages out.
    pub cors_origins: Vec<String>,
    /// Refuse requests whose `Host` is not this machine: a page in the user's browser must not reach a server without keys by giving
    /// its own name the address 127.0.0.1.
    pub loopback_hosts_only: bool,
    /// Add the names that inference gateways read from vLLM.
    pub vllm_metrics: bool,
}

/// Shared by all routes.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) model: LoadedModel,
    pub(crate) tenants: Tenants,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) drain: Drain,
    /// In units of `BODY_UNIT` bytes.
    pub(crate) bodies: Arc<tokio::sync::Semaphore>,
    pub(crate) cors_origins: Vec<String>,
    pub(crate) loopback_hosts_only: bool,
}

pub(crate) type SharedApp = Arc<App>;

/// Bodies are counted in pieces of so many bytes.
pub(crate) const BODY_UNIT: usize = 4096;

impl App {
    pub(crate) fn new(model: LoadedModel, options: Options, drain: Drain) -> App {
        let Options { limits, tenants, cors_origins, loopback_hosts_only, vllm_metrics } = options;
        App {
            metrics: Metrics::new(&model.id, vllm_metrics),
            bodies: Arc::new(tokio::sync::Semaphore::new(limits.max_bodies_bytes.div_ceil(BODY_UNIT))),
            model,
            tenants,
            limits,
            drain,
            cors_origins,
            loopback_hosts_only,
        }
    }
}
