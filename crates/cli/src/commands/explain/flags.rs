//! The flags of the chain, and whether any of them was given: without one, `explain` shows a chain that is worth explaining.

use anyhow::Result;
use clap::error::Error;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use pellucid_sampling::{Preset, SamplingParams};
use pellucid_tokenizer::Tokenizer;

use crate::sampling_args::SamplingArgs;

/// What is explained when nothing is asked for: what people chat with, with steps of both kinds.
const DEFAULT: Preset = Preset::Chat;
/// Flags that do not say how to choose.
const NEUTRAL_FLAGS: [&str; 2] = ["seed", "stop_token"];

#[derive(Debug)]
pub(super) struct ChainArgs {
    args: SamplingArgs,
    is_given: bool,
}

impl ChainArgs {
    /// The effective parameters. With a flag and without a preset, what is not given is neutral: the model's own distribution.
    pub(super) fn params(&self, tokenizer: &Tokenizer) -> Result<SamplingParams> {
        let given = self.args.params(tokenizer, 1.0)?;
        if self.is_given {
            return Ok(given);
        }
        let SamplingParams { seed, end_ids, stop_ids, .. } = given;
        Ok(SamplingParams { seed, end_ids, stop_ids, ..DEFAULT.params() })
    }

    /// Refuses what is wrong whatever the model.
    pub(super) fn check(&self) -> Result<()> {
        self.args.check(1.0)
    }

    pub(super) fn preset(&self) -> Option<Preset> {
        if self.is_given { self.args.preset() } else { Some(DEFAULT) }
    }

    /// Whether the user said how to choose.
    pub(super) fn is_given(&self) -> bool {
        self.is_given
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
