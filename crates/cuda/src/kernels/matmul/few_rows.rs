//! Launches of `few_rows.cu`: products of up to eight rows on any GPU.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};
use crate::kernels::format;

/// By format, from F16 on.
pub(crate) const KERNELS: &[&str] = &[
    "linear_few_f16",
    "linear_few_bf16",
    "linear_few_q8_0",
    "linear_few_q4_0",
    "linear_few_q4_k",
    "linear_few_q5_k",
    "linear_few_q6_k",
    "linear_few_mxfp4",
];

const WARPS: u32 = 16;
/// Shared memory of a block besides the rows of x is less than this.
const OTHER_BYTES: u32 = 17 << 10;

/// Bytes of the rows of x in shared memory.
fn shared_bytes(product: &LinearProduct) -> u32 {
    product.num_rows * (product.x.pitch * 2 + 16)
}

/// Whether the rows fit into shared memory.
pub(super) fn fits(device: &Device, product: &LinearProduct) -> bool {
    shared_bytes(product) + OTHER_BYTES <= device.shared_limit
}

pub(super) fn launch(device: &Device, dtype: DType, product: &LinearProduct) -> Result<(), Error> {
    let kernel = KERNELS[format(dtype).expect("a format with tiles") as usize - 1];
    let blocks = (product.num_tiles * product.slices).div_ceil(WARPS).min(device.num_multiprocessors());
    let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * WARPS, shared_bytes: shared_bytes(product) };
    device.launch(kernel, grid, product)
}
