//! The commands and global flags of the program, and the only module that reads the environment.
//!
//! `main` parses a [`Cli`] and gets the [`Hub`] that it describes.

use crate::commands::{
    bench::BenchArgs, completions::CompletionsArgs, completions::ManArgs, devices::DevicesArgs, embed::EmbedArgs,
    explain::ExplainArgs, inspect::InspectArgs, list::ListArgs, models::ModelsArgs, open::OpenArgs,
    perplexity::PerplexityArgs, prove::ProveArgs, pull::PullArgs, quantize::QuantizeArgs, rm::RmArgs, run::RunArgs,
    selftest::SelftestArgs, serve::ServeArgs, serve::SpanVariables, server_models::PsArgs, server_models::StopArgs,
    tokenize::TokenizeArgs,
};
use crate::flags::ranks::RankArgs;
use crate::flags::setting_layers::{self, Setting};
use crate::flags::usage_error::{self, OrUsage, bail_usage};
use crate::hub::{Hub, Python, Remote, Token};
use crate::server_client::ServerVariables;
use crate::terminal::interrupt::Interrupt;
use anyhow::{Result, anyhow};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
const DEFAULT_STALL_S: u64 = 30;

/// An LLM inference engine that you can see through.
///
/// MODEL is a name (`pellucid models` shows them), the path of a GGUF file or of
/// a Hugging Face folder, or a model of the hub: OWNER/REPO, OWNER/REPO:Q4_K_M
/// or the address of its page; what is not there is downloaded. An existing path
/// goes before a name. Results go to standard output, everything else to
/// standard error. Exit status: 0 success, 1 failure, 2 wrong usage (a flag, a
/// value, a name or path that does not exist), 130 after Ctrl-C, 143 after
/// SIGTERM.
#[derive(Debug, Parser)]
#[command(name = "pellucid", version, verbatim_doc_comment, max_term_width = 80)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    store: StoreArgs,
    /// Notes about the environment, for the log of `serve`.
    #[arg(skip)]
    pub(crate) notes: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Serve(Box<ServeArgs>),
    Ps(PsArgs),
    Stop(StopArgs),
    Open(OpenArgs),
    Explain(ExplainArgs),
    Models(ModelsArgs),
    Pull(PullArgs),
    List(ListArgs),
    Rm(RmArgs),
    Inspect(InspectArgs),
    Tokenize(TokenizeArgs),
    Embed(EmbedArgs),
    Perplexity(PerplexityArgs),
    Devices(DevicesArgs),
    Selftest(SelftestArgs),
    Bench(BenchArgs),
    Prove(ProveArgs),
    Quantize(QuantizeArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    Man(ManArgs),
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Model store")]
struct StoreArgs {
    /// Folder of the model store
    /// [default: PELLUCID_HOME or the cache folder]
    #[arg(long, global = true, verbatim_doc_comment, value_name = "DIR")]
    models_dir: Option<PathBuf>,

    /// Hub to pull models from
    /// [default: HF_ENDPOINT or huggingface.co]
    #[arg(long, global = true, verbatim_doc_comment, value_name = "URL")]
    endpoint: Option<String>,

    /// Seconds without data before a download is retried
    #[arg(
        long,
        global = true,
        value_name = "SECONDS",
        default_value_t = DEFAULT_STALL_S,
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    stall_timeout: u64,
}

impl Cli {
    /// Parses the command line; for `serve` also the environment and the config file, which have lower precedence.
    pub(crate) fn read() -> Result<Cli> {
        let cli = Cli::parse_layers(std::env::args_os().collect())?;
        match &cli.command {
            Command::Run(args) => match args.page_arguments()? {
                Some(arguments) => Ok(Cli { store: cli.store, ..Cli::parse_layers(arguments)? }),
                None => Ok(cli),
            },
            Command::Open(args) => Ok(Cli { store: cli.store, ..Cli::parse_layers(args.serve_arguments())? }),
            _ => Ok(cli),
        }
    }

    /// Returns the program's parser. A negative number after a flag is its value, so that the error is about the value.
    fn program() -> clap::Command {
        Cli::command().mut_subcommands(|command| {
            command.mut_args(|argument| {
                let is_flag = argument.get_long().is_some() && argument.get_action().takes_values();
                if is_flag { argument.allow_negative_numbers(true) } else { argument }
            })
        })
    }

    /// Parses a command line, and for `serve` the layers below it.
    fn parse_layers(arguments: Vec<OsString>) -> Result<Cli> {
        let mut notes = Vec::new();
        let mut matches =
            Cli::program().try_get_matches_from(&arguments).unwrap_or_else(|error| usage_error::exit_with(&error));
        if let Some(("run", given)) = matches.subcommand()
            && given.get_flag("page")
        {
            refuse_beside_page(given)?;
        }
        if let Some(("serve", given)) = matches.subcommand() {
            let mut command = Cli::command();
            // Adds the global flags to each command.
            command.build();
            let serve = command.find_subcommand("serve").expect("it was just found");
            let settings = setting_layers::lower_layers(serve, given, |name| std::env::var_os(name)).or_usage()?;
            notes = setting_layers::unknown_variables(serve, std::env::vars_os().map(|(name, _)| name));
            let parse = |settings: &[Setting]| {
                let flags = settings.iter().map(|setting| setting.flag.clone());
                Cli::program().try_get_matches_from(arguments.iter().cloned().chain(flags))
            };
            matches = parse(&settings).unwrap_or_else(|error| {
                // The user did not type these flags, so the error names the variable or file of the wrong one.
                let culprit = settings.iter().find(|setting| parse(std::slice::from_ref(setting)).is_err());
                match culprit {
                    Some(setting) => setting.exit_with(&error),
                    None => usage_error::exit_with(&error),
                }
            });
        }
        let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| usage_error::exit_with(&error));
        Ok(Cli { notes, ..cli })
    }

    /// Returns the ranks of a command that may have several.
    pub(crate) fn ranks(&self) -> Option<&RankArgs> {
        match &self.command {
            Command::Run(args) => Some(&args.compute.ranks),
            Command::Serve(args) => Some(&args.compute.ranks),
            Command::Bench(args) => Some(&args.compute.ranks),
            Command::Prove(args) => Some(&args.compute.ranks),
            _ => None,
        }
    }

    /// Whether the environment allows colour: NO_COLOR is not set (no-color.org), and the terminal is not dumb.
    pub(crate) fn wants_color(&self) -> bool {
        path("NO_COLOR").is_none() && path("TERM").is_none_or(|terminal| terminal.as_os_str() != "dumb")
    }

    /// Columns that the environment gives in COLUMNS; `None` if it does not, or not a number.
    pub(crate) fn columns(&self) -> Option<usize> {
        std::env::var("COLUMNS").ok()?.trim().parse().ok().filter(|&columns| columns > 0)
    }

    /// Returns address and key of a running server, as the environment gives them.
    pub(crate) fn server_variables(&self) -> Result<ServerVariables> {
        Ok(ServerVariables { url: variable("PELLUCID_URL")?, api_key: variable("PELLUCID_API_KEY")? })
    }

    /// Returns the settings of OpenTelemetry that the environment gives. A variable for traces comes before the one for
    /// all signals.
    pub(crate) fn span_variables(&self) -> Result<SpanVariables> {
        let for_traces = |name: &str| match variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))? {
            Some(value) => Ok(Some(value)),
            None => variable(&format!("OTEL_EXPORTER_OTLP_{name}")),
        };
        Ok(SpanVariables {
            endpoint: variable("OTEL_EXPORTER_OTLP_ENDPOINT")?,
            traces_endpoint: variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")?,
            protocol: for_traces("PROTOCOL")?,
            headers: for_traces("HEADERS")?,
            service: variable("OTEL_SERVICE_NAME")?,
            disabled: variable("OTEL_SDK_DISABLED")?,
        })
    }

    /// Returns the store and hub that the flags and the environment describe.
    pub(crate) fn hub(&self, interrupt: Interrupt) -> Result<Hub> {
        let root = match &self.store.models_dir {
            Some(folder) => folder.clone(),
            None => store_folder()?,
        };
        let remote = Remote {
            endpoint: match &self.store.endpoint {
                Some(endpoint) => endpoint.clone(),
                None => variable("HF_ENDPOINT")?.unwrap_or(DEFAULT_ENDPOINT.into()),
            },
            // A token copied from a page often ends with a line end, which a header must not contain.
            token: variable("HF_TOKEN")?.map(|token| Token::new(token.trim().to_owned())),
            stall: Duration::from_secs(self.store.stall_timeout),
            python: Python {
                program: "python3".into(),
                variables: std::env::vars_os().map(|(name, _)| name).collect(),
            },
        };
        Ok(Hub::new(root, remote, interrupt))
    }
}

/// Returns the default folder of the model store on this operating system.
fn store_folder() -> Result<PathBuf> {
    if let Some(home) = path("PELLUCID_HOME") {
        return Ok(home);
    }
    // The XDG specification says that a relative path must be ignored.
    let cache = path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = cache.or_else(|| match std::env::consts::OS {
        "windows" => path("LOCALAPPDATA"),
        "macos" => path("HOME").map(|home| home.join("Library/Caches")),
        _ => path("HOME").map(|home| home.join(".cache")),
    });
    let cache = cache.ok_or_else(|| {
        anyhow!("there is no default folder for models because HOME is not set; set --models-dir or PELLUCID_HOME")
    })?;
    Ok(cache.join("pellucid"))
}

/// Returns an environment variable if it is set and not empty; an error if it is not UTF-8.
fn variable(name: &str) -> Result<Option<String>> {
    let value = std::env::var_os(name).map(|value| setting_layers::text(name, value)).transpose()?;
    Ok(value.filter(|value| !value.trim().is_empty()))
}

/// Returns an environment variable as a path if it is set and not empty.
fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.to_string_lossy().trim().is_empty()).map(PathBuf::from)
}

/// Refuses flags that the page would not apply.
fn refuse_beside_page(given: &clap::ArgMatches) -> Result<()> {
    let command = Cli::command();
    let run = command.find_subcommand("run").expect("it was just found");
    let is_given = |id: &str| given.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
    let others = run.get_arguments().filter(|argument| {
        let id = argument.get_id().as_str();
        !["page", "model", "first", "words"].contains(&id) && is_given(id)
    });
    match others.filter_map(clap::Arg::get_long).next() {
        Some(flag) => {
            bail_usage!("--page cannot be combined with --{flag}: the page and `serve` have settings of their own")
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_help_text() {
        for command in Cli::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {} has no help", command.get_name(), argument.get_id());
            }
        }
    }
}
