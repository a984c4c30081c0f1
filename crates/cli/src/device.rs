//! Which device computes: what `--device` means, and the one place of the program that picks one.

use std::io::Write;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use pellucid_cpu::{CpuBackend, CpuOptions, Isa};
use pellucid_cuda::{CudaBackend, CudaOptions, Unusable};
use pellucid_tensor::Backend;

/// What can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first usable GPU, else the CPU.
    Auto,
    Cpu,
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').unwrap_or((text, "0")) {
            ("auto", _) if text == "auto" => Ok(DeviceChoice::Auto),
            ("cpu", _) if text == "cpu" => Ok(DeviceChoice::Cpu),
            ("cuda", number) => match number.parse() {
                Ok(number) => Ok(DeviceChoice::Cuda(number)),
                Err(_) => Err(format!("\"{number}\" is not the number of a GPU")),
            },
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

/// How the CPU is to compute, when it does.
pub(crate) struct CpuChoice {
    pub(crate) num_threads: Option<usize>,
    pub(crate) isa: Option<Isa>,
}

/// How a GPU is to compute, when one does.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CudaChoice {
    /// `--fast`
    pub(crate) fast: bool,
    /// `--nvrtc`
    pub(crate) compile_kernels: bool,
}

fn open_cuda(ordinal: usize, choice: CudaChoice) -> Result<CudaBackend, Unusable> {
    let CudaChoice { fast, compile_kernels } = choice;
    let backend = CudaBackend::open(CudaOptions { ordinal, fast, compile_kernels })?;
    if fast && !backend.has_fast_products() {
        let _ = writeln!(std::io::stderr(), "--fast: cuBLASLt was not found; the usual kernels compute");
    }
    Ok(backend)
}

/// The first GPU that can be used; those before it are named.
fn open_first_cuda(choice: CudaChoice) -> Result<CudaBackend, Unusable> {
    let mut passed_over = Vec::new();
    for device in pellucid_cuda::devices()? {
        match open_cuda(device.ordinal, choice) {
            Ok(backend) => {
                for why in passed_over {
                    let _ = writeln!(std::io::stderr(), "{why}; computing on {}", backend.description());
                }
                return Ok(backend);
            }
            Err(why) => passed_over.push(why),
        }
    }
    Err(passed_over.into_iter().next().unwrap_or(Unusable::NoDevice))
}

/// The device that was asked for; `None` is the same as auto, except that a machine without an NVIDIA driver is not worth a word then.
pub(crate) fn open(choice: Option<DeviceChoice>, cpu: CpuChoice, cuda: CudaChoice) -> Result<Arc<dyn Backend>> {
    let open_cpu = |cpu| match cuda {
        CudaChoice { fast: false, compile_kernels: false } => open_cpu(cpu),
        CudaChoice { fast: true, .. } => bail!("--fast: a CPU has no faster way than the usual one; it is for GPUs"),
        CudaChoice { compile_kernels: true, .. } => bail!("--nvrtc: a CPU needs no kernels compiled; it is for GPUs"),
    };
    match choice {
        Some(DeviceChoice::Cpu) => open_cpu(cpu),
        Some(DeviceChoice::Cuda(number)) => {
            Ok(Arc::new(open_cuda(number, cuda).map_err(|why| anyhow!("--device cuda: {why}"))?))
        }
        Some(DeviceChoice::Auto) | None => match open_first_cuda(cuda) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(why) => {
                let backend = open_cpu(cpu)?;
                if choice.is_some() || !matches!(why, Unusable::NoDriver) {
                    let _ = writeln!(std::io::stderr(), "{why}; computing on {}", backend.description());
                }
                Ok(backend)
            }
        },
    }
}

fn open_cpu(choice: CpuChoice) -> Result<Arc<dyn Backend>> {
    let defaults = CpuOptions::default();
    let options = CpuOptions {
        num_threads: choice.num_threads.unwrap_or(defaults.num_threads),
        isa: choice.isa.unwrap_or(defaults.isa),
    };
    match CpuBackend::new(options) {
        Ok(backend) => Ok(Arc::new(backend)),
        Err(pellucid_cpu::Unusable::Isa(isa)) => {
            let available: Vec<&str> = Isa::ALL.iter().filter(|isa| isa.is_available()).map(|isa| isa.name()).collect();
            bail!("--cpu-isa {isa}: this machine does not have it; it has {}", available.join(", "))
        }
        Err(why) => bail!("--threads: {why}; give fewer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        for wrong in ["", "gpu", "cpu:1", "auto:0", "cuda:", "cuda:-1", "cuda:x"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }
}
