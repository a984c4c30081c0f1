//! The options that a user gave, laid over a preset or over the neutral values.

use std::collections::BTreeMap;

use crate::Error;
use crate::options::{OPTIONS, OptionKind, SamplingOption, SamplingParams, Value};

/// Options that a request or a command line gave. An option that is absent keeps the value of the preset, or the
/// neutral one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GivenOptions {
    /// By [`SamplingOption::param`].
    values: BTreeMap<&'static str, Value>,
}

impl GivenOptions {
    pub fn insert(&mut self, option: &SamplingOption, value: Value) {
        self.values.insert(option.param(), value);
    }

    pub(super) fn remove(&mut self, param: &str) {
        self.values.remove(param);
    }

    /// Returns the value of the option with this [`SamplingOption::param`].
    pub fn get(&self, param: &str) -> Option<&Value> {
        self.values.get(param)
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns these options with those of `changes` in place of the ones that both have.
    pub fn changed(mut self, changes: GivenOptions) -> GivenOptions {
        self.values.extend(changes.values);
        self
    }

    pub fn seed(&self) -> Option<u64> {
        match self.get("seed") {
            Some(Value::Seed(seed)) => Some(*seed),
            _ => None,
        }
    }

    pub fn min_tokens(&self) -> Option<u32> {
        match self.get("min_tokens") {
            Some(Value::Count(count)) => Some(*count),
            _ => None,
        }
    }

    /// Whether an option was given that has no effect on greedy decoding. The seed does not count.
    pub fn imply_sampling(&self) -> bool {
        let asks = |option: &SamplingOption| option.is_sampled_only() && option.kind() != OptionKind::Seed;
        OPTIONS.iter().any(|option| asks(option) && self.values.contains_key(option.param()))
    }

    /// Refuses a given option that has no effect on `params` because the option that it needs is not set.
    ///
    /// Stricter than [`SamplingParams::check_effect`], which accepts an option at its default: a reply reports all
    /// parameters, and a client may send them back.
    pub fn check_needs(&self, params: &SamplingParams) -> Result<(), Error> {
        for option in OPTIONS.iter().filter(|option| self.values.contains_key(option.param())) {
            if let Some(needs) = option.needs()
                && !(needs.is_met)(params)
            {
                return Err(Error::NoEffect { name: option.param(), without: needs.what });
            }
        }
        Ok(())
    }

    /// Returns `start` with the given options set. `encode` turns a text into tokens as they occur inside a longer
    /// text.
    pub fn apply(&self, start: SamplingParams, encode: impl Fn(&str) -> Vec<u32>) -> SamplingParams {
        let mut params = start;
        for option in OPTIONS {
            match self.get(option.param()) {
                // Texts come last: whether the usual ones apply depends on other options.
                Some(Value::Texts(_)) | None => {}
                Some(value) => option.set(&mut params, value.clone()),
            }
        }
        for option in OPTIONS.iter().filter(|option| matches!(option.kind(), OptionKind::Texts { .. })) {
            let sequences = self.texts(option, &params).into_iter().map(&encode).collect();
            option.set(&mut params, Value::Sequences(sequences));
        }
        params
    }

    /// Returns the texts of an option: those that were given, even if none, or the usual ones where they have an
    /// effect.
    pub fn texts(&self, option: &SamplingOption, params: &SamplingParams) -> Vec<&str> {
        match (self.get(option.param()), option.kind()) {
            (Some(Value::Texts(texts)), _) => texts.iter().map(String::as_str).collect(),
            (_, OptionKind::Texts { usual, .. }) if option.needs().is_none_or(|needs| (needs.is_met)(params)) => {
                usual.to_vec()
            }
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Preset, StepKind};

    /// A value of the option's kind that differs from the neutral one.
    fn other_value(option: &SamplingOption) -> Value {
        match option.kind() {
            OptionKind::Number { high, .. } => Value::Number(high / 2.0),
            OptionKind::Count { low } => Value::Count(low + 7),
            OptionKind::Seed => Value::Seed(7),
            OptionKind::TokenBias { .. } => Value::TokenBias(vec![(3, 0.5)]),
            OptionKind::Tokens { .. } => Value::Tokens(vec![3, 4]),
            OptionKind::Texts { .. } => Value::Texts(vec!["ab".into()]),
            OptionKind::Steps => Value::Steps(vec![StepKind::TopK]),
        }
    }

    fn encode(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn each_option_sets_its_own_parameter_and_no_other() {
        for option in OPTIONS {
            let mut given = GivenOptions::default();
            given.insert(option, other_value(option));
            let params = given.apply(SamplingParams::default(), encode);
            for other in OPTIONS {
                // The multiplier of DRY brings the usual sequence breakers.
                let follows = option.param() == "dry_multiplier" && other.param() == "dry_sequence_breakers";
                let expected = other.param() == option.param() || follows;
                assert_eq!(other.is_set(&params), expected, "{} sets {}", option.param(), other.param());
            }
        }
    }

    #[test]
    fn given_options_win_over_a_preset_and_changes_over_both() {
        let top_p = SamplingOption::by_param("top_p").unwrap();
        let mut given = GivenOptions::default();
        given.insert(top_p, Value::Number(0.5));
        let params = given.apply(Preset::Chat.params(), encode);
        assert_eq!(params, SamplingParams { top_p: 0.5, ..Preset::Chat.params() });
        let mut changes = GivenOptions::default();
        changes.insert(top_p, Value::Number(0.25));
        let changed = given.changed(changes);
        assert_eq!(changed.apply(Preset::Chat.params(), encode).top_p, 0.25);
        assert!(changed.imply_sampling() && !GivenOptions::default().imply_sampling());
    }

    #[test]
    fn usual_texts_apply_only_where_they_have_an_effect_and_none_are_given() {
        let [multiplier, breakers] =
            ["dry_multiplier", "dry_sequence_breakers"].map(|name| SamplingOption::by_param(name).unwrap());
        let mut given = GivenOptions::default();
        assert!(given_params(&given).dry_sequence_breakers.is_empty());
        given.insert(multiplier, Value::Number(0.8));
        assert_eq!(given_params(&given).dry_sequence_breakers, crate::DRY_BREAKERS.map(encode));
        given.insert(breakers, Value::Texts(Vec::new()));
        assert!(given_params(&given).dry_sequence_breakers.is_empty(), "the user gave none");
        given.insert(breakers, Value::Texts(vec!["ab".into()]));
        assert_eq!(given_params(&given).dry_sequence_breakers, [[97, 98]]);
    }

    fn given_params(given: &GivenOptions) -> SamplingParams {
        given.apply(SamplingParams::default(), encode)
    }
}
