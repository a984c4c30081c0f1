//! Launches of `merge_tiles.cu`: merges tiles of attention that different blocks computed.

use pellucid_tensor::Error;

use super::prefill::{AttentionParameter, WideParameter};
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] =
    &["attention_merge", "merge_part_64", "merge_part_128", "merge_part_256", "attention_merge_wide"];

const THREADS: u32 = 128;
/// Dimensions that a block of `merge_part` takes.
const MERGED: u32 = 32;

/// Tiles that a block of `merge_part` loads together: `SIDE_BY_SIDE` of merge_tiles.cu.
const SIDE_BY_SIDE: u32 = 16;
/// Maximum tiles that a block of `merge_part` holds: `SIDE_BY_SIDE` times `HELD` of merge_tiles.cu.
const AT_ONCE: u32 = 16 * SIDE_BY_SIDE;

/// Maximum tiles whose factors `attention_merge` holds at a time: `MAX_COUNTED` of merge_tiles.cu.
const MAX_COUNTED: u32 = 4096;

/// Shared memory for tiles, beside three values for each of `num_counted` tiles.
fn bytes_for_tiles(device: &Device, num_counted: u32) -> u32 {
    device.shared_limit.saturating_sub(12 * num_counted + 1024) & !127
}

/// Merges tiles of any kind.
pub(crate) fn merge(device: &Device, parameter: &AttentionParameter) -> Result<(), Error> {
    device.launch("attention_merge", merge_grid(device, parameter), parameter)
}

/// Merges tiles of wide heads.
pub(crate) fn merge_wide(device: &Device, parameter: &WideParameter) -> Result<(), Error> {
    device.launch("attention_merge_wide", merge_grid(device, &parameter.attention), parameter)
}

fn merge_grid(device: &Device, parameter: &AttentionParameter) -> Grid {
    // 72 KiB hold the tiles of 8,192 positions of a common head.
    let counted = parameter.max_tiles.min(MAX_COUNTED);
    let shared_bytes = 12 * counted + bytes_for_tiles(device, counted).min(72 << 10);
    Grid { blocks: [parameter.num_rows, parameter.num_heads, 1], threads: THREADS, shared_bytes }
}

/// Merges many tiles of single tokens on the tensor cores: several blocks for a head.
pub(crate) fn merge_parts(device: &Device, parameter: &AttentionParameter) -> Result<(), Error> {
    let available = bytes_for_tiles(device, parameter.max_tiles);
    if available < SIDE_BY_SIDE * MERGED * 4 {
        return merge(device, parameter);
    }
    let shared_bytes = 12 * parameter.max_tiles + available.min(parameter.max_tiles.min(AT_ONCE) * MERGED * 4);
    let blocks = [parameter.num_rows, parameter.num_heads, parameter.head_size / MERGED];
    let size = parameter.head_size.ilog2() as usize - 5;
    device.launch(KERNELS[size], Grid { blocks, threads: THREADS, shared_bytes }, parameter)
}
