//! The [`Backend`](pellucid_tensor::Backend) for NVIDIA GPUs, found at run time.
//!
//! Building this crate needs nothing of CUDA, and using it needs only the driver: kernels are embedded as machine code
//! for the common architectures and as PTX for later ones. Without a driver [`devices`] returns an error; a missing
//! library never causes a panic.
//!
//! `backend.rs` implements the operations by the files beside it; `kernels/` holds each kernel file beside the code
//! that launches it.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod attention;
mod backend;
mod cublas;
mod digest;
mod driver;
mod experts;
mod gpu;
pub mod kernels;
mod memory;
mod module;
mod pinned;
mod probe;
mod products;
mod recurrence;
mod step;
mod upload;

pub use backend::{CudaBackend, CudaOptions};
pub use probe::{DeviceInfo, Unusable, devices};
