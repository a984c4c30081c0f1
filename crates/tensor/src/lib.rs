//! What numbers are: the formats, the quantized block layouts, tensors, and the operations that a device offers.
//!
//! This crate depends on no other room. Devices (`cpu`) implement [`Backend`]; `model` calls it.

mod bytes;
mod dtype;
pub mod quant;

pub use bytes::SharedBytes;
pub use dtype::DType;
