//! Speculation changes no reply: tokens, finish reasons, counts, log probabilities to the bit and traces are the same
//! with any drafter as without.
//!
//! - `families`: thousands of prompts on every tiny model and KV format, with honest and hostile drafters.
//! - `samplers`: every option of the sampler, one by one.
//! - `composition`: choices, limits, the prefix cache, preemption, control messages, tenants and look-ahead steps.
//! - `mtp`: layers of a model that predict further tokens, right and wrong ones.
//! - `draft_models`: a draft model that is the target, another one, one that computes NaN, and one that fails.
//!
//! Each comparison has a positive control: with `Engine::trust_drafts` it must fail. `PELLUCID_ROUNDS=N` multiplies the
//! prompts of `families` by N.

mod composition;
mod draft_models;
mod families;
mod mtp;
mod samplers;
mod support;
