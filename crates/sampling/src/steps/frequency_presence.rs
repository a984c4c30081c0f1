//! Frequency and presence penalty as the OpenAI API defines them, over the output: logit - frequency * count -
//! presence.

use super::step::Effect;
use super::{Context, Description, Step, bounded};
use crate::candidates::Candidates;
use crate::{Error, SamplingParams};

pub(super) const DESCRIPTION: Description = Description {
    name: "frequency_presence_penalty",
    label: |p| match (p.frequency_penalty == 0.0, p.presence_penalty == 0.0) {
        (true, _) => "presen",
        (false, true) => "freq",
        (false, false) => "fr+pr",
    },
    effect: Effect::EditsLogits,
    is_movable: true,
    summary: "tokens of the output: subtracts the frequency penalty times their count, and the presence penalty once",
    is_used: |p| p.frequency_penalty != 0.0 || p.presence_penalty != 0.0,
    option: |p| if p.frequency_penalty != 0.0 { "frequency_penalty" } else { "presence_penalty" },
    short_setting,
    meaning: |_| {
        "lowers the logits of tokens in the reply: by the first number for each occurrence, by the second once".into()
    },
    build: |p, _| Box::new(FrequencyPresence { frequency: p.frequency_penalty, presence: p.presence_penalty }),
};

fn short_setting(p: &SamplingParams) -> String {
    match (p.frequency_penalty == 0.0, p.presence_penalty == 0.0) {
        (true, _) => p.presence_penalty.to_string(),
        (false, true) => p.frequency_penalty.to_string(),
        (false, false) => format!("{}+{}", p.frequency_penalty, p.presence_penalty),
    }
}

#[derive(Debug)]
struct FrequencyPresence {
    frequency: f32,
    presence: f32,
}

impl Step for FrequencyPresence {
    fn setting(&self) -> String {
        format!("frequency {}, presence {}", self.frequency, self.presence)
    }

    /// Costs as much as there are distinct tokens in the window.
    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        let in_output = context.input.history.counts().filter(|(_, count)| count.output > 0);
        set.edit(in_output, |logit, count| {
            let penalty = f64::from(self.frequency) * f64::from(count.output) + f64::from(self.presence);
            bounded(logit, f64::from(logit) - penalty)
        });
        Ok(())
    }
}
