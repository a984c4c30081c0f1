//! Why a grammar was refused.

/// An error in the source of a grammar, or in the vocabulary that it is compiled for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A JSON schema is invalid, has a feature that is not enforced, or allows no value.
    #[error("the schema at {place}: {problem}")]
    Schema {
        /// JSON pointer to the place in the schema, such as `#/properties/name/minLength`.
        place: String,
        /// Explanation of the problem, and what to do.
        problem: String,
    },
    /// The schema of a tool's arguments is refused.
    #[error("the tool {name:?}: {problem}")]
    Tool {
        /// Name of the tool.
        name: String,
        /// Error of the schema.
        problem: Box<Error>,
    },
    /// A regular expression, a grammar or a list of choices is invalid.
    #[error("the {kind}: {problem}")]
    Source {
        /// `regex`, `grammar` or `choice`.
        kind: &'static str,
        /// Explanation of the problem, with the line where there are lines.
        problem: String,
    },
    /// The source is larger or deeper than the limits allow.
    #[error("the {kind} has {found} {what}, but at most {limit} are supported")]
    TooLarge {
        /// `schema`, `regex`, `grammar` or `choice`.
        kind: &'static str,
        /// The thing that was counted.
        what: &'static str,
        /// The limit.
        limit: usize,
        /// The number in the source.
        found: usize,
    },
    /// The model's vocabulary cannot be used for structured output.
    #[error("this model's vocabulary cannot be used for structured output: {0}")]
    Vocabulary(String),
    /// The system has no thread or no memory to compile the grammar.
    #[error("no thread could be started to compile the grammar; try again later")]
    NoThread,
}

impl Error {
    pub(crate) fn source(kind: &'static str, problem: impl Into<String>) -> Error {
        Error::Source { kind, problem: problem.into() }
    }

    /// Returns the error with the name of the tool in whose schema it is.
    pub(crate) fn in_tool(self, name: &str) -> Error {
        Error::Tool { name: name.to_owned(), problem: Box::new(self) }
    }

    /// Returns an error of a part of a schema, which is at `place`, as an error of the whole.
    pub(crate) fn below(self, place: &str) -> Error {
        match self {
            Error::Schema { place: part, problem } => {
                Error::Schema { place: format!("{place}{}", part.trim_start_matches('#')), problem }
            }
            other => other,
        }
    }
}
