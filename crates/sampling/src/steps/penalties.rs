//! Logit bias, and the penalties on tokens that were there before. Each costs as much as there are distinct tokens to change.

use crate::candidates::Candidates;
use crate::history::History;

/// Large logits stay numbers: an edit neither rules a token out nor makes it win outright. Infinite ones stay as the model gave them.
pub(crate) fn bounded(before: f32, after: f64) -> f32 {
    if before.is_finite() { (after as f32).clamp(f32::MIN, f32::MAX) } else { before }
}

pub(crate) fn logit_bias(set: &mut Candidates<'_>, bias: &[(u32, f32)]) {
    set.edit(bias.iter().copied(), |logit, bias| bounded(logit, f64::from(logit) + f64::from(bias)));
}

/// Over prompt and output: positive logit / penalty, negative logit * penalty (Keskar et al., "CTRL", 2019).
pub(crate) fn repetition(set: &mut Candidates<'_>, history: &History, penalty: f32) {
    let penalty = f64::from(penalty);
    set.edit(history.counts().map(|(token, _)| (token, ())), |logit, ()| {
        let logit64 = f64::from(logit);
        bounded(logit, if logit > 0.0 { logit64 / penalty } else { logit64 * penalty })
    });
}

/// Over the output: logit - frequency * count - presence * (count > 0), as the OpenAI API defines the two.
pub(crate) fn frequency_presence(set: &mut Candidates<'_>, history: &History, frequency: f32, presence: f32) {
    let seen = history.counts().filter(|(_, count)| count.output > 0);
    set.edit(seen, |logit, count| {
        let penalty = f64::from(frequency) * f64::from(count.output) + f64::from(presence);
        bounded(logit, f64::from(logit) - penalty)
    });
}
