//! The flags of `serve`. Each may also stand in the config file and in the environment; `layers.rs` says how.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use pellucid_engine::Overcommit;
use pellucid_server::Limits;

use super::DEFAULT_HOST;
use crate::flags::compute::ComputeArgs;

/// Serve a model over HTTP, for OpenAI's clients
///
/// Every flag can also be set in the file of --config (`port = 8000`) and in
/// the environment (PELLUCID_PORT=8000). Flags win over the environment, the
/// environment over the file, the file over the defaults.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ServeArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    /// [default: smollm2, fetched on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    pub(super) model: Option<String>,

    /// Name that requests give the model [default: that of --model]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) served_model_name: Option<String>,

    /// Settings in TOML, named like the flags [default: PELLUCID_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Address to listen at
    #[arg(long, value_name = "ADDRESS", default_value_t = DEFAULT_HOST, value_parser = address)]
    pub(super) host: IpAddr,

    /// Port to listen at; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(super) port: u16,

    /// Sequences that are computed at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number(1, 4096))]
    pub(super) max_sequences: usize,

    /// Requests that may wait; more get 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number(1, 65_536))]
    pub(super) max_waiting: usize,

    /// Who may begin before there is memory for all that it may come to need:
    /// never (nobody), unbounded (requests without max_tokens, with room for
    /// 256 tokens at a time) or always (everybody). When memory runs out,
    /// someone makes way and is computed again later, to the same reply
    #[arg(long, verbatim_doc_comment, value_name = "WHO", default_value = "unbounded")]
    pub(super) overcommit: OvercommitArg,

    /// System prompt whose cached prefix all tenants share
    /// [default: each tenant finds its own prefixes alone]
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    pub(super) shared_system: Option<PathBuf>,

    #[command(flatten)]
    access: AccessArgs,

    #[command(flatten)]
    bounds: BoundArgs,

    /// Add the metrics that inference gateways read from vLLM
    #[arg(long, help_heading = "Operations")]
    pub(super) vllm_metrics: bool,

    /// Form of the log: text or json
    #[arg(
        long,
        help_heading = "Operations",
        value_name = "FORM",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub(super) log_format: LogFormat,

    /// What to log: error, warn, info or debug
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
    pub(super) compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// The one key that requests must bring (better set as
    /// PELLUCID_API_KEY: other users of the machine can see flags)
    #[arg(long, verbatim_doc_comment, value_name = "KEY")]
    pub(super) api_key: Option<String>,

    /// Keys, tenants and their limits, in TOML or JSON
    #[arg(long, value_name = "FILE")]
    pub(super) keys_file: Option<PathBuf>,

    /// Serve the network without keys: everybody who can reach it may use it
    #[arg(long)]
    pub(super) allow_unauthenticated_network: bool,

    /// Certificate chain in PEM, for HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(super) tls_cert: Option<PathBuf>,

    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(super) tls_key: Option<PathBuf>,

    /// Let web pages of this origin ask (scheme, host and port, no path),
    /// or of any (*); may be given again
    #[arg(long, verbatim_doc_comment, value_name = "ORIGIN", value_parser = origin)]
    pub(super) cors_origin: Vec<String>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Bounds")]
pub(crate) struct BoundArgs {
    /// Bytes of a request's body; more get 413
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = number(1024, 1 << 30))]
    max_body_bytes: usize,

    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = number(1, 1 << 20))]
    max_connections: usize,

    /// Seconds for headers to arrive, and for a connection to be idle
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    header_timeout: u64,

    /// Seconds for a body to arrive
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    body_timeout: u64,

    /// Seconds for a client to take what was written to it
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = seconds())]
    write_timeout: u64,

    /// Seconds for a reply to be complete; it ends where it is then
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = seconds())]
    request_timeout: u64,

    /// Seconds for replies in flight to end, when told to leave
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = seconds())]
    drain_timeout: u64,

    /// Seconds that a step may take before /ready fails
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
pub(super) enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub(super) enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

impl ServeArgs {
    pub(super) fn limits(&self) -> Limits {
        let bounds = &self.bounds;
        Limits {
            max_body_bytes: bounds.max_body_bytes,
            max_connections: bounds.max_connections,
            header_timeout: Duration::from_secs(bounds.header_timeout),
            body_timeout: Duration::from_secs(bounds.body_timeout),
            write_timeout: Duration::from_secs(bounds.write_timeout),
            request_timeout: Duration::from_secs(bounds.request_timeout),
            drain_timeout: Duration::from_secs(bounds.drain_timeout),
            watchdog: Duration::from_secs(bounds.watchdog),
            ..Limits::default()
        }
    }
}

/// An IP address, or this machine by its usual name. Other names would have to be asked for, and could mean several.
fn address(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(DEFAULT_HOST);
    }
    text.parse().map_err(|_| "expected an IP address such as 127.0.0.1 or 0.0.0.0, or localhost".to_owned())
}

/// An origin as browsers send it: they compare letter by letter, so a path or a slash at the end would never match.
fn origin(text: &str) -> Result<String, String> {
    let place = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_place = |place: &str| {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._:[]".contains(c);
        !place.is_empty() && place.chars().all(allowed)
    };
    if text == "*" || text == "null" || place.is_some_and(is_place) {
        return Ok(text.to_owned());
    }
    Err("expected * or an origin such as https://example.com or http://localhost:3000, in small letters and without a path".into())
}

fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=86_400)
}

fn number(least: u64, most: u64) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(least..=most)
}

/// By the names that the flag takes.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(super) enum OvercommitArg {
    Never,
    Unbounded,
    Always,
}

impl OvercommitArg {
    pub(super) fn policy(self) -> Overcommit {
        // Tokens that a request without `max_tokens` reserves room for at a time.
        const GROWTH: usize = 256;
        match self {
            OvercommitArg::Never => Overcommit::Never,
            OvercommitArg::Unbounded => Overcommit::Unbounded { growth: GROWTH },
            OvercommitArg::Always => Overcommit::Always,
        }
    }
}
