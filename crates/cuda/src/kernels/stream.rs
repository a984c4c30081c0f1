//! Launches of `stream.cu`.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};

macro_rules! stream_kernels {
    ($($format:literal),*) => { &[$(concat!("stream_", $format), concat!("stream_rows_", $format)),*] };
}

pub(crate) const KERNELS: &[&str] = stream_kernels!("q8_0", "q4_0", "q4_k", "q5_k", "q6_k");

const WARPS: u32 = 16;
/// Stages of the rings of `stream_rows_*`.
const FEW_STAGES: u32 = 3;

/// A format's place among the kernels, the stages of its deep rings and the bytes of a stage.
fn family(dtype: DType) -> Option<(usize, u32, u32)> {
    Some(match dtype {
        DType::Q8_0 => (0, 5, 2 * 1088),
        DType::Q4_0 => (1, 5, 4 * 576),
        DType::Q4_K => (2, 5, 2368),
        DType::Q5_K => (3, 4, 2880),
        DType::Q6_K => (4, 3, 3360),
        _ => return None,
    })
}

/// The kernel with the deepest rings that fit beside the rows, and its shared memory: rings, rows of x, two sets of sums.
fn choose(device: &Device, dtype: DType, product: &LinearProduct) -> Option<(&'static str, u32)> {
    let (place, deep, stage_bytes) = family(dtype)?;
    let rows_bytes = product.num_rows * (product.x.pitch * 2 + 16 + 2 * WARPS * 16 * 4);
    let shared_bytes = |stages| WARPS * stages * stage_bytes + rows_bytes;
    let kernels = [(KERNELS[2 * place], shared_bytes(deep)), (KERNELS[2 * place + 1], shared_bytes(FEW_STAGES))];
    kernels.into_iter().find(|&(_, bytes)| bytes + 1024 <= device.shared_limit)
}

/// Whether the device has the kernels and a block room for the rows.
pub(crate) fn serves(device: &Device, dtype: DType, product: &LinearProduct) -> bool {
    device.has_wide_products && product.num_rows <= 8 && choose(device, dtype, product).is_some()
}

/// A product of few rows.
pub(crate) fn launch(device: &Device, dtype: DType, product: &LinearProduct) -> Result<(), Error> {
    let (kernel, shared_bytes) = choose(device, dtype, product).expect("it serves");
    let mut product = *product;
    let items = product.num_tiles / 2;
    // Where most warps of the device find a tile each, none is shared.
    product.spread = if items >= 4 * device.num_multiprocessors() { 1 } else { product.slices };
    let grid = Grid { blocks: [items.min(device.num_multiprocessors()), 1, 1], threads: 32 * WARPS, shared_bytes };
    device.launch(kernel, grid, &product)
}
