//! The program `pellucid`: parses the command line, runs one command, reports errors and sets the exit status.
//!
//! A library, because Cargo compiles a library while the crates that it uses are still being optimized, and a program
//! only after that: a clean build ends ten seconds earlier.
#![forbid(unsafe_code)]

mod atomic_file;
mod commands;
mod flags;
mod guard_service;
mod http_error;
mod hub;
mod server_client;
mod terminal;

use anyhow::Result;
use flags::command_line::{Cli, Command};
use flags::ranks;
use flags::usage_error::{USAGE_STATUS, UsageError, without_os_codes};
use std::io::Write;
use std::panic;
use std::process::ExitCode;
use terminal::interrupt::{Interrupt, Interrupted, interrupted_status, wait_if_exiting};
use terminal::log;
use terminal::output::{Output, is_reader_gone};

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    panic::set_hook(Box::new(log::report_panic));
    pellucid_checkpoint::report_bus_errors();
    // The hook has printed the message of a panic; only the exit status is left to set.
    let result = panic::catch_unwind(run);
    wait_if_exiting();
    let status = result.map_or(ExitCode::FAILURE, status);
    log::finish();
    status
}

/// Reports an error and returns the exit status.
fn status(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) if ranks::is_end(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => ExitCode::from(interrupted_status()),
        Err(error) => {
            log::error(&without_os_codes(&format!("{error:#}")));
            if UsageError::is(&error) { ExitCode::from(USAGE_STATUS) } else { ExitCode::FAILURE }
        }
    }
}

fn run() -> Result<()> {
    let cli = Cli::read()?;
    let interrupt = Interrupt::install();
    let hub = cli.hub(interrupt.clone())?;
    if let Some(ranks) = cli.ranks()
        && ranks.follows()?
    {
        // It ends with rank 0, which gets the same signals.
        interrupt.on_signal(|| ());
    }
    let mut output = Output::new();
    match &cli.command {
        Command::Run(args) => commands::run::run(args, &hub, &interrupt, cli.wants_color(), &mut output),
        Command::Serve(args) => commands::serve::run(args, (&cli.notes, &cli.span_variables()?), &hub, &interrupt),
        Command::Ps(args) => commands::server_models::ps(args, &cli.server_variables()?, &mut output),
        Command::Stop(args) => commands::server_models::stop(args, &cli.server_variables()?, &mut output),
        Command::Open(_) => unreachable!("the command line turns it into `serve`"),
        Command::Explain(args) => {
            commands::explain::run(args, &hub, &interrupt, cli.wants_color(), cli.columns(), &mut output)
        }
        Command::Models(args) => commands::models::run(args, &hub, &mut output),
        Command::Pull(args) => commands::pull::run(args, &hub, &mut output),
        Command::List(args) => commands::list::run(args, &hub, &mut output),
        Command::Rm(args) => commands::rm::run(args, &hub, &mut output),
        Command::Inspect(args) => commands::inspect::run(args, &hub, &mut output),
        Command::Tokenize(args) => commands::tokenize::run(args, &hub, &mut output),
        Command::Embed(args) => commands::embed::run(args, &hub, &mut output),
        Command::Devices(args) => commands::devices::run(args, &mut output),
        Command::Selftest(args) => commands::selftest::run(args, &mut output),
        Command::Perplexity(args) => commands::perplexity::run(args, &hub, &mut output),
        Command::Bench(args) => commands::bench::run(args, &hub, &interrupt, &mut output),
        Command::Prove(args) => commands::prove::run(args, &hub, &cli.server_variables()?, &mut output),
        Command::Quantize(args) => commands::quantize::run(args, &hub, &interrupt, &mut output),
        Command::Completions(args) => commands::completions::completions(args, &mut output),
        Command::Man(args) => commands::completions::man(args, &mut output),
    }?;
    Ok(output.flush()?)
}
