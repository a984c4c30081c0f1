//! The flags of `serve`. Each can also be set in the config file and in the environment; see `flags/setting_layers.rs`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use pellucid_engine::Overcommit;
use pellucid_server::{ForwardedHeader, KeepAlive, Limits, Network, Proxies, ResponseDatabase};

use super::{DEFAULT_HOST, KvEventArgs, SpanArgs};
use crate::commands::embed::PoolingArgs;
use crate::flags::byte_size;
use crate::flags::chat_template::TemplateArgs;
use crate::flags::compute::ComputeArgs;
use crate::flags::guard::GuardArgs;
use crate::flags::sampling::SamplingArgs;
use crate::flags::speculation::SpeculationArgs;
use crate::flags::usage_error::OrUsage;
use crate::terminal::log::LogFormat;

/// Serve models over HTTP: APIs of OpenAI, Anthropic, Ollama and llama.cpp
///
/// Every flag can also be set in the file of --config (`port = 8000`) and in
/// the environment (PELLUCID_PORT=8000). Flags override the environment, the
/// environment overrides the file, the file overrides the defaults.
///
/// The sampling flags are defaults of requests that do not give these options.
/// Without a flag, the model's own recommendation applies, or else OpenAI's
/// defaults: temperature 1, everything else neutral. /v1/models shows them.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ServeArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model;
    /// may be given again, or be a folder of models: requests choose by name.
    /// NAME=PATH or NAME,ALIAS=PATH gives the names
    /// [default: qwen2.5-coder-1.5b, 1.1 GB, downloaded on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    pub(super) model: Vec<String>,

    #[command(flatten)]
    pub(super) several: SeveralArgs,

    /// Name of the model in requests [default: that of --model]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) served_model_name: Option<String>,

    /// Further name by which requests may call the model; replies have
    /// the name above; may be given again
    #[arg(long, verbatim_doc_comment, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) alias: Vec<String>,

    /// Second model, which computes vectors (/v1/embeddings, /v1/rerank);
    /// --model may also be such a model, and is then the only one
    #[arg(long, verbatim_doc_comment, value_name = "MODEL")]
    pub(super) embedding_model: Option<String>,

    #[command(flatten)]
    pub(super) pooling: PoolingArgs,

    #[command(flatten)]
    pub(super) template: TemplateArgs,

    /// Config file in TOML with names like the flags
    /// [default: PELLUCID_CONFIG]
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Address to listen at
    #[arg(long, value_name = "ADDRESS", default_value_t = DEFAULT_HOST, value_parser = address)]
    pub(super) host: IpAddr,

    /// Port to listen at; 0 is any free port
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(super) port: u16,

    /// Open the page in the browser, as `pellucid open` does
    #[arg(long)]
    pub(super) open: bool,

    /// Maximum sequences in a batch
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number(1, 4096))]
    pub(super) max_sequences: usize,

    /// Maximum requests that wait; further ones, and those beyond a tenant's share, get 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number(1, 65_536))]
    pub(super) max_waiting: usize,

    /// Requests that may start before there is KV memory for their maximum
    /// length: never (none), unbounded (those without max_tokens, which
    /// reserve 256 tokens at a time) or always (all). When memory runs out,
    /// a request is preempted and recomputed later, with the same reply
    #[arg(long, verbatim_doc_comment, value_name = "WHO", default_value = "unbounded")]
    pub(super) overcommit: OvercommitArg,

    /// File with a system prompt whose cached prefix all tenants share
    /// [default: no prefix is shared between tenants]
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    pub(super) shared_system: Option<PathBuf>,

    #[command(flatten)]
    access: AccessArgs,

    #[command(flatten)]
    bounds: BoundArgs,

    #[command(flatten)]
    pub(super) guard: GuardArgs,

    /// Add metrics under the names of vLLM, for inference gateways
    #[arg(long, help_heading = "Operations")]
    pub(super) vllm_metrics: bool,

    /// Format of the log: text or json
    #[arg(
        long,
        help_heading = "Operations",
        value_name = "FORM",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub(super) log_format: LogFormat,

    /// Minimum level to log: error, warn, info or debug
    #[arg(
        long,
        help_heading = "Operations",
        value_name = "LEVEL",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub(super) log_level: LogLevel,

    #[command(flatten)]
    pub(super) spans: SpanArgs,

    #[command(flatten)]
    pub(super) kv_events: KvEventArgs,

    /// Defaults of requests that do not give these options.
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,

    #[command(flatten)]
    pub(super) speculation: SpeculationArgs,

    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

/// Bounds on the models that are loaded at the same time. A single model is loaded as long as the server runs, unless
/// one of these flags is given.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Several models")]
pub(crate) struct SeveralArgs {
    /// Maximum memory of all loaded models: weights, keys and values, and
    /// steps. The least recently used is unloaded when another is needed
    /// [default: 4/5 of the free memory]
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", value_parser = byte_size::parse)]
    pub(super) max_memory: Option<u64>,

    /// Maximum number of loaded models
    /// [default: as many as fit]
    #[arg(long, verbatim_doc_comment, value_name = "N", value_parser = number(1, 65_536))]
    pub(super) max_models: Option<usize>,

    /// Time that an unused model stays loaded, such as 5m; 0 unloads it
    /// after its last request
    /// [default: until its memory is needed]
    #[arg(long, verbatim_doc_comment, value_name = "TIME", allow_hyphen_values = true)]
    pub(super) keep_alive: Option<KeepAlive>,

    /// Settings of single models in TOML: a table for each, with context,
    /// kv-memory, chat-template and sampling options
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    pub(super) model_settings: Option<PathBuf>,
}

impl SeveralArgs {
    /// Whether a flag is given.
    pub(super) fn is_given(&self) -> bool {
        self.max_memory.is_some()
            || self.max_models.is_some()
            || self.keep_alive.is_some()
            || self.model_settings.is_some()
    }
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Key that requests must send (prefer PELLUCID_API_KEY: other
    /// users of the machine can see flags)
    #[arg(long, verbatim_doc_comment, value_name = "KEY")]
    pub(super) api_key: Option<String>,

    /// Keys, tenants and their limits, in TOML or JSON
    #[arg(long, value_name = "FILE")]
    pub(super) keys_file: Option<PathBuf>,

    /// Serve the network without keys: everyone who can reach it may use it
    #[arg(long)]
    pub(super) allow_unauthenticated_network: bool,

    /// Certificate chain in PEM, for HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(super) tls_cert: Option<PathBuf>,

    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(super) tls_key: Option<PathBuf>,

    /// Address or range (10.0.0.0/8) of a proxy in front of the server,
    /// whose header says where a request comes from; may be given again
    /// [default: the header is ignored]
    #[arg(long, verbatim_doc_comment, value_name = "CIDR")]
    trusted_proxy: Vec<Network>,

    /// Header that trusted proxies set: x-forwarded-for or forwarded
    #[arg(
        long,
        value_name = "NAME",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        requires = "trusted_proxy"
    )]
    forwarded_header: ForwardedHeaderArg,

    /// Maximum wrong keys per minute and address; further keys from there
    /// get 429 unless they were valid there before
    #[arg(long, verbatim_doc_comment, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_wrong_keys: u32,

    /// Allow requests from web pages of this origin (scheme, host and
    /// port, no path), or of any origin (*); may be given again
    #[arg(long, verbatim_doc_comment, value_name = "ORIGIN", value_parser = origin)]
    pub(super) cors_origin: Vec<String>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Bounds")]
pub(crate) struct BoundArgs {
    /// Maximum bytes of a request's body; more get 413
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = number(1024, 1 << 30))]
    max_body_bytes: usize,

    /// Maximum bytes that clients make the server hold: bodies, messages and
    /// unread replies; more get 503, a tenant above its share gets 429
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", default_value = "256MiB", value_parser = byte_size::parse)]
    max_client_memory: u64,

    /// Maximum bytes of stored responses (/v1/responses), which tenants
    /// share; the least recently used of a tenant are dropped
    #[arg(long, verbatim_doc_comment, value_name = "SIZE", default_value = "64MiB", value_parser = byte_size::parse)]
    max_stored_bytes: u64,

    /// SQLite file that keeps stored responses beyond a restart; made if it
    /// does not exist
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    responses_db: Option<PathBuf>,

    /// Maximum open connections; beyond it the longest idle one is closed,
    /// or the new one gets 503. The limit of open files may allow fewer
    #[arg(long, verbatim_doc_comment, value_name = "N", default_value_t = 16_384, value_parser = number(1, 1 << 20))]
    max_connections: usize,

    /// Maximum open connections of an address other than loopback and
    /// trusted proxies; more get 429
    /// [default: as many as are free]
    #[arg(long, verbatim_doc_comment, value_name = "N", value_parser = number(1, 1 << 20))]
    max_connections_per_address: Option<usize>,

    /// Maximum seconds for headers to arrive, and of an idle connection
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    header_timeout: u64,

    /// Maximum seconds for a body to arrive
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    body_timeout: u64,

    /// Maximum seconds for a client to accept written data
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    write_timeout: u64,

    /// Minimum bytes per second of a body that arrives, averaged over a
    /// third of --body-timeout, and of a reply that is read, averaged over
    /// --write-timeout; 0 is no minimum
    #[arg(long, verbatim_doc_comment, value_name = "BYTES", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(0..=1 << 30))]
    min_transfer_rate: u32,

    /// Maximum seconds of a reply; it is cut off then
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = seconds())]
    request_timeout: u64,

    /// Maximum seconds to finish running replies at shutdown
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = seconds())]
    drain_timeout: u64,

    /// Maximum seconds of a step before /ready fails
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    watchdog: u64,
}

impl std::ops::Deref for ServeArgs {
    type Target = AccessArgs;

    fn deref(&self) -> &AccessArgs {
        &self.access
    }
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub(super) enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

/// Values of `--forwarded-header`.
#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum ForwardedHeaderArg {
    #[default]
    XForwardedFor,
    Forwarded,
}

impl ServeArgs {
    /// Opens the file of stored responses.
    pub(super) fn responses_db(&self) -> anyhow::Result<Option<ResponseDatabase>> {
        let open = |path: &PathBuf| {
            ResponseDatabase::open(path).map_err(|error| anyhow::anyhow!("--responses-db {error}")).or_usage()
        };
        self.bounds.responses_db.as_ref().map(open).transpose()
    }

    pub(super) fn limits(&self) -> Limits {
        let bounds = &self.bounds;
        Limits {
            max_body_bytes: bounds.max_body_bytes,
            max_client_memory: usize::try_from(bounds.max_client_memory).unwrap_or(usize::MAX),
            max_stored_bytes: usize::try_from(bounds.max_stored_bytes).unwrap_or(usize::MAX),
            max_connections: bounds.max_connections,
            max_connections_per_address: bounds.max_connections_per_address,
            max_wrong_keys: self.max_wrong_keys,
            min_transfer_rate: bounds.min_transfer_rate,
            header_timeout: Duration::from_secs(bounds.header_timeout),
            body_timeout: Duration::from_secs(bounds.body_timeout),
            write_timeout: Duration::from_secs(bounds.write_timeout),
            request_timeout: Duration::from_secs(bounds.request_timeout),
            drain_timeout: Duration::from_secs(bounds.drain_timeout),
            watchdog: Duration::from_secs(bounds.watchdog),
        }
    }
}

impl ServeArgs {
    pub(super) fn proxies(&self) -> Proxies {
        let header = match self.forwarded_header {
            ForwardedHeaderArg::XForwardedFor => ForwardedHeader::XForwardedFor,
            ForwardedHeaderArg::Forwarded => ForwardedHeader::Forwarded,
        };
        Proxies { trusted: self.trusted_proxy.clone(), header }
    }
}

/// Parses an IP address or `localhost`. Other names are rejected, because they may resolve to several addresses.
fn address(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(DEFAULT_HOST);
    }
    text.parse().map_err(|_| "expected an IP address such as 127.0.0.1 or 0.0.0.0, or localhost".to_owned())
}

/// Parses an origin as browsers send it. It is compared byte by byte, so one with a path or a slash would never match.
fn origin(text: &str) -> Result<String, String> {
    let place = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_place = |place: &str| {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._:[]".contains(c);
        !place.is_empty() && place.chars().all(allowed)
    };
    if text == "*" || text == "null" || place.is_some_and(is_place) {
        return Ok(text.to_owned());
    }
    Err("expected * or an origin such as https://example.com or http://localhost:3000, in lower case and without a \
         path"
        .into())
}

fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=86_400)
}

fn number(min: u64, max: u64) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(min..=max)
}

/// Values of `--overcommit`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(super) enum OvercommitArg {
    Never,
    Unbounded,
    Always,
}

impl OvercommitArg {
    pub(super) fn policy(self) -> Overcommit {
        // Tokens that a request without `max_tokens` reserves at a time.
        const GROWTH: usize = 256;
        match self {
            OvercommitArg::Never => Overcommit::Never,
            OvercommitArg::Unbounded => Overcommit::Unbounded { growth: GROWTH },
            OvercommitArg::Always => Overcommit::Always,
        }
    }
}
