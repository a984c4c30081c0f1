//! The sampling flags with what applies where none is given: a chat and `explain` then use a preset.

use anyhow::Result;
use clap::error::Error;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use pellucid_sampling::{Preset, SamplingParams};
use pellucid_tokenizer::Tokenizer;

use crate::flags::sampling::SamplingArgs;

/// Preset of a chat and of `explain` without sampling flags.
pub(crate) const CHAT_DEFAULT: Preset = Preset::Chat;
/// Flags that do not change the distribution, so that the preset still applies beside them.
const NEUTRAL_FLAGS: [&str; 2] = ["seed", "stop_ids"];

/// The sampling flags, and whether any was given.
#[derive(Debug, Clone)]
pub(crate) struct ChainArgs {
    args: SamplingArgs,
    is_given: bool,
}

/// Values that apply where no flag gives one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SamplingDefaults {
    /// Preset to use when no sampling flag is given.
    pub(crate) preset: Option<Preset>,
    /// Temperature to use when neither a flag nor a preset gives one. All other options are neutral then.
    pub(crate) temperature: f32,
}

impl ChainArgs {
    /// Returns the effective parameters.
    pub(crate) fn params(&self, tokenizer: &Tokenizer, defaults: SamplingDefaults) -> Result<SamplingParams> {
        let given = self.args.params(tokenizer, defaults.temperature)?;
        match defaults.preset {
            Some(preset) if !self.is_given => {
                let SamplingParams { seed, end_ids, stop_ids, .. } = given;
                Ok(SamplingParams { seed, end_ids, stop_ids, ..preset.params() })
            }
            _ => Ok(given),
        }
    }

    /// Returns these flags with one more. The default preset stays in effect below it.
    pub(crate) fn changed(&self, name: &str, value: &str, defaults: SamplingDefaults) -> Result<ChainArgs> {
        let start = self.args.clone().with_preset(self.preset(defaults));
        Ok(ChainArgs { args: start.changed(name, value)?, is_given: true })
    }

    /// Rejects flags that are wrong with any model.
    pub(crate) fn check(&self, defaults: SamplingDefaults) -> Result<()> {
        self.args.check(defaults.temperature)
    }

    pub(crate) fn preset(&self, defaults: SamplingDefaults) -> Option<Preset> {
        if self.is_given { self.args.preset() } else { defaults.preset }
    }

    /// Whether a sampling flag was given.
    pub(crate) fn is_given(&self) -> bool {
        self.is_given
    }

    /// Returns the flags without defaults.
    pub(crate) fn flags(&self) -> &SamplingArgs {
        &self.args
    }
}

impl FromArgMatches for ChainArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let flags = SamplingArgs::augment_args(Command::new("flags"));
        let is_given = (flags.get_arguments())
            .map(|flag| flag.get_id().as_str())
            .filter(|id| !NEUTRAL_FLAGS.contains(id))
            .any(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        Ok(ChainArgs { args: SamplingArgs::from_arg_matches(matches)?, is_given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = ChainArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ChainArgs {
    fn augment_args(command: Command) -> Command {
        SamplingArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        SamplingArgs::augment_args_for_update(command)
    }
}
