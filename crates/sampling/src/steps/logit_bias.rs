//! Logit bias: logit + bias for the listed tokens.

use super::step::Effect;
use super::{Context, Description, Step, bounded};
use crate::Error;
use crate::candidates::Candidates;

pub(super) const DESCRIPTION: Description = Description {
    name: "logit_bias",
    label: |_| "bias",
    effect: Effect::EditsLogits,
    is_movable: false,
    summary: "adds `logit_bias` to the logits of the listed tokens",
    is_used: |p| !p.logit_bias.is_empty(),
    option: |_| "logit_bias",
    short_setting: |p| format!("{} tok", p.logit_bias.len()),
    meaning: |_| "adds the given numbers to the logits of the given tokens".into(),
    build: |p, _| Box::new(LogitBias { bias: p.logit_bias.clone() }),
};

#[derive(Debug)]
struct LogitBias {
    bias: Vec<(u32, f32)>,
}

impl Step for LogitBias {
    fn setting(&self) -> String {
        format!("{} tokens", self.bias.len())
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        set.edit(self.bias.iter().copied(), |logit, bias| bounded(logit, f64::from(logit) + f64::from(bias)));
        Ok(())
    }
}
