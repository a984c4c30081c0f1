//! The steps in words: what each does to the candidates, for people who meet it for the first time.

use pellucid_sampling::{SamplingParams, StepKind};

/// The head of a step's column, in at most six letters.
pub(super) fn label(kind: StepKind, params: &SamplingParams) -> &'static str {
    match kind {
        StepKind::LogitBias => "bias",
        StepKind::TokenRules => "rules",
        StepKind::Repetition => "repeat",
        StepKind::FrequencyPresence if params.frequency_penalty == 0.0 => "presen",
        StepKind::FrequencyPresence if params.presence_penalty == 0.0 => "freq",
        StepKind::FrequencyPresence => "fr+pr",
        StepKind::Dry => "dry",
        StepKind::Mask => "mask",
        StepKind::Temperature => "temp",
        StepKind::TopNSigma => "sigma",
        StepKind::TopK => "top-k",
        StepKind::Typical => "typic",
        StepKind::TopP => "top-p",
        StepKind::MinP => "min-p",
        StepKind::Xtc => "xtc",
        StepKind::Mirostat => "mirost",
        StepKind::Draw => "draw",
    }
}

/// The setting below that head.
pub(super) fn setting(kind: StepKind, params: &SamplingParams) -> String {
    let p = params;
    match kind {
        StepKind::LogitBias => format!("{} tok", p.logit_bias.len()),
        StepKind::TokenRules | StepKind::Mask | StepKind::Draw => String::new(),
        StepKind::Repetition => p.repetition_penalty.to_string(),
        StepKind::FrequencyPresence if p.frequency_penalty == 0.0 => p.presence_penalty.to_string(),
        StepKind::FrequencyPresence if p.presence_penalty == 0.0 => p.frequency_penalty.to_string(),
        StepKind::FrequencyPresence => format!("{}+{}", p.frequency_penalty, p.presence_penalty),
        StepKind::Dry => p.dry.multiplier.to_string(),
        StepKind::Temperature if p.dynamic_temperature_range != 0.0 => {
            format!("{}±{}", p.temperature, p.dynamic_temperature_range)
        }
        StepKind::Temperature => p.temperature.to_string(),
        StepKind::TopNSigma => p.top_n_sigma.to_string(),
        StepKind::TopK => p.top_k.to_string(),
        StepKind::Typical => p.typical_p.to_string(),
        StepKind::TopP => p.top_p.to_string(),
        StepKind::MinP => p.min_p.to_string(),
        StepKind::Xtc => p.xtc_probability.to_string(),
        StepKind::Mirostat => p.mirostat.map_or_else(String::new, |mirostat| format!("tau {}", mirostat.tau)),
    }
}

/// What a step does, in a sentence without its subject.
pub(super) fn meaning(kind: StepKind, params: &SamplingParams) -> String {
    let p = params;
    match kind {
        StepKind::LogitBias => "adds the given numbers to the logits of the given tokens".into(),
        StepKind::TokenRules => "takes out what may not be chosen".into(),
        StepKind::Repetition => "makes tokens of the prompt and the reply less likely".into(),
        StepKind::FrequencyPresence => {
            "lowers the logits of tokens that the reply has used: by the first number for each time, by the second once"
                .into()
        }
        StepKind::Dry => "lowers the logit of a token that would continue the repeat of a phrase".into(),
        StepKind::Mask => "takes out what the grammar forbids".into(),
        StepKind::Temperature if p.dynamic_temperature_range != 0.0 => {
            "divides the logits, by more where the model is unsure".into()
        }
        StepKind::Temperature if p.temperature == 0.0 => "greedy: the highest logit stays, alone".into(),
        StepKind::Temperature if p.temperature < 1.0 => {
            format!("divides every logit by {}: the likely gain", p.temperature)
        }
        StepKind::Temperature => format!("divides every logit by {}: the unlikely gain", p.temperature),
        StepKind::TopNSigma => format!("keeps logits within {} standard deviations of the highest", p.top_n_sigma),
        StepKind::TopK => format!("keeps the {} most probable", p.top_k),
        StepKind::Typical => {
            format!("keeps those closest to the expected surprise that together reach {}", percent(p.typical_p))
        }
        StepKind::TopP => format!("keeps the top ones that together reach {}", percent(p.top_p)),
        StepKind::MinP => format!("keeps those at least {} as probable as the best", percent(p.min_p)),
        StepKind::Xtc => format!(
            "{} of the time, takes out all but the last of those with {} or more",
            percent(p.xtc_probability),
            percent(p.xtc_threshold)
        ),
        StepKind::Mirostat => "cuts what would surprise too much, and adjusts that limit after each token".into(),
        StepKind::Draw if p.temperature == 0.0 => "with one candidate left, there is nothing to draw".into(),
        StepKind::Draw => {
            "a race: each candidate takes the time -ln(u)/p and the first home wins; its u is a random number \
             fixed by seed, position and token"
                .into()
        }
    }
}

fn percent(part: f32) -> String {
    // 0.05 as f32 times 100 has a tail of digits that nobody typed.
    format!("{}%", (f64::from(part) * 1e6).round() / 1e4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_fit_their_columns_and_every_step_has_words() {
        for kind in StepKind::ALL {
            assert!(label(kind, &SamplingParams::default()).len() <= 6, "{kind}");
            assert!(!meaning(kind, &SamplingParams::default()).is_empty(), "{kind}");
        }
        assert_eq!(percent(0.05), "5%");
        assert_eq!(percent(0.925), "92.5%");
    }
}
