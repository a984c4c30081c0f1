//! Flags of guards, which judge prompts and replies; `run`, `explain` and `serve` share them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use pellucid_engine::Overcommit;
use pellucid_generate::{Guard, Guards, ModelGuard, OnGuardError, PatternGuard};

use super::compute::ComputeArgs;
use super::text_file;
use super::usage_error::OrUsage;
use crate::guard_service::GuardService;
use crate::hub::Hub;
use crate::terminal::format::bytes_text;

/// Maximum context of a guard's model. Its policy and a conversation have to fit.
const MAX_CONTEXT: usize = 8192;
/// Verdicts that a guard's model computes at once; each may take a whole context of KV memory.
const MAX_SEQUENCES: usize = 2;
/// Verdicts that may wait for a guard's model.
const MAX_WAITING: usize = 1024;

#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Guard")]
pub(crate) struct GuardArgs {
    /// Block prompts and replies in which a regular expression of this file
    /// matches, one on each line
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    guard_patterns: Option<PathBuf>,

    /// Ask this model about prompts and replies, on the same device: Llama
    /// Guard, Qwen3Guard, or any model that can chat
    #[arg(long, verbatim_doc_comment, value_name = "MODEL")]
    guard_model: Option<String>,

    /// Ask this HTTP service about prompts and replies
    #[arg(long, value_name = "URL", value_parser = url)]
    guard_url: Option<String>,

    /// Maximum seconds until a guard's model or service gives its verdict
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    guard_timeout: u64,

    /// Text that a guard could not judge: closed (blocked) or open (passed)
    #[arg(long, value_name = "HOW", value_enum, default_value_t, hide_possible_values = true)]
    guard_on_error: OnErrorArg,
}

/// Values of `--guard-on-error`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum OnErrorArg {
    #[default]
    Closed,
    Open,
}

/// Guards that are ready, and what to tell about them.
#[derive(Debug, Default)]
pub(crate) struct OpenGuards {
    pub(crate) guards: Guards,
    /// One line for each guard.
    pub(crate) notes: Vec<String>,
    /// Identifies the settings that decide what is blocked; empty without guards.
    pub(crate) fingerprint: String,
}

impl GuardArgs {
    /// Opens the guards of the flags. A guard's model is loaded before the model that it guards, whose KV memory then
    /// takes what is left.
    pub(crate) fn open(&self, compute: &ComputeArgs, hub: &Hub) -> Result<OpenGuards> {
        let mut open = OpenGuards::default();
        let mut guards: Vec<Arc<dyn Guard>> = Vec::new();
        if let Some(path) = &self.guard_patterns {
            let what = || format!("--guard-patterns {}", path.display());
            let text = text_file::read(path).context("--guard-patterns")?;
            let guard = PatternGuard::parse(&text).with_context(what).or_usage()?;
            let patterns = match guard.num_patterns() {
                1 => "1 pattern".to_owned(),
                count => format!("{count} patterns"),
            };
            open.notes.push(format!("guard: {patterns} of {}", path.display()));
            open.fingerprint += &format!("patterns {text}\0");
            guards.push(Arc::new(guard));
        }
        if let Some(name) = &self.guard_model {
            let (guard, note) = self.open_model(name, compute, hub).with_context(|| format!("--guard-model {name}"))?;
            open.notes.push(note);
            open.fingerprint += &format!("model {name}\0");
            guards.push(Arc::new(guard));
        }
        if let Some(url) = &self.guard_url {
            open.notes.push(format!("guard: the service {url}"));
            open.fingerprint += &format!("service {url}\0");
            guards.push(Arc::new(GuardService::new(url.clone(), self.timeout())));
        }
        let on_error = match self.guard_on_error {
            OnErrorArg::Closed => OnGuardError::Closed,
            OnErrorArg::Open => OnGuardError::Open,
        };
        open.guards = Guards::new(guards, on_error);
        Ok(open)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.guard_timeout)
    }

    fn open_model(&self, name: &str, compute: &ComputeArgs, hub: &Hub) -> Result<(ModelGuard, String)> {
        let path = hub.resolve(Some(name))?;
        let own = pellucid_model::read_config(&compute.checkpoint(&path, hub)?)?.context_len;
        let compute = compute.for_guard();
        let builder = (compute.builder(&path, hub)?)
            .context(own.min(MAX_CONTEXT))
            .max_sequences(MAX_SEQUENCES)
            .max_waiting(MAX_WAITING)
            .overcommit(Overcommit::Never);
        let loaded = compute.load(builder)?;
        let (weights, kv) = (loaded.info.weight_bytes, loaded.info.kv_memory.bytes());
        let guard = ModelGuard::new(loaded.model, self.timeout())?;
        let format = guard.format().name();
        let (weights, kv) = (bytes_text(weights), bytes_text(kv));
        Ok((guard, format!("guard: the model {name} ({format}), {weights} of weights, {kv} of keys and values")))
    }
}

fn url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match rest {
        Some(rest) if !rest.is_empty() && !rest.starts_with('/') => Ok(text.to_owned()),
        _ => Err("expected an address such as http://127.0.0.1:9000/judge".into()),
    }
}
