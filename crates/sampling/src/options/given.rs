//! The options that a user gave, laid over a preset or over the neutral values.

use std::collections::BTreeMap;

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

    /// Whether an option was given that has no effect on greedy decoding.
    pub fn imply_sampling(&self) -> bool {
        OPTIONS.iter().any(|option| option.is_sampled_only() && self.values.contains_key(option.param()))
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
