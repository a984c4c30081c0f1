//! The sampling flags, made from the table of options in the crate `sampling`; `run`, `explain`, `bench` and `serve`
//! share them.
//!
//! Each flag is optional. An option without its flag has the value of the preset; without a preset, the one that the
//! model recommends, or else Pellucid's default. In `serve` the flags are themselves defaults, of requests.

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{ArgAction, ValueParser};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, value_parser};
use pellucid_engine::{self as engine, BeamParams, EarlyStopping, MAX_WIDTH, Request};
use pellucid_sampling::{
    self as sampling, Fallback, GivenOptions, OPTIONS, OptionKind, PELLUCID_DEFAULT, Preset, SamplingDefaults,
    SamplingOption, SamplingParams, StepKind, Value,
};
use pellucid_tokenizer::Tokenizer;

const HEADING: &str = "Sampling";
/// Columns of a help text: clap indents it by 10 and lines end at 80.
const HELP_WIDTH: usize = 70;

/// Values of the sampling flags.
#[derive(Debug, Clone, Default)]
pub(crate) struct SamplingArgs {
    preset: Option<Preset>,
    /// Whether to take the most probable token: all options are neutral then, but for those that are given.
    greedy: bool,
    given: GivenOptions,
    /// Options whose values are tokens, as the user wrote them: only the model's tokenizer knows their ids.
    tokens: Vec<(&'static SamplingOption, Vec<String>)>,
    /// Whether options were changed after the command line was read.
    is_changed: bool,
}

impl Args for SamplingArgs {
    fn augment_args(command: Command) -> Command {
        let preset = Arg::new("preset").long("preset").value_name("NAME").help_heading(HEADING);
        let names = listed(&Preset::ALL.map(Preset::name), "or");
        let purpose = format!("Options for a purpose: {names}; flags given beside it win");
        let preset = preset.value_parser(str::parse::<Preset>).help(wrapped(&purpose, HELP_WIDTH));
        let greedy = Arg::new("greedy").long("greedy").action(ArgAction::SetTrue).help_heading(HEADING);
        let greedy = greedy.conflicts_with_all(["preset", "temperature"]);
        let greedy = greedy.help("Take the most probable token each time, with no default options");
        OPTIONS.iter().fold(command.arg(preset).arg(greedy), |command, option| command.arg(argument(option)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SamplingArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let preset = matches.get_one("preset").copied();
        let mut args = SamplingArgs { preset, greedy: matches.get_flag("greedy"), ..SamplingArgs::default() };
        for option in OPTIONS {
            let id = option.param();
            let texts = || matches.get_many::<String>(id).map(|texts| texts.cloned().collect::<Vec<_>>());
            let value = match option.kind() {
                OptionKind::Number { .. } => matches.get_one(id).copied().map(Value::Number),
                OptionKind::Count { .. } => matches.get_one(id).copied().map(Value::Count),
                OptionKind::Seed => matches.get_one(id).copied().map(Value::Seed),
                OptionKind::Texts { .. } => texts().map(Value::Texts),
                OptionKind::Steps => matches.get_many(id).map(|kinds| Value::Steps(kinds.copied().collect())),
                OptionKind::TokenBias { .. } | OptionKind::Tokens { .. } => {
                    args.tokens.extend(texts().map(|texts| (option, texts)));
                    None
                }
            };
            if let Some(value) = value {
                args.given.insert(option, value);
            }
        }
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = SamplingArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the flag of an option.
fn argument(option: &'static SamplingOption) -> Arg {
    let (parser, action): (ValueParser, ArgAction) = match option.kind() {
        OptionKind::Number { .. } => (value_parser!(f32).into(), ArgAction::Set),
        OptionKind::Count { .. } => (value_parser!(u32).into(), ArgAction::Set),
        OptionKind::Seed => (value_parser!(u64).into(), ArgAction::Set),
        OptionKind::TokenBias { .. } | OptionKind::Tokens { .. } | OptionKind::Texts { .. } => {
            (value_parser!(String), ArgAction::Append)
        }
        OptionKind::Steps => (ValueParser::new(str::parse::<StepKind>), ArgAction::Append),
    };
    let arg = Arg::new(option.param()).long(option.flag()).value_name(option.value_name()).help_heading(HEADING);
    let arg = arg.value_parser(parser).action(action).allow_negative_numbers(true).help(help(option));
    if option.kind() == OptionKind::Steps { arg.value_delimiter(',') } else { arg }
}

/// Returns the help text: what the option does, how to write its value, and what applies without the flag.
fn help(option: &SamplingOption) -> String {
    // The placeholder of the value says more here than the option's own name.
    let text = option.doc().replace(&format!("`{}`", option.param()), option.value_name());
    let mut text = text.replace('`', "").trim_end_matches('.').to_owned();
    text += match option.kind() {
        OptionKind::TokenBias { .. } => "; TOKEN is an id, or a text that is one token; may be given again",
        OptionKind::Tokens { .. } => " (an id, or a text that is one token); may be given again",
        OptionKind::Texts { .. } => "; may be given again",
        OptionKind::Steps => "; names are separated by commas",
        OptionKind::Number { .. } | OptionKind::Count { .. } | OptionKind::Seed => "",
    };
    let default = match (option.kind(), option.neutral()) {
        (OptionKind::Seed, _) => " [default: 0, shown with the reply; in serve a random one]".to_owned(),
        (OptionKind::Steps, _) => {
            let names: Vec<&str> = StepKind::movable().map(StepKind::name).collect();
            format!(" [default: {}]", names.join(", "))
        }
        _ if option.param() == "temperature" => {
            format!(
                " [default: the model's recommendation, else {}, in serve 1; so for all options]",
                PELLUCID_DEFAULT.params().temperature
            )
        }
        (OptionKind::Tokens { .. } | OptionKind::TokenBias { .. }, _) | (_, None) => String::new(),
        (_, Some(value)) if option.needed_option().is_some() => unbroken(&format!("[default: {value}]")),
        (_, Some(value)) => unbroken(&format!("[neutral: {value}]")),
    };
    wrapped(&(text + &default), HELP_WIDTH)
}

/// Returns a space and the text with spaces at which [`wrapped`] does not break a line.
fn unbroken(text: &str) -> String {
    format!(" {}", text.replace(' ', "\u{a0}"))
}

/// Breaks a text into lines of at most `width` columns.
pub(crate) fn wrapped(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            *line += if line.is_empty() { "" } else { " " };
            *line += word;
        }
    }
    lines.join("\n").replace('\u{a0}', " ")
}

/// Joins names with commas and a last word.
pub(crate) fn listed(names: &[&str], last: &str) -> String {
    match names {
        [others @ .., name] if !others.is_empty() => format!("{} {last} {name}", others.join(", ")),
        names => names.concat(),
    }
}

/// The flags of beam search.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Beam search")]
pub(crate) struct BeamArgs {
    /// Number of beams; searches instead of sampling
    #[arg(long, value_name = "N")]
    beams: Option<usize>,

    /// Beams to show [default: 1]
    #[arg(long, value_name = "N", requires = "beams")]
    beams_returned: Option<usize>,

    /// Divide scores by the length to this power: above 0 favours
    /// long replies, 0 is neutral [default: 1]
    #[arg(long, verbatim_doc_comment, value_name = "P", requires = "beams", allow_negative_numbers = true)]
    length_penalty: Option<f32>,

    /// Stop when enough beams have ended: true, false (by a heuristic)
    /// or never (when no beam can improve) [default: false]
    #[arg(long, verbatim_doc_comment, value_name = "WHEN", requires = "beams")]
    early_stopping: Option<EarlyStoppingFlag>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum EarlyStoppingFlag {
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
            Some(EarlyStoppingFlag::True) => EarlyStopping::Always,
            Some(EarlyStoppingFlag::Never) => EarlyStopping::Never,
            Some(EarlyStoppingFlag::False) | None => EarlyStopping::Heuristic,
        };
        Ok(Some(BeamParams { width, num_returned, length_penalty: self.length_penalty.unwrap_or(1.0), early_stopping }))
    }
}

impl SamplingArgs {
    /// Returns the parameters that the flags describe, with `defaults` below them.
    pub(crate) fn params(&self, tokenizer: &Tokenizer, defaults: &SamplingDefaults) -> Result<SamplingParams> {
        let given = self.given(tokenizer)?;
        let start = SamplingParams { end_ids: tokenizer.end_ids().to_vec(), ..self.start() };
        let params = self.resolved(&given, defaults).apply(start, |text| tokenizer.encode_within(text));
        self.checked(&params)?;
        Ok(params)
    }

    /// Rejects flags that are wrong as defaults of a server with any model.
    pub(crate) fn check_for_server(&self) -> Result<()> {
        self.checked(&self.given.apply(self.start(), |_| vec![0]))
    }

    /// Returns the defaults of a server with these flags. A preset and `--greedy` replace the model's recommendation.
    pub(crate) fn for_server(&self, tokenizer: &Tokenizer, model: GivenOptions) -> Result<SamplingDefaults> {
        let start = self.start();
        let mut server = GivenOptions::of(&start);
        let is_replaced = self.preset.is_some() || self.greedy;
        if let Some(option) = SamplingOption::by_param("temperature").filter(|_| is_replaced) {
            server.insert(option, Value::Number(start.temperature));
        }
        let server = server.changed(self.given(tokenizer)?);
        let model = if is_replaced { GivenOptions::default() } else { model };
        let defaults = SamplingDefaults { model, server };
        let options = defaults.resolve(&GivenOptions::default(), Fallback::OpenAi);
        self.checked(&options.apply(SamplingParams::default(), |text| tokenizer.encode_within(text)))?;
        Ok(defaults)
    }

    /// Returns the given options, with tokens as their ids.
    fn given(&self, tokenizer: &Tokenizer) -> Result<GivenOptions> {
        let mut given = self.given.clone();
        for (option, words) in &self.tokens {
            let flag = format!("--{}", option.flag());
            let value = match option.kind() {
                OptionKind::TokenBias { .. } => Value::TokenBias(
                    words.iter().map(|word| token_bias(tokenizer, word, &flag)).collect::<Result<_>>()?,
                ),
                _ => Value::Tokens(token_ids(tokenizer, words).context(flag)?),
            };
            given.insert(option, value);
        }
        Ok(given)
    }

    /// Returns the given options with the defaults below them, unless a preset or `--greedy` replaces these.
    fn resolved(&self, given: &GivenOptions, defaults: &SamplingDefaults) -> GivenOptions {
        match (self.preset, self.greedy) {
            (None, false) => defaults.resolve(given, Fallback::Pellucid),
            _ => given.clone(),
        }
    }

    /// Returns the names that [`SamplingArgs::changed`] takes.
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        std::iter::once("preset").chain(OPTIONS.iter().map(|option| option.flag()))
    }

    /// Returns these flags with one more, named as on the command line, without its dashes. A preset replaces all but
    /// the seed.
    pub(crate) fn changed(&self, name: &str, value: &str) -> Result<SamplingArgs> {
        let name = name.trim_start_matches('-').replace('_', "-");
        if !SamplingArgs::names().any(|known| known == name) {
            bail!("there is no option {name}; /set alone lists them");
        }
        let command = SamplingArgs::augment_args(Command::new("set")).no_binary_name(true);
        let matches = command.try_get_matches_from([format!("--{name}={value}")]);
        let matches = matches.map_err(|_| match name.as_str() {
            "preset" => anyhow!("preset: expected {}, found {value}", listed(&Preset::ALL.map(Preset::name), "or")),
            _ => anyhow!("{name}: {value:?} is not a value of this option"),
        })?;
        let mut change = SamplingArgs { is_changed: true, ..SamplingArgs::from_arg_matches(&matches)? };
        if change.preset.is_some() {
            if let (Some(option), Some(seed)) = (SamplingOption::by_param("seed"), self.given.get("seed")) {
                change.given.insert(option, seed.clone());
            }
            return Ok(change);
        }
        let mut tokens: Vec<_> = self.tokens.clone();
        tokens.retain(|(option, _)| !change.tokens.iter().any(|(other, _)| other.param() == option.param()));
        tokens.extend(change.tokens);
        // A temperature replaces `--greedy`, which is one.
        let greedy = self.greedy && change.given.get("temperature").is_none();
        let given = self.given.clone().changed(change.given);
        let changed = SamplingArgs { preset: self.preset, greedy, given, tokens, is_changed: true };
        changed.check()?;
        Ok(changed)
    }

    /// Rejects flags that are wrong with any model, so that the user learns of it before one is loaded.
    pub(crate) fn check(&self) -> Result<()> {
        self.checked(&self.without_tokenizer())
    }

    fn checked(&self, params: &SamplingParams) -> Result<()> {
        let checks = params.check().and_then(|()| params.check_effect()).and_then(|()| self.given.check_needs(params));
        checks.map_err(in_flags)
    }

    /// Returns the parameters as far as they do not depend on the tokenizer: texts become arbitrary tokens.
    fn without_tokenizer(&self) -> SamplingParams {
        self.resolved(&self.given, &SamplingDefaults::default()).apply(self.start(), |_| vec![0])
    }

    fn start(&self) -> SamplingParams {
        match (self.preset, self.greedy) {
            (Some(preset), _) => preset.params(),
            (None, true) => SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            (None, false) => SamplingParams::default(),
        }
    }

    /// Rejects flags that have no effect on beam search.
    pub(crate) fn check_beside(&self, beams: BeamParams, num_choices: usize, best_of: usize) -> Result<()> {
        // Beam search takes no defaults.
        let mut sampling = self.given.apply(SamplingParams::default(), |_| vec![0]);
        // Only the number of stop tokens matters here, not their ids.
        let is_stop = |option: &SamplingOption| option.param() == "stop_ids";
        let num_stops = self.tokens.iter().find(|(option, _)| is_stop(option)).map_or(0, |(_, words)| words.len());
        sampling.stop_ids = vec![0; num_stops];
        let request = Request { num_choices, best_of, beams: Some(beams), ..Request::new(vec![0], sampling) };
        beams.check(&request).map_err(|error| match error {
            engine::Error::NotWithBeams { name } => anyhow!("--beams cannot be combined with {}", flag(name)),
            engine::Error::OutOfRange { name, expected, found } => {
                anyhow!("{}: expected {expected}, found {found}", flag(name))
            }
            other => other.into(),
        })
    }

    /// Returns the parameters of beam search, which takes no defaults.
    pub(crate) fn without_defaults(&self, tokenizer: &Tokenizer) -> Result<SamplingParams> {
        let start = SamplingParams { end_ids: tokenizer.end_ids().to_vec(), ..SamplingParams::default() };
        let params = self.given(tokenizer)?.apply(start, |text| tokenizer.encode_within(text));
        self.checked(&params)?;
        Ok(params)
    }

    /// Describes the origin of the options: a preset, `--greedy`, or the defaults, and flags or changes in a chat.
    pub(crate) fn origin(&self, defaults: &SamplingDefaults) -> String {
        let given = if self.is_changed { "changes by /set" } else { "flags" };
        let base = match self.preset {
            Some(preset) => format!("preset {preset}"),
            None if self.greedy => "greedy".to_owned(),
            None if self.given.replaces_defaults() => return given.to_owned(),
            None if defaults.model.is_empty() => format!("preset {PELLUCID_DEFAULT} (the default)"),
            None => "recommended by the model".to_owned(),
        };
        let is_changed = self.changes_distribution() || !self.tokens.is_empty();
        if is_changed { format!("{base} with {given}") } else { base }
    }

    /// Whether a flag was given that says how to sample.
    pub(crate) fn is_given(&self) -> bool {
        self.preset.is_some() || self.greedy || self.changes_distribution() || !self.tokens.is_empty()
    }

    /// Whether an option was given, other than the seed.
    fn changes_distribution(&self) -> bool {
        OPTIONS.iter().any(|option| option.kind() != OptionKind::Seed && self.given.get(option.param()).is_some())
    }

    /// Whether a flag asks for the most probable token.
    pub(crate) fn is_greedy(&self) -> bool {
        self.greedy || self.given.get("temperature") == Some(&Value::Number(0.0))
    }

    pub(crate) fn min_tokens(&self) -> Option<u32> {
        self.given.min_tokens()
    }

    pub(crate) fn preset(&self) -> Option<Preset> {
        self.preset
    }
}

/// Returns the flag of a parameter that an error names.
fn flag(name: &str) -> String {
    let param = name.split_once(',').map_or(name, |(param, _)| param);
    match (name, SamplingOption::by_param(param)) {
        ("a penalty", _) => name.to_owned(),
        ("n", _) => "--choices".to_owned(),
        (_, Some(option)) => format!("--{}", option.flag()),
        (_, None) => format!("--{}", name.replace('_', "-")),
    }
}

/// Words an error with the names of flags in place of those of parameters.
fn in_flags(error: sampling::Error) -> anyhow::Error {
    use sampling::Error;
    let text = error.to_string();
    match error {
        Error::OutOfRange { name, .. }
        | Error::TooMany { name, .. }
        | Error::Empty { name }
        | Error::ListedTwice { name, .. }
        | Error::AllExcluded { name }
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

/// Reads TOKEN=BIAS. The bias comes after the last equals sign, since a token may contain one.
fn token_bias(tokenizer: &Tokenizer, word: &str, flag: &str) -> Result<(u32, f32)> {
    let parts = word.rsplit_once('=').and_then(|(token, bias)| Some((token, bias.trim().parse::<f32>().ok()?)));
    let Some((token, bias)) = parts else { bail!("{flag}: expected TOKEN=BIAS, found {word:?}") };
    Ok((token_id(tokenizer, token).context(flag.to_owned())?, bias))
}

fn token_ids(tokenizer: &Tokenizer, tokens: &[String]) -> Result<Vec<u32>> {
    tokens.iter().map(|token| token_id(tokenizer, token)).collect()
}

/// Returns the id of a token that is given as its id or as its text.
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

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    /// Returns the error for these flags before a model is loaded.
    fn refused(flags: &[&str]) -> String {
        let command = SamplingArgs::augment_args(clap::Command::new("flags")).no_binary_name(true);
        let matches = command.try_get_matches_from(flags).expect("flags that can be read");
        let args = SamplingArgs::from_arg_matches(&matches).expect("flags that can be read");
        args.check().expect_err("a refusal").to_string()
    }

    #[test]
    fn one_option_can_be_changed_and_the_others_stay() {
        let preset = SamplingArgs { preset: Some(Preset::Chat), ..SamplingArgs::default() };
        let changed = preset.changed("temperature", "0.25").and_then(|args| args.changed("top_k", "7")).unwrap();
        let params = changed.without_tokenizer();
        assert_eq!((params.temperature, params.top_k, params.top_p), (0.25, 7, Preset::Chat.params().top_p));
        assert!(changed.changed("preset", "code").unwrap().given.is_empty());
        let seeded = changed.changed("seed", "9").and_then(|args| args.changed("preset", "code")).unwrap();
        assert_eq!((seeded.without_tokenizer().seed, seeded.preset), (9, Some(Preset::Code)));
        let origin = |args: &SamplingArgs| args.origin(&SamplingDefaults::default());
        assert_eq!(
            (origin(&preset), origin(&changed)),
            ("preset chat".into(), "preset chat with changes by /set".into())
        );
        let error = |name, value| preset.changed(name, value).unwrap_err().to_string();
        assert_eq!(error("top-p", "x"), "top-p: \"x\" is not a value of this option");
        assert_eq!(error("top-p", "7"), "--top-p: expected 0 to 1, found 7");
        assert_eq!(error("topp", "1"), "there is no option topp; /set alone lists them");
        let expected = format!("preset: expected {}, found bogus", listed(&Preset::ALL.map(Preset::name), "or"));
        assert_eq!(error("preset", "bogus"), expected);
    }

    #[test]
    fn refusals_name_the_flag() {
        assert_eq!(refused(&["--top-p", "1.5"]), "--top-p: expected 0 to 1, found 1.5");
        assert_eq!(refused(&["--mirostat", "200"]), "--mirostat: expected 0 to 100, found 200");
        assert_eq!(refused(&["--xtc-threshold", "0.2"]), "--xtc-threshold does nothing without --xtc-probability");
        assert_eq!(refused(&["--dry-base", "1.75", "--greedy"]), "--dry-base does nothing without --dry-multiplier");
        assert_eq!(
            refused(&["--dry-breaker", "x", "--dry-multiplier", "0"]),
            "--dry-breaker does nothing without --dry-multiplier"
        );
        assert_eq!(refused(&["--penalty-window", "9"]), "--penalty-window does nothing without a penalty");
        let left_out = refused(&["--samplers", "top_k", "--min-p", "0.1"]);
        assert!(left_out.starts_with("--samplers: min_p is set but not listed"), "{left_out}");
        let truncates = refused(&["--mirostat", "5", "--top-k", "3"]);
        assert_eq!(truncates, "--top-k: mirostat does its own truncation; leave --top-k neutral or mirostat off");
    }
}
