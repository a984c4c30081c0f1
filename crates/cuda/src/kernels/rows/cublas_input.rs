//! Launches of `cublas_input.cu`.

use pellucid_tensor::Error;

use super::elementwise::{self, Elementwise};
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["find_largest", "round_to_half"];

/// `FastScalars` of cublas_input.cu: its bytes, and the offsets of the two values that the library reads.
pub(crate) const SCALARS_BYTES: usize = 12;
pub(crate) const BACK: u64 = 4;
pub(crate) const ZERO: u64 = 8;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct FastRows {
    pub(crate) x: u64,
    pub(crate) out: u64,
    pub(crate) scalars: u64,
    pub(crate) len: u64,
}

impl FastRows {
    /// Rounds x to F16, and writes the factor of a product of it.
    pub(crate) fn launch(&self, device: &Device) -> Result<(), Error> {
        let clear = Elementwise { x: self.scalars, y: 0, len: 1, cap: 0.0, activation: 0 };
        elementwise::launch(device, "clear", clear)?;
        let blocks = self.len.div_ceil(256).min(u64::from(device.num_multiprocessors() * 8)) as u32;
        device.launch("find_largest", Grid::linear(blocks, 256), self)?;
        device.launch("round_to_half", Grid::linear(blocks, 256), self)
    }
}
