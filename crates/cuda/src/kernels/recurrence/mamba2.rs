//! Launches of `mamba2.cu`.

use pellucid_tensor::Error;

use super::{COLUMNS, MATRIX_THREADS, SMALL_MATRIX, States, has_many_blocks};
use crate::driver::{Device, Grid};
use crate::kernels::Operand;

pub(crate) const KERNELS: &[&str] =
    &["mamba2_convolve", "mamba2_scan_128", "mamba2_scan_many_128", "mamba2_scan_256", "mamba2_norm"];

const CONVOLUTION_THREADS: u32 = 256;
/// Threads of a block of the norm. The order of its sums depends on it.
const NORM_THREADS: u32 = 1024;

/// `Mamba2` of mamba2.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Mamba2Parameter {
    pub(crate) states: States,
    pub(crate) projected: u64,
    pub(crate) time_step: u64,
    pub(crate) taps: u64,
    /// 0 for none.
    pub(crate) bias: u64,
    pub(crate) rate: u64,
    pub(crate) time_bias: u64,
    pub(crate) skip: u64,
    pub(crate) rows: u64,
    pub(crate) factors: u64,
    pub(crate) out: u64,
    pub(crate) time_limits: [f32; 2],
    pub(crate) num_heads: u32,
    pub(crate) head_size: u32,
    pub(crate) num_groups: u32,
    pub(crate) state_size: u32,
    pub(crate) num_taps: u32,
}

impl Mamba2Parameter {
    /// Launches the convolution and the recurrence of sequences of at most `num_runs` runs of rows.
    pub(crate) fn launch(&self, device: &Device, num_runs: u32) -> Result<(), Error> {
        let num_sequences = self.states.num_sequences;
        let channels = self.num_heads * self.head_size + 2 * self.num_groups * self.state_size;
        let blocks = [(channels + self.num_heads).div_ceil(CONVOLUTION_THREADS), num_runs, num_sequences];
        device.launch("mamba2_convolve", Grid { blocks, threads: CONVOLUTION_THREADS, shared_bytes: 0 }, self)?;
        let blocks = [self.head_size.div_ceil(COLUMNS), self.num_heads, num_sequences];
        let kernel = match self.state_size <= SMALL_MATRIX {
            true if has_many_blocks(device, blocks) => "mamba2_scan_many_128",
            true => "mamba2_scan_128",
            false => "mamba2_scan_256",
        };
        device.launch(kernel, Grid { blocks, threads: MATRIX_THREADS, shared_bytes: 0 }, self)
    }
}

/// `Mamba2Norm` of mamba2.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Mamba2Norm {
    pub(crate) x: u64,
    pub(crate) gate: u64,
    pub(crate) weight: u64,
    pub(crate) cols: u32,
    pub(crate) norm_size: u32,
    pub(crate) eps: f32,
    pub(crate) with_operand: u32,
    pub(crate) operand: Operand,
}

impl Mamba2Norm {
    pub(crate) fn launch(&self, device: &Device, num_rows: usize) -> Result<(), Error> {
        device.launch("mamba2_norm", Grid::linear(num_rows as u32, NORM_THREADS), self)
    }
}
