//! `pellucid selftest`: checks a device against formulas and goldens of the reference implementation, which the program
//! contains.

use std::io::Write;
use std::panic;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pellucid::{Device, DeviceOptions, Isa};
use pellucid_selftest::Report;
use pellucid_tensor::Backend;

use crate::flags::compute::open_device;
use crate::terminal::output::Output;

/// Check a device against formulas and the reference implementation
///
/// Checks every operation, and tiny models of every architecture; then that
/// replies do not depend on other requests, as `pellucid prove` does.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct SelftestArgs {
    /// Device to check: cpu, cuda or cuda:N
    /// [default: the GPU if there is one, else the CPU]
    #[arg(long, verbatim_doc_comment, value_name = "DEVICE")]
    device: Option<Device>,

    /// CPU instruction set: scalar, neon, avx2, avx512 or amx
    /// [default: the best that the machine has]
    #[arg(long, verbatim_doc_comment, value_name = "NAME")]
    cpu_isa: Option<Isa>,

    /// Check a GPU with --fast; equal bits are not required then
    #[arg(long)]
    fast: bool,

    /// Compile a GPU's kernels with NVRTC, as for a GPU without
    /// embedded machine code
    #[arg(long, verbatim_doc_comment)]
    nvrtc: bool,
}

pub(crate) fn run(args: &SelftestArgs, output: &mut Output) -> Result<()> {
    let SelftestArgs { device, cpu_isa: isa, fast, nvrtc: compile_kernels } = *args;
    let backend = open_device(DeviceOptions { device, threads: None, isa, fast, compile_kernels })?;
    writeln!(output, "{}", backend.description())?;
    output.flush()?;
    let folder = tempfile::tempdir().context("could not create a temporary folder for the models")?;
    // A check that fails panics; its message is in the table, so the hook prints nothing.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let mut written = Ok(());
    let reports = pellucid_selftest::run(&backend, folder.path(), !args.fast, &mut |report| {
        if written.is_ok() {
            written = line(output, report);
        }
    });
    panic::set_hook(hook);
    written?;
    let mut failed = reports.iter().filter(|report| report.failure.is_some()).count();
    let mut num_checks = reports.len();
    if !args.fast {
        let report = prove(&backend, folder.path(), isa);
        failed += usize::from(report.failure.is_some());
        num_checks += 1;
        line(output, &report)?;
    }
    if failed > 0 {
        output.flush()?;
        bail!("{failed} of {num_checks} checks failed on {}", backend.description());
    }
    writeln!(output, "all {num_checks} checks passed")?;
    Ok(())
}

/// Compares replies in batches with those of requests alone, as `pellucid prove` does with the user's model.
fn prove(backend: &Arc<dyn Backend>, folder: &Path, isa: Option<Isa>) -> Report {
    let begun = Instant::now();
    let cpu = DeviceOptions { device: Some(Device::Cpu), threads: Some(1), isa, ..DeviceOptions::default() };
    let failure = crate::commands::prove::quick(backend, folder, || open_device(cpu)).err();
    Report {
        name: "prove: replies do not depend on other requests".into(),
        took: begun.elapsed(),
        failure: failure.map(|error| format!("{error:#}")),
    }
}

fn line(output: &mut Output, report: &Report) -> Result<()> {
    let took_ms = report.took.as_secs_f64() * 1000.0;
    match &report.failure {
        None => writeln!(output, "ok      {:<46} {took_ms:>8.1} ms", report.name)?,
        Some(why) => writeln!(output, "FAILED  {:<46} {took_ms:>8.1} ms\n        {why}", report.name)?,
    }
    Ok(output.flush()?)
}
