//! Logits to token: the chain of named steps, the keyed draw, and the trace of both. Depends on no other crate of the
//! project.
//!
//! Read `sampler.rs` first, then the steps in `steps/`, then `draw.rs`. `options/table.rs` defines every option. The
//! engine calls [`Sampler::sample`] once per token; the command line and the server build [`SamplingParams`] and show
//! the [`TokenTrace`].
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod candidates;
mod check;
mod digest;
mod draw;
mod error;
mod exponential;
mod history;
mod logprobs;
mod options;
mod philox;
mod preset;
mod probabilities;
mod random_seed;
mod row_blocks;
mod sampler;
mod steps;
mod trace;

#[cfg(test)]
mod tests;

pub use candidates::Workspace;
pub use digest::{Digest, DigestQuery, OwnedDigest, RACE_MARGIN, Shortlist};
pub use error::Error;
pub use history::{Count, History};
pub use logprobs::Logprobs;
pub use options::{
    DRY_BREAKERS, DefaultSource, Fallback, GivenOptions, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKER_LEN, MAX_DRY_BREAKERS,
    MAX_LISTED_TOKENS, MAX_LOGPROBS, MAX_TEMPERATURE, MAX_VOCAB_SIZE, OPTIONS, OptionKind, PELLUCID_DEFAULT,
    SamplingDefaults, SamplingOption, SamplingParams, Value, ValueRef,
};
pub use philox::{philox, uniform};
pub use preset::Preset;
pub use random_seed::random_seed;
pub use sampler::{Choice, End, Input, Sampler, State};
pub use steps::{Effect, StepKind, TokenConstraint, TokenMatcher};
pub use trace::{CandidateTrace, DrawTrace, RunnerTrace, StepTrace, TokenTrace};
