//! Launches of `pack_weight.cu`.

use pellucid_tensor::Error;

use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["pack_weight"];

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct PackWeight {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) row_bytes: u64,
    pub(crate) cols: u32,
    pub(crate) first_row: u32,
    pub(crate) num_rows: u32,
    pub(crate) format: u32,
    pub(crate) from_f32: u32,
}

pub(crate) fn pack(device: &Device, weight: &PackWeight) -> Result<(), Error> {
    let lanes = weight.num_rows.div_ceil(16) as usize * weight.cols.div_ceil(256) as usize * 4 * 32;
    device.launch("pack_weight", Grid::items(lanes, 256), weight)
}
