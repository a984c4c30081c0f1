//! Checks of [`SamplingParams`] against the table of options. A value out of range is an error with the option's name;
//! nothing is clamped.

use crate::options::{
    MAX_DRY_BREAKER_LEN, MAX_LISTED_TOKENS, MAX_LOGPROBS, MAX_VOCAB_SIZE, OPTIONS, OptionKind, ValueRef,
};
use crate::{Effect, Error, SamplingParams, StepKind};

impl SamplingParams {
    /// Refuses values out of range, tokens that are listed twice, and steps that are set but would not run.
    pub fn check(&self) -> Result<(), Error> {
        for option in OPTIONS {
            if let Some(value) = option.get(self) {
                check_length(option.param(), option.kind(), value)?;
            }
        }
        at_most("end_ids", self.end_ids.len(), MAX_LISTED_TOKENS)?;
        for option in OPTIONS {
            if let Some(value) = option.get(self) {
                check_range(option.param(), option.kind(), value)?;
            }
        }
        in_range("logprobs", self.logprobs.unwrap_or(0).into(), 0.0, MAX_LOGPROBS.into())?;
        self.check_order()
    }

    /// Refuses an option that has no effect because the option that it needs is not set.
    ///
    /// For parameters that people write. [`Sampler::new`](crate::Sampler::new) accepts such parameters.
    pub fn check_effect(&self) -> Result<(), Error> {
        for option in OPTIONS {
            if let Some(needs) = option.needs()
                && option.is_set(self)
                && !(needs.is_met)(self)
            {
                return Err(Error::NoEffect { name: option.param(), without: needs.what });
            }
        }
        if self.temperature == 0.0 && self.dynamic_temperature_range != 0.0 {
            return Err(Error::NothingToMove { name: "dynamic_temperature_range" });
        }
        Ok(())
    }

    /// Refuses an order with fixed or repeated steps, and steps that are set but would not run.
    fn check_order(&self) -> Result<(), Error> {
        if let Some(order) = &self.samplers {
            for (index, kind) in order.iter().enumerate() {
                if !kind.is_movable() {
                    return Err(Error::StepFixed { step: kind.name() });
                }
                if order[..index].contains(kind) {
                    return Err(Error::StepTwice { step: kind.name() });
                }
            }
            if let Some(kind) = StepKind::movable().find(|kind| self.uses(*kind) && !order.contains(kind)) {
                return Err(Error::StepLeftOut { step: kind.name() });
            }
        }
        let truncates = |kind: &StepKind| kind.effect() == Effect::Truncates && self.uses(*kind);
        match StepKind::movable().find(truncates) {
            Some(kind) if self.uses(StepKind::Mirostat) => {
                Err(Error::MirostatTruncates { step: self.setting_of(kind) })
            }
            _ => Ok(()),
        }
    }

    /// Whether a step is in the chain, which leaves out steps at their neutral value.
    pub fn uses(&self, kind: StepKind) -> bool {
        (kind.description().is_used)(self)
    }

    /// Returns the name of the parameter that puts a step to use.
    pub fn setting_of(&self, kind: StepKind) -> &'static str {
        (kind.description().option)(self)
    }

    /// Refuses token ids outside the vocabulary.
    pub(crate) fn check_ids(&self, vocab_size: usize) -> Result<(), Error> {
        if !(1..=MAX_VOCAB_SIZE).contains(&vocab_size) {
            return Err(Error::VocabularySize { limit: MAX_VOCAB_SIZE, found: vocab_size });
        }
        let is_outside = |token: &u32| *token as usize >= vocab_size;
        let values = OPTIONS.iter().filter_map(|option| Some((option.param(), option.get(self)?)));
        for (name, value) in values.chain([("end_ids", ValueRef::Tokens(&self.end_ids))]) {
            let outside = match value {
                ValueRef::Tokens(ids) => ids.iter().copied().find(is_outside),
                ValueRef::TokenBias(bias) => bias.iter().map(|&(token, _)| token).find(is_outside),
                ValueRef::Sequences(sequences) => sequences.iter().flatten().copied().find(is_outside),
                ValueRef::Number(_) | ValueRef::Count(_) | ValueRef::Seed(_) | ValueRef::Steps(_) => None,
            };
            if let Some(token) = outside {
                return Err(Error::OutsideVocabulary { name, token, vocab_size });
            }
        }
        Ok(())
    }
}

impl SamplingParams {
    /// Refuses rules that exclude every token of the vocabulary. Ids outside of it were refused before.
    pub(crate) fn check_left(&self, vocab_size: usize) -> Result<(), Error> {
        let ends = || self.end_ids.iter().chain(&self.stop_ids).filter(|_| self.min_tokens > 0);
        if self.allowed_tokens.is_none() && self.banned_tokens.len() + ends().count() < vocab_size {
            return Ok(());
        }
        let mut is_left = vec![self.allowed_tokens.is_none(); vocab_size];
        self.allowed_tokens.iter().flatten().for_each(|&id| is_left[id as usize] = true);
        self.banned_tokens.iter().for_each(|&id| is_left[id as usize] = false);
        if !is_left.contains(&true) {
            return Err(Error::AllExcluded { name: "banned_tokens" });
        }
        ends().for_each(|&id| is_left[id as usize] = false);
        if is_left.contains(&true) { Ok(()) } else { Err(Error::AllExcluded { name: "min_tokens" }) }
    }
}

/// Refuses a list that is too long.
fn check_length(name: &'static str, kind: OptionKind, value: ValueRef<'_>) -> Result<(), Error> {
    match (kind, value) {
        (OptionKind::TokenBias { max_len, .. }, ValueRef::TokenBias(list)) => at_most(name, list.len(), max_len),
        (OptionKind::Tokens { max_len, .. }, ValueRef::Tokens(list)) => at_most(name, list.len(), max_len),
        (OptionKind::Texts { max_len, .. }, ValueRef::Sequences(list)) => {
            at_most(name, list.len(), max_len)?;
            let longest = list.iter().map(Vec::len).max().unwrap_or(0);
            at_most("dry_sequence_breakers, tokens of one", longest, MAX_DRY_BREAKER_LEN)
        }
        _ => Ok(()),
    }
}

/// Refuses a number out of range, an empty list where one entry is needed, and a token that is listed twice.
fn check_range(name: &'static str, kind: OptionKind, value: ValueRef<'_>) -> Result<(), Error> {
    match (kind, value) {
        (OptionKind::Number { low, high, .. }, ValueRef::Number(found)) => {
            in_range(name, found.into(), low.into(), high.into())
        }
        (OptionKind::Count { low }, ValueRef::Count(found)) => {
            in_range(name, found.into(), low.into(), u32::MAX.into())
        }
        (OptionKind::TokenBias { low, high, .. }, ValueRef::TokenBias(list)) => {
            list.iter().try_for_each(|&(_, bias)| in_range(name, bias.into(), low.into(), high.into()))?;
            let mut tokens: Vec<u32> = list.iter().map(|&(token, _)| token).collect();
            tokens.sort_unstable();
            match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
                Some(pair) => Err(Error::ListedTwice { name, token: pair[0] }),
                None => Ok(()),
            }
        }
        (OptionKind::Tokens { min_len, .. }, ValueRef::Tokens(list)) if list.len() < min_len => {
            Err(Error::Empty { name })
        }
        (OptionKind::Texts { .. }, ValueRef::Sequences(list)) if list.iter().any(Vec::is_empty) => {
            Err(Error::Empty { name: "dry_sequence_breakers, tokens of one" })
        }
        _ => Ok(()),
    }
}

fn at_most(name: &'static str, found: usize, limit: usize) -> Result<(), Error> {
    if found > limit { Err(Error::TooMany { name, limit, found }) } else { Ok(()) }
}

fn in_range(name: &'static str, found: f64, low: f64, high: f64) -> Result<(), Error> {
    // NaN is in no range.
    if (low..=high).contains(&found) { Ok(()) } else { Err(Error::OutOfRange { name, low, high, found }) }
}
