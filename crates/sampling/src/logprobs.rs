//! Log probabilities of the model itself: of the raw logits, before bias, penalties, masks and temperature.
//!
//! A client therefore cannot use a bias to read the probability of a token below the reported ones.

use crate::Error;
use crate::candidates::{Candidate, Candidates, Workspace};
use crate::probabilities::Probabilities;

/// Log probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// ln p of the sampled token; -inf if its logit is -inf.
    pub chosen: f32,
    /// The `num_top` most probable tokens with their ln p, ties to the lower id.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Returns the log probabilities of a token that was given and not sampled, such as one of a prompt.
    pub fn of(logits: &[f32], token: u32, num_top: u32, space: &mut Workspace) -> Result<Logprobs, Error> {
        let mut set = Candidates::new(logits, space)?;
        let view = ModelView::new(&mut set, num_top);
        Ok(view.report(logits[token as usize]))
    }
}

/// The raw logits' probabilities, taken before the first step changes them.
#[derive(Debug)]
pub(crate) struct ModelView {
    probabilities: Probabilities,
    top: Vec<Candidate>,
}

impl ModelView {
    pub(crate) fn new(set: &mut Candidates<'_>, num_top: u32) -> Self {
        let top = if num_top == 0 { Vec::new() } else { set.highest(num_top as usize) };
        ModelView { probabilities: set.probabilities(), top }
    }

    pub(crate) fn logprob(&self, logit: f32) -> f32 {
        self.probabilities.ln_of(logit) as f32
    }

    pub(crate) fn report(&self, chosen: f32) -> Logprobs {
        let top = self.top.iter().map(|candidate| (candidate.id, self.logprob(candidate.logit))).collect();
        Logprobs { chosen: self.logprob(chosen), top }
    }
}
