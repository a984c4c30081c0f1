//! The operations of a transformer on slices. Each file holds the formula once; [`crate::simd`] compiles it for each
//! instruction set.

pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod norm;
pub(crate) mod rope;
