//! `pellucid list`: the models in the store.

use crate::hub::{Format, Hub, Manifest};
use crate::terminal::format::bytes_text;
use crate::terminal::log;
use crate::terminal::output::Output;
use anyhow::Result;
use serde_json::json;
use std::io::Write;
use std::path::Path;

/// Show the models on this machine: name, size, format, date and path
///
/// Pulled models, and files that `pellucid models add` gave a name.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Print a JSON array, with files, hashes and sizes in bytes
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ListArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let manifests = hub.store.manifests()?;
    let names = hub.store.names()?;
    if args.json {
        let pulled = manifests.iter().map(|manifest| model_json(hub, manifest));
        let models: Vec<_> = pulled.chain(names.iter().map(|(name, path)| name_json(name, path))).collect();
        return Ok(output.write_json(&models)?);
    }
    if manifests.is_empty() && names.is_empty() {
        let store = hub.store.root().display();
        log::note(&format!("no models in {store} yet; `pellucid models` shows what to pull"));
    }
    for manifest in &manifests {
        let damaged = if hub.store.damage(manifest).is_some() { "  (damaged: pull it again)" } else { "" };
        writeln!(output, "{}{damaged}", manifest.name)?;
        // The JSON also has the time of day.
        let date = manifest.pulled.split('T').next().unwrap_or_default();
        let size = bytes_text(manifest.bytes());
        writeln!(
            output,
            "  {size}  {}  {date}  {}",
            format_text(manifest.format),
            hub.store.entry(manifest).display()
        )?;
    }
    for (name, path) in &names {
        let missing = if path.exists() { "" } else { "  (missing)" };
        writeln!(output, "{name}{missing}\n  a name of  {}", path.display())?;
    }
    Ok(())
}

fn format_text(format: Format) -> &'static str {
    match format {
        Format::Gguf => "gguf",
        Format::Safetensors => "safetensors",
    }
}

fn model_json(hub: &Hub, manifest: &Manifest) -> serde_json::Value {
    json!({
        "name": manifest.name,
        "bytes": manifest.bytes(),
        "format": format_text(manifest.format),
        "path": hub.store.entry(manifest),
        "pulled": manifest.pulled,
        "source": manifest.source,
        "revision": manifest.revision,
        "complete": hub.store.damage(manifest).is_none(),
        "files": manifest.files,
    })
}

fn name_json(name: &str, path: &Path) -> serde_json::Value {
    let bytes = path.metadata().ok().filter(std::fs::Metadata::is_file).map(|found| found.len());
    let format = if path.is_dir() { Format::Safetensors } else { Format::Gguf };
    json!({
        "name": name,
        "bytes": bytes,
        "format": format_text(format),
        "path": path,
        "pulled": null,
        "source": "a local file",
        "revision": null,
        "complete": path.exists(),
        "files": [],
    })
}
