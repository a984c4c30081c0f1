//! The [`Backend`](pellucid_tensor::Backend) for NVIDIA GPUs, found at run time.
//!
//! Nothing of CUDA is needed to build this crate, and nothing but the driver to use it: kernels are embedded as machine code for the
//! common architectures and as PTX for later ones. Where there is no driver, [`devices`] says so in a sentence; nothing here panics
//! for want of a library. `kernels/` holds each kernel file beside the code that launches it.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod attention;
mod backend;
mod cublas;
mod digest;
mod driver;
mod expert_steps;
mod experts;
mod gpu;
pub mod kernels;
mod memory;
mod module;
mod pinned;
mod probe;
mod products;
mod step;
mod upload;

pub use backend::{CudaBackend, CudaOptions};
pub use probe::{DeviceInfo, Unusable, devices};
