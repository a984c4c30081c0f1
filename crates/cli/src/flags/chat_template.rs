//! `--chat-template`: a template in place of the model's own; `run`, `explain` and `serve` share it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use pellucid::Builder;

use super::text_file;
use super::usage_error::bail_usage;

#[derive(Debug, clap::Args)]
pub(crate) struct TemplateArgs {
    /// File with a chat template in Jinja, used instead of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
}

impl TemplateArgs {
    /// Whether a template is given.
    pub(crate) fn is_given(&self) -> bool {
        self.chat_template.is_some()
    }

    /// Reads the file, if one is given.
    pub(crate) fn read(&self) -> Result<Option<String>> {
        let Some(path) = &self.chat_template else { return Ok(None) };
        let text = text_file::read(path).context("--chat-template")?;
        if text.trim().is_empty() {
            bail_usage!("--chat-template {}: the file is empty, expected a template", path.display());
        }
        Ok(Some(text))
    }

    /// Sets the template of a builder, if one is given.
    pub(crate) fn apply(&self, builder: Builder) -> Result<Builder> {
        Ok(match self.read()? {
            Some(text) => builder.chat_template(text),
            None => builder,
        })
    }
}
