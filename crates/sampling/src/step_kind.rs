//! The names of the steps and their default order. The same names serve `samplers` in a request, the trace and the error messages.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// A step of the chain.
///
/// Those of [`StepKind::MOVABLE`] can be put in any order with `samplers`. The others have their place: bias and token rules come
/// first, the mask comes before the first step that drops candidates or weighs them (so that no step can leave only what the
/// grammar forbids), the draw comes last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepKind {
    LogitBias,
    /// Banned tokens, allowed tokens, and no end before `min_tokens`.
    TokenRules,
    Repetition,
    FrequencyPresence,
    Dry,
    /// What a grammar allows.
    Mask,
    /// Fixed or dynamic.
    Temperature,
    TopNSigma,
    TopK,
    Typical,
    TopP,
    MinP,
    Xtc,
    /// In place of the truncating steps.
    Mirostat,
    Draw,
}

impl StepKind {
    /// The default order is the order here.
    ///
    /// Top-n-sigma stands before top-k, where llama.cpp has it (temperature does not change what it keeps); XTC comes after the
    /// truncating steps, as its author asks, so that its threshold speaks of the probabilities that would be drawn from.
    pub const ALL: [StepKind; 15] = [
        StepKind::LogitBias,
        StepKind::TokenRules,
        StepKind::Repetition,
        StepKind::FrequencyPresence,
        StepKind::Dry,
        StepKind::Mask,
        StepKind::Temperature,
        StepKind::TopNSigma,
        StepKind::TopK,
        StepKind::Typical,
        StepKind::TopP,
        StepKind::MinP,
        StepKind::Xtc,
        StepKind::Mirostat,
        StepKind::Draw,
    ];

    /// The steps that `samplers` may list, in their default order.
    pub const MOVABLE: [StepKind; 10] = [
        StepKind::Repetition,
        StepKind::FrequencyPresence,
        StepKind::Dry,
        StepKind::Temperature,
        StepKind::TopNSigma,
        StepKind::TopK,
        StepKind::Typical,
        StepKind::TopP,
        StepKind::MinP,
        StepKind::Xtc,
    ];

    pub fn name(self) -> &'static str {
        match self {
            StepKind::LogitBias => "logit_bias",
            StepKind::TokenRules => "token_rules",
            StepKind::Repetition => "repetition_penalty",
            StepKind::FrequencyPresence => "frequency_presence_penalty",
            StepKind::Dry => "dry",
            StepKind::Mask => "grammar",
            StepKind::Temperature => "temperature",
            StepKind::TopNSigma => "top_n_sigma",
            StepKind::TopK => "top_k",
            StepKind::Typical => "typical_p",
            StepKind::TopP => "top_p",
            StepKind::MinP => "min_p",
            StepKind::Xtc => "xtc",
            StepKind::Mirostat => "mirostat",
            StepKind::Draw => "draw",
        }
    }

    /// Steps that change logits one by one and look at no other candidate.
    pub(crate) fn edits(self) -> bool {
        use StepKind::{Dry, FrequencyPresence, LogitBias, Repetition, TokenRules};
        matches!(self, LogitBias | TokenRules | Repetition | FrequencyPresence | Dry)
    }

    /// Where the step stands in the default order.
    pub(crate) fn usual_place(self) -> usize {
        StepKind::ALL.iter().position(|&kind| kind == self).expect("a step of all")
    }

    /// Steps that mirostat does away with.
    pub(crate) fn truncates(self) -> bool {
        use StepKind::{MinP, TopK, TopNSigma, TopP, Typical, Xtc};
        matches!(self, TopNSigma | TopK | Typical | TopP | MinP | Xtc)
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StepKind {
    type Err = Error;

    /// Names of movable steps; a fixed one is refused as such, not as unknown.
    fn from_str(name: &str) -> Result<Self, Error> {
        // The CLI's flags have hyphens where names have underscores.
        let name = name.replace('-', "_");
        match StepKind::ALL.into_iter().find(|kind| kind.name() == name) {
            Some(kind) if StepKind::MOVABLE.contains(&kind) => Ok(kind),
            Some(kind) => Err(Error::StepFixed { step: kind.name() }),
            None => Err(Error::UnknownStep {
                found: name.chars().take(40).collect(),
                expected: StepKind::MOVABLE.map(StepKind::name).join(", "),
            }),
        }
    }
}
