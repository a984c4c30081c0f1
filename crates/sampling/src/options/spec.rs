//! A row of the table of options: what kind of value it takes, its names, and how it is read and set.

use std::ops::RangeInclusive;

use crate::options::{MAX_LISTED_TOKENS, SamplingParams, Value, ValueRef};

/// Type of an option's value, with its range. Both ends of a range are allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptionKind {
    Number {
        low: f32,
        high: f32,
        /// Maximum in a JSON request, where an API that others define allows less than the sampler.
        json_high: f32,
    },
    /// Whole number from `low` to `u32::MAX`.
    Count { low: u32 },
    /// Whole number from 0 to `u64::MAX`.
    Seed,
    /// Numbers by token id.
    TokenBias { low: f32, high: f32, max_len: usize },
    /// Token ids.
    Tokens { min_len: usize, max_len: usize },
    /// Texts, each of at most `max_bytes` bytes. `usual` holds those that apply when none are given.
    Texts { max_len: usize, max_bytes: usize, usual: &'static [&'static str] },
    /// Names of steps, each at most once.
    Steps,
}

/// Another option, or one of several, without which an option has no effect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Its name, or words such as "a penalty".
    pub(crate) what: &'static str,
    pub(crate) is_met: fn(&SamplingParams) -> bool,
}

/// The part of a row that is written by hand in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spec {
    kind: OptionKind,
    value_name: &'static str,
    json_name: Option<&'static str>,
    flag: Option<&'static str>,
    needs: Option<Needs>,
    /// Value in effect while the option is not set but what it needs is.
    default: Option<f32>,
    /// Words for what applies while the option is not set.
    unset: Option<&'static str>,
    is_sampled_only: bool,
}

impl Spec {
    const fn new(kind: OptionKind, value_name: &'static str) -> Spec {
        Spec {
            kind,
            value_name,
            json_name: None,
            flag: None,
            needs: None,
            default: None,
            unset: None,
            is_sampled_only: false,
        }
    }

    pub(super) const fn number(value_name: &'static str, low: f32, high: f32) -> Spec {
        Spec::new(OptionKind::Number { low, high, json_high: high }, value_name)
    }

    pub(super) const fn count(value_name: &'static str, low: u32) -> Spec {
        Spec::new(OptionKind::Count { low }, value_name)
    }

    pub(super) const fn seed(value_name: &'static str) -> Spec {
        Spec::new(OptionKind::Seed, value_name)
    }

    pub(super) const fn token_bias(value_name: &'static str, low: f32, high: f32) -> Spec {
        Spec::new(OptionKind::TokenBias { low, high, max_len: MAX_LISTED_TOKENS }, value_name)
    }

    pub(super) const fn tokens(value_name: &'static str, min_len: usize, max_len: usize) -> Spec {
        Spec::new(OptionKind::Tokens { min_len, max_len }, value_name)
    }

    pub(super) const fn texts(
        value_name: &'static str,
        max_len: usize,
        max_bytes: usize,
        usual: &'static [&'static str],
    ) -> Spec {
        Spec::new(OptionKind::Texts { max_len, max_bytes, usual }, value_name)
    }

    pub(super) const fn steps(value_name: &'static str) -> Spec {
        Spec::new(OptionKind::Steps, value_name)
    }

    /// Lowers the maximum for JSON requests.
    pub(super) const fn json_high(mut self, json_high: f32) -> Spec {
        if let OptionKind::Number { low, high, .. } = self.kind {
            self.kind = OptionKind::Number { low, high, json_high };
        }
        self
    }

    /// Gives the field of a JSON request a name that differs from that of the parameter.
    pub(super) const fn json_name(self, name: &'static str) -> Spec {
        Spec { json_name: Some(name), ..self }
    }

    /// Gives the flag a name that differs from that of the parameter.
    pub(super) const fn flag(self, flag: &'static str) -> Spec {
        Spec { flag: Some(flag), ..self }
    }

    pub(super) const fn needs(self, what: &'static str, is_met: fn(&SamplingParams) -> bool) -> Spec {
        Spec { needs: Some(Needs { what, is_met }), ..self }
    }

    pub(super) const fn default(self, value: f32) -> Spec {
        Spec { default: Some(value), ..self }
    }

    pub(super) const fn unset(self, words: &'static str) -> Spec {
        Spec { unset: Some(words), ..self }
    }

    /// Marks an option that has no effect on greedy decoding.
    pub(super) const fn sampled_only(self) -> Spec {
        Spec { is_sampled_only: true, ..self }
    }
}

/// One sampling option: a row of [`OPTIONS`](crate::OPTIONS).
#[derive(Debug, Clone, Copy)]
pub struct SamplingOption {
    pub(super) param: &'static str,
    /// The name with hyphens.
    pub(super) flag: &'static str,
    pub(super) doc: &'static str,
    pub(super) spec: Spec,
    pub(super) get: fn(&SamplingParams) -> Option<ValueRef<'_>>,
    pub(super) set: fn(&mut SamplingParams, Value) -> bool,
}

impl SamplingOption {
    /// Finds an option by the name of its field in [`SamplingParams`], which is also its name in errors.
    pub fn by_param(param: &str) -> Option<&'static SamplingOption> {
        crate::OPTIONS.iter().find(|option| option.param == param)
    }

    /// Field of [`SamplingParams`], and the name in errors.
    pub fn param(&self) -> &'static str {
        self.param
    }

    /// Field of a JSON request.
    pub fn json_name(&self) -> &'static str {
        self.spec.json_name.unwrap_or(self.param)
    }

    /// Flag of the command line, without its two hyphens.
    pub fn flag(&self) -> &'static str {
        self.spec.flag.unwrap_or(self.flag)
    }

    /// Placeholder of the value in help texts, such as `K`.
    pub fn value_name(&self) -> &'static str {
        self.spec.value_name
    }

    pub fn kind(&self) -> OptionKind {
        self.spec.kind
    }

    /// One line about what the option does. Names of options are in backticks.
    pub fn doc(&self) -> &'static str {
        self.doc.trim()
    }

    /// Whether the option has an effect only where tokens are sampled, not where the most probable one is taken.
    pub fn is_sampled_only(&self) -> bool {
        self.spec.is_sampled_only
    }

    /// Range of a number in a JSON request; `None` for options of another kind.
    pub fn json_range(&self) -> Option<RangeInclusive<f32>> {
        match self.spec.kind {
            OptionKind::Number { low, json_high, .. } => Some(low..=json_high),
            _ => None,
        }
    }

    /// Returns the value; `None` while the option is not set.
    pub fn get<'p>(&self, params: &'p SamplingParams) -> Option<ValueRef<'p>> {
        (self.get)(params)
    }

    /// Returns the value in effect: the one that is set, or the default where what the option needs is set.
    pub fn effective<'p>(&self, params: &'p SamplingParams) -> Option<ValueRef<'p>> {
        let default = || self.spec.default.filter(|_| self.needs().is_none_or(|needs| (needs.is_met)(params)));
        self.get(params).or_else(|| default().map(ValueRef::Number))
    }

    /// Sets the option.
    ///
    /// # Panics
    /// When the value is not of the option's kind: that is an error of the caller, not of a user.
    pub fn set(&self, params: &mut SamplingParams, value: Value) {
        assert!((self.set)(params, value), "{}: the value has to be a {:?}", self.param, self.spec.kind);
    }

    /// Whether the value differs from the neutral one.
    pub fn is_set(&self, params: &SamplingParams) -> bool {
        self.get(params) != self.get(&SamplingParams::default())
    }

    pub(crate) fn needs(&self) -> Option<Needs> {
        self.spec.needs
    }

    /// Name of the option without which this one has no effect.
    pub fn needed_option(&self) -> Option<&'static str> {
        self.spec.needs.map(|needs| needs.what)
    }

    /// Value at which the option does nothing or, for an option that needs another one, the value that it has until it
    /// is set. `None` for the seed, which has no such value.
    pub fn neutral(&self) -> Option<String> {
        let neutral = SamplingParams::default();
        let words = self.spec.unset.map(str::to_owned);
        let default = self.spec.default.map(|value| value.to_string());
        let value = (self.spec.kind != OptionKind::Seed).then(|| self.get(&neutral)).flatten();
        words.or(default).or_else(|| value.map(|value| value.to_string()))
    }
}
