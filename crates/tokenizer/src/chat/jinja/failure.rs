//! Reasons why a template does not compile or a rendering ends early, with the place in the template.

use crate::error::Error;

/// Result of a step of parsing or evaluation.
pub(super) type Outcome<T> = Result<T, Failure>;

/// A line and column of a template, in characters from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) line: u32,
    pub(super) column: u32,
}

#[derive(Debug)]
pub(super) enum Kind {
    Message(String),
    /// The message of `raise_exception`.
    Refused(String),
    TooSlow {
        limit: u64,
    },
    TooLarge {
        limit: usize,
    },
    /// The system has no memory for `bytes` more bytes.
    OutOfMemory {
        bytes: usize,
    },
    Cancelled,
}

/// Boxed, so that results stay small.
#[derive(Debug)]
pub(super) struct Failure(Box<(Kind, Option<Place>)>);

impl Failure {
    pub(super) fn new(kind: Kind) -> Failure {
        Failure(Box::new((kind, None)))
    }

    pub(super) fn error(message: impl Into<String>) -> Failure {
        Failure::new(Kind::Message(message.into()))
    }

    /// Returns the failure of an allocation that the system refused.
    pub(super) fn out_of_memory(bytes: usize) -> Failure {
        Failure::new(Kind::OutOfMemory { bytes })
    }

    /// Sets the place, unless an inner statement did.
    pub(super) fn at(mut self, place: Place) -> Failure {
        self.0.1.get_or_insert(place);
        self
    }

    /// Returns the text for an error message.
    pub(super) fn describe(&self) -> String {
        let message = match &self.0.0 {
            Kind::Message(message) | Kind::Refused(message) => message.as_str(),
            Kind::TooSlow { .. } => "too much work",
            Kind::TooLarge { .. } => "too much memory",
            Kind::OutOfMemory { .. } => "out of memory",
            Kind::Cancelled => "cancelled",
        };
        match self.0.1 {
            Some(Place { line, column }) => format!("{message} (line {line}, column {column})"),
            None => message.to_owned(),
        }
    }

    pub(super) fn into_render_error(self) -> Error {
        match self.0.0 {
            Kind::Refused(message) => Error::TemplateRefused(message),
            Kind::TooSlow { limit } => Error::TemplateTooSlow { limit },
            Kind::TooLarge { limit } => Error::TemplateTooLarge { limit },
            Kind::OutOfMemory { bytes } => Error::OutOfMemory { bytes },
            Kind::Cancelled => Error::Cancelled,
            Kind::Message(_) => Error::TemplateRender(self.describe()),
        }
    }
}
