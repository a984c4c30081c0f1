//! Launches of `merge.cu`: tiles of attention that were shared out over blocks.

use pellucid_tensor::Error;

use super::attention::AttentionParameter;
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["attention_merge", "merge_part_64", "merge_part_128", "merge_part_256"];

const THREADS: u32 = 128;
/// Dimensions that a block of `merge_part` takes.
const MERGED: u32 = 32;

/// Tiles that a block of `merge_part` brings side by side, and at a time at most: `SIDE_BY_SIDE`, and that by `HELD`.
const SIDE_BY_SIDE: u32 = 16;
const AT_ONCE: u32 = 16 * SIDE_BY_SIDE;

/// Three numbers for each tile, and `most_bytes` for tiles, or what there is room for: where that is next to nothing, a launch is refused.
fn shared_bytes(device: &Device, max_tiles: u32, most_bytes: u32) -> u32 {
    let counts_bytes = 12 * max_tiles;
    let room = device.shared_limit.saturating_sub(counts_bytes + 1024) & !127;
    counts_bytes + most_bytes.min(room.max(SIDE_BY_SIDE * MERGED * 4))
}

/// Tiles of any kind.
pub(crate) fn merge(device: &Device, parameter: &AttentionParameter) -> Result<(), Error> {
    // As many tiles as 8,192 positions of a common head have.
    let shared_bytes = shared_bytes(device, parameter.max_tiles, 72 << 10);
    let grid = Grid { blocks: [parameter.num_rows, parameter.num_heads, 1], threads: THREADS, shared_bytes };
    device.launch("attention_merge", grid, parameter)
}

/// Tiles of single tokens on the tensor cores, many of them: several blocks for a head.
pub(crate) fn merge_parts(device: &Device, parameter: &AttentionParameter) -> Result<(), Error> {
    let stage_bytes = parameter.max_tiles.min(AT_ONCE) * MERGED * 4;
    let shared_bytes = shared_bytes(device, parameter.max_tiles, stage_bytes);
    let blocks = [parameter.num_rows, parameter.num_heads, parameter.head_size / MERGED];
    let size = parameter.head_size.ilog2() as usize - 5;
    device.launch(KERNELS[size], Grid { blocks, threads: THREADS, shared_bytes }, parameter)
}
