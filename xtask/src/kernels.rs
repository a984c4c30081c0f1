//! `xtask kernels`: compiles the CUDA kernels into `crates/cuda/artifacts` and reports registers and spills.
//!
//! `--check` compiles and reports but writes nothing. `--only 90a` compiles for one architecture, for a quick trial on
//! one GPU; a test fails while the artifacts lack an architecture. nvcc 13.0 is required, for example from the PyPI
//! packages nvidia-cuda-nvcc, -nvvm, -crt, -runtime and -cccl, unzipped into one folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use pellucid_cuda::kernels::{self, ARCHITECTURES, KernelFile};

/// Compiles every kernel file; `arguments` are those after the word `kernels`.
pub(crate) fn compile_kernels(arguments: &[String]) -> Result<()> {
    let mut nvcc = PathBuf::from("nvcc");
    let mut check = false;
    let mut architectures = ARCHITECTURES.to_vec();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--nvcc" => nvcc = rest.next().context("--nvcc needs a path")?.into(),
            "--only" => {
                let only = rest.next().context("--only needs an architecture")?;
                architectures.retain(|name| name == only);
                if architectures.is_empty() {
                    bail!("--only {only}: expected one of {}", ARCHITECTURES.join(", "));
                }
            }
            "--check" => check = true,
            other => bail!("unknown argument {other}"),
        }
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/cuda/artifacts");
    let work = tempfile::tempdir()?;
    let mut total = 0;
    for file in kernels::FILES {
        let binary = compile(&nvcc, file, &architectures, work.path())?;
        let bytes = std::fs::read(&binary)?;
        total += bytes.len();
        if !check {
            std::fs::write(folder.join(format!("{}.fatbin", file.name)), bytes)?;
        }
    }
    println!("{total} bytes for sm_{} and PTX", architectures.join(", sm_"));
    if !check {
        std::fs::write(folder.join("sources.mark"), kernels::source_mark(&architectures) + "\n")?;
    }
    Ok(())
}

/// Compiles one file for `architectures` and prints the registers and spills of its kernels.
fn compile(nvcc: &Path, file: &KernelFile, architectures: &[&str], work: &Path) -> Result<PathBuf> {
    let source = work.join(format!("{}.cu", file.name));
    let binary = work.join(format!("{}.fatbin", file.name));
    std::fs::write(&source, kernels::full_source(file))?;
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-fatbin", "-Xfatbin=-compress-all", "-Xptxas=-v", "--threads=2"]);
    // The shared sources are put before every file, and each file uses only some of their functions.
    command.arg("-diag-suppress=177");
    for architecture in architectures {
        command.arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    command.arg(format!("-gencode=arch=compute_{0},code=compute_{0}", ARCHITECTURES[0]));
    let output = command.arg("-o").arg(&binary).arg(&source).output();
    let output = output.with_context(|| format!("{} could not be run", nvcc.display()))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{}.cu:\n{report}{}", file.name, String::from_utf8_lossy(&output.stdout));
    }
    report_resources(file.name, &report);
    if let Some(missing) = file.kernels.iter().find(|name| !report.contains(&format!("entry function '{name}'"))) {
        bail!("{}.cu has no kernel {missing}", file.name);
    }
    Ok(binary)
}

/// Prints one line for each kernel and architecture: its registers, and `SPILLS` if it spills.
fn report_resources(name: &str, report: &str) {
    let mut kernel = String::new();
    let mut spills = false;
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.replace("' for '", " ").trim_end_matches('\'').to_owned();
        } else if line.contains("spill stores") {
            spills = !line.contains(" 0 bytes spill stores");
        } else if let Some((_, rest)) = line.split_once("Used ") {
            let registers = rest.split_whitespace().next().unwrap_or("?");
            println!("{name:<10} {kernel:<40} {registers:>3} registers{}", if spills { "  SPILLS" } else { "" });
        } else if line.contains("warning") {
            println!("{line}");
        }
    }
}
