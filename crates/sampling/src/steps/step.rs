//! The parts of a step: a [`Description`] that holds for every request, and a [`Step`] with the settings of one
//! request.

use std::fmt::Debug;

use crate::candidates::Candidates;
use crate::digest::DigestPlan;
use crate::{Error, Input, SamplingParams};

/// Effect of a step on the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Changes the logits of some tokens, each without looking at the others.
    EditsLogits,
    /// Excludes tokens by a rule that does not depend on logits.
    ExcludesTokens,
    /// Divides all logits alike.
    ScalesLogits,
    /// Drops candidates by their probabilities or logits.
    Truncates,
    /// Draws one of the candidates.
    Draws,
}

/// The part of a step that is the same for every request.
#[derive(Debug)]
pub(crate) struct Description {
    /// Name in `samplers`, in the trace and in errors.
    pub(crate) name: &'static str,
    /// Head of the step's column in `pellucid explain`, at most six letters.
    pub(crate) label: fn(&SamplingParams) -> &'static str,
    pub(crate) effect: Effect,
    /// Whether `samplers` may list the step.
    pub(crate) is_movable: bool,
    /// One line for `docs/sampling.md`.
    pub(crate) summary: &'static str,
    /// Whether the step is in the chain for these parameters.
    pub(crate) is_used: fn(&SamplingParams) -> bool,
    /// Name of the parameter that puts the step to use.
    pub(crate) option: fn(&SamplingParams) -> &'static str,
    /// Setting in a few letters, below the label.
    pub(crate) short_setting: fn(&SamplingParams) -> String,
    /// Effect of the step with these parameters: a sentence without its subject.
    pub(crate) meaning: fn(&SamplingParams) -> String,
    /// Builds the step for a vocabulary of the given size.
    pub(crate) build: fn(&SamplingParams, usize) -> Box<dyn Step>,
}

/// Input of a step besides the candidates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) input: &'a Input<'a>,
    pub(crate) seed: u64,
    /// Mirostat's limit; the other steps have no state.
    pub(crate) mu: f64,
}

/// A step with its settings.
pub(crate) trait Step: Debug + Send + Sync {
    /// Returns the setting in words, as the trace shows it.
    fn setting(&self) -> String {
        String::new()
    }

    /// Changes logits or drops candidates, but never all of them.
    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error>;

    /// Whether the step excludes a token whatever its logit is. `num_output` is the number of tokens of the reply.
    fn excludes(&self, _token: u32, _num_output: usize) -> bool {
        false
    }

    /// Adds the step to the plan of a digest. Returns false when the step has to see the whole row.
    fn plan_digest(&self, _plan: &mut DigestPlan) -> bool {
        false
    }
}

/// Formats a probability as a percentage: 0.05 is "5%".
pub(crate) fn percent(part: f32) -> String {
    // Rounded, because 0.05 as an f32 times 100 has digits that the user did not type.
    format!("{}%", (f64::from(part) * 1e6).round() / 1e4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_as_typed() {
        assert_eq!(percent(0.05), "5%");
        assert_eq!(percent(0.925), "92.5%");
    }
}
