//! Launches of `few_rows_ring.cu`: products of up to eight rows with quantized weights, on compute capability 9.0.

use pellucid_tensor::{DType, Error};

use super::linear::LinearProduct;
use crate::driver::{Device, Grid};
use crate::kernels::format;

macro_rules! stream_kernels {
    ($($format:literal),*) => {
        &[$(concat!("stream_", $format), concat!("stream_rows_", $format)),*]
    };
}

/// For each format, the kernel with the deepest rings that fit beside one or two rows, and the one for more rows. Those
/// of Q4_K and Q5_K serve Q6_K too.
pub(crate) const KERNELS: &[&str] = stream_kernels!("q8_0", "q4_0", "q4_k", "q5_k");

/// Index of the first kernel of a format, the stages of its deep rings, the bytes of a stage and the units of 64
/// columns in it.
struct Family {
    first_kernel: usize,
    stages: u32,
    stage_bytes: u32,
    units: u32,
}

fn family(dtype: DType) -> Option<Family> {
    let (first_kernel, stages, units, unit_bytes) = match dtype {
        DType::Q8_0 => (0, 5, 2, 1088),
        DType::Q4_0 => (2, 5, 4, 576),
        DType::Q4_K => (4, 4, 4, 640),
        DType::Q5_K => (6, 4, 4, 768),
        DType::Q6_K => (4, 3, 4, 896),
        _ => return None,
    };
    Some(Family { first_kernel, stages, stage_bytes: units * unit_bytes, units })
}

/// `StreamPlan` of linear_map.cu.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct StreamPlan {
    spread: u32,
    early: u32,
    format: u32,
    second_format: u32,
    first_blocks: u32,
    second_tile: u32,
}

const WARPS: u32 = 16;
/// Stages of the rings of `stream_rows_*`.
const FEW_STAGES: u32 = 3;

/// The kernel variant and the distribution of a launch.
#[derive(Debug, Clone, Copy)]
struct LaunchPlan {
    kernel: &'static str,
    /// Whether its rings are the deepest that fit beside one or two rows.
    is_deep: bool,
    /// Warps that share a tile.
    spread: u32,
    shared_bytes: u32,
}

/// Returns the fastest launch plan that fits into shared memory. With many tiles and few rows each warp takes whole
/// tiles; otherwise each slice of a tile has a warp, with the deepest rings that fit.
fn choose(device: &Device, dtype: DType, product: &LinearProduct) -> Option<LaunchPlan> {
    let Family { first_kernel, stages: deep, stage_bytes, .. } = family(dtype)?;
    let LinearProduct { num_rows, slices, num_tiles, .. } = *product;
    let shape = |kind: usize, stages: u32, spread: u32| {
        // The rows of x, and two sets of sums for every slice of the tiles that a block works on.
        let rows_bytes = num_rows * (product.x.pitch * 2 + 16 + 2 * (WARPS / spread) * slices * 16 * 4);
        let shared_bytes = WARPS * stages * stage_bytes + rows_bytes;
        LaunchPlan { kernel: KERNELS[first_kernel + kind], is_deep: kind == 0, spread, shared_bytes }
    };
    let has_many_tiles = num_rows <= 2 && num_tiles / 2 >= 4 * device.num_multiprocessors();
    let alone = has_many_tiles.then(|| shape(0, deep, 1));
    let shared = [shape(0, deep, slices), shape(1, FEW_STAGES, slices)];
    alone.into_iter().chain(shared).find(|shape| shape.shared_bytes + 1024 <= device.shared_limit)
}

/// Chunks that a warp loads before x. They delay x, but if there is more to read than the rings hold, the rings run dry
/// unless they are filled early.
fn early(device: &Device, dtype: DType, product: &LinearProduct) -> u32 {
    let Family { stages, units, .. } = family(dtype).expect("it serves");
    let chunks = product.num_tiles * (product.cols.div_ceil(256) * 4 / units);
    let fits = chunks <= stages * WARPS * device.num_multiprocessors();
    if fits { 1 } else { 2 }
}

/// Whether the device has the kernels and the rows fit into shared memory.
pub(crate) fn serves(device: &Device, dtype: DType, product: &LinearProduct) -> bool {
    device.has_wgmma && product.num_rows <= 8 && choose(device, dtype, product).is_some()
}

/// Launches a product of up to eight rows.
pub(crate) fn launch(device: &Device, dtype: DType, product: &LinearProduct) -> Result<(), Error> {
    let shape = choose(device, dtype, product).expect("it serves");
    let blocks = (product.num_tiles / 2).min(device.num_multiprocessors());
    let format = format(dtype).expect("it serves");
    let mut product = *product;
    product.plan = StreamPlan {
        spread: shape.spread,
        early: early(device, dtype, &product),
        format,
        second_format: format,
        first_blocks: blocks,
        second_tile: product.num_tiles,
    };
    let grid = Grid { blocks: [blocks, 1, 1], threads: 32 * WARPS, shared_bytes: shape.shared_bytes };
    device.launch(shape.kernel, grid, &product)
}

/// Launches a product together with one of the same input in another format; `both` has the tiles of the second after
/// those of the first. Returns false, and launches nothing, if no kernel has both formats.
pub(crate) fn launch_two(
    device: &Device,
    (first, first_type): (&LinearProduct, DType),
    (second, second_type): (&LinearProduct, DType),
    both: &LinearProduct,
) -> Result<bool, Error> {
    if !device.has_wgmma || !matches!((first_type, second_type), (DType::Q4_K | DType::Q5_K, DType::Q6_K)) {
        return Ok(false);
    }
    let shapes = choose(device, first_type, first).zip(choose(device, second_type, second));
    let same = |(a, b): &(LaunchPlan, LaunchPlan)| (a.is_deep, a.spread) == (b.is_deep, b.spread);
    let Some((first_shape, second_shape)) = shapes.filter(same) else { return Ok(false) };
    // All blocks run at once: minimise the bytes of the block that reads most.
    let (blocks, items) = (device.num_multiprocessors(), [first.num_tiles / 2, second.num_tiles / 2]);
    let unit_bytes = [first_type, second_type].map(|dtype| family(dtype).map_or(0, |f| f.stage_bytes / f.units));
    let most = |second_blocks: u32| {
        let longest = |i: usize, blocks: u32| items[i].div_ceil(blocks) * unit_bytes[i];
        longest(0, blocks - second_blocks).max(longest(1, second_blocks))
    };
    let second_blocks = (1..blocks).min_by_key(|&second_blocks| most(second_blocks)).unwrap_or(1).min(items[1]);
    let first_blocks = (blocks - second_blocks).min(items[0]);
    let mut both = *both;
    both.plan = StreamPlan {
        spread: first_shape.spread,
        early: early(device, first_type, first).max(early(device, second_type, second)),
        format: format(first_type).expect("it serves"),
        second_format: format(second_type).expect("it serves"),
        first_blocks,
        second_tile: first.num_tiles,
    };
    let shared_bytes = first_shape.shared_bytes.max(second_shape.shared_bytes);
    let grid = Grid { blocks: [first_blocks + second_blocks, 1, 1], threads: 32 * WARPS, shared_bytes };
    device.launch(first_shape.kernel, grid, &both)?;
    Ok(true)
}
