//! `pellucid rm`: removes a model from the store.

use crate::hub::Hub;
use crate::terminal::format::{bytes_text, grouped};
use crate::terminal::output::Output;
use anyhow::{Result, bail};
use std::io::Write;

/// Remove a pulled model and its files, without confirmation
#[derive(Debug, clap::Args)]
pub(crate) struct RmArgs {
    /// Name of a pulled model, as `pellucid list` shows it
    name: String,
}

pub(crate) fn run(args: &RmArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let Some(manifest) = hub.store.find(&args.name)? else {
        let known: Vec<_> = hub.store.manifests()?.into_iter().map(|manifest| manifest.name).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        bail!("there is no pulled model `{}` in {}; pulled are: {known}", args.name, hub.store.root().display());
    };
    let freed = hub.store.remove(&manifest)?;
    writeln!(output, "removed {}: {} bytes freed ({})", manifest.name, grouped(freed), bytes_text(freed))?;
    Ok(())
}
