//! The `Backend` for CPUs: one set of operations, compiled for each instruction set and selected once at start.
//!
//! Activations are f32, weights are repacked when they are loaded, keys and values are f32, f16, bf16 or Q8_0.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod attention;
mod backend;
mod bandwidth;
mod core_affinity;
mod free_memory;
mod idle_prefetch;
mod math;
mod matmul;
mod memory;
mod ops;
mod pool;
mod recurrence;
#[cfg(test)]
mod scalar_tests;
mod shared_slice;
mod simd;
mod sync;

pub use backend::{CpuBackend, CpuOptions, Unusable};
pub use free_memory::free_memory;
pub use simd::Isa;
