//! From text to text over one engine: the crate between the programs (command line, server, library) and the engine.
//!
//! Read in the order of a request: [`LoadedModel`] is a model that is ready to answer, and [`PromptEncoder`] makes
//! token ids of messages or text. This crate opens no file, chooses no device, and knows neither HTTP nor terminals.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod clock;
mod error;
mod model;
mod prompt;

pub use clock::{utc_at, utc_now};
pub use error::Error;
pub use model::LoadedModel;
pub use prompt::{ChatPrompt, PromptEncoder};
