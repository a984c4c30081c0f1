//! The kernels, in folders by what they do: each `x.cu` beside the `x.rs` that launches it. `xtask kernels` compiles
//! them into `artifacts/`.
//!
//! A `.cu` file includes nothing. The files of `shared/` are put before each of them as text, and `states.cu` before
//! those of `recurrence`.

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod matmul;
pub(crate) mod recurrence;
pub(crate) mod rows;

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
    (recurrence, $name:ident) => {
        kernel_file!(
            recurrence,
            $name,
            concat!(
                include_str!("recurrence/states.cu"),
                include_str!(concat!("recurrence/", stringify!($name), ".cu"))
            )
        )
    };
    ($folder:ident, $name:ident) => {
        kernel_file!($folder, $name, include_str!(concat!(stringify!($folder), "/", stringify!($name), ".cu")))
    };
    ($folder:ident, $name:ident, $source:expr) => {
        KernelFile {
            name: stringify!($name),
            source: $source,
            kernels: $folder::$name::KERNELS,
            binary: include_bytes!(concat!("../../artifacts/", stringify!($name), ".fatbin")),
        }
    };
}

/// Every kernel file.
pub static FILES: &[KernelFile] = &[
    kernel_file!(attention, decode),
    kernel_file!(attention, merge_tiles),
    kernel_file!(attention, prefill),
    kernel_file!(attention, prefill_wgmma),
    kernel_file!(attention, store_kv),
    kernel_file!(experts, expert_panels),
    kernel_file!(experts, expert_rows),
    kernel_file!(matmul, few_rows),
    kernel_file!(matmul, few_rows_ring),
    kernel_file!(matmul, many_rows),
    kernel_file!(matmul, many_rows_wgmma),
    kernel_file!(matmul, pack_weight),
    kernel_file!(recurrence, delta_net),
    kernel_file!(recurrence, mamba2),
    kernel_file!(recurrence, short_convolution),
    kernel_file!(rows, cublas_input),
    kernel_file!(rows, digest),
    kernel_file!(rows, elementwise),
    kernel_file!(rows, norm),
    kernel_file!(rows, route_experts),
];

/// Whether a kernel loads so much at a time into registers that it needs space in the L1 cache for it.
pub(crate) fn reads_through_cache(kernel: &str) -> bool {
    kernel.starts_with("linear_few")
}

const SHARED: [&str; 9] = [
    include_str!("shared/prelude.cu"),
    include_str!("shared/weight_formats.cu"),
    include_str!("shared/linear_map.cu"),
    include_str!("shared/norm_in_product.cu"),
    include_str!("shared/attention_scores.cu"),
    include_str!("shared/wgmma.cu"),
    include_str!("shared/wide_product.cu"),
    include_str!("shared/expert_tables.cu"),
    include_str!("shared/routing.cu"),
];

/// Returns the text that the compiler sees for a file.
pub fn full_source(file: &KernelFile) -> String {
    SHARED.into_iter().chain([file.source]).collect::<Vec<_>>().join("\n")
}

/// Machine code is embedded for these, and PTX of the first for every later one.
pub const ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90a", "100a", "120a"];

/// A hash (FNV-1a) of all sources and of the names that are looked up in them, and the architectures they were compiled
/// for. It is written beside the compiled kernels, so that a test finds out when they are outdated.
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

/// `Format` of weight_formats.cu: the layout of a weight on the device. `None` for formats without tiles.
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
        DType::MXFP4 => 8,
        _ => return None,
    })
}

/// Bytes of a weight in the tiles of weight_formats.cu.
pub(crate) fn packed_bytes(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
    let group_bytes = match dtype {
        DType::F32 => return rows.checked_mul(cols)?.checked_mul(4),
        DType::F16 | DType::BF16 => 4 * 2048,
        DType::Q8_0 => 4 * 1088,
        DType::Q4_0 | DType::MXFP4 => 4 * 576,
        DType::Q4_K => 4 * 640,
        DType::Q5_K => 4 * 768,
        DType::Q6_K => 4 * 896,
        _ => return None,
    };
    (rows.div_ceil(128) * 8).checked_mul(cols.div_ceil(GROUP_COLS))?.checked_mul(group_bytes)
}

/// Columns of a group; operands have whole groups.
pub(crate) const GROUP_COLS: usize = 256;

// A parameter is sound if it mirrors the structure of its kernel. The list is in one place so that it can be reviewed
// as a whole.
macro_rules! parameters {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: `#[repr(C)]`, with the fields of the structure of the same name in the kernel file, in order and
            // of equal sizes.
            unsafe impl Parameter for $type {}
        )*
    };
}

parameters! {
    rows::elementwise::Embed,
    rows::elementwise::MovedRows,
    rows::elementwise::Elementwise,
    rows::elementwise::GateRows,
    rows::elementwise::OperandRows,
    rows::elementwise::Angles,
    rows::elementwise::Rotation,
    rows::elementwise::GateByColumns,
    rows::elementwise::HeadRows,
    rows::elementwise::JoinHeads,
    rows::elementwise::ReadBytes,
    rows::norm::Norm,
    rows::route_experts::Route,
    rows::route_experts::AddWeighted,
    rows::route_experts::ScaleExperts,
    recurrence::delta_net::DeltaNetParameter,
    recurrence::delta_net::DeltaNorm,
    recurrence::mamba2::Mamba2Parameter,
    recurrence::mamba2::Mamba2Norm,
    recurrence::short_convolution::ShortConvolutionParameter,
    rows::digest::DigestRows,
    rows::cublas_input::FastRows,
    matmul::pack_weight::PackWeight,
    matmul::linear::LinearProduct,
    experts::expert_panels::ExpertInput,
    experts::expert_panels::GatedOperand,
    experts::expert_panels::ExpertPanels,
    experts::expert_rows::ExpertGroups,
    experts::expert_rows::ExpertProduct,
    experts::expert_rows::AddExperts,
    attention::store_kv::StoreParameter,
    attention::store_kv::RotateParameter,
    attention::store_kv::ExpandParameter,
    attention::prefill::AttentionParameter,
    attention::prefill::WideParameter,
    attention::decode::OneToken,
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
