//! Load tests of a built server. `tests/README.md` describes the commands and their arguments.
//!
//! The program talks to the server over HTTP and watches its process through `/proc`. It prints measurements, and ends
//! with an error if a condition fails that must hold on every machine.

mod client;
mod idle;
mod mixed;
mod overload;
mod requests;
mod server;
mod soak;
mod speed;
mod tenants;

use std::path::PathBuf;
use std::process::ExitCode;

use server::Server;

const USAGE: &str = "usage: load mixed|overload|soak|speed|idle|tenants --pellucid PROGRAM [--model MODEL] \
                     [--requests N] \
                     [--clients N] [--seconds N] [--connections N] [--rounds N] [--input TOKENS] [--output TOKENS] \
                     [--strict]";

/// The command line; each command reads its part.
#[derive(Debug)]
struct Arguments {
    command: String,
    pellucid: PathBuf,
    /// The model to serve; the tiny model if `None`.
    model: Option<String>,
    requests: usize,
    clients: usize,
    seconds: u64,
    connections: usize,
    rounds: usize,
    input: usize,
    output: usize,
    /// Whether conditions that depend on an idle machine must hold too.
    is_strict: bool,
}

impl Arguments {
    fn read() -> Option<Arguments> {
        let mut words = std::env::args().skip(1);
        let mut arguments = Arguments {
            command: words.next()?,
            pellucid: PathBuf::new(),
            model: None,
            requests: 20_000,
            clients: 32,
            seconds: 10,
            connections: 10_000,
            rounds: 3,
            input: 128,
            output: 64,
            is_strict: false,
        };
        while let Some(flag) = words.next() {
            let mut number = || words.next()?.parse().ok();
            match flag.as_str() {
                "--strict" => arguments.is_strict = true,
                "--requests" => arguments.requests = number()?,
                "--clients" => arguments.clients = number()?,
                "--seconds" => arguments.seconds = number()? as u64,
                "--connections" => arguments.connections = number()?,
                "--rounds" => arguments.rounds = number()?,
                "--input" => arguments.input = number()?,
                "--output" => arguments.output = number()?,
                "--pellucid" => arguments.pellucid = words.next()?.into(),
                "--model" => arguments.model = Some(words.next()?),
                _ => return None,
            }
        }
        Some(arguments)
    }
}

fn main() -> ExitCode {
    let Some(arguments) = Arguments::read() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let outcome = match arguments.command.as_str() {
        "mixed" => mixed::run(&arguments),
        "overload" => overload::run(&arguments),
        "soak" => soak::run(&arguments),
        "speed" => speed::run(&arguments),
        "idle" => idle::run(&arguments),
        "tenants" => tenants::run(&arguments),
        _ => Err(USAGE.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
