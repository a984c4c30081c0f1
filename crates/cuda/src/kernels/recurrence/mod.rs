//! Layers with a recurrence. The files share `states.cu`, which is put before each of them.

pub(crate) mod delta_net;
pub(crate) mod mamba2;
pub(crate) mod short_convolution;

use crate::driver::Device;

/// `States` of states.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct States {
    pub(crate) spans: u64,
    pub(crate) memory: u64,
    pub(crate) state_len: u64,
    pub(crate) num_sequences: u32,
}

/// Maximum taps of a convolution: `MAX_TAPS` of states.cu.
pub(crate) const MAX_TAPS: usize = 8;
/// Maximum rows and columns of the matrix of a head. `HEAD_VALUES` of delta_net.cu depends on it.
pub(crate) const MAX_MATRIX: usize = 256;
/// Columns of a matrix that a block takes: `COLUMNS` of states.cu.
const COLUMNS: u32 = 32;
const MATRIX_THREADS: u32 = 128;
/// Rows of a matrix up to which the smaller kernels serve.
const SMALL_MATRIX: u32 = 128;

/// Whether a multiprocessor has more blocks of a recurrence than the kernels for few blocks leave room for.
fn has_many_blocks(device: &Device, blocks: [u32; 3]) -> bool {
    blocks.iter().product::<u32>() > 2 * device.num_multiprocessors()
}

/// Rows of a sequence that one thread of a convolution computes: `CONVOLVED_RUN` of states.cu.
pub(crate) const CONVOLVED_RUN: usize = 16;
