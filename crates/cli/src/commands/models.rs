//! `pellucid models`: the names that MODEL arguments understand, and names for files of this machine.

use crate::flags::usage_error::bail_usage;
use crate::hub::{Hub, known_models};
use crate::terminal::format::bytes_text;
use crate::terminal::output::Output;
use anyhow::Result;
use pellucid_checkpoint::Checkpoint;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Show the names of models with sizes and memory, or name a local file
///
/// Lists models that are known to work well, which are downloaded on first use,
/// pulled models, and names that were given to files. Every command that takes
/// a MODEL takes these names.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub(crate) struct ModelsArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,

    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Give a model file or folder a name; `pellucid rm NAME` removes it
    Add(AddArgs),
}

#[derive(Debug, clap::Args)]
struct AddArgs {
    /// New name: letters, digits, `-`, `_` and `.`
    name: String,
    /// Path of a GGUF file or Hugging Face folder
    path: PathBuf,
}

/// Positions of the context for which the list shows the smaller memory: enough for a chat.
const CHAT_CONTEXT: u64 = 8192;

/// Free memory that a known model needs.
struct Memory {
    /// For a context of `CHAT_CONTEXT` positions.
    chat: u64,
    /// For a whole context, the default.
    whole: u64,
}

impl Memory {
    /// Formats both values, or one if they are equal in print: `1.4 to 2.3 GB`.
    fn text(&self) -> String {
        let (chat, whole) = (bytes_text(self.chat), bytes_text(self.whole));
        match (chat.split_once(' '), whole.split_once(' ')) {
            _ if chat == whole => whole,
            (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} to {whole}"),
            _ => format!("{chat} to {whole}"),
        }
    }
}

/// A line of the list.
struct Row {
    name: String,
    bytes: Option<u64>,
    memory: Option<Memory>,
    state: &'static str,
    /// Purpose and licence of a known model, repository of another pulled one, or path.
    about: String,
}

pub(crate) fn run(args: &ModelsArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    if let Some(Action::Add(AddArgs { name, path })) = &args.action {
        if !path.exists() {
            bail_usage!("there is no file or folder {}", path.display());
        }
        // A file that is not a model is refused now, not when it is used.
        Checkpoint::open(path)?;
        let path = hub.store.add_name(name, path)?;
        writeln!(output, "{name} is {}", path.display())?;
        return Ok(());
    }
    let rows = rows(hub)?;
    if args.json {
        let models: Vec<_> = (rows.iter())
            .map(|row| {
                let memory = row.memory.as_ref();
                json!({
                    "name": row.name, "bytes": row.bytes, "state": row.state, "about": row.about,
                    "memory_bytes": memory.map(|memory| memory.whole),
                    "memory_bytes_8k_context": memory.map(|memory| memory.chat),
                })
            })
            .collect();
        return Ok(output.write_json(&models)?);
    }
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).clamp(4, 40);
    writeln!(output, "{:width$}  {:>8}  {:>17}  {:9}  ABOUT", "NAME", "SIZE", "MEMORY", "STATE")?;
    for row in &rows {
        let size = row.bytes.map_or_else(|| "?".to_owned(), bytes_text);
        let memory = row.memory.as_ref().map_or_else(String::new, Memory::text);
        writeln!(output, "{:width$}  {size:>8}  {memory:>17}  {:9}  {}", row.name, row.state, row.about)?;
    }
    writeln!(
        output,
        "\nMEMORY is the free memory for the weights and one context: with --context {CHAT_CONTEXT}, and the model's \
         whole one."
    )?;
    Ok(())
}

fn rows(hub: &Hub) -> Result<Vec<Row>> {
    let manifests = hub.store.manifests()?;
    let mut rows = Vec::new();
    for model in known_models::MODELS {
        let is_there = manifests.iter().any(|manifest| manifest.name == model.name);
        rows.push(Row {
            name: model.name.to_owned(),
            bytes: Some(model.bytes),
            memory: Some(Memory { chat: model.memory_for(CHAT_CONTEXT), whole: model.memory_bytes() }),
            state: match (model.is_embedded(), is_there) {
                (true, _) => "built in",
                (false, true) => "pulled",
                (false, false) => "hub",
            },
            about: format!("{} ({})", model.about, model.licence),
        });
    }
    for (name, path) in hub.store.names()? {
        let bytes = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file).map(|found| found.len());
        let state = if path.exists() { "local" } else { "missing" };
        rows.push(Row { name, bytes, memory: None, state, about: path.display().to_string() });
    }
    for manifest in manifests {
        if known_models::find(&manifest.name).is_none() {
            let damaged = hub.store.damage(&manifest).is_some();
            rows.push(Row {
                bytes: Some(manifest.bytes()),
                memory: None,
                state: if damaged { "damaged" } else { "pulled" },
                about: format!("{}/{}", manifest.owner, manifest.repo),
                name: manifest.name,
            });
        }
    }
    Ok(rows)
}
