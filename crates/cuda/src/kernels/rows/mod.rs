//! Kernels that work on each row: embedding, norms, activations, routing, digests of logits.

pub(crate) mod cublas_input;
pub(crate) mod digest;
pub(crate) mod elementwise;
pub(crate) mod norm;
pub(crate) mod route_experts;
