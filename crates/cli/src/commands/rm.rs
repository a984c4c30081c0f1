//! `pellucid rm`: removes a model from the store.

use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::format::{bytes_text, grouped};
use crate::terminal::output::Output;
use anyhow::Result;
use std::io::Write;

/// Remove a pulled model and its files, without confirmation
///
/// A name of `pellucid models add` is removed alone; its file stays.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArgs {
    /// Name of a model, as `pellucid list` shows it
    name: String,
}

pub(crate) fn run(args: &RmArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    if let Some(path) = hub.store.remove_name(&args.name)? {
        writeln!(output, "removed the name {}; {} stays", args.name, path.display())?;
        return Ok(());
    }
    let Some(manifest) = hub.store.find(&args.name)? else {
        let pulled = hub.store.manifests()?.into_iter().map(|manifest| manifest.name);
        let known: Vec<_> = pulled.chain(hub.store.names()?.into_keys()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        bail_usage!("there is no model `{}` in {}; there are: {known}", args.name, hub.store.root().display());
    };
    let freed = hub.store.remove(&manifest)?;
    writeln!(output, "removed {}: {} bytes freed ({})", manifest.name, grouped(freed), bytes_text(freed))?;
    Ok(())
}
