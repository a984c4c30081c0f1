//! The flags of the chain, and whether any of them was given: without one, a chat and `explain` take a preset.

use anyhow::Result;
use clap::error::Error;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use pellucid_sampling::{Preset, SamplingParams};
use pellucid_tokenizer::Tokenizer;

use crate::flags::sampling::SamplingArgs;

/// What a chat is drawn with when nothing is asked for, and what `explain` explains.
pub(crate) const CHAT_DEFAULT: Preset = Preset::Chat;
/// Flags that do not say how to choose.
const NEUTRAL_FLAGS: [&str; 2] = ["seed", "stop_ids"];

#[derive(Debug)]
pub(crate) struct ChainArgs {
    args: SamplingArgs,
    is_given: bool,
}

/// What stands for what was not said.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Otherwise {
    /// Where no flag says how to choose.
    pub(crate) preset: Option<Preset>,
    /// Where neither a flag nor a preset gives one. All else is neutral then: the model's own distribution.
    pub(crate) temperature: f32,
}

impl ChainArgs {
    /// The effective parameters.
    pub(crate) fn params(&self, tokenizer: &Tokenizer, otherwise: Otherwise) -> Result<SamplingParams> {
        let given = self.args.params(tokenizer, otherwise.temperature)?;
        match otherwise.preset {
            Some(preset) if !self.is_given => {
                let SamplingParams { seed, end_ids, stop_ids, .. } = given;
                Ok(SamplingParams { seed, end_ids, stop_ids, ..preset.params() })
            }
            _ => Ok(given),
        }
    }

    /// Refuses what is wrong whatever the model.
    pub(crate) fn check(&self, otherwise: Otherwise) -> Result<()> {
        self.args.check(otherwise.temperature)
    }

    pub(crate) fn preset(&self, otherwise: Otherwise) -> Option<Preset> {
        if self.is_given { self.args.preset() } else { otherwise.preset }
    }

    /// Whether the user said how to choose.
    pub(crate) fn is_given(&self) -> bool {
        self.is_given
    }

    /// The flags alone.
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
