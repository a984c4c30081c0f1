//! Errors of usage, which exit with status 2, and the wording of errors that come from libraries.
//!
//! An error of usage is one of the command line and of what the user hands over with it: a flag or argument that is
//! wrong, does not fit the others or the model, or names a model that does not exist, or a file or folder that is not
//! what it is for. Everything else is a failure, with status 1: a damaged model, a disk, a network, a device.

use std::fmt::{self, Display};
use std::io::Write;

use anyhow::Error;
use clap::CommandFactory;
use clap::error::{ContextKind, ErrorKind};

use crate::flags::command_line::Cli;
use crate::terminal::spelling;

/// Exit status of an error of usage, which is also that of the library that parses the flags.
pub(crate) const USAGE_STATUS: u8 = 2;

/// The message of an error of usage.
#[derive(Debug)]
pub(crate) struct UsageError(String);

impl UsageError {
    /// Returns the error of usage with this message.
    pub(crate) fn because(message: impl Display) -> Error {
        Error::new(UsageError(format!("{message:#}")))
    }

    /// Whether an error is one of usage.
    pub(crate) fn is(error: &Error) -> bool {
        error.chain().any(|cause| {
            cause.is::<UsageError>()
                || cause.downcast_ref().is_some_and(refuses_request)
                || matches!(cause.downcast_ref(), Some(pellucid_generate::Error::PromptTooLong { .. }))
                || cause.downcast_ref().is_some_and(is_no_model)
        })
    }
}

/// Whether the engine refused what a command line requested: a prompt or an option, and not the engine's own state.
fn refuses_request(error: &pellucid_engine::Error) -> bool {
    use pellucid_engine::Error;
    use pellucid_sampling::Error as Sampling;
    match error {
        Error::EmptyPrompt
        | Error::PromptTooLong { .. }
        | Error::TextTooLong { .. }
        | Error::IdOutsideVocabulary { .. }
        | Error::OutOfRange { .. }
        | Error::NotWithBeams { .. }
        | Error::ExceedsKvMemory { .. }
        | Error::ExceedsQuota { .. }
        | Error::StatefulDraftModel { .. } => true,
        Error::Sampling(error) => !matches!(
            error,
            Sampling::NotANumber { .. }
                | Sampling::NumLogits { .. }
                | Sampling::VocabularySize { .. }
                | Sampling::MaskLength { .. }
                | Sampling::NothingLeft
                | Sampling::Grammar(_)
        ),
        Error::QueueFull
        | Error::Cancelled
        | Error::Stopped
        | Error::Model(_)
        | Error::OutOfMemory(_)
        | Error::DeviceLost(_)
        | Error::Internal(_) => false,
    }
}

/// Whether a path leads to something else than a model; other errors are those of models that are damaged or cannot be
/// read.
fn is_no_model(error: &pellucid_checkpoint::Error) -> bool {
    use pellucid_checkpoint::Error;
    match error {
        Error::NotAModel { .. } | Error::BadMagic { .. } | Error::Pickle { .. } => true,
        // By this file a folder is told from one of something else.
        Error::MissingFile { path, .. } => path.file_name().is_some_and(|name| name == "config.json"),
        _ => false,
    }
}

impl Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Returns from a function with an error of usage; takes the arguments of `format!`.
macro_rules! bail_usage {
    ($($message:tt)*) => {
        return Err($crate::flags::usage_error::UsageError::because(format!($($message)*)))
    };
}
pub(crate) use bail_usage;

/// Marks the error of a check of flags as one of usage.
pub(crate) trait OrUsage<T> {
    /// Returns the value; the error keeps its message and becomes one of usage.
    fn or_usage(self) -> Result<T, Error>;
}

impl<T, E: Into<Error>> OrUsage<T> for Result<T, E> {
    fn or_usage(self) -> Result<T, Error> {
        self.map_err(|error| UsageError::because(error.into()))
    }
}

/// Prints what the parser of flags has to say, an error or the help, and exits.
pub(crate) fn exit_with(error: &clap::Error) -> ! {
    if let Some(advice) = advice(error) {
        let _ = writeln!(std::io::stderr(), "error: {advice}\n\nFor more information, try '--help'.");
        std::process::exit(USAGE_STATUS.into());
    }
    if matches!(error.kind(), ErrorKind::ValueValidation) {
        let text = error.render();
        let is_colored = std::io::IsTerminal::is_terminal(&std::io::stderr());
        let text = if is_colored { text.ansi().to_string() } else { text.to_string() };
        let _ = write!(std::io::stderr(), "{}", reworded(&text));
        std::process::exit(USAGE_STATUS.into());
    }
    error.exit()
}

/// Flags of `run` for several replies.
const SEVERAL_REPLIES: [&str; 6] =
    ["--choices", "--best-of", "--beams", "--beams-returned", "--length-penalty", "--early-stopping"];

/// Returns what to write instead of the parser's message: if a command line begins with a prompt or with `--model`
/// where a command belongs, if it has a flag that belongs to another command, or a model without its flag.
fn advice(error: &clap::Error) -> Option<String> {
    let text = |kind| error.get(kind).map(ToString::to_string);
    match error.kind() {
        ErrorKind::InvalidSubcommand if error.get(ContextKind::SuggestedSubcommand).is_none() => {
            let word = text(ContextKind::InvalidSubcommand)?;
            if word.starts_with('-') {
                return None;
            }
            let is_nested = text(ContextKind::Usage).is_some_and(|usage| usage.contains("pellucid models"));
            if is_nested {
                return Some(format!("`pellucid models` has no command {word:?}; `pellucid rm MODEL` removes a model"));
            }
            let program = Cli::command();
            let names = program.get_subcommands().map(clap::Command::get_name);
            Some(match spelling::closest(&word, names) {
                Some(name) => format!("there is no command {word:?}: did you mean pellucid {name}?"),
                None => format!("there is no command {word:?}; to ask a model, write: pellucid run {word:?}"),
            })
        }
        ErrorKind::UnknownArgument if text(ContextKind::Usage)?.contains("<COMMAND>") => {
            let flag = text(ContextKind::InvalidArg).filter(|flag| ["-m", "--model"].contains(&flag.as_str()))?;
            Some(format!("{flag} belongs after a command, as in: pellucid run {flag} MODEL \"What is gravity?\""))
        }
        ErrorKind::UnknownArgument if text(ContextKind::Usage)?.contains("pellucid serve") => {
            let word = text(ContextKind::InvalidArg).filter(|word| !word.starts_with('-'))?;
            Some(format!("{word:?} needs a flag before it; models are given as in: pellucid serve --model {word}"))
        }
        ErrorKind::UnknownArgument if text(ContextKind::Usage)?.contains("pellucid explain") => {
            let flag = text(ContextKind::InvalidArg).filter(|flag| SEVERAL_REPLIES.contains(&flag.as_str()))?;
            Some(format!("{flag} belongs to `pellucid run`: explain shows one reply, that of a run without {flag}"))
        }
        _ => None,
    }
}

/// Causes in the wording of the standard library, and ours.
const CAUSES: [(&str, &str); 8] = [
    ("invalid digit found in string", "expected a whole number that is not negative"),
    ("cannot parse integer from empty string", "expected a whole number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("number would be zero for non-zero type", "expected a number above 0"),
    ("invalid float literal", "expected a number"),
    ("cannot parse float from empty string", "expected a number"),
    ("provided string was not `true` or `false`", "expected true or false"),
];

/// Replaces the wording of libraries in the message of a flag whose value is wrong.
pub(crate) fn reworded(text: &str) -> String {
    let text = CAUSES.iter().fold(text.to_owned(), |text, (theirs, ours)| text.replace(theirs, ours));
    text.lines().map(|line| with_range(line) + "\n").collect()
}

/// Turns `...: 0 is not in 1..=1024` into `...: expected 1 to 1024`.
fn with_range(line: &str) -> String {
    let found = line.rsplit_once(" is not in ").and_then(|(before, range)| {
        let (start, end) = range.split_once("..")?;
        let end = end.trim_start_matches('=');
        let before = before.rsplit_once(' ')?.0;
        let expected = match end {
            // The largest value of the type says nothing about the flag.
            "" | "4294967295" | "18446744073709551615" => format!("expected {start} or more"),
            end => format!("expected {start} to {end}"),
        };
        Some(format!("{before} {expected}"))
    });
    found.unwrap_or_else(|| line.to_owned())
}

/// Removes the numbers of the operating system from a message: `(os error 2)` tells a user nothing.
pub(crate) fn without_os_codes(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(" (os error ") {
        let (before, code) = rest.split_at(at);
        kept += before;
        match code.split_once(')') {
            Some((_, after)) => rest = after,
            None => rest = "",
        }
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_usage_is_known_behind_a_context() {
        let error = UsageError::because("--stop: expected a text").context("more");
        assert!(UsageError::is(&error) && !UsageError::is(&anyhow::anyhow!("a failure")));
        let marked = Err::<(), _>(anyhow::anyhow!("inner").context("outer")).or_usage().unwrap_err();
        assert_eq!(format!("{marked:#}"), "outer: inner");
    }

    #[test]
    fn a_request_that_the_engine_refuses_is_an_error_of_usage_and_a_failure_is_not() {
        use pellucid_engine::Error;
        let is_usage = |error: Error| UsageError::is(&anyhow::Error::from(error).context("more"));
        assert!(is_usage(Error::PromptTooLong { prompt: 9, context: 8 }));
        assert!(is_usage(pellucid_sampling::Error::AllExcluded { name: "logit_bias" }.into()));
        assert!(!is_usage(Error::Stopped) && !is_usage(Error::Model("a layer failed".into())));
        assert!(!is_usage(pellucid_sampling::Error::NotANumber { token: 1 }.into()));
        let too_long = pellucid_generate::Error::PromptTooLong { at_least: 9, context_len: 8 };
        assert!(UsageError::is(&too_long.into()));
    }

    #[test]
    fn a_path_that_is_no_model_is_an_error_of_usage_and_a_damaged_model_is_not() {
        use pellucid_checkpoint::Error;
        let no_model = || Error::NotAModel { path: "a".into(), found: "a text".into() };
        assert!(UsageError::is(&pellucid::Error::Open(no_model()).into()), "behind the library's error");
        assert!(UsageError::is(&anyhow::Error::from(no_model()).context("more")));
        assert!(UsageError::is(&Error::BadMagic { path: "a.gguf".into(), found: b"notg".to_vec() }.into()));
        let missing = |name: &str| Error::MissingFile { path: name.into(), needed_by: "a reason".into() };
        assert!(UsageError::is(&missing("folder/config.json").into()));
        assert!(!UsageError::is(&missing("folder/model.safetensors").into()));
        let found = 9;
        assert!(!UsageError::is(&Error::UnsupportedVersion { path: "a.gguf".into(), found }.into()));
    }

    #[test]
    fn libraries_do_not_speak() {
        let text = "error: invalid value 'x' for '--context <TOKENS>': invalid digit found in string\n";
        assert!(reworded(text).ends_with("'--context <TOKENS>': expected a whole number that is not negative\n"));
        let text = "error: invalid value '0' for '--threads <N>': 0 is not in 1..=1024\n\nFor more\n";
        assert_eq!(reworded(text), "error: invalid value '0' for '--threads <N>': expected 1 to 1024\n\nFor more\n");
        assert_eq!(with_range("a: 0 is not in 1.."), "a: expected 1 or more");
        assert_eq!(without_os_codes("x: No such file (os error 2)"), "x: No such file");
        assert_eq!(without_os_codes("a (os error 2), b (os error 13)!"), "a, b!");
    }
}
