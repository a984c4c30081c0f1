//! Flags for structured output: the grammar of a reply, from a file or from the command line.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use pellucid_engine::TenantId;
use pellucid_generate::{GrammarSource, LoadedModel};
use pellucid_sampling::TokenConstraint;

use super::usage_error::OrUsage;

/// The grammar of a reply; at most one of these.
#[derive(Debug, Clone, Default, clap::Args)]
#[group(multiple = false)]
pub(crate) struct GrammarArgs {
    /// Reply with JSON that satisfies the JSON schema in this file
    #[arg(long, value_name = "FILE", help_heading = "Structured output")]
    json_schema: Option<PathBuf>,

    /// Reply with a text that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", help_heading = "Structured output")]
    regex: Option<String>,

    /// Reply with a text of the grammar in this file, in Lark or GBNF
    #[arg(long, value_name = "FILE", help_heading = "Structured output")]
    grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// Returns the flag that was given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        let given = [
            ("--json-schema", self.json_schema.is_some()),
            ("--regex", self.regex.is_some()),
            ("--grammar", self.grammar.is_some()),
        ];
        given.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag)
    }

    /// Reads the file of the grammar, before a model is loaded.
    pub(crate) fn source(&self) -> Result<Option<GrammarSource>> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display())).or_usage()
        };
        if let Some(path) = &self.json_schema {
            let text = read(path)?;
            let schema = serde_json::from_str(&text).with_context(|| format!("{} is not valid JSON", path.display()));
            return Ok(Some(GrammarSource::JsonSchema(schema.or_usage()?)));
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(GrammarSource::Grammar(read(path)?)));
        }
        Ok(self.regex.clone().map(GrammarSource::Regex))
    }

    /// Compiles the grammar for a model.
    pub(crate) fn compile(
        &self,
        source: Option<&GrammarSource>,
        model: &LoadedModel,
    ) -> Result<Option<Arc<dyn TokenConstraint>>> {
        let Some(source) = source else { return Ok(None) };
        let flag = self.flag().unwrap_or_default();
        let grammar = model.grammar(TenantId(0), source.clone());
        Ok(Some(grammar.map_err(anyhow::Error::new).with_context(|| flag.to_owned()).or_usage()?))
    }
}
