//! The options that apply where a request gives none, in layers: those of the operator over those that the model
//! recommends, and below both a fallback.
//!
//! `run`, chat and `explain` fall back to Pellucid's own default, the API to OpenAI's. The options of a request come on
//! top. Each option is looked up by itself, with one exception: options that make the lower ones meaningless (see
//! [`GivenOptions::replaces_defaults`]) drop them all.

use std::fmt;

use crate::{GivenOptions, OPTIONS, OptionKind, Preset, SamplingParams, Value};

/// Origin of a default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultSource {
    /// The operator of a server.
    Server,
    /// The files of the model.
    Model,
    /// Pellucid's own default.
    Pellucid,
    /// OpenAI's documented default: temperature 1, everything else neutral.
    OpenAi,
}

impl DefaultSource {
    pub fn name(self) -> &'static str {
        match self {
            DefaultSource::Server => "server",
            DefaultSource::Model => "model",
            DefaultSource::Pellucid => "pellucid",
            DefaultSource::OpenAi => "openai",
        }
    }
}

impl fmt::Display for DefaultSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The lowest layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fallback {
    /// [`PELLUCID_DEFAULT`].
    #[default]
    Pellucid,
    /// Every option neutral, temperature 1.
    OpenAi,
}

/// Pellucid's own default, for models that recommend nothing.
pub const PELLUCID_DEFAULT: Preset = Preset::Chat;

/// Defaults of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Options that the model's files recommend. If there is one, the fallback is not used: a recommendation is a set,
    /// and an option that it leaves out is neutral.
    pub model: GivenOptions,
    /// Options that the operator of a server gave.
    pub server: GivenOptions,
}

impl SamplingDefaults {
    /// Returns the options of a request that gives `given`, with the defaults for those that it does not give.
    pub fn resolve(&self, given: &GivenOptions, fallback: Fallback) -> GivenOptions {
        over(self.below_request(fallback), given)
    }

    /// Returns the options of a request that gives none.
    fn below_request(&self, fallback: Fallback) -> GivenOptions {
        let lowest = match fallback {
            _ if !self.model.is_empty() => self.model.clone(),
            Fallback::Pellucid => GivenOptions::of(&PELLUCID_DEFAULT.params()),
            Fallback::OpenAi => GivenOptions::default(),
        };
        over(lowest, &self.server)
    }

    /// Returns the origin of the default of an option. `param` is its [`param`](crate::SamplingOption::param).
    pub fn source_of(&self, param: &str, fallback: Fallback) -> DefaultSource {
        let is_model = self.model.get(param).is_some() && !self.server.replaces_defaults();
        match fallback {
            _ if self.server.get(param).is_some() => DefaultSource::Server,
            _ if is_model => DefaultSource::Model,
            Fallback::Pellucid => DefaultSource::Pellucid,
            Fallback::OpenAi => DefaultSource::OpenAi,
        }
    }
}

/// Lays `upper` over `lower`.
fn over(lower: GivenOptions, upper: &GivenOptions) -> GivenOptions {
    if upper.replaces_defaults() {
        return upper.clone();
    }
    let is_greedy = lower.get("temperature") == Some(&Value::Number(0.0));
    let mut options = lower.changed(upper.clone());
    // Top-k and the like have no effect on greedy decoding, so whoever gives one means to sample.
    if is_greedy && upper.get("temperature").is_none() && upper.imply_sampling() {
        options.remove("temperature");
    }
    // A recommended order of the steps cannot list a step that only a request sets.
    if options.apply(SamplingParams::default(), |_| vec![0]).check().is_err() {
        options.remove("samplers");
    }
    options
}

impl GivenOptions {
    /// Returns the options of `params` that are not neutral, without those whose values are tokens.
    pub fn of(params: &SamplingParams) -> GivenOptions {
        let mut given = GivenOptions::default();
        for option in OPTIONS.iter().filter(|option| option.is_set(params)) {
            let value = match (option.kind(), option.get(params)) {
                (OptionKind::Number { .. }, Some(crate::ValueRef::Number(value))) => Value::Number(value),
                (OptionKind::Count { .. }, Some(crate::ValueRef::Count(value))) => Value::Count(value),
                (OptionKind::Steps, Some(crate::ValueRef::Steps(kinds))) => Value::Steps(kinds.to_vec()),
                _ => continue,
            };
            given.insert(option, value);
        }
        given
    }

    /// Whether these options leave no sense to the defaults below them: a temperature of 0 asks for the most probable
    /// token, Mirostat truncates by itself, and `samplers` lists every step that is set.
    pub fn replaces_defaults(&self) -> bool {
        self.get("temperature") == Some(&Value::Number(0.0))
            || self.get("mirostat_tau").is_some()
            || self.get("samplers").is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplingOption;

    fn options(values: &[(&str, f32)]) -> GivenOptions {
        let mut given = GivenOptions::default();
        for &(param, value) in values {
            let option = SamplingOption::by_param(param).expect("an option");
            let value = match option.kind() {
                OptionKind::Count { .. } => Value::Count(value as u32),
                _ => Value::Number(value),
            };
            given.insert(option, value);
        }
        given
    }

    fn resolved(defaults: &SamplingDefaults, given: &[(&str, f32)], fallback: Fallback) -> SamplingParams {
        defaults.resolve(&options(given), fallback).apply(SamplingParams::default(), |_| vec![0])
    }

    #[test]
    fn each_layer_covers_the_ones_below() {
        let none = SamplingDefaults::default();
        let expected = PELLUCID_DEFAULT.params();
        let params = resolved(&none, &[], Fallback::Pellucid);
        assert_eq!(
            (params.temperature, params.top_k, params.top_p),
            (expected.temperature, expected.top_k, expected.top_p)
        );
        assert_eq!(params.dry_multiplier, expected.dry_multiplier);
        assert_eq!(resolved(&none, &[], Fallback::OpenAi), SamplingParams::default());

        let model = options(&[("temperature", 0.6), ("top_p", 0.95)]);
        let defaults = SamplingDefaults { model, server: options(&[("top_p", 0.5)]) };
        for fallback in [Fallback::Pellucid, Fallback::OpenAi] {
            let params = resolved(&defaults, &[], fallback);
            // The recommendation is a set: nothing of the fallback mixes with it.
            assert_eq!(params, SamplingParams { temperature: 0.6, top_p: 0.5, ..SamplingParams::default() });
            let params = resolved(&defaults, &[("temperature", 1.2), ("top_k", 9.0)], fallback);
            assert_eq!((params.temperature, params.top_p, params.top_k), (1.2, 0.5, 9));
        }
        let source = |param| defaults.source_of(param, Fallback::OpenAi).name();
        assert_eq!([source("temperature"), source("top_p"), source("top_k")], ["model", "server", "openai"]);
    }

    #[test]
    fn options_that_exclude_the_defaults_drop_them() {
        let none = SamplingDefaults::default();
        let greedy = resolved(&none, &[("temperature", 0.0)], Fallback::Pellucid);
        assert_eq!(greedy, SamplingParams { temperature: 0.0, ..SamplingParams::default() });
        let mirostat = resolved(&none, &[("mirostat_tau", 5.0)], Fallback::Pellucid);
        assert_eq!(mirostat, SamplingParams { mirostat_tau: Some(5.0), ..SamplingParams::default() });
        // A recommended temperature of 0 gives way to an option that needs sampling, but not to a mere seed.
        let defaults = SamplingDefaults { model: options(&[("temperature", 0.0)]), ..none };
        assert_eq!(resolved(&defaults, &[("top_k", 5.0)], Fallback::Pellucid).temperature, 1.0);
        let mut seed = GivenOptions::default();
        seed.insert(SamplingOption::by_param("seed").unwrap(), Value::Seed(3));
        assert_eq!(defaults.resolve(&seed, Fallback::Pellucid).get("temperature"), Some(&Value::Number(0.0)));
    }
}
