//! Flags for structured output: the grammar of a reply, from a file or from the command line.

use std::path::PathBuf;

use anyhow::{Context, Result};
use pellucid_generate::GrammarSource;

use crate::flags::{json_file, text_file};

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

    /// Reads the file of the grammar, before a model is loaded. Returns it with its flag.
    pub(crate) fn source(&self) -> Result<Option<(&'static str, GrammarSource)>> {
        let Some(flag) = self.flag() else { return Ok(None) };
        let source = if let Some(path) = &self.json_schema {
            GrammarSource::JsonSchema(json_file::read(path)?)
        } else if let Some(path) = &self.grammar {
            GrammarSource::Grammar(text_file::read(path).context("--grammar")?)
        } else {
            GrammarSource::Regex(self.regex.clone().unwrap_or_default())
        };
        Ok(Some((flag, source)))
    }
}
