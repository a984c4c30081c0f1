//! Launches of `wide.cu`.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &[
    "wide16_f16",
    "wide32_f16",
    "wide64_f16",
    "wide128_f16",
    "wide16_bf16",
    "wide32_bf16",
    "wide64_bf16",
    "wide128_bf16",
    "wide16_q8_0",
    "wide32_q8_0",
    "wide64_q8_0",
    "wide128_q8_0",
    "wide16_q4_0",
    "wide32_q4_0",
    "wide64_q4_0",
    "wide128_q4_0",
    "wide16_q4_k",
    "wide32_q4_k",
    "wide64_q4_k",
    "wide128_q4_k",
    "wide16_q5_k",
    "wide32_q5_k",
    "wide64_q5_k",
    "wide128_q5_k",
    "wide16_q6_k",
    "wide32_q6_k",
    "wide64_q6_k",
    "wide128_q6_k",
];

const THREADS: u32 = 384;

/// The first kernel of a format, and the bytes and number of the chunks of weights in its ring: `WideShape` of wide.cu.
fn family(dtype: DType) -> Option<(usize, u32, bool)> {
    Some(match dtype {
        DType::F16 => (0, 2048, true),
        DType::BF16 => (4, 2048, true),
        DType::Q8_0 => (8, 1088, true),
        DType::Q4_0 => (12, 576, true),
        DType::Q4_K => (16, 2368, false),
        DType::Q5_K => (20, 2880, false),
        DType::Q6_K => (24, 3360, false),
        _ => return None,
    })
}

/// Shared memory of a block: both rings, and what lies before the next multiple of 1024.
fn shared_bytes(rows: u32, chunk_bytes: u32, whole_units: bool) -> u32 {
    let x_stages = match rows {
        128 => 6,
        64 => 8,
        _ if whole_units => 5,
        _ => 8,
    };
    let w_stages = match whole_units {
        true => x_stages,
        false if rows <= 32 => 3,
        false => 4,
    };
    1024 + x_stages * rows * 128 + w_stages * 8 * chunk_bytes
}

/// Whether this device has the kernels and the format its own.
pub(crate) fn serves(device: &Device, dtype: DType) -> bool {
    device.has_wide_products && family(dtype).is_some()
}

/// A product of more than a few rows.
pub(crate) fn launch(device: &Device, dtype: DType, product: &LinearProduct) -> Result<(), Error> {
    let (first, chunk_bytes, whole_units) = family(dtype).expect("a format with tiles");
    let (kernel, rows) = match product.num_rows {
        0..=16 => (first, 16),
        17..=32 => (first + 1, 32),
        33..=64 => (first + 2, 64),
        _ => (first + 3, 128),
    };
    let mut blocks = [product.num_rows.div_ceil(rows), product.num_tiles.div_ceil(8), 1];
    // Few blocks would leave multiprocessors idle: then each slice has a block, and the blocks of a tile are a cluster.
    if blocks[0] * blocks[1] < 3 * device.num_multiprocessors() / 4 {
        blocks[2] = product.slices;
    }
    let grid = Grid { blocks, threads: THREADS, shared_bytes: shared_bytes(rows, chunk_bytes, whole_units) };
    device.launch_clusters(KERNELS[kernel], grid, blocks[2], product)
}
