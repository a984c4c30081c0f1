//! Launches of `delta_net.cu`.

use pellucid_tensor::Error;

use super::{COLUMNS, MATRIX_THREADS, SMALL_MATRIX, States, has_many_blocks};
use crate::driver::{Device, Grid};
use crate::kernels::Operand;

pub(crate) const KERNELS: &[&str] =
    &["delta_convolve", "delta_scan_128", "delta_scan_many_128", "delta_scan_256", "delta_norm"];

/// `DeltaNet` of delta_net.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct DeltaNetParameter {
    pub(crate) states: States,
    pub(crate) projected: u64,
    pub(crate) beta: u64,
    pub(crate) time_step: u64,
    pub(crate) taps: u64,
    pub(crate) decay: u64,
    pub(crate) time_bias: u64,
    pub(crate) rows: u64,
    pub(crate) factors: u64,
    pub(crate) out: u64,
    pub(crate) num_key_heads: u32,
    pub(crate) num_value_heads: u32,
    pub(crate) key_size: u32,
    pub(crate) value_size: u32,
    pub(crate) num_taps: u32,
    pub(crate) is_tiled: u32,
}

impl DeltaNetParameter {
    /// Launches the convolution and the recurrence of sequences of at most `num_runs` runs of rows.
    pub(crate) fn launch(&self, device: &Device, num_runs: u32) -> Result<(), Error> {
        let num_sequences = self.states.num_sequences;
        let blocks = [self.num_key_heads + self.num_value_heads, num_runs, num_sequences];
        let threads = self.key_size.max(self.value_size).next_multiple_of(32);
        device.launch("delta_convolve", Grid { blocks, threads, shared_bytes: 0 }, self)?;
        let blocks = [self.value_size.div_ceil(COLUMNS), self.num_value_heads, num_sequences];
        let kernel = match self.key_size <= SMALL_MATRIX {
            true if has_many_blocks(device, blocks) => "delta_scan_many_128",
            true => "delta_scan_128",
            false => "delta_scan_256",
        };
        device.launch(kernel, Grid { blocks, threads: MATRIX_THREADS, shared_bytes: 0 }, self)
    }
}

/// `DeltaNorm` of delta_net.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct DeltaNorm {
    pub(crate) x: u64,
    pub(crate) gate: u64,
    pub(crate) weight: u64,
    pub(crate) num_heads: u32,
    pub(crate) size: u32,
    pub(crate) eps: f32,
    pub(crate) with_operand: u32,
    pub(crate) operand: Operand,
}

impl DeltaNorm {
    pub(crate) fn launch(&self, device: &Device, num_rows: usize) -> Result<(), Error> {
        device.launch("delta_norm", Grid::linear(num_rows as u32, (32 * self.num_heads).min(1024)), self)
    }
}
