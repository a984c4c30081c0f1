//! Launches of `stream.cu`.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};

macro_rules! stream_kernels {
    ($($format:literal),*) => {
        &[$(concat!("stream_", $format), concat!("stream_rows_", $format)),*, "stream_q4_k_q6_k", "stream_q5_k_q6_k"]
    };
}

pub(crate) const KERNELS: &[&str] = stream_kernels!("q8_0", "q4_0", "q4_k", "q5_k", "q6_k");

/// A format's place among the kernels, the stages of its deep rings, the bytes of a stage and the units of 64 columns in it.
struct Family {
    place: usize,
    stages: u32,
    stage_bytes: u32,
    units: u32,
}

fn family(dtype: DType) -> Option<Family> {
    let (place, stages, units, unit_bytes) = match dtype {
        DType::Q8_0 => (0, 5, 2, 1088),
        DType::Q4_0 => (1, 5, 4, 576),
        DType::Q4_K => (2, 4, 4, 640),
        DType::Q5_K => (3, 4, 4, 768),
        DType::Q6_K => (4, 3, 4, 896),
        _ => return None,
    };
    Some(Family { place, stages, stage_bytes: units * unit_bytes, units })
}

const WARPS: u32 = 16;
/// Stages of the rings of `stream_rows_*`.
const FEW_STAGES: u32 = 3;

/// A way to launch a product.
#[derive(Debug, Clone, Copy)]
struct Shape {
    kernel: &'static str,
    /// With rings as deep as a row or two leave room for.
    is_deep: bool,
    /// Warps that share a tile.
    spread: u32,
    shared_bytes: u32,
}

/// The best way that fits. Where there are many tiles and few rows a warp has a tile to itself; else all slices of a tile have a warp each,
/// with rings as deep as there is room for.
fn choose(device: &Device, dtype: DType, product: &LinearProduct) -> Option<Shape> {
    let Family { place, stages: deep, stage_bytes, .. } = family(dtype)?;
    let LinearProduct { num_rows, slices, num_tiles, .. } = *product;
    let shape = |kind: usize, stages: u32, spread: u32| {
        // The rows of x, and two sets of sums for every slice of every tile under way.
        let rows_bytes = num_rows * (product.x.pitch * 2 + 16 + 2 * (WARPS / spread) * slices * 16 * 4);
        let shared_bytes = WARPS * stages * stage_bytes + rows_bytes;
        Shape { kernel: KERNELS[2 * place + kind], is_deep: kind == 0, spread, shared_bytes }
    };
    let has_many_tiles = num_rows <= 2 && num_tiles / 2 >= 4 * device.num_multiprocessors();
    let alone = has_many_tiles.then(|| shape(0, deep, 1));
    let shared = [shape(0, deep, slices), shape(1, FEW_STAGES, slices)];
    alone.into_iter().chain(shared).find(|shape| shape.shared_bytes + 1024 <= device.shared_limit)
}

/// Chunks that a warp asks for before x is there: x waits behind them, but where there is more to read than the rings hold, they run
/// dry unless they are filled early.
fn early(device: &Device, dtype: DType, product: &LinearProduct) -> u32 {
    let Family { stages, units, .. } = family(dtype).expect("it serves");
    let chunks = product.num_tiles * (product.cols.div_ceil(256) * 4 / units);
    let fits = chunks <= stages * WARPS * device.num_multiprocessors();
    if fits { 1 } else { 2 }
}

/// Whether the device has the kernels and a block room for the rows.
pub(crate) fn serves(device: &Device, dtype: DType, product: &LinearProduct) -> bool {
    device.has_wide_products && product.num_rows <= 8 && choose(device, dtype, product).is_some()
}

/// A product of few rows.
pub(crate) fn launch(device: &Device, dtype: DType, product: &LinearProduct) -> Result<(), Error> {
    let shape = choose(device, dtype, product).expect("it serves");
    let mut product = *product;
    product.spread = shape.spread;
    product.early = early(device, dtype, &product);
    let blocks = (product.num_tiles / 2).min(device.num_multiprocessors());
    let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * WARPS, shared_bytes: shape.shared_bytes };
    device.launch(shape.kernel, grid, &product)
}

/// `TwoProducts` of stream.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TwoProducts {
    first: LinearProduct,
    second: LinearProduct,
    first_blocks: u32,
}

/// The kernel for matrices of two formats with the same input, behind those of one.
fn kernel_of_two(first: DType, second: DType) -> Option<&'static str> {
    const TWO: usize = KERNELS.len() - 2;
    match (first, second) {
        (DType::Q4_K, DType::Q6_K) => Some(KERNELS[TWO]),
        (DType::Q5_K, DType::Q6_K) => Some(KERNELS[TWO + 1]),
        _ => None,
    }
}

/// Launches two products of the same input together; false, and nothing done, where no kernel has both formats.
pub(crate) fn launch_two(
    device: &Device,
    (first, first_type): (&LinearProduct, DType),
    (second, second_type): (&LinearProduct, DType),
) -> Result<bool, Error> {
    let kernel = kernel_of_two(first_type, second_type).filter(|_| device.has_wide_products);
    let Some(kernel) = kernel else { return Ok(false) };
    let shape = |product, dtype| choose(device, dtype, product).filter(|shape| shape.is_deep);
    let (Some(first_shape), Some(second_shape)) = (shape(first, first_type), shape(second, second_type)) else {
        return Ok(false);
    };
    // Each has blocks by its share of the tiles, and all blocks are on the device at once.
    let (blocks, items) = (device.num_multiprocessors(), [first.num_tiles / 2, second.num_tiles / 2]);
    let second_blocks = (blocks * items[1]).div_ceil(items[0] + items[1]).clamp(1, items[1]);
    let first_blocks = (blocks - second_blocks).min(items[0]);
    let mut parameter = TwoProducts { first: *first, second: *second, first_blocks };
    parameter.first.spread = first_shape.spread;
    parameter.second.spread = second_shape.spread;
    parameter.first.early = early(device, first_type, first);
    parameter.second.early = early(device, second_type, second);
    let shared_bytes = first_shape.shared_bytes.max(second_shape.shared_bytes);
    let grid = Grid { blocks: [first_blocks + second_blocks, 1, 1], threads: 32 * WARPS, shared_bytes };
    device.launch(kernel, grid, &parameter)?;
    Ok(true)
}
