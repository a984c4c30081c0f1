//! Starts the program `pellucid`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    pellucid_cli::main()
}
