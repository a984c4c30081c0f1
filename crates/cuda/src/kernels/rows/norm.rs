//! Launches of `norm.cu`.

use pellucid_tensor::Error;

use crate::driver::{Device, Grid};
use crate::kernels::Operand;
use crate::kernels::matmul::linear::SliceSums;

pub(crate) const KERNELS: &[&str] = &["rms_norm", "rms_norm_many", "rms_norm_heads", "layer_norm"];

/// Values of a group that a warp of `rms_norm_heads` holds, and warps of its blocks.
const HEAD_WIDTH: u32 = 128;
const HEADS_A_BLOCK: u32 = 8;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Norm {
    pub(crate) x: u64,
    /// Added to x first; 0 for none.
    pub(crate) y: u64,
    /// Sums of the slices of a product with split K, added to x first in place of `y`.
    pub(crate) slices: SliceSums,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) out: u64,
    pub(crate) width: u32,
    pub(crate) eps: f32,
    pub(crate) with_operand: u32,
    pub(crate) operand: Operand,
    /// Set by [`norm`].
    pub(crate) num_groups: u32,
}

impl Norm {
    /// Whether nothing is added to the rows first, and no operand is made.
    fn is_plain(&self) -> bool {
        self.y == 0 && self.slices.is_none() && self.with_operand == 0
    }
}

/// Threads of a block: the maximum for whole rows, so that fused products can add in the same order (`takes_norm`); for
/// narrower groups one for every four values, so that a head needs one warp.
pub(crate) fn threads(width: u32) -> u32 {
    if width >= 1024 { 1024 } else { (width / 4).next_multiple_of(32).max(32) }
}

/// Launches a norm of `num_groups` groups of `norm.width` values each: rows, or heads.
pub(crate) fn norm(device: &Device, kernel: &'static str, num_groups: usize, norm: &Norm) -> Result<(), Error> {
    let norm = &Norm { num_groups: num_groups as u32, ..*norm };
    if kernel == "rms_norm" && norm.width <= HEAD_WIDTH && norm.is_plain() {
        let blocks = norm.num_groups.div_ceil(HEADS_A_BLOCK);
        return device.launch("rms_norm_heads", Grid::linear(blocks, 32 * HEADS_A_BLOCK), norm);
    }
    let has_many_groups = norm.num_groups > 2 * device.num_multiprocessors();
    let kernel =
        if kernel == "rms_norm" && has_many_groups && norm.slices.is_none() { "rms_norm_many" } else { kernel };
    device.launch(kernel, Grid::linear(num_groups as u32, threads(norm.width)), norm)
}
