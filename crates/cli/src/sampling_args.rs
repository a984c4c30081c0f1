//! The flags that say how tokens are chosen; the same for `run` and `explain`.
//!
//! Each flag is optional: what is not given comes from the preset, and without one from the neutral value. The result is shown.

use anyhow::{Context, Result, anyhow, bail};
use pellucid_engine::{self as engine, BeamParams, EarlyStopping, MAX_WIDTH, Request};
use pellucid_sampling::{self as sampling, DRY_BREAKERS, Dry, Mirostat, Preset, SamplingParams, StepKind};
use pellucid_tokenizer::Tokenizer;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Choosing tokens")]
pub(crate) struct SamplingArgs {
    /// Parameters by use: code, factual, chat, creative or brainstorm;
    /// flags given beside it win
    #[arg(long, verbatim_doc_comment, value_name = "NAME")]
    preset: Option<Preset>,

    /// Seed of the draw: the same seed gives the same reply
    /// [default: a random one, shown with the reply]
    #[arg(long, verbatim_doc_comment, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,

    /// Divide the logits by T: 0 takes the highest, 1 is the model's
    /// own distribution (neutral), more is freer
    /// [default: the preset's; else 1 where something is drawn, else 0;
    /// a chat without flags has the preset chat]
    #[arg(long, verbatim_doc_comment, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Let the temperature move by R with the model's uncertainty; neutral 0
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    dynamic_temperature: Option<f32>,

    /// How that movement bends; neutral 1, a straight line
    #[arg(long, value_name = "E", allow_negative_numbers = true)]
    dynamic_temperature_exponent: Option<f32>,

    /// Keep the K highest; neutral 0
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,

    /// Keep the most probable tokens that together reach P; neutral 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Keep tokens at least P times as probable as the best; neutral 0
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,

    /// Keep the tokens closest to the expected surprise that together
    /// reach P; neutral 1
    #[arg(long, verbatim_doc_comment, value_name = "P", allow_negative_numbers = true)]
    typical_p: Option<f32>,

    /// Keep logits within N standard deviations of the highest; neutral 0
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    top_n_sigma: Option<f32>,

    /// How often to leave out the top choices (XTC); neutral 0
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_probability: Option<f32>,

    /// How probable a top choice is, for XTC [default: 0.1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    xtc_threshold: Option<f32>,

    /// Divide the logits of tokens in prompt and reply by R; neutral 1
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,

    /// Subtract F for each time a token is in the reply; neutral 0
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,

    /// Subtract F when a token is in the reply at all; neutral 0
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,

    /// Let the penalties look at the last N tokens [default: all]
    #[arg(long, value_name = "N")]
    penalty_window: Option<u32>,

    /// Penalise continued repeats of phrases (DRY) by M logits; neutral 0
    #[arg(long, value_name = "M", allow_negative_numbers = true)]
    dry_multiplier: Option<f32>,

    /// Growth of DRY's penalty with each repeated token [default: 1.75]
    #[arg(long, value_name = "B", allow_negative_numbers = true, requires = "dry_multiplier")]
    dry_base: Option<f32>,

    /// Repeats up to so many tokens are free of DRY [default: 2]
    #[arg(long, value_name = "N", requires = "dry_multiplier")]
    dry_allowed_length: Option<u32>,

    /// Tokens that DRY looks back over [default: all]
    #[arg(long, value_name = "N", requires = "dry_multiplier")]
    dry_range: Option<u32>,

    /// Text that a repeat does not reach across, for DRY; may be given
    /// again [default: line end, colon, double quote, asterisk]
    #[arg(long, verbatim_doc_comment, value_name = "TEXT", requires = "dry_multiplier")]
    dry_breaker: Vec<String>,

    /// Hold the surprise at TAU bits a token (Mirostat 2), usually 5;
    /// in place of the steps that keep some tokens
    #[arg(long, verbatim_doc_comment, value_name = "TAU", allow_negative_numbers = true)]
    mirostat: Option<f32>,

    /// How fast Mirostat corrects itself [default: 0.1]
    #[arg(long, value_name = "ETA", allow_negative_numbers = true, requires = "mirostat")]
    mirostat_eta: Option<f32>,

    /// Add BIAS to a token's logit; TOKEN is an id, or a text that is
    /// one token; may be given again
    #[arg(long, verbatim_doc_comment, value_name = "TOKEN=BIAS")]
    logit_bias: Vec<String>,

    /// Never choose this token (an id, or a text that is one token);
    /// may be given again
    #[arg(long, verbatim_doc_comment, value_name = "TOKEN")]
    ban: Vec<String>,

    /// Choose only tokens given with this flag; may be given again
    #[arg(long, value_name = "TOKEN")]
    allow: Vec<String>,

    /// Do not end before so many tokens; neutral 0
    #[arg(long, value_name = "N")]
    min_tokens: Option<u32>,

    /// End at this token (an id, or a text that is one token); may be given again
    #[arg(long, value_name = "TOKEN")]
    stop_token: Vec<String>,

    /// Order of the steps, comma-separated; a step that is set must be
    /// listed [default: repetition_penalty, frequency_presence_penalty,
    /// dry, temperature, top_n_sigma, top_k, typical_p, top_p, min_p, xtc]
    #[arg(long, verbatim_doc_comment, value_name = "LIST", value_delimiter = ',')]
    samplers: Option<Vec<StepKind>>,
}

/// The flags of beam search.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Beam search")]
pub(crate) struct BeamArgs {
    /// Search with so many beams in place of drawing
    #[arg(long, value_name = "N")]
    beams: Option<usize>,

    /// Beams to show [default: 1]
    #[arg(long, value_name = "N", requires = "beams")]
    beams_returned: Option<usize>,

    /// Divide scores by length to this power: above 0 favours long
    /// replies, 0 is neutral [default: 1]
    #[arg(long, verbatim_doc_comment, value_name = "P", requires = "beams", allow_negative_numbers = true)]
    length_penalty: Option<f32>,

    /// Stop when enough beams have ended: true, false (by a heuristic)
    /// or never (only when none can get better) [default: false]
    #[arg(long, verbatim_doc_comment, value_name = "WHEN", requires = "beams")]
    early_stopping: Option<Stopping>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Stopping {
    True,
    False,
    Never,
}

impl BeamArgs {
    pub(crate) fn is_given(&self) -> bool {
        self.beams.is_some()
    }

    pub(crate) fn params(&self) -> Result<Option<BeamParams>> {
        let Some(width) = self.beams else { return Ok(None) };
        if !(2..=MAX_WIDTH).contains(&width) {
            bail!("--beams: expected 2 to {MAX_WIDTH}, found {width}");
        }
        let num_returned = self.beams_returned.unwrap_or(1);
        if !(1..=width).contains(&num_returned) {
            bail!("--beams-returned: expected 1 to {width}, the number of beams, found {num_returned}");
        }
        let early_stopping = match self.early_stopping {
            Some(Stopping::True) => EarlyStopping::Always,
            Some(Stopping::Never) => EarlyStopping::Never,
            Some(Stopping::False) | None => EarlyStopping::Heuristic,
        };
        Ok(Some(BeamParams { width, num_returned, length_penalty: self.length_penalty.unwrap_or(1.0), early_stopping }))
    }
}

impl SamplingArgs {
    /// The parameters that the flags describe. `default_temperature` stands when neither flag nor preset gives one.
    pub(crate) fn params(&self, tokenizer: &Tokenizer, default_temperature: f32) -> Result<SamplingParams> {
        let mut params = SamplingParams {
            seed: self.seed.unwrap_or_else(random_seed),
            end_ids: tokenizer.end_ids().to_vec(),
            ..self.numbers(default_temperature)
        };
        if params.dry.multiplier > 0.0 {
            let usual = DRY_BREAKERS.map(String::from);
            let breakers = if self.dry_breaker.is_empty() { &usual[..] } else { &self.dry_breaker };
            params.dry.breakers.extend(breakers.iter().map(|text| tokenizer.encode_within(text)));
        }
        for bias in &self.logit_bias {
            let parts = bias.rsplit_once('=').and_then(|(token, bias)| Some((token, bias.trim().parse::<f32>().ok()?)));
            let Some((token, bias)) = parts else { bail!("--logit-bias: expected TOKEN=BIAS, found {bias:?}") };
            params.logit_bias.push((token_id(tokenizer, token).context("--logit-bias")?, bias));
        }
        params.banned_tokens.extend(token_ids(tokenizer, &self.ban).context("--ban")?);
        params.stop_ids.extend(token_ids(tokenizer, &self.stop_token).context("--stop-token")?);
        if !self.allow.is_empty() {
            params.allowed_tokens = Some(token_ids(tokenizer, &self.allow).context("--allow")?);
        }
        checked(&params)?;
        Ok(params)
    }

    /// Refuses what is wrong whatever the model: that is said before one is loaded.
    pub(crate) fn check(&self, default_temperature: f32) -> Result<()> {
        checked(&self.numbers(default_temperature))
    }

    /// What needs no tokenizer.
    fn numbers(&self, default_temperature: f32) -> SamplingParams {
        let start = match self.preset {
            Some(preset) => preset.params(),
            None => SamplingParams { temperature: default_temperature, ..SamplingParams::default() },
        };
        let eta = self.mirostat_eta.unwrap_or(Mirostat::default().eta);
        SamplingParams {
            temperature: self.temperature.unwrap_or(start.temperature),
            dynamic_temperature_range: self.dynamic_temperature.unwrap_or(start.dynamic_temperature_range),
            dynamic_temperature_exponent: self
                .dynamic_temperature_exponent
                .unwrap_or(start.dynamic_temperature_exponent),
            top_n_sigma: self.top_n_sigma.unwrap_or(start.top_n_sigma),
            top_k: self.top_k.unwrap_or(start.top_k),
            typical_p: self.typical_p.unwrap_or(start.typical_p),
            top_p: self.top_p.unwrap_or(start.top_p),
            min_p: self.min_p.unwrap_or(start.min_p),
            xtc_probability: self.xtc_probability.unwrap_or(start.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(start.xtc_threshold),
            repetition_penalty: self.repetition_penalty.unwrap_or(start.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(start.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(start.presence_penalty),
            penalty_window: self.penalty_window.or(start.penalty_window),
            dry: Dry {
                multiplier: self.dry_multiplier.unwrap_or(start.dry.multiplier),
                base: self.dry_base.unwrap_or(start.dry.base),
                allowed_length: self.dry_allowed_length.unwrap_or(start.dry.allowed_length),
                range: self.dry_range.or(start.dry.range),
                breakers: start.dry.breakers,
            },
            mirostat: self.mirostat.map(|tau| Mirostat { tau, eta }).or(start.mirostat),
            min_tokens: self.min_tokens.unwrap_or(start.min_tokens),
            samplers: self.samplers.clone().or(start.samplers),
            ..start
        }
    }

    /// Refuses flags that a search does not heed.
    pub(crate) fn check_beside(&self, beams: BeamParams, num_choices: usize, best_of: usize) -> Result<()> {
        let mut sampling = self.numbers(1.0);
        // What the flag says does not matter here.
        sampling.stop_ids = self.stop_token.iter().map(|_| 0).collect();
        let request = Request { num_choices, best_of, beams: Some(beams), ..Request::new(vec![0], sampling) };
        beams.check(&request).map_err(|error| match error {
            engine::Error::NotWithBeams { name } => anyhow!("--beams does not go together with {}", flag(name)),
            engine::Error::OutOfRange { name, expected, found } => {
                anyhow!("{}: expected {expected}, found {found}", flag(name))
            }
            other => other.into(),
        })
    }

    /// Whether something was given that matters only where a token is drawn: then the temperature is 1 unless said otherwise.
    pub(crate) fn draws(&self) -> bool {
        let numbers = [
            self.dynamic_temperature,
            self.top_p,
            self.min_p,
            self.typical_p,
            self.top_n_sigma,
            self.xtc_probability,
            self.mirostat,
        ];
        numbers.iter().any(Option::is_some) || self.top_k.is_some() || self.seed.is_some()
    }

    pub(crate) fn min_tokens(&self) -> Option<u32> {
        self.min_tokens
    }

    pub(crate) fn preset(&self) -> Option<Preset> {
        self.preset
    }
}

fn checked(params: &SamplingParams) -> Result<()> {
    params.check().and_then(|()| params.check_effect()).map_err(in_flags)
}

/// What a parameter is called here.
fn flag(name: &str) -> String {
    match name {
        "a penalty" => name.to_owned(),
        "n" => "--choices".to_owned(),
        "dynamic_temperature_range" => "--dynamic-temperature".to_owned(),
        "mirostat_tau" => "--mirostat".to_owned(),
        "banned_tokens" => "--ban".to_owned(),
        "allowed_tokens" => "--allow".to_owned(),
        "stop_ids" => "--stop-token".to_owned(),
        "dry_sequence_breakers" => "--dry-breaker".to_owned(),
        name => format!("--{}", name.replace('_', "-")),
    }
}

/// An error of parameters, by the names that they have here.
fn in_flags(error: sampling::Error) -> anyhow::Error {
    use sampling::Error;
    let text = error.to_string();
    match error {
        Error::OutOfRange { name, .. }
        | Error::TooMany { name, .. }
        | Error::Empty { name }
        | Error::ListedTwice { name, .. }
        | Error::OutsideVocabulary { name, .. }
        | Error::NothingToMove { name } => anyhow!("{}", text.replacen(name, &flag(name), 1)),
        Error::NoEffect { name, without } => anyhow!("{} does nothing without {}", flag(name), flag(without)),
        Error::MirostatTruncates { step } => anyhow!("{}", text.replace(step, &flag(step))),
        Error::UnknownStep { .. } | Error::StepTwice { .. } | Error::StepFixed { .. } | Error::StepLeftOut { .. } => {
            anyhow!("--{text}")
        }
        _ => anyhow!("{text}"),
    }
}

fn token_ids(tokenizer: &Tokenizer, tokens: &[String]) -> Result<Vec<u32>> {
    tokens.iter().map(|token| token_id(tokenizer, token)).collect()
}

/// A number is an id; anything else must be the text of one token.
fn token_id(tokenizer: &Tokenizer, token: &str) -> Result<u32> {
    if let Ok(id) = token.parse::<u32>() {
        if id as usize >= tokenizer.vocab_size() {
            bail!("the id {id} is outside the vocabulary of {}", tokenizer.vocab_size());
        }
        return Ok(id);
    }
    if let Some(id) = tokenizer.id_of(token) {
        return Ok(id);
    }
    match tokenizer.encode_within(token)[..] {
        [id] => Ok(id),
        ref ids => bail!("{token:?} is {} tokens ({ids:?}), expected one", ids.len()),
    }
}

/// A seed for requests that bring none, from the operating system's randomness, which keys the standard library's hash maps.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Few enough digits to type again.
    RandomState::new().hash_one(0) % 1_000_000_000
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    /// What is said of these flags before a model is loaded.
    fn refused(flags: &[&str]) -> String {
        let command = SamplingArgs::augment_args(clap::Command::new("flags")).no_binary_name(true);
        let matches = command.try_get_matches_from(flags).expect("flags that can be read");
        let args = SamplingArgs::from_arg_matches(&matches).expect("flags that can be read");
        args.check(1.0).expect_err("a refusal").to_string()
    }

    #[test]
    fn refusals_name_the_flag() {
        assert_eq!(refused(&["--top-p", "1.5"]), "--top-p: expected 0 to 1, found 1.5");
        assert_eq!(refused(&["--mirostat", "200"]), "--mirostat: expected 0 to 100, found 200");
        assert_eq!(refused(&["--xtc-threshold", "0.2"]), "--xtc-threshold does nothing without --xtc-probability");
        assert_eq!(refused(&["--penalty-window", "9"]), "--penalty-window does nothing without a penalty");
        let left_out = refused(&["--samplers", "top_k", "--min-p", "0.1"]);
        assert!(left_out.starts_with("--samplers: min_p is set but not listed"), "{left_out}");
        let truncates = refused(&["--mirostat", "5", "--top-k", "3"]);
        assert_eq!(truncates, "--top-k: mirostat does its own truncation; leave --top-k neutral or mirostat off");
    }
}
