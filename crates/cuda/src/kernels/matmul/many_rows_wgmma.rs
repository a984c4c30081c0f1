//! Launches of `many_rows_wgmma.cu`: products of more than eight rows, on compute capability 9.0.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};

macro_rules! wide_kernels {
    ($($format:literal),*) => {
        &[
            "wide16_gated_bf16",
            "wide32_gated_bf16",
            "wide64_gated_bf16",
            "wide128_gated_bf16",
            $(
            concat!("wide16_", $format),
            concat!("wide32_", $format),
            concat!("wide64_", $format),
            concat!("wide128_", $format),
            concat!("wide16_split_", $format),
            concat!("wide32_split_", $format),
            concat!("wide64_split_", $format),
            concat!("wide128_split_", $format),
        )*]
    };
}

pub(crate) const KERNELS: &[&str] = wide_kernels!("f16", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "mxfp4");

/// Threads of a block of `wide_product`.
pub(crate) const THREADS: u32 = 384;

/// Index of a format in [`KERNELS`], and the bytes of its chunks.
pub(crate) fn family(dtype: DType) -> Option<(usize, u32)> {
    Some(match dtype {
        DType::F16 => (0, 2048),
        DType::BF16 => (1, 2048),
        DType::Q8_0 => (2, 2 * 1088),
        DType::Q4_0 => (3, 4 * 576),
        DType::Q4_K => (4, 4 * 640),
        DType::Q5_K => (5, 4 * 768),
        DType::Q6_K => (6, 4 * 896),
        DType::MXFP4 => (7, 4 * 576),
        _ => return None,
    })
}

/// Blocks that share a multiprocessor.
fn blocks_at_once(rows: u32, splits: bool) -> u32 {
    if rows <= 32 || (rows == 64 && splits) { 2 } else { 1 }
}

/// Shared memory of a block: both rings of `WideShape` in wide_product.cu, and the padding to a multiple of 1024.
pub(crate) fn shared_bytes(rows: u32, shares_multiprocessor: bool, chunk_bytes: u32) -> u32 {
    let x_stages = match (rows, shares_multiprocessor) {
        (128, _) => 6,
        (_, false) => 8,
        (64, _) => 4,
        _ => 6,
    };
    let x_bytes = x_stages * rows * 128;
    let room = if shares_multiprocessor { 111 << 10 } else { 223 << 10 } - x_bytes;
    let w_bytes = 8 * chunk_bytes;
    1024 + x_bytes + (room / w_bytes).min(12) * w_bytes
}

/// Whether the device has the kernels and the format has tiles.
pub(crate) fn serves(device: &Device, dtype: DType) -> bool {
    device.has_wgmma && family(dtype).is_some()
}

/// Number of blocks over which the slices of each of `tiles` tiles are best distributed, if `capacity` blocks run at
/// once. A round of blocks takes the time of its slices and, for its start and end, a sixteenth of the time of all
/// slices.
fn shares(tiles: u32, slices: u32, capacity: u32) -> u32 {
    let cost = |shares: &u32| (tiles * shares).div_ceil(capacity) * (16 / shares + 1);
    [1, 2, 4, 8].into_iter().filter(|&shares| shares <= slices).min_by_key(cost).expect("there is a slice")
}

/// How a product is distributed over blocks.
struct Plan {
    /// Index of the kernel's size among four, and its rows.
    size: usize,
    rows: u32,
    blocks: [u32; 3],
}

impl Plan {
    fn of(device: &Device, product: &LinearProduct) -> Plan {
        let (size, rows) = match product.num_rows {
            0..=16 => (0, 16),
            17..=32 => (1, 32),
            33..=64 => (2, 64),
            _ => (3, 128),
        };
        let mut blocks = [product.num_rows.div_ceil(rows), product.num_tiles.div_ceil(8), 1];
        let (tiles, multiprocessors) = (blocks[0] * blocks[1], device.num_multiprocessors());
        // Few blocks would leave multiprocessors idle: then the slices of a tile are distributed over several.
        if tiles < 3 * multiprocessors / 4 {
            blocks[2] = shares(tiles, product.slices, multiprocessors * blocks_at_once(rows, true));
        }
        Plan { size, rows, blocks }
    }

    fn splits(&self) -> bool {
        self.blocks[2] > 1
    }
}

/// Whether a product of two matrices can gate its result.
pub(crate) fn gates(device: &Device, dtype: DType, product: &LinearProduct) -> bool {
    let is_wide = product.num_rows > 8 && serves(device, dtype) && dtype == DType::BF16;
    is_wide && product.is_pair() && product.fills_groups() && !Plan::of(device, product).splits()
}

/// Launches a product of more than eight rows. Returns it if its slices are left, see [`LinearProduct::launch`].
pub(crate) fn launch(
    device: &Device,
    dtype: DType,
    mut product: LinearProduct,
    workspace: impl FnOnce(usize) -> Result<u64, Error>,
) -> Result<Option<LinearProduct>, Error> {
    let (place, chunk_bytes) = family(dtype).expect("a format with tiles");
    let plan = Plan::of(device, &product);
    if plan.splits() {
        product.workspace = workspace(product.workspace_bytes())?;
    }
    let shared_bytes = shared_bytes(plan.rows, blocks_at_once(plan.rows, plan.splits()) == 2, chunk_bytes);
    let kernel = match product.is_gated() {
        true => KERNELS[plan.size],
        false => KERNELS[4 + 8 * place + plan.size + if plan.splits() { 4 } else { 0 }],
    };
    let grid = Grid { blocks: plan.blocks, threads: THREADS, shared_bytes };
    device.launch(kernel, grid, &product)?;
    Ok(plan.splits().then_some(product))
}
