//! The formats of KV memory as a flag's value; shared by the commands that run a model and by `inspect`.

use clap::ValueEnum;
use pellucid_tensor::DType;

/// Halves unless something else is asked for: half the memory and reading of f32, with an error that stays below that of the
/// quantized weights by orders of magnitude (docs/accuracy.md), and eight times as fine as bf16. What lies beyond its range is an error
/// of that request, never a wrong number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvType {
    F32,
    #[default]
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl KvType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::Bf16 => DType::BF16,
            KvType::Q8_0 => DType::Q8_0,
        }
    }
}
