//! The source of a grammar, as a client gives it, and the limits on its size.

use serde_json::Value;

use crate::{CallSource, Error};

/// Maximum bytes of a source: of the schema's text, the expression, the grammar, or all choices together.
pub const MAX_SOURCE_BYTES: usize = 256 * 1024;
/// Maximum entries of a list of choices.
pub const MAX_CHOICES: usize = 4096;

/// Constraint on the text of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// A JSON value that satisfies this schema.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A text of this grammar in Lark syntax, or in GBNF, which has `::=`.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of tools, in a model's own format.
    Calls(CallSource),
}

impl GrammarSource {
    /// Returns the name of the kind in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            GrammarSource::JsonObject => "json_object",
            GrammarSource::JsonSchema(_) => "schema",
            GrammarSource::Regex(_) => "regex",
            GrammarSource::Grammar(_) => "grammar",
            GrammarSource::Choice(_) => "choice",
            GrammarSource::Calls(_) => "tools",
        }
    }

    /// Refuses a source that is too large.
    pub(crate) fn check_size(&self) -> Result<(), Error> {
        let num_bytes = match self {
            GrammarSource::JsonObject => 0,
            GrammarSource::JsonSchema(schema) => schema.to_string().len(),
            GrammarSource::Regex(text) | GrammarSource::Grammar(text) => text.len(),
            GrammarSource::Calls(calls) => calls.tools.iter().map(|tool| tool.parameters.to_string().len()).sum(),
            GrammarSource::Choice(choices) => {
                if choices.len() > MAX_CHOICES {
                    return Err(self.too_large("entries", MAX_CHOICES, choices.len()));
                }
                choices.iter().map(String::len).sum()
            }
        };
        if num_bytes > MAX_SOURCE_BYTES {
            return Err(self.too_large("bytes", MAX_SOURCE_BYTES, num_bytes));
        }
        Ok(())
    }

    fn too_large(&self, what: &'static str, limit: usize, found: usize) -> Error {
        Error::TooLarge { kind: self.kind(), what, limit, found }
    }
}
