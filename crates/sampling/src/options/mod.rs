//! The sampling options: each is defined once, in `table.rs`, with its type, range, neutral value and one-line
//! description.
//!
//! Everything that names an option reads that table: [`SamplingParams`] and its checks, the fields of a JSON request
//! and their OpenAPI schema, the flags of the command line, and the table in `docs/sampling.md`.

mod defaults;
mod define;
mod given;
mod spec;
mod table;
mod value;

#[cfg(test)]
pub(crate) mod document;

pub use defaults::{DefaultSource, Fallback, PELLUCID_DEFAULT, SamplingDefaults};
pub use given::GivenOptions;
pub use spec::{OptionKind, SamplingOption};
pub use table::{
    DRY_BREAKERS, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKER_LEN, MAX_DRY_BREAKERS, MAX_LISTED_TOKENS, MAX_LOGPROBS,
    MAX_TEMPERATURE, MAX_VOCAB_SIZE, OPTIONS, SamplingParams,
};
pub use value::{Value, ValueRef};
