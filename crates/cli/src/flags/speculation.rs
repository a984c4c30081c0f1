//! The flags of speculation, which `run`, `serve`, `bench` and `explain` share, and how drafted tokens are reported.

use std::path::Path;

use anyhow::Result;
use pellucid::{Builder, DraftCounts, DrafterKind, Speculation, SpeculationError, SpeculationStats};
use serde_json::{Map, Value, json};

use crate::flags::usage_error::{UsageError, bail_usage};
use crate::hub::Hub;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Drafters that propose tokens, which the model checks several at a
    /// time: draft=MODEL (a smaller model with the same vocabulary), mtp (the
    /// layer that some models have for predicting further tokens), ngram
    /// (what followed the same words in prompt and reply), suffix (what
    /// followed them in earlier replies), or off. Names are separated by
    /// commas. Replies are the same, to the byte, and may come faster
    /// [default: off]
    #[arg(long, verbatim_doc_comment, value_name = "WHO")]
    speculate: Vec<Speculation>,

    /// Maximum tokens of a draft, 1 to 15
    /// [default: the number that is expected to be fastest, in each step]
    #[arg(long, verbatim_doc_comment, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=15))]
    draft_tokens: Option<u8>,
}

impl SpeculationArgs {
    /// Returns the drafters of the flags, with the draft model as the user named it.
    pub(crate) fn named(&self) -> Result<Speculation> {
        let Some((first, others)) = self.speculate.split_first() else { return Ok(Speculation::DEFAULT) };
        let whole = others.iter().try_fold(first.clone(), |whole, one| {
            let error = || SpeculationError::Contradiction(whole.to_string(), one.to_string());
            whole.clone().and(one.clone()).ok_or_else(error)
        });
        whole.map_err(|error| UsageError::because(format!("--speculate: {error}")))
    }

    /// Returns the value of `--draft-tokens`.
    pub(crate) fn draft_tokens(&self) -> Option<usize> {
        self.draft_tokens.map(usize::from)
    }

    /// Whether a flag is given.
    pub(crate) fn is_given(&self) -> bool {
        !self.speculate.is_empty() || self.draft_tokens.is_some()
    }

    /// Rejects flags that contradict each other, before a model is loaded.
    pub(crate) fn check(&self) -> Result<()> {
        if self.named()?.is_off() && self.draft_tokens.is_some() {
            bail_usage!("--draft-tokens has no effect without a drafter; --speculate names one");
        }
        Ok(())
    }

    /// Rejects flags of a server that contradict each other. Predictions of requests have the length of
    /// `--draft-tokens` without other drafters too.
    pub(crate) fn check_for_server(&self) -> Result<()> {
        self.named().map(|_| ())
    }

    /// Returns the drafters. A draft model is found like the argument of `--model`, and downloaded if it is not there.
    pub(crate) fn resolve(&self, hub: &Hub) -> Result<Speculation> {
        let mut speculation = self.named()?;
        if let Some(name) = speculation.draft_path().map(|name| name.to_string_lossy().into_owned()) {
            let path = hub.resolve(Some(&name)).map_err(|error| error.context(format!("--speculate draft={name}")))?;
            speculation = speculation.draft_model(path);
        }
        Ok(match self.draft_tokens {
            Some(num_tokens) => speculation.max_draft_tokens(usize::from(num_tokens)),
            None => speculation,
        })
    }

    /// Sets the drafters of a builder.
    pub(crate) fn apply(&self, builder: Builder, hub: &Hub) -> Result<Builder> {
        Ok(builder.speculate(self.resolve(hub)?))
    }
}

/// Describes drafters in words: `draft model qwen.gguf, ngram`.
pub(crate) fn drafters_text(speculation: &Speculation) -> String {
    let name = |path: &Path| path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    match speculation.draft_path() {
        Some(path) => Speculation::draft_model(speculation.clone(), name(path)).to_string(),
        None => speculation.to_string(),
    }
}

/// Describes the counts of a reply: `62 of 80 drafted tokens accepted (ngram)`; `None` if nothing was drafted.
pub(crate) fn counts_text(stats: &SpeculationStats) -> Option<String> {
    let total = stats.total();
    let used: Vec<(DrafterKind, DraftCounts)> = stats.used().collect();
    let by_drafter = match used[..] {
        [] => return None,
        [(only, _)] => only.name().to_owned(),
        _ => {
            let one = |(drafter, counts): &(DrafterKind, DraftCounts)| {
                format!("{} {} of {}", drafter.name(), counts.accepted, counts.drafted)
            };
            used.iter().map(one).collect::<Vec<_>>().join(", ")
        }
    };
    Some(format!("{} of {} drafted tokens accepted ({by_drafter})", total.accepted, total.drafted))
}

/// Returns the counts of a reply for JSON: in all, and by drafter.
pub(crate) fn counts_json(stats: &SpeculationStats) -> Value {
    let json_of = |counts: DraftCounts| {
        let DraftCounts { drafted, accepted } = counts;
        json!({ "drafted": drafted, "accepted": accepted, "rejected": counts.rejected() })
    };
    let drafters: Map<String, Value> =
        stats.used().map(|(drafter, counts)| (drafter.name().to_owned(), json_of(counts))).collect();
    let mut object = json_of(stats.total());
    object["drafters"] = drafters.into();
    object
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn read(flags: &[&str]) -> Result<SpeculationArgs, String> {
        let command = SpeculationArgs::augment_args(clap::Command::new("flags")).no_binary_name(true);
        let matches = command.try_get_matches_from(flags).map_err(|error| error.to_string())?;
        SpeculationArgs::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_name_drafters() {
        let named = |flags: &[&str]| read(flags).unwrap().named().map_err(|error| error.to_string());
        assert_eq!(named(&[]).unwrap(), Speculation::DEFAULT);
        assert_eq!(named(&["--speculate", "ngram,suffix"]).unwrap(), Speculation::OFF.ngram().suffix());
        let twice = named(&["--speculate=suffix", "--speculate=draft=x"]).unwrap();
        assert_eq!(twice, Speculation::OFF.suffix().draft_model("x"));
        let error = named(&["--speculate=off", "--speculate=ngram"]).unwrap_err();
        assert_eq!(error, "--speculate: off and ngram cannot be combined");
        let error = read(&["--speculate", "ngrm"]).unwrap_err();
        assert!(error.contains("expected draft=MODEL, mtp, ngram or suffix, separated by commas, or off"), "{error}");
        assert!(read(&["--draft-tokens", "16"]).is_err() && read(&["--draft-tokens", "0"]).is_err());
        let useless = read(&["--draft-tokens", "4", "--speculate", "off"]).unwrap();
        assert!(useless.check().is_err() && useless.check_for_server().is_ok());
    }

    #[test]
    fn the_help_names_the_default() {
        let mut command = SpeculationArgs::augment_args(clap::Command::new("flags"));
        let help = command.render_long_help().to_string();
        assert!(help.contains(&format!("[default: {}]", Speculation::DEFAULT)), "{help}");
    }

    #[test]
    fn counts_are_described() {
        let mut stats = SpeculationStats::default();
        assert_eq!(counts_text(&stats), None);
        stats.add(DrafterKind::Ngram, DraftCounts { drafted: 80, accepted: 62 });
        assert_eq!(counts_text(&stats).unwrap(), "62 of 80 drafted tokens accepted (ngram)");
        stats.add(DrafterKind::DraftModel, DraftCounts { drafted: 5, accepted: 1 });
        let text = counts_text(&stats).unwrap();
        assert_eq!(text, "63 of 85 drafted tokens accepted (draft 1 of 5, ngram 62 of 80)");
        assert_eq!(counts_json(&stats)["drafters"]["draft"], json!({ "drafted": 5, "accepted": 1, "rejected": 4 }));
    }
}
