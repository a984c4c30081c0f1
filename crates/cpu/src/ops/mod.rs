//! The operations of a transformer on host slices. Each file holds the formula once; [`crate::simd`] makes it fast.

pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod norm;
pub(crate) mod rope;
