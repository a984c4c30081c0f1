//! `pellucid devices`: the devices of this machine, and why some cannot be used.

use std::io::Write;

use anyhow::Result;
use pellucid_cpu::Isa;
use serde_json::json;

use crate::terminal::format::bytes_text;
use crate::terminal::output::Output;

/// Show the devices of this machine, and why some cannot be used
#[derive(Debug, clap::Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DevicesArgs, output: &mut Output) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let isas: Vec<&str> = Isa::ALL.iter().filter(|isa| isa.is_available()).map(|isa| isa.name()).collect();
    let gpus = pellucid_cuda::devices();
    if args.json {
        let devices = gpus.as_deref().unwrap_or_default().iter().map(|gpu| {
            json!({
                "name": gpu.name,
                "device": format!("cuda:{}", gpu.ordinal),
                "compute_capability": format!("{}.{}", gpu.capability.0, gpu.capability.1),
                "memory_bytes": gpu.total_bytes,
                "multiprocessors": gpu.num_multiprocessors,
                "unusable": gpu.unusable.as_ref().map(ToString::to_string),
            })
        });
        let no_cuda = gpus.as_ref().err().map(ToString::to_string);
        let cpu = json!({ "threads": threads, "instructions": isas });
        return Ok(output.write_json(&json!({ "cpu": cpu, "cuda": devices.collect::<Vec<_>>(), "no_cuda": no_cuda }))?);
    }
    writeln!(output, "cpu     {threads} threads; instructions: {}", isas.join(", "))?;
    match gpus {
        Err(why) => writeln!(output, "cuda    none: {why}")?,
        Ok(gpus) => {
            for gpu in gpus {
                let (major, minor) = gpu.capability;
                let memory = bytes_text(gpu.total_bytes);
                let driver = gpu.driver_text();
                writeln!(
                    output,
                    "cuda:{}  {}; {memory}; compute {major}.{minor}; {} multiprocessors; driver for CUDA {driver}",
                    gpu.ordinal, gpu.name, gpu.num_multiprocessors
                )?;
                if let Some(why) = gpu.unusable {
                    writeln!(output, "        cannot be used: {why}")?;
                }
            }
        }
    }
    Ok(())
}
