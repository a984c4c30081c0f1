//! `pellucid serve`: serves a model over HTTP. Logs model, device, memory and address, then serves until it is shut
//! down.

mod access;
mod browser;
mod embeddings;
pub(crate) mod fingerprint;
mod flags;
mod kv_events;
mod later_models;
mod model_settings;
mod names;
mod on_demand;
mod pull;
mod reload;
mod several;
mod spans;

use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pellucid::{Loaded, ModelInfo};
use pellucid_generate::LoadedModel;
use pellucid_sampling::{Fallback, GivenOptions, OPTIONS, SamplingDefaults, SamplingOption, SamplingParams};
use pellucid_server::{Drain, Ended, LogLosses, Options, Purpose, ServedModel, ServedModels, SharedTenants, Tenants};
use tracing::{info, warn};
use tracing_subscriber::filter::LevelFilter;

use crate::flags::compute::{memory_text, resident_bytes};
use crate::flags::guard::OpenGuards;
use crate::flags::speculation::drafters_text;
use crate::flags::text_file;
use crate::flags::usage_error::OrUsage;
use crate::hub::Hub;
use crate::terminal::format::bytes_text;
use crate::terminal::interrupt::{Interrupt, Interrupted};
use crate::terminal::log;
use flags::LogLevel;
pub(crate) use flags::ServeArgs;
pub(crate) use kv_events::KvEventArgs;
use kv_events::KvEvents;
use names::{GivenModel, given_model};
pub(crate) use spans::{SpanArgs, SpanVariables};

pub(crate) fn run(
    args: &ServeArgs,
    (notes, span_variables): (&[String], &SpanVariables),
    hub: &Hub,
    interrupt: &Interrupt,
) -> Result<()> {
    if args.compute.ranks.follows()? {
        return follow(args, hub);
    }
    let log_losses = start_log(args)?;
    notes.iter().for_each(|note| warn!("{note}"));
    // Errors that do not depend on the model are reported before it is loaded.
    let tenants = access::tenants(args).or_usage()?;
    let tls = access::tls(args).or_usage()?;
    check_exposure(args, &tenants).or_usage()?;
    let template = args.template.read()?;
    args.sampling.check_for_server().or_usage()?;
    args.speculation.check_for_server()?;
    let spans = spans::start(&args.spans, span_variables).or_usage()?;
    let responses_db = args.responses_db()?;
    let listener = TcpListener::bind((args.host, args.port))
        .with_context(|| format!("cannot listen at {} port {}", args.host, args.port))?;
    let several = several::models(args, hub)?;
    let first = args.model.first().map(|text| given_model(text)).transpose().map_err(anyhow::Error::msg).or_usage()?;
    let name = first.as_ref().map(|given| given.model);
    let path = if several.is_none() { hub.resolve(name)? } else { PathBuf::new() };
    let guards = args.guard.open(&args.compute, hub)?;
    guards.notes.iter().for_each(|note| info!("{note}"));
    let tenants = SharedTenants::from(tenants);
    let kv_events = kv_events::start(args, &tenants, several.is_some())?;
    let (models, device, later) = match several {
        Some(several) => {
            let (models, device, later) = several::plan(args, several, guards, &tenants, hub)?;
            (models, device, Some(later))
        }
        None => {
            let (models, device) =
                load_one(args, (first, &path), (&tenants, kv_events.as_ref(), hub), (template, guards))?;
            (models, device, None)
        }
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let address = listener.local_addr().context("the listening socket has no address")?;
    log_client_memory(args);
    let drain = Drain::default();
    let asked = drain.clone();
    interrupt.on_signal(move || asked.signal());
    reload::start(args, &tenants, tls.as_ref(), interrupt);
    // After the handlers of signals: a supervisor may send one as soon as it reads this line.
    info!(url = format!("{scheme}://{address}"), keys = tenants.has_keys(), "listening");
    let url = format!("{scheme}://{address}");
    if let Some(model) = models.models.first() {
        info!("try: {}", curl_text(&url, model, tenants.has_keys()));
    }
    if args.open {
        browser::open(browser::page_url(scheme, address));
    }
    let options = Options {
        limits: args.limits(),
        loopback_hosts_only: !tenants.has_keys() && args.host.is_loopback(),
        tenants,
        proxies: args.proxies(),
        cors_origins: args.cors_origin.clone(),
        vllm_metrics: args.vllm_metrics,
        device,
        log_losses,
        spans: spans.clone(),
        kv_events: kv_events.map(|events| events.publisher),
        puller: Some(Arc::new(pull::HubPuller { hub: hub.clone(), later })),
        responses_db,
    };
    let ended = pellucid_server::run(models, options, listener, tls, drain).context("the server cannot run")?;
    if let Some(exporter) = spans {
        spans::finish(&exporter);
    }
    match ended {
        Ended::Drained => {
            info!("shut down: every reply was finished");
            Err(Interrupted.into())
        }
        Ended::CutShort => {
            log::error("shut down before every reply was finished");
            Err(Interrupted.into())
        }
        Ended::EngineStopped => bail!("the engine has stopped; see the log for the reason"),
    }
}

/// Opens the only model, or the only one and that of `--embedding-model`. They are loaded as long as the server runs.
fn load_one(
    args: &ServeArgs,
    (given, path): (Option<GivenModel<'_>>, &Path),
    (tenants, kv_events, hub): (&SharedTenants, Option<&KvEvents>, &Hub),
    (template, guards): (Option<String>, OpenGuards),
) -> Result<(ServedModels, String)> {
    let mut own = given.iter().flat_map(|given| &given.names).map(|name| (*name).to_owned());
    let id = args.served_model_name.clone().or_else(|| own.next());
    let id = id.unwrap_or_else(|| fingerprint::model_name(given.as_ref().map(|given| given.model), path));
    let aliases: Vec<String> = own.chain(args.alias.iter().cloned()).collect();
    let names = (id.clone(), fingerprint::aliases(&id, &aliases));
    if embeddings::is_embedding_model(args, path)? {
        kv_events::refuse(kv_events, "a model that computes vectors has no prefix cache")?;
        embeddings::refuse_flags_for_text(args, template.as_deref(), &guards.guards)?;
        let (model, device) = embeddings::load(args, names, path, hub)?;
        return Ok((ServedModels::new(vec![model]), device));
    }
    let (model, device) = load_generator(args, names, path, (tenants, kv_events, hub), (template, guards))?;
    let mut models = vec![model];
    if let Some(name) = &args.embedding_model {
        models.push(embeddings::load_second(args, name, hub)?);
    }
    Ok((ServedModels::new(models), device))
}

/// Opens the model that generates text, and logs what it is. Returns it with its device in words.
fn load_generator(
    args: &ServeArgs,
    (id, aliases): (String, Vec<String>),
    path: &Path,
    (tenants, kv_events, hub): (&SharedTenants, Option<&KvEvents>, &Hub),
    (template, guards): (Option<String>, OpenGuards),
) -> Result<(ServedModel, String)> {
    let loaded = load(args, path, (tenants, kv_events), hub, template.clone())?;
    let (files, device) = (&loaded.info.files, &loaded.info.device);
    let context_len = loaded.model.context_len;
    let settings = [template.as_deref(), Some(guards.fingerprint.as_str()).filter(|text| !text.is_empty())];
    let fingerprint = fingerprint::fingerprint(path, files, context_len, device, &args.compute, settings)?;
    let sampling = args.sampling.for_server(&loaded.model.tokenizer, loaded.model.sampling.model.clone()).or_usage()?;
    let model = LoadedModel { id, aliases, fingerprint, sampling, guards: guards.guards, ..loaded.model };
    log_generator(&model, &loaded.info, args.max_sequences, args.max_waiting);
    let device = loaded.info.device.clone();
    Ok((ServedModel { memory_bytes: reserved_bytes(&loaded.info), device: device.clone(), ..model.into() }, device))
}

/// Returns the bytes of weights, keys, values and steps.
fn reserved_bytes(info: &ModelInfo) -> u64 {
    let draft_bytes = info.draft.as_ref().map_or(0, |draft| draft.weight_bytes);
    info.kv_memory.bytes() + info.weight_bytes + draft_bytes + info.scratch_bytes
}

/// Logs what a loaded model is, and what it takes.
fn log_generator(model: &LoadedModel, loaded: &ModelInfo, max_sequences: usize, max_waiting: usize) {
    info!(
        model = model.id,
        aliases = (!model.aliases.is_empty()).then(|| model.aliases.join(", ")),
        fingerprint = model.fingerprint,
        context = model.context_len,
        chat = model.template.is_some(),
        device = loaded.device,
        "loaded"
    );
    info!("{}", sampling_text(&model.sampling));
    if !loaded.speculation.is_off() {
        info!("speculation: {}", drafters_text(&loaded.speculation));
    }
    if model.template.is_some() {
        info!("format of tool calls: {}", model.calling().description());
    }
    if let Some(error) = &model.template_error {
        warn!("{error}; chat requests are rejected");
    }
    info!(sequences = max_sequences, waiting = max_waiting, "{}", memory_text(loaded));
    info!("memory: {} reserved for weights, keys, values and steps", bytes_text(reserved_bytes(loaded)));
}

/// Logs the memory that the program uses now, and that clients may make it use.
fn log_client_memory(args: &ServeArgs) {
    if let Some(resident) = resident_bytes() {
        info!(
            "memory: {} in use now, up to {} for requests and replies",
            bytes_text(resident),
            bytes_text(args.limits().max_client_memory as u64)
        );
    }
}

/// Describes the sampling of a request that gives no options: each value with its source.
fn sampling_text(defaults: &SamplingDefaults) -> String {
    let options = defaults.resolve(&GivenOptions::default(), Fallback::OpenAi);
    let params = options.apply(SamplingParams::default(), |_| Vec::new());
    let is_shown = |option: &&SamplingOption| option.param() == "temperature" || options.get(option.param()).is_some();
    let shown = OPTIONS.iter().filter(is_shown).map(|option| {
        let value = option.effective(&params).map_or_else(String::new, |value| format!(" {value}"));
        format!("{}{value} ({})", option.param(), defaults.source_of(option.param(), Fallback::OpenAi))
    });
    format!("sampling defaults: {}", shown.collect::<Vec<_>>().join(", "))
}

/// Returns a command line that asks the server a question, or for a vector.
fn curl_text(url: &str, model: &ServedModel, has_keys: bool) -> String {
    let (path, body) = match (model.purpose, model.has_template) {
        (Purpose::Text, true) => ("chat/completions", r#""messages": [{"role": "user", "content": "Hello"}]"#),
        (Purpose::Text, false) => ("completions", r#""prompt": "Once upon a time""#),
        (Purpose::Vectors, _) => ("embeddings", r#""input": "Hello""#),
    };
    let id = serde_json::Value::from(model.id.as_str());
    curl(url, path, &format!("{{\"model\": {id}, {body}}}"), has_keys)
}

/// Returns a command line that sends a body.
fn curl(url: &str, path: &str, body: &str, has_keys: bool) -> String {
    let url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:");
    let key = if has_keys { " -H \"Authorization: Bearer $KEY\"" } else { "" };
    format!("curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'")
}

/// Rejects a server without keys that the network can reach, unless the operator allows it explicitly.
fn check_exposure(args: &ServeArgs, tenants: &Tenants) -> Result<()> {
    if tenants.has_keys() || args.host.is_loopback() || args.allow_unauthenticated_network {
        return Ok(());
    }
    bail!(
        "--host {} is reachable from the network, but there are no keys; set --api-key or --keys-file, or \
         --allow-unauthenticated-network if everyone who can reach it may use it",
        args.host
    )
}

/// Computes the steps of the server on rank 0 until it shuts down.
fn follow(args: &ServeArgs, hub: &Hub) -> Result<()> {
    let first = args.model.first().map(|text| given_model(text)).transpose().map_err(anyhow::Error::msg).or_usage()?;
    let path = hub.resolve(first.as_ref().map(|given| given.model))?;
    let builder = args.speculation.apply(args.compute.builder_on_ranks(&path, hub)?, hub)?;
    args.compute.load(builder).map(drop)
}

fn load(
    args: &ServeArgs,
    path: &Path,
    (tenants, kv_events): (&SharedTenants, Option<&KvEvents>),
    hub: &Hub,
    template: Option<String>,
) -> Result<Loaded> {
    let mut builder = (args.compute.builder_on_ranks(path, hub)?)
        .max_sequences(args.max_sequences)
        .max_waiting(args.max_waiting)
        .overcommit(args.overcommit.policy());
    builder = args.speculation.apply(builder, hub)?;
    if let Some(template) = template {
        builder = builder.chat_template(template);
    }
    for (tenant, num_tokens) in tenants.kv_quotas() {
        builder = builder.quota(tenant, num_tokens as usize);
    }
    if let Some(KvEvents { tenant, publisher }) = kv_events {
        builder = builder.kv_events(*tenant, publisher.sink());
    }
    if let Some(path) = &args.shared_system {
        let text = text_file::read(path).context("--shared-system")?;
        builder = builder.shared_system(text.trim_end());
    }
    args.compute.load(builder)
}

fn start_log(args: &ServeArgs) -> Result<Arc<LogLosses>> {
    let level = match args.log_level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    log::start(level, args.log_format).context("cannot start the thread that writes the log")
}

/// Default address to listen at.
pub(crate) const DEFAULT_HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
