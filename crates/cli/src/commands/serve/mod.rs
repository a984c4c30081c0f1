//! `pellucid serve`: the engine behind HTTP. Says what it loaded, on which device, with which memory, and where it listens; then serves
//! until it is told to leave.

mod fingerprint;
mod flags;

use std::net::{IpAddr, TcpListener};
use std::path::Path;

use anyhow::{Context, Result, bail};
use pellucid::Loaded;
use pellucid_generate::LoadedModel;
use pellucid_server::{Drain, Ended, KeysFile, Options, TenantConfig, Tenants, Tls};
use tracing::{info, warn};
use tracing_subscriber::filter::LevelFilter;

use crate::flags::compute::memory_text;
use crate::hub::Hub;
use crate::terminal::interrupt::Interrupt;
pub(crate) use flags::ServeArgs;
use flags::{LogFormat, LogLevel};

pub(crate) fn run(args: &ServeArgs, hub: &Hub, interrupt: &Interrupt) -> Result<()> {
    // What can be wrong without a model is said before one is loaded.
    let tenants = tenants(args)?;
    let tls = tls(args)?;
    check_exposure(args, &tenants)?;
    let listener = TcpListener::bind((args.host, args.port))
        .with_context(|| format!("cannot listen at {} port {}", args.host, args.port))?;
    let path = hub.resolve(args.model.as_deref())?;
    start_log(args);
    let loaded = load(args, &path, &tenants)?;
    let fingerprint = fingerprint::fingerprint(&path, &loaded, &args.compute)?;
    let name = || fingerprint::model_name(args.model.as_deref(), &path);
    let model = LoadedModel { id: args.served_model_name.clone().unwrap_or_else(name), fingerprint, ..loaded.model };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let address = listener.local_addr().context("the listening socket has no address")?;
    info!(
        model = model.id,
        fingerprint = model.fingerprint,
        context = model.context_len,
        chat = model.template.is_some(),
        device = loaded.info.device,
        "loaded"
    );
    if let Some(error) = &model.template_error {
        warn!("{error}; chats are refused");
    }
    info!(sequences = args.max_sequences, waiting = args.max_waiting, "{}", memory_text(&loaded.info));
    info!(url = format!("{scheme}://{address}"), keys = tenants.has_keys(), "listening");
    let drain = Drain::default();
    let asked = drain.clone();
    interrupt.on_signal(move || asked.signal());
    let options = Options {
        limits: args.limits(),
        loopback_hosts_only: !tenants.has_keys() && args.host.is_loopback(),
        tenants,
        cors_origins: args.cors_origin.clone(),
        vllm_metrics: args.vllm_metrics,
    };
    match pellucid_server::run(model, options, listener, tls, drain).context("the server cannot run")? {
        Ended::Drained => {
            info!("left: every reply was finished");
            Ok(())
        }
        Ended::CutShort => bail!("left before every reply was finished"),
        Ended::EngineStopped => bail!("the engine has stopped; the log says why"),
    }
}

/// Who may ask: the keys of the file, the key of the flag, or everybody.
fn tenants(args: &ServeArgs) -> Result<Tenants> {
    let mut configs = Vec::new();
    if let Some(path) = &args.keys_file {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read the keys file {}", path.display()))?;
        configs = KeysFile::parse(&text).with_context(|| path.display().to_string())?.tenant;
    }
    if let Some(key) = &args.api_key {
        configs.push(TenantConfig {
            name: "default".into(),
            keys: vec![key.clone()],
            // Whoever sets the server's flags is its operator.
            trace: true,
            metrics: true,
            ..TenantConfig::default()
        });
    }
    if configs.is_empty() {
        return Ok(Tenants::open());
    }
    let tenants = Tenants::new(configs);
    if args.keys_file.is_none() { tenants.context("--api-key") } else { Ok(tenants?) }
}

fn tls(args: &ServeArgs) -> Result<Option<Tls>> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Ok(Some(Tls::from_pem(&read(certificate)?, &read(key)?)?)),
        _ => Ok(None),
    }
}

/// Without keys the server is for this machine alone, unless the operator says in so many words that it is for everybody.
fn check_exposure(args: &ServeArgs, tenants: &Tenants) -> Result<()> {
    if tenants.has_keys() || args.host.is_loopback() || args.allow_unauthenticated_network {
        return Ok(());
    }
    bail!(
        "--host {} is open to the network, but there are no keys; give --api-key or --keys-file, or say \
         --allow-unauthenticated-network if everybody who can reach it may use it",
        args.host
    )
}

fn load(args: &ServeArgs, path: &Path, tenants: &Tenants) -> Result<Loaded> {
    let mut builder = (args.compute.builder(path))
        .max_sequences(args.max_sequences)
        .max_waiting(args.max_waiting)
        .overcommit(args.overcommit.policy());
    for (tenant, num_tokens) in tenants.kv_quotas() {
        builder = builder.quota(tenant, num_tokens as usize);
    }
    if let Some(path) = &args.shared_system {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the shared system prompt {}", path.display()))?;
        builder = builder.shared_system(text.trim_end());
    }
    args.compute.load(builder)
}

/// The log goes to standard error. It holds no text of prompts or replies and no keys, at any level.
fn start_log(args: &ServeArgs) {
    let level = match args.log_level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
    // A second subscriber is refused; there is only ever one.
    let _ = match args.log_format {
        LogFormat::Text => tracing::subscriber::set_global_default(builder.finish()),
        LogFormat::Json => tracing::subscriber::set_global_default(builder.json().flatten_event(true).finish()),
    };
}

/// Where the server listens unless told otherwise.
pub(crate) const DEFAULT_HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
