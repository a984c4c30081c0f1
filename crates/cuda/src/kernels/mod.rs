//! The kernels: each `x.cu` beside the `x.rs` that launches it. `xtask kernels` compiles them into `artifacts/`.
//!
//! A `.cu` file includes nothing; what it shares with the others, `SHARED`, is put before it as text.

pub(crate) mod attention;
pub(crate) mod decode;
pub(crate) mod digest;
pub(crate) mod expert_products;
pub(crate) mod experts;
pub(crate) mod fast;
pub(crate) mod flash;
pub(crate) mod linear;
pub(crate) mod merge;
pub(crate) mod norm;
pub(crate) mod pack;
pub(crate) mod rows;
pub(crate) mod store;
pub(crate) mod stream;
pub(crate) mod wide;

use pellucid_tensor::DType;

use crate::driver::Parameter;

/// A compiled kernel file and what it holds.
#[derive(Debug)]
pub struct KernelFile {
    pub name: &'static str,
    pub source: &'static str,
    pub kernels: &'static [&'static str],
    /// Machine code for the common architectures and PTX for later ones.
    pub(crate) binary: &'static [u8],
}

macro_rules! kernel_file {
    ($name:literal, $kernels:expr) => {
        KernelFile {
            name: $name,
            source: include_str!(concat!($name, ".cu")),
            kernels: $kernels,
            binary: include_bytes!(concat!("../../artifacts/", $name, ".fatbin")),
        }
    };
}

/// Every kernel file.
pub static FILES: &[KernelFile] = &[
    kernel_file!("attention", attention::KERNELS),
    kernel_file!("decode", decode::KERNELS),
    kernel_file!("digest", digest::KERNELS),
    kernel_file!("expert_products", expert_products::KERNELS),
    kernel_file!("experts", experts::KERNELS),
    kernel_file!("fast", fast::KERNELS),
    kernel_file!("flash", flash::KERNELS),
    kernel_file!("linear", linear::KERNELS),
    kernel_file!("merge", merge::KERNELS),
    kernel_file!("norm", norm::KERNELS),
    kernel_file!("pack", pack::KERNELS),
    kernel_file!("rows", rows::KERNELS),
    kernel_file!("store", store::KERNELS),
    kernel_file!("stream", stream::KERNELS),
    kernel_file!("wide", wide::KERNELS),
];

/// Whether the loads of a kernel are so many at a time that they need room in the first cache on their way to registers.
pub(crate) fn reads_through_cache(kernel: &str) -> bool {
    kernel.starts_with("linear_few")
}

const SHARED: [&str; 5] = [
    include_str!("prelude.cu"),
    include_str!("formats.cu"),
    include_str!("product.cu"),
    include_str!("scores.cu"),
    include_str!("hopper.cu"),
];

/// A file as the compiler sees it.
pub fn full_source(file: &KernelFile) -> String {
    SHARED.into_iter().chain([file.source]).collect::<Vec<_>>().join("\n")
}

/// Machine code is embedded for these, and PTX of the first for every later one.
pub const ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90a", "100a", "120a"];

/// A mark of all sources and of the names that are looked up in them (FNV-1a), and what they were compiled for. It is written beside the
/// compiled kernels, and tells when they no longer belong together.
pub fn source_mark(architectures: &[&str]) -> String {
    let mut mark: u64 = 0xcbf2_9ce4_8422_2325;
    let texts = |file: &KernelFile| full_source(file) + &file.kernels.join(" ");
    for byte in FILES.iter().flat_map(|file| texts(file).into_bytes()) {
        mark = (mark ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{mark:016x} {}", architectures.join(" "))
}

/// `Operand` of prelude.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Operand {
    pub(crate) numbers: u64,
    pub(crate) scales: u64,
    pub(crate) maxima: u64,
    pub(crate) pitch: u32,
    pub(crate) is_bf16: u32,
}

impl Operand {
    pub(crate) const NONE: Operand = Operand { numbers: 0, scales: 0, maxima: 0, pitch: 0, is_bf16: 0 };
}

/// `Format` of formats.cu: how a weight lies on the device. `None` for formats that have no tiles of their own.
pub(crate) fn format(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::Q8_0 => 3,
        DType::Q4_0 => 4,
        DType::Q4_K => 5,
        DType::Q5_K => 6,
        DType::Q6_K => 7,
        _ => return None,
    })
}

/// Bytes of a weight in the tiles of formats.cu.
pub(crate) fn packed_bytes(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
    let group_bytes = match dtype {
        DType::F32 => return rows.checked_mul(cols)?.checked_mul(4),
        DType::F16 | DType::BF16 => 4 * 2048,
        DType::Q8_0 => 4 * 1088,
        DType::Q4_0 => 4 * 576,
        DType::Q4_K => 4 * 640,
        DType::Q5_K => 4 * 768,
        DType::Q6_K => 4 * 896,
        _ => return None,
    };
    (rows.div_ceil(128) * 8).checked_mul(cols.div_ceil(GROUP_COLS))?.checked_mul(group_bytes)
}

/// Columns of a group; operands have whole groups.
pub(crate) const GROUP_COLS: usize = 256;

// A parameter is sound when it mirrors its kernel's structure: the list stands here so that it is looked over as a whole.
macro_rules! parameters {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: `#[repr(C)]`, with the fields of the structure of the same name in the kernel file, in order and of equal sizes.
            unsafe impl Parameter for $type {}
        )*
    };
}

parameters! {
    rows::Embed, rows::Gather, rows::Elementwise, rows::GateRows, rows::OperandRows, rows::Angles, rows::Rotation, rows::ReadBytes,
    norm::Norm, pack::PackWeight, linear::LinearProduct, store::StoreParameter, store::RotateParameter, attention::AttentionParameter,
    experts::Route, experts::AddWeighted, store::ExpandParameter, decode::OneToken,
    digest::DigestRows, expert_products::ExpertGroups, expert_products::ExpertProduct, expert_products::AddExperts,
    fast::FastRows,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiled_kernels_belong_to_these_sources() {
        let mark = include_str!("../../artifacts/sources.mark").trim();
        assert_eq!(mark, source_mark(&ARCHITECTURES), "a kernel changed: run `cargo run -p xtask -- kernels`");
    }
}
