//! Repetition penalty (Keskar et al., "CTRL", 2019), over prompt and output: positive logit / penalty, negative logit *
//! penalty.

use super::step::Effect;
use super::{Context, Description, Step, bounded};
use crate::Error;
use crate::candidates::Candidates;

pub(super) const DESCRIPTION: Description = Description {
    name: "repetition_penalty",
    label: |_| "repeat",
    effect: Effect::EditsLogits,
    is_movable: true,
    summary: "tokens of prompt and output: divides a positive logit by the penalty, multiplies a negative one",
    is_used: |p| p.repetition_penalty != 1.0,
    option: |_| "repetition_penalty",
    short_setting: |p| p.repetition_penalty.to_string(),
    meaning: |_| "makes tokens of the prompt and the reply less likely".into(),
    build: |p, _| Box::new(Repetition { penalty: p.repetition_penalty }),
};

#[derive(Debug)]
struct Repetition {
    penalty: f32,
}

impl Step for Repetition {
    fn setting(&self) -> String {
        self.penalty.to_string()
    }

    /// Costs as much as there are distinct tokens in the window.
    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        let penalty = f64::from(self.penalty);
        set.edit(context.input.history.counts().map(|(token, _)| (token, ())), |logit, ()| {
            let logit64 = f64::from(logit);
            bounded(logit, if logit > 0.0 { logit64 / penalty } else { logit64 * penalty })
        });
        Ok(())
    }
}
