//! The device that computes. This is the only module of the project that chooses one.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;

use pellucid_cpu::{CpuBackend, CpuOptions, Isa};
use pellucid_cuda::{CudaBackend, CudaOptions};
use pellucid_tensor::Backend;

/// A device to compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// The first usable GPU, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    /// Reads `auto`, `cpu`, `cuda` or `cuda:N`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').unwrap_or((text, "0")) {
            ("auto", _) if text == "auto" => Ok(Device::Auto),
            ("cpu", _) if text == "cpu" => Ok(Device::Cpu),
            ("cuda", number) => match number.parse() {
                Ok(number) => Ok(Device::Cuda(number)),
                Err(_) => Err(format!("expected the number of a GPU after \"cuda:\", found {number:?}")),
            },
            _ => Err(format!("expected auto, cpu, cuda or cuda:N, found {text:?}")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Auto => f.write_str("auto"),
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// A device and how it computes.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    /// `None` is [`Device::Auto`], except that a machine without an NVIDIA driver gives no note.
    pub device: Option<Device>,
    /// Threads of the CPU. `None` is one for each core.
    pub threads: Option<usize>,
    /// Instruction set of the CPU. `None` is the best that the machine has.
    pub isa: Option<Isa>,
    /// Lets cuBLASLt multiply BF16 and F16 matrices on a GPU: faster with many rows, but the bits of a reply may then
    /// depend on the rest of the batch.
    pub fast: bool,
    /// Compiles the GPU's kernels with NVRTC instead of loading the embedded machine code.
    pub compile_kernels: bool,
}

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// `fast` was set, and the CPU computes.
    #[error("only GPUs have the kernels of `fast`, but the CPU was selected")]
    FastOnCpu,
    /// `compile_kernels` was set, and the CPU computes.
    #[error("only the kernels of GPUs can be compiled with NVRTC, but the CPU was selected")]
    CompileOnCpu,
    /// The machine lacks the instruction set.
    #[error("this machine does not support {isa}; it supports {}", available.join(", "))]
    Isa {
        /// The instruction set that was requested.
        isa: Isa,
        /// Names of those that the machine supports.
        available: Vec<&'static str>,
    },
    /// The layers cannot be shared out among devices in this way.
    #[error("{reason}")]
    Split {
        /// The reason.
        reason: String,
    },
    /// The devices have too little free memory for the model together.
    #[error(
        "the model does not fit: {device} would have {num_layers} layers, which take {:.1} GB with keys and values of \
         one context, but can have {:.1} GB; use a smaller context, a smaller type of keys and values, or a smaller \
         model",
        *needed as f64 / 1e9, *budget as f64 / 1e9
    )]
    TooSmall {
        /// The device in words.
        device: String,
        /// Bytes of the parts that are left for it.
        needed: u64,
        /// Bytes that it can have.
        budget: u64,
        /// Number of its layers.
        num_layers: usize,
    },
    /// The operating system refuses to start the threads.
    #[error("the CPU's threads cannot be started; use fewer")]
    Threads(#[source] pellucid_cpu::Unusable),
    /// The GPU cannot be used.
    #[error("cuda:{ordinal} cannot be used")]
    Cuda {
        /// Number of the GPU.
        ordinal: usize,
        /// The reason.
        source: pellucid_cuda::Unusable,
    },
}

impl DeviceOptions {
    /// Opens the device. `note` receives sentences that a user may want to read: GPUs that were skipped, and why.
    pub fn open(&self, note: &mut dyn FnMut(String)) -> Result<Arc<dyn Backend>, DeviceError> {
        match self.device {
            Some(Device::Cpu) => self.open_cpu(),
            Some(Device::Cuda(ordinal)) => {
                let backend = self.open_cuda(ordinal, note);
                Ok(Arc::new(backend.map_err(|source| DeviceError::Cuda { ordinal, source })?))
            }
            Some(Device::Auto) | None => match self.open_first_cuda(note) {
                Ok(backend) => Ok(Arc::new(backend)),
                Err(reason) => {
                    let backend = self.open_cpu()?;
                    if self.device.is_some() || !matches!(reason, pellucid_cuda::Unusable::NoDriver) {
                        note(format!("{reason}; computing on {}", backend.description()));
                    }
                    Ok(backend)
                }
            },
        }
    }

    /// Opens the first usable GPU and notes the unusable ones before it.
    fn open_first_cuda(&self, note: &mut dyn FnMut(String)) -> Result<CudaBackend, pellucid_cuda::Unusable> {
        let mut skipped = Vec::new();
        for device in pellucid_cuda::devices()? {
            match self.open_cuda(device.ordinal, note) {
                Ok(backend) => {
                    for reason in skipped {
                        note(format!("{reason}; computing on {}", backend.description()));
                    }
                    return Ok(backend);
                }
                Err(reason) => skipped.push(reason),
            }
        }
        Err(skipped.into_iter().next().unwrap_or(pellucid_cuda::Unusable::NoDevice))
    }

    fn open_cuda(&self, ordinal: usize, note: &mut dyn FnMut(String)) -> Result<CudaBackend, pellucid_cuda::Unusable> {
        let DeviceOptions { fast, compile_kernels, .. } = *self;
        let backend = CudaBackend::open(CudaOptions { ordinal, fast, compile_kernels })?;
        if fast && !backend.has_fast_products() {
            note("cuBLASLt was not found; the usual kernels compute".into());
        }
        Ok(backend)
    }

    /// Returns the options for one of `num_ranks` groups of threads that share the CPU's threads. At least one is each
    /// group's.
    pub fn shared_by(&self, num_ranks: NonZeroUsize) -> DeviceOptions {
        let threads = self.threads.unwrap_or(CpuOptions::default().num_threads);
        DeviceOptions { threads: Some((threads / num_ranks).max(1)), ..*self }
    }

    fn open_cpu(&self) -> Result<Arc<dyn Backend>, DeviceError> {
        if self.fast {
            return Err(DeviceError::FastOnCpu);
        }
        if self.compile_kernels {
            return Err(DeviceError::CompileOnCpu);
        }
        let defaults = CpuOptions::default();
        let options = CpuOptions {
            num_threads: self.threads.unwrap_or(defaults.num_threads),
            isa: self.isa.unwrap_or(defaults.isa),
        };
        match CpuBackend::new(options) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(pellucid_cpu::Unusable::Isa(isa)) => {
                let available = Isa::ALL.iter().filter(|isa| isa.is_available()).map(|isa| isa.name()).collect();
                Err(DeviceError::Isa { isa, available })
            }
            Err(reason) => Err(DeviceError::Threads(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_device_names() {
        assert_eq!("auto".parse(), Ok(Device::Auto));
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
        for wrong in ["", "gpu", "cpu:1", "auto:0", "cuda:", "cuda:-1", "cuda:x"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_for_gpus_are_rejected_on_a_cpu() {
        let open = |options: DeviceOptions| options.open(&mut |_| ()).map(drop);
        let cpu = DeviceOptions { device: Some(Device::Cpu), ..DeviceOptions::default() };
        assert!(matches!(open(DeviceOptions { fast: true, ..cpu }), Err(DeviceError::FastOnCpu)));
        assert!(matches!(open(DeviceOptions { compile_kernels: true, ..cpu }), Err(DeviceError::CompileOnCpu)));
    }

    #[test]
    fn a_missing_instruction_set_is_an_error_that_lists_the_others() {
        let Some(isa) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) else { return };
        let options = DeviceOptions { device: Some(Device::Cpu), isa: Some(isa), ..DeviceOptions::default() };
        let error = options.open(&mut |_| ()).map(drop).expect_err("the instruction set is missing");
        assert!(error.to_string().contains("it supports scalar"), "{error}");
    }

    #[test]
    fn a_missing_gpu_is_an_error_with_its_number() {
        let options = DeviceOptions { device: Some(Device::Cuda(99)), ..DeviceOptions::default() };
        let error = options.open(&mut |_| ()).map(drop).expect_err("no machine has a hundred GPUs");
        assert!(matches!(error, DeviceError::Cuda { ordinal: 99, .. }), "{error}");
    }
}
