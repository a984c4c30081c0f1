//! Layers with a recurrence: each task computes some channels or heads of one sequence, row after row.
//!
//! A task loads its part of the state into a buffer, advances it by every row, and stores it where the step asks for
//! it. Tasks share no value, and a row is computed from the state before it alone, so that neither threads nor chunks
//! have an influence on the result.

mod delta_net;
mod mamba2;
mod short_convolution;

pub(crate) use delta_net::delta_net;
pub(crate) use mamba2::mamba2;
pub(crate) use short_convolution::short_convolution;
