//! `pellucid ps` and `pellucid stop`: the models of a running server.

use std::io::Write;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::server_client::{Client, ServerArgs, ServerVariables};
use crate::terminal::format::bytes_text;
use crate::terminal::output::Output;

/// Show the models of a running server: state, memory and requests
#[derive(Debug, clap::Args)]
pub(crate) struct PsArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: ServerArgs,
}

/// Unload a model of a running server
///
/// A model with requests in flight is unloaded when they have ended. It is
/// loaded again when a request names it. With a key, it needs the right
/// `manage_models` of the keys file.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct StopArgs {
    /// Name of the model, as `pellucid ps` shows it
    model: String,

    #[command(flatten)]
    server: ServerArgs,
}

pub(crate) fn ps(args: &PsArgs, variables: &ServerVariables, output: &mut Output) -> Result<()> {
    let answer = Client::new(&args.server, variables)?.get("/v1/models")?;
    let Some(cards) = answer["data"].as_array() else { bail!("the server lists no models: it is no Pellucid server") };
    // Each alias has a card of its own.
    let models: Vec<&Value> = cards.iter().filter(|card| card["id"] == card["root"]).collect();
    if args.json {
        return Ok(output.write_json(&models.into_iter().map(row_json).collect::<Vec<_>>())?);
    }
    let width = models.iter().filter_map(|card| card["id"].as_str()).map(str::len).max().unwrap_or(0).clamp(4, 60);
    writeln!(
        output,
        "{:width$}  {:10}  {:>9}  {:>8}  {:>9}  DEVICE",
        "NAME", "STATE", "MEMORY", "REQUESTS", "EXPIRES"
    )?;
    for card in models {
        let status = &card["pellucid"];
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let state = match status["progress"].as_f64() {
            Some(part) => format!("{} {:.0}%", text(&status["state"]), part * 100.0),
            None => text(&status["state"]),
        };
        // For a model that is not loaded, the server says how much memory it would take.
        let memory = status["memory_bytes"].as_u64().filter(|_| status["state"] != "unloaded");
        let memory = memory.map_or_else(|| "-".to_owned(), bytes_text);
        let requests = status["requests"].as_u64().map_or_else(|| "-".to_owned(), |count| count.to_string());
        let (name, expires, device) = (text(&card["id"]), expires(&status["expires_at"]), text(&status["device"]));
        writeln!(output, "{name:width$}  {state:10}  {memory:>9}  {requests:>8}  {expires:>9}  {device}")?;
    }
    Ok(())
}

fn row_json(card: &Value) -> Value {
    let mut row = json!({ "name": card["id"], "context": card["max_model_len"], "capabilities": card["capabilities"] });
    if let (Value::Object(row), Value::Object(status)) = (&mut row, card["pellucid"].clone()) {
        row.extend(status);
    }
    row
}

/// Returns the time until a model is unloaded.
fn expires(at: &Value) -> String {
    let Some(at) = at.as_u64() else { return "-".into() };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    match at.saturating_sub(now) {
        seconds if seconds >= 3600 => format!("{} h", seconds / 3600),
        seconds if seconds >= 60 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

pub(crate) fn stop(args: &StopArgs, variables: &ServerVariables, output: &mut Output) -> Result<()> {
    let client = Client::new(&args.server, variables)?;
    let card = client.post("/models/unload", &json!({ "model": args.model }))?;
    let (name, status) = (card["id"].as_str().unwrap_or(&args.model), &card["pellucid"]);
    match status["state"].as_str() {
        Some("unloaded") => writeln!(output, "{name} is unloaded")?,
        Some("loading") => writeln!(output, "{name} is being loaded; stop it when it is ready")?,
        _ => writeln!(output, "{name} has requests in flight and is unloaded when they have ended")?,
    }
    Ok(())
}
