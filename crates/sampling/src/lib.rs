//! Logits to token: the chain of named steps, the keyed draw, and the record of both. Depends on no other room.
//!
//! Read `sampler.rs` first, then the steps in `steps/`, then `draw.rs`. `engine` calls [`Sampler::sample`] once for each token; the
//! CLI and the server build [`SamplingParams`] and show the [`TokenTrace`].
#![forbid(unsafe_code)]

mod blocks;
mod candidates;
mod check;
mod digest;
mod draw;
mod error;
mod exponential;
mod history;
mod logprobs;
mod params;
mod philox;
mod preset;
mod probabilities;
mod sampler;
mod step_kind;
mod steps;
mod trace;

#[cfg(test)]
mod tests;

pub use candidates::Workspace;
pub use check::{
    MAX_DRY_BREAKER_LEN, MAX_DRY_BREAKERS, MAX_LISTED_TOKENS, MAX_LOGPROBS, MAX_TEMPERATURE, MAX_VOCAB_SIZE,
};
pub use digest::{Digest, DigestQuery, OwnedDigest, RACE_MARGIN, Shortlist};
pub use error::Error;
pub use history::{Count, History};
pub use logprobs::Logprobs;
pub use params::{DRY_BREAKERS, Dry, Mirostat, SamplingParams};
pub use philox::{philox, uniform};
pub use preset::Preset;
pub use sampler::{Choice, End, Input, Sampler, State};
pub use step_kind::StepKind;
pub use trace::{CandidateTrace, DrawTrace, RunnerTrace, StepTrace, TokenTrace};
