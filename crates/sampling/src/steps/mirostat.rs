//! Mirostat 2 (Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity", 2021):
//! drops every token whose surprise is above mu bits, draws, and moves mu by the distance between the drawn token's
//! surprise and the target.
//!
//! As llama.cpp defines it: mu starts at twice the target, and the surprise of the drawn token is measured after the
//! cut, with the probabilities of the remaining candidates.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::candidates::Candidates;
use crate::{Error, SamplingParams};

pub(super) const DESCRIPTION: Description = Description {
    name: "mirostat",
    label: |_| "mirost",
    effect: Effect::Truncates,
    is_movable: false,
    summary: "drops tokens whose surprise is above mu, and moves mu towards the target after each token; \
              excludes the other steps that truncate",
    is_used: |p| p.mirostat_tau.is_some(),
    option: |_| "mirostat_tau",
    short_setting: |p| p.mirostat_tau.map_or_else(String::new, |tau| format!("tau {tau}")),
    meaning: |_| "cuts what would surprise too much, and adjusts that limit after each token".into(),
    build: |p, _| Box::new(Mirostat::of(p).unwrap_or(Mirostat { tau: f32::INFINITY, eta: 0.0 })),
};

/// Learning rate of the paper and of llama.cpp, used until `mirostat_eta` is set.
pub(crate) const DEFAULT_ETA: f32 = 0.1;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mirostat {
    tau: f32,
    eta: f32,
}

impl Mirostat {
    /// Returns `None` where Mirostat is off.
    pub(crate) fn of(params: &SamplingParams) -> Option<Mirostat> {
        params.mirostat_tau.map(|tau| Mirostat { tau, eta: params.mirostat_eta.unwrap_or(DEFAULT_ETA) })
    }

    pub(crate) fn first_mu(&self) -> f64 {
        2.0 * f64::from(self.tau)
    }

    /// Returns mu after a token that had `probability` among the remaining candidates.
    pub(crate) fn next_mu(&self, mu: f64, probability: f64) -> f64 {
        let surprise = -libm::log2(probability);
        mu - f64::from(self.eta) * (surprise - f64::from(self.tau))
    }
}

impl Step for Mirostat {
    fn setting(&self) -> String {
        format!("tau {}, eta {}", self.tau, self.eta)
    }

    /// Keeps -log2 p <= mu, and always the most probable token.
    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        // -ln p = h + ln(total).
        let reach = context.mu * std::f64::consts::LN_2 - libm::log(set.mass().total);
        if reach >= 0.0 {
            set.keep_from(set.cut_at(reach));
        } else if let Some(best) = set.best() {
            set.keep_only(best);
        }
        Ok(())
    }
}
