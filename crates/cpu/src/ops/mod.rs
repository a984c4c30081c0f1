//! The operations of a transformer on slices. Each file holds the formula once; [`crate::simd`] compiles it for each
//! instruction set.

pub(crate) mod convolution;
pub(crate) mod delta_net;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod mamba2;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod short_convolution;
