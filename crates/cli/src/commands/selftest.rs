//! `pellucid selftest`: checks a device against formulas and goldens of the reference implementation, which the program
//! contains.

use std::io::Write;
use std::panic;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pellucid::{Device, DeviceOptions, Isa};
use pellucid_selftest::{Report, Verdict};
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
    let mut reports = pellucid_selftest::run(&backend, folder.path(), !args.fast, &mut |report| {
        if written.is_ok() {
            written = line(output, report);
        }
    });
    panic::set_hook(hook);
    written?;
    if !args.fast {
        let report = prove(&backend, folder.path(), isa);
        line(output, &report)?;
        reports.push(report);
    }
    let count = |is_one: fn(&Verdict) -> bool| reports.iter().filter(|report| is_one(&report.verdict)).count();
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_)));
    let refused = count(|verdict| matches!(verdict, Verdict::Refused(_)));
    let num_checks = reports.len() - refused;
    if failed > 0 {
        output.flush()?;
        bail!("{failed} of {num_checks} checks failed on {}", backend.description());
    }
    write!(output, "all {num_checks} checks passed")?;
    match refused {
        0 => writeln!(output)?,
        1 => writeln!(output, "; one model needs what this device does not have")?,
        _ => writeln!(output, "; {refused} models need what this device does not have")?,
    }
    Ok(())
}

/// Compares replies in batches with those of requests alone, as `pellucid prove` does with the user's model.
fn prove(backend: &Arc<dyn Backend>, folder: &Path, isa: Option<Isa>) -> Report {
    let begun = Instant::now();
    let cpu = DeviceOptions { device: Some(Device::Cpu), threads: Some(1), isa, ..DeviceOptions::default() };
    let verdict = match crate::commands::prove::quick(backend, folder, || open_device(cpu)) {
        Ok(_) => Verdict::Passed,
        Err(error) => Verdict::Failed(format!("{error:#}")),
    };
    Report { name: "prove: replies do not depend on other requests".into(), took: begun.elapsed(), verdict }
}

fn line(output: &mut Output, report: &Report) -> Result<()> {
    let took_ms = report.took.as_secs_f64() * 1000.0;
    match &report.verdict {
        Verdict::Passed => writeln!(output, "ok      {:<46} {took_ms:>8.1} ms", report.name)?,
        Verdict::Refused(why) => writeln!(output, "refused {}\n        {why}", report.name)?,
        Verdict::Failed(why) => writeln!(output, "FAILED  {:<46} {took_ms:>8.1} ms\n        {why}", report.name)?,
    }
    Ok(output.flush()?)
}
