//! The launch of `short_convolution.cu`.

use pellucid_tensor::Error;

use super::States;
use crate::driver::{Device, Grid};

pub(crate) const KERNELS: &[&str] = &["short_convolution"];

const THREADS: u32 = 256;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ShortConvolutionParameter {
    pub(crate) states: States,
    pub(crate) projected: u64,
    pub(crate) taps: u64,
    /// 0 for none.
    pub(crate) bias: u64,
    pub(crate) out: u64,
    pub(crate) channels: u32,
    pub(crate) num_taps: u32,
}

impl ShortConvolutionParameter {
    /// Launches the convolution of sequences of at most `num_runs` runs of rows.
    pub(crate) fn launch(&self, device: &Device, num_runs: u32) -> Result<(), Error> {
        let blocks = [self.channels.div_ceil(THREADS), num_runs, self.states.num_sequences];
        device.launch("short_convolution", Grid { blocks, threads: THREADS, shared_bytes: 0 }, self)
    }
}
