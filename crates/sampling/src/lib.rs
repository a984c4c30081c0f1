//! Logits to token. Depends on no other room; `engine` calls it once for each token.

mod philox;
mod sampler;

pub use philox::{philox, uniform};
pub use sampler::{Error, MAX_TEMPERATURE, SamplingParams, sample};
