//! Launches of `prefill_wgmma.cu`.

use pellucid_tensor::Error;

use super::prefill::AttentionParameter;
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &[
    "flash_wide_f16_64",
    "flash_wide_capped_f16_64",
    "flash_wide_f16_128",
    "flash_wide_capped_f16_128",
    "flash_wide_bf16_64",
    "flash_wide_capped_bf16_64",
    "flash_wide_bf16_128",
    "flash_wide_capped_bf16_128",
];

/// Launches attention of chunks of tokens, for a storage and a head size whose keys and values are in panels.
pub(crate) fn launch(device: &Device, storage: usize, parameter: &AttentionParameter) -> Result<(), Error> {
    let is_large = parameter.head_size == 128;
    let group = (parameter.num_heads / parameter.num_kv_heads).max(1);
    let piece = group.next_power_of_two().min(16);
    // 64 rows of queries for each of two groups of warps, and a ring of tiles of keys and values.
    let panel_bytes = 64 * 128;
    let (panels, stages) = if is_large { (2, 5) } else { (1, 8) };
    let shared_bytes = 1024 + 2 * panels * panel_bytes * (1 + stages);
    let blocks = [parameter.num_kv_heads * group.div_ceil(piece), parameter.num_runs, 1];
    let kernel = KERNELS[4 * (storage - 1) + 2 * usize::from(is_large) + usize::from(parameter.cap != 0.0)];
    device.launch(kernel, Grid { blocks, threads: 384, shared_bytes }, parameter)
}
