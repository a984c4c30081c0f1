//! Products with quantized weights: integer arithmetic on 8-bit activations and packed weights.
//!
//! [`panel_layout`] is how weights lie in memory, [`activations`] how rows of x are quantized. [`scalar`] defines the
//! result; every other file computes the same bits with the instructions it is named after.

pub(crate) mod activations;
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(crate) mod file_block;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(crate) mod panel_layout;
pub(super) mod scalar;
