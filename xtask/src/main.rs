//! Repository tasks that are no part of the product: `cargo xtask TASK`.
//!
//! `kernels` compiles the CUDA kernels; `tidy` checks the rules of `docs/style.md` that a machine can check; `dist`
//! makes packages of the program; `page` builds the web page.
#![forbid(unsafe_code)]

mod cargo_metadata;
mod dist;
mod kernels;
mod page;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "usage: xtask kernels [--nvcc PATH] [--only ARCHITECTURE] [--check]
       xtask tidy [--all]
       xtask dist [--program FILE] [--only KIND,...] [--out FOLDER] [--release-url URL]
       xtask page [--check]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.split_first() {
        Some((task, rest)) if task == "kernels" => kernels::compile_kernels(rest),
        Some((task, rest)) if task == "tidy" => tidy::run(rest),
        Some((task, rest)) if task == "dist" => dist::run(rest),
        Some((task, rest)) if task == "page" => page::run(rest),
        _ => Err(anyhow::anyhow!("{USAGE}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
