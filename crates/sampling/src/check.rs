//! The allowed range of every parameter, in one table. What is out of range is refused by name; nothing is clamped.

use crate::params::SamplingParams;
use crate::{Error, StepKind};

/// Far above any use: at 100, odds of a million to one become 1.15 to one.
pub const MAX_TEMPERATURE: f32 = 100.0;
/// More would let a client read the model's last layer off (Carlini et al., "Stealing part of a production language model", 2024).
pub const MAX_LOGPROBS: u32 = 20;
/// Entries of `logit_bias`, `stop_ids` and the like: far above any use, and small beside a row of logits.
pub const MAX_LISTED_TOKENS: usize = 4096;
pub const MAX_DRY_BREAKERS: usize = 256;
pub const MAX_DRY_BREAKER_LEN: usize = 64;
/// Above every vocabulary in use; ids and counts stay far from the edge of their types.
pub const MAX_VOCAB_SIZE: usize = 1 << 22;

/// A number's name, value and allowed range, both ends included.
type Range = (&'static str, f64, f64, f64);

impl SamplingParams {
    /// Every number with its range.
    fn ranges(&self) -> Vec<Range> {
        let optional = |value: Option<u32>| value.map_or(1.0, f64::from);
        let tokens = f64::from(u32::MAX);
        let mut ranges = vec![
            ("temperature", self.temperature.into(), 0.0, MAX_TEMPERATURE.into()),
            ("dynamic_temperature_range", self.dynamic_temperature_range.into(), 0.0, MAX_TEMPERATURE.into()),
            ("dynamic_temperature_exponent", self.dynamic_temperature_exponent.into(), 0.0, 100.0),
            ("top_n_sigma", self.top_n_sigma.into(), 0.0, 100.0),
            ("typical_p", self.typical_p.into(), 0.0, 1.0),
            ("top_p", self.top_p.into(), 0.0, 1.0),
            ("min_p", self.min_p.into(), 0.0, 1.0),
            ("xtc_probability", self.xtc_probability.into(), 0.0, 1.0),
            // Two tokens cannot both have more than a half.
            ("xtc_threshold", self.xtc_threshold.into(), 0.0, 0.5),
            ("repetition_penalty", self.repetition_penalty.into(), 0.01_f32.into(), 100.0),
            ("frequency_penalty", self.frequency_penalty.into(), -2.0, 2.0),
            ("presence_penalty", self.presence_penalty.into(), -2.0, 2.0),
            ("penalty_window", optional(self.penalty_window), 1.0, tokens),
            ("dry_multiplier", self.dry.multiplier.into(), 0.0, 100.0),
            ("dry_base", self.dry.base.into(), 1.0, 100.0),
            ("dry_allowed_length", self.dry.allowed_length.into(), 1.0, tokens),
            ("dry_range", optional(self.dry.range), 1.0, tokens),
            ("logprobs", self.logprobs.unwrap_or(0).into(), 0.0, MAX_LOGPROBS.into()),
        ];
        if let Some(mirostat) = self.mirostat {
            ranges.push(("mirostat_tau", mirostat.tau.into(), 0.0, 100.0));
            ranges.push(("mirostat_eta", mirostat.eta.into(), 0.0, 1.0));
        }
        ranges.extend(self.logit_bias.iter().map(|&(_, bias)| ("logit_bias", f64::from(bias), -100.0, 100.0)));
        ranges
    }

    /// Every list of tokens with its longest length. Bans may name a large part of the vocabulary, such as all of one script.
    fn lists(&self) -> Vec<(&'static str, usize, usize)> {
        let longest_breaker = self.dry.breakers.iter().map(Vec::len).max().unwrap_or(0);
        vec![
            ("logit_bias", self.logit_bias.len(), MAX_LISTED_TOKENS),
            ("banned_tokens", self.banned_tokens.len(), MAX_VOCAB_SIZE),
            ("allowed_tokens", self.allowed_tokens.as_ref().map_or(0, Vec::len), MAX_VOCAB_SIZE),
            ("end_ids", self.end_ids.len(), MAX_LISTED_TOKENS),
            ("stop_ids", self.stop_ids.len(), MAX_LISTED_TOKENS),
            ("dry_sequence_breakers", self.dry.breakers.len(), MAX_DRY_BREAKERS),
            ("dry_sequence_breakers, tokens of one", longest_breaker, MAX_DRY_BREAKER_LEN),
        ]
    }

    /// Refuses what is out of range, what is listed twice, and steps that could not take effect.
    pub fn check(&self) -> Result<(), Error> {
        for (name, limit, found) in self.lists().into_iter().map(|(name, found, limit)| (name, limit, found)) {
            if found > limit {
                return Err(Error::TooMany { name, limit, found });
            }
        }
        for (name, found, low, high) in self.ranges() {
            // NaN is in no range.
            if !(low..=high).contains(&found) {
                return Err(Error::OutOfRange { name, low, high, found });
            }
        }
        if self.allowed_tokens.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::Empty { name: "allowed_tokens" });
        }
        if self.dry.breakers.iter().any(Vec::is_empty) {
            return Err(Error::Empty { name: "dry_sequence_breakers, tokens of one" });
        }
        let mut biased: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        biased.sort_unstable();
        if let Some(pair) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::ListedTwice { name: "logit_bias", token: pair[0] });
        }
        self.check_order()
    }

    /// Refuses settings of steps that are off: whoever gives one expects something of it. For what people ask; a sampler does not mind.
    pub fn check_effect(&self) -> Result<(), Error> {
        let usual = SamplingParams::default();
        let penalises = self.uses(StepKind::Repetition) || self.uses(StepKind::FrequencyPresence);
        let settings = [
            (
                "dynamic_temperature_exponent",
                self.dynamic_temperature_exponent != usual.dynamic_temperature_exponent,
                self.dynamic_temperature_range != 0.0,
                "dynamic_temperature_range",
            ),
            ("xtc_threshold", self.xtc_threshold != usual.xtc_threshold, self.uses(StepKind::Xtc), "xtc_probability"),
            ("penalty_window", self.penalty_window.is_some(), penalises, "a penalty"),
            ("dry_base", self.dry.base != usual.dry.base, self.uses(StepKind::Dry), "dry_multiplier"),
            (
                "dry_allowed_length",
                self.dry.allowed_length != usual.dry.allowed_length,
                self.uses(StepKind::Dry),
                "dry_multiplier",
            ),
            ("dry_range", self.dry.range.is_some(), self.uses(StepKind::Dry), "dry_multiplier"),
            ("dry_sequence_breakers", !self.dry.breakers.is_empty(), self.uses(StepKind::Dry), "dry_multiplier"),
        ];
        if let Some(&(name, .., without)) = settings.iter().find(|(_, is_set, is_used, _)| *is_set && !is_used) {
            return Err(Error::NoEffect { name, without });
        }
        if self.temperature == 0.0 && self.dynamic_temperature_range != 0.0 {
            return Err(Error::NothingToMove { name: "dynamic_temperature_range" });
        }
        Ok(())
    }

    /// Refuses an order that is not one, and steps that are set but would not run.
    fn check_order(&self) -> Result<(), Error> {
        if let Some(order) = &self.samplers {
            for (index, kind) in order.iter().enumerate() {
                if !StepKind::MOVABLE.contains(kind) {
                    return Err(Error::StepFixed { step: kind.name() });
                }
                if order[..index].contains(kind) {
                    return Err(Error::StepTwice { step: kind.name() });
                }
            }
            if let Some(kind) = StepKind::MOVABLE.into_iter().find(|kind| self.uses(*kind) && !order.contains(kind)) {
                return Err(Error::StepLeftOut { step: kind.name() });
            }
        }
        if self.mirostat.is_some()
            && let Some(kind) = StepKind::MOVABLE.into_iter().find(|kind| kind.truncates() && self.uses(*kind))
        {
            return Err(Error::MirostatTruncates { step: self.setting_of(kind) });
        }
        Ok(())
    }

    /// Whether a step is away from its neutral value. The draw and the mask are always there.
    pub fn uses(&self, kind: StepKind) -> bool {
        match kind {
            StepKind::LogitBias => !self.logit_bias.is_empty(),
            StepKind::TokenRules => {
                !self.banned_tokens.is_empty()
                    || self.allowed_tokens.is_some()
                    || (self.min_tokens > 0 && !(self.end_ids.is_empty() && self.stop_ids.is_empty()))
            }
            StepKind::Repetition => self.repetition_penalty != 1.0,
            StepKind::FrequencyPresence => self.frequency_penalty != 0.0 || self.presence_penalty != 0.0,
            StepKind::Dry => self.dry.multiplier != 0.0,
            StepKind::Mask => true,
            StepKind::Temperature => self.temperature != 1.0 || self.dynamic_temperature_range != 0.0,
            StepKind::TopNSigma => self.top_n_sigma != 0.0,
            StepKind::TopK => self.top_k != 0,
            StepKind::Typical => self.typical_p < 1.0,
            StepKind::TopP => self.top_p < 1.0,
            StepKind::MinP => self.min_p > 0.0,
            StepKind::Xtc => self.xtc_probability > 0.0,
            StepKind::Mirostat => self.mirostat.is_some(),
            StepKind::Draw => true,
        }
    }

    /// The name of the parameter that puts a step to use, which is how people know the step.
    pub fn setting_of(&self, kind: StepKind) -> &'static str {
        match kind {
            StepKind::TokenRules if !self.banned_tokens.is_empty() => "banned_tokens",
            StepKind::TokenRules if self.allowed_tokens.is_some() => "allowed_tokens",
            StepKind::TokenRules => "min_tokens",
            StepKind::Repetition => "repetition_penalty",
            StepKind::FrequencyPresence if self.frequency_penalty != 0.0 => "frequency_penalty",
            StepKind::FrequencyPresence => "presence_penalty",
            StepKind::Dry => "dry_multiplier",
            StepKind::Temperature if self.temperature == 1.0 => "dynamic_temperature_range",
            StepKind::Typical => "typical_p",
            StepKind::Xtc => "xtc_probability",
            StepKind::Mirostat => "mirostat_tau",
            kind => kind.name(),
        }
    }

    /// Refuses ids that the vocabulary does not have.
    pub(crate) fn check_ids(&self, vocab_size: usize) -> Result<(), Error> {
        if !(1..=MAX_VOCAB_SIZE).contains(&vocab_size) {
            return Err(Error::VocabularySize { limit: MAX_VOCAB_SIZE, found: vocab_size });
        }
        let biased: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        let breakers = self.dry.breakers.concat();
        let lists: [(&'static str, &[u32]); 6] = [
            ("logit_bias", &biased),
            ("banned_tokens", &self.banned_tokens),
            ("allowed_tokens", self.allowed_tokens.as_deref().unwrap_or(&[])),
            ("end_ids", &self.end_ids),
            ("stop_ids", &self.stop_ids),
            ("dry_sequence_breakers", &breakers),
        ];
        for (name, ids) in lists {
            if let Some(&token) = ids.iter().find(|&&token| token as usize >= vocab_size) {
                return Err(Error::OutsideVocabulary { name, token, vocab_size });
            }
        }
        Ok(())
    }
}
