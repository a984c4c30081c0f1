//! Flags of guards, which judge prompts and replies; `run` and `serve` share them.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use pellucid_generate::{Guard, Guards, OnGuardError, PatternGuard};

use super::usage_error::OrUsage;

#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Guard")]
pub(crate) struct GuardArgs {
    /// Block prompts and replies in which a regular expression of this file
    /// matches, one on each line
    #[arg(long, verbatim_doc_comment, value_name = "FILE")]
    guard_patterns: Option<PathBuf>,

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

impl GuardArgs {
    /// Returns the guards of the flags. Their files are read before a model is loaded.
    pub(crate) fn open(&self) -> Result<Guards> {
        let mut guards: Vec<Arc<dyn Guard>> = Vec::new();
        if let Some(path) = &self.guard_patterns {
            let what = || format!("--guard-patterns {}", path.display());
            let text = std::fs::read_to_string(path).with_context(what).or_usage()?;
            guards.push(Arc::new(PatternGuard::parse(&text).with_context(what).or_usage()?));
        }
        let on_error = match self.guard_on_error {
            OnErrorArg::Closed => OnGuardError::Closed,
            OnErrorArg::Open => OnGuardError::Open,
        };
        Ok(Guards::new(guards, on_error))
    }
}
