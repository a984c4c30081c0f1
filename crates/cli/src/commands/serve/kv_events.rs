//! Changes of the prefix cache for routers, over ZeroMQ.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pellucid_engine::TenantId;
use pellucid_model::BLOCK_LEN;
use pellucid_server::{KvEventPublisher, SharedTenants};
use tracing::info;

use super::ServeArgs;
use crate::flags::usage_error::OrUsage;

/// Publishing of changes of the prefix cache.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Operations")]
pub(crate) struct KvEventArgs {
    /// Publish changes of the prefix cache at this address (such as
    /// tcp://127.0.0.1:5557), in vLLM's format, for routers. Whoever can
    /// connect to it reads token ids of prompts
    #[arg(long, verbatim_doc_comment, value_name = "ADDRESS", value_parser = endpoint)]
    kv_events: Option<SocketAddr>,

    /// Tenant whose changes are published; needed if there are keys. Those
    /// of other tenants, and of requests with a cache_salt, never are
    #[arg(long, verbatim_doc_comment, value_name = "NAME", requires = "kv_events")]
    kv_events_tenant: Option<String>,

    /// First frame of each message, which subscribers select
    /// [default: empty]
    #[arg(long, verbatim_doc_comment, value_name = "TEXT", requires = "kv_events")]
    kv_events_topic: Option<String>,
}

/// A publisher, and the tenant whose changes it gets.
#[derive(Debug)]
pub(super) struct KvEvents {
    pub(super) tenant: TenantId,
    pub(super) publisher: Arc<KvEventPublisher>,
}

/// Reads an address as ZeroMQ writes it; `*` is every interface.
fn endpoint(text: &str) -> Result<SocketAddr, String> {
    let expected = || "expected an address such as tcp://127.0.0.1:5557 or tcp://*:5557".to_owned();
    let address = text.strip_prefix("tcp://").ok_or_else(expected)?;
    if let Some(port) = address.strip_prefix("*:") {
        let port = port.parse().map_err(|_| expected())?;
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port));
    }
    address.parse().map_err(|_| expected())
}

/// Starts the publisher, if an address is given.
pub(super) fn start(args: &ServeArgs, tenants: &SharedTenants, has_several: bool) -> Result<Option<KvEvents>> {
    let KvEventArgs { kv_events: Some(address), kv_events_tenant: name, kv_events_topic: topic } = &args.kv_events
    else {
        return Ok(None);
    };
    let tenant = check(args, *address, name.as_deref(), tenants, has_several).or_usage()?;
    let publisher = KvEventPublisher::bind(*address, topic.clone().unwrap_or_default(), BLOCK_LEN)
        .with_context(|| format!("--kv-events cannot listen at tcp://{address}"))?;
    let tenant_name = name.as_deref();
    info!(tenant = tenant_name, "KV events are published at tcp://{}", publisher.address());
    Ok(Some(KvEvents { tenant, publisher }))
}

fn check(
    args: &ServeArgs,
    address: SocketAddr,
    name: Option<&str>,
    tenants: &SharedTenants,
    has_several: bool,
) -> Result<TenantId> {
    if has_several {
        bail!("--kv-events needs a server with one model, whose blocks it names");
    }
    if !address.ip().is_loopback() && !args.allow_unauthenticated_network {
        bail!(
            "--kv-events tcp://{address} is reachable from the network and asks for no key; use a loopback address, or \
             --allow-unauthenticated-network if everyone who can reach it may read the prompts"
        )
    }
    match (name, tenants.id_of(name)) {
        (_, Some(tenant)) => Ok(tenant),
        (None, None) => {
            bail!("--kv-events needs --kv-events-tenant if there are keys: events contain token ids of prompts")
        }
        (Some(name), None) => bail!("--kv-events-tenant {name}: no tenant has this name"),
    }
}

/// Refuses a publisher that would have nothing to publish.
pub(super) fn refuse(kv_events: Option<&KvEvents>, reason: &str) -> Result<()> {
    if kv_events.is_some() {
        return Err(anyhow::anyhow!("--kv-events: {reason}")).or_usage();
    }
    Ok(())
}
