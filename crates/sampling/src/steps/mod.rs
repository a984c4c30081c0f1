//! The steps, a file each. A step takes the candidates, changes logits or drops some, and never drops all.
//!
//! `sampler.rs` holds the chain that calls them; this file is the list of what a step can be.

pub(crate) mod dry;
pub(crate) mod min_p;
pub(crate) mod mirostat;
pub(crate) mod penalties;
pub(crate) mod temperature;
pub(crate) mod token_rules;
pub(crate) mod top_k;
pub(crate) mod top_n_sigma;
pub(crate) mod top_p;
pub(crate) mod typical;
pub(crate) mod xtc;

use crate::candidates::Candidates;
use crate::history::History;
use crate::params::{Dry, Mirostat};
use crate::{Error, Input, StepKind};

/// A step with its settings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    LogitBias(Vec<(u32, f32)>),
    TokenRules(token_rules::TokenRules),
    Repetition { penalty: f32 },
    FrequencyPresence { frequency: f32, presence: f32 },
    Dry(Dry),
    Mask,
    Temperature { temperature: f32 },
    DynamicTemperature { temperature: f32, range: f32, exponent: f32 },
    TopNSigma { n: f32 },
    TopK { k: u32 },
    Typical { p: f32 },
    TopP { p: f32 },
    MinP { p: f32 },
    Xtc { probability: f32, threshold: f32 },
    Mirostat(Mirostat),
    Draw,
}

impl Step {
    pub(crate) fn kind(&self) -> StepKind {
        match self {
            Step::LogitBias(_) => StepKind::LogitBias,
            Step::TokenRules(_) => StepKind::TokenRules,
            Step::Repetition { .. } => StepKind::Repetition,
            Step::FrequencyPresence { .. } => StepKind::FrequencyPresence,
            Step::Dry(_) => StepKind::Dry,
            Step::Mask => StepKind::Mask,
            Step::Temperature { .. } | Step::DynamicTemperature { .. } => StepKind::Temperature,
            Step::TopNSigma { .. } => StepKind::TopNSigma,
            Step::TopK { .. } => StepKind::TopK,
            Step::Typical { .. } => StepKind::Typical,
            Step::TopP { .. } => StepKind::TopP,
            Step::MinP { .. } => StepKind::MinP,
            Step::Xtc { .. } => StepKind::Xtc,
            Step::Mirostat(_) => StepKind::Mirostat,
            Step::Draw => StepKind::Draw,
        }
    }

    /// The setting, as the trace shows it.
    pub(crate) fn setting(&self) -> String {
        match self {
            Step::LogitBias(bias) => format!("{} tokens", bias.len()),
            Step::TokenRules(rules) => rules.setting(),
            Step::Repetition { penalty } => format!("{penalty}"),
            Step::FrequencyPresence { frequency, presence } => format!("frequency {frequency}, presence {presence}"),
            Step::Dry(dry) => {
                format!("multiplier {}, base {}, allowed length {}", dry.multiplier, dry.base, dry.allowed_length)
            }
            Step::Mask | Step::Draw => String::new(),
            Step::Temperature { temperature } => format!("{temperature}"),
            Step::DynamicTemperature { temperature, range, exponent } => {
                format!("{temperature} +- {range}, exponent {exponent}")
            }
            Step::TopNSigma { n } => format!("{n}"),
            Step::TopK { k } => format!("{k}"),
            Step::Typical { p } | Step::TopP { p } | Step::MinP { p } => format!("{p}"),
            Step::Xtc { probability, threshold } => format!("probability {probability}, threshold {threshold}"),
            Step::Mirostat(mirostat) => format!("tau {}, eta {}", mirostat.tau, mirostat.eta),
        }
    }

    /// Whether the step takes part in this choice: a mask that nobody gave does not.
    pub(crate) fn applies(&self, input: &Input<'_>) -> bool {
        !matches!(self, Step::Mask) || input.mask.is_some()
    }

    /// Everything but the draw. `mu` is mirostat's; the other steps have no memory.
    pub(crate) fn apply(&self, set: &mut Candidates<'_>, input: &Input<'_>, seed: u64, mu: f64) -> Result<(), Error> {
        let history: &History = input.history;
        match self {
            Step::LogitBias(bias) => penalties::logit_bias(set, bias),
            Step::TokenRules(rules) => rules.apply(set, history),
            Step::Repetition { penalty } => penalties::repetition(set, history, *penalty),
            Step::FrequencyPresence { frequency, presence } => {
                penalties::frequency_presence(set, history, *frequency, *presence);
            }
            Step::Dry(dry) => dry::dry(set, history, dry),
            Step::Mask => {
                if let Some(words) = input.mask {
                    set.mask(words);
                }
                set.settle_infinities()?;
            }
            Step::Temperature { temperature } => temperature::temperature(set, f64::from(*temperature)),
            Step::DynamicTemperature { temperature, range, exponent } => {
                temperature::dynamic(set, *temperature, *range, *exponent);
            }
            Step::TopNSigma { n } => top_n_sigma::top_n_sigma(set, *n),
            Step::TopK { k } => top_k::top_k(set, *k),
            Step::Typical { p } => typical::typical(set, *p),
            Step::TopP { p } => top_p::top_p(set, *p),
            Step::MinP { p } => min_p::min_p(set, *p),
            Step::Xtc { probability, threshold } => {
                if crate::philox::xtc_coin(seed, input.position) < f64::from(*probability) {
                    xtc::exclude_top_choices(set, *threshold);
                }
            }
            Step::Mirostat(_) => mirostat::truncate(set, mu),
            Step::Draw => {}
        }
        Ok(())
    }
}
