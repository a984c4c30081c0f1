//! The steps, one file each, and their list in the default order.
//!
//! A new step is a file here with a `DESCRIPTION`, a line in the list below, and its options in `options/table.rs`; see
//! `docs/guides/add-a-sampler-step.md`. `sampler.rs` builds the chain and runs it.

mod constraint;
mod dry;
mod frequency_presence;
mod grammar_mask;
mod kind;
mod logit_bias;
mod min_p;
pub(crate) mod mirostat;
mod repetition;
mod step;
mod temperature;
mod token_rules;
mod top_k;
mod top_n_sigma;
mod top_p;
mod typical;
mod weighted_draw;
mod xtc;

pub use constraint::{TokenConstraint, TokenMatcher};
pub use step::Effect;
pub(crate) use step::{Context, Description, Step};

kind::steps! {
    // The fixed steps at the beginning.
    LogitBias: logit_bias,
    /// Banned tokens, allowed tokens, and no end before `min_tokens`.
    TokenRules: token_rules,

    Repetition: repetition,
    FrequencyPresence: frequency_presence,
    Dry: dry,
    /// Tokens that the grammar excludes. Comes before the first step that looks at more than one candidate, so that no
    /// step can leave only tokens that the grammar excludes.
    Mask: grammar_mask,
    /// Fixed or dynamic.
    Temperature: temperature,
    // Before top-k, as in llama.cpp. Temperature does not change what it keeps.
    TopNSigma: top_n_sigma,
    TopK: top_k,
    Typical: typical,
    TopP: top_p,
    MinP: min_p,
    // After the other truncating steps, as its author asks: its threshold is then about the probabilities of the draw.
    Xtc: xtc,

    /// Replaces the truncating steps.
    Mirostat: mirostat,
    Draw: weighted_draw,
}

/// Keeps an edited logit finite, so that an edit neither excludes a token nor makes it certain. Infinite logits stay as
/// they are.
pub(crate) fn bounded(before: f32, after: f64) -> f32 {
    if before.is_finite() { (after as f32).clamp(f32::MIN, f32::MAX) } else { before }
}
