//! The suites. Each compares a backend, or a model on it, with a formula, with the reference implementation, or with
//! itself to the bit.

pub mod batch_invariance;
pub(crate) mod chained_drafts;
pub mod digests;
pub mod fused_operations;
mod harness;
pub mod look_ahead;
pub(crate) mod models;
pub mod operations;
pub mod predictors;
mod random_data;
pub mod residual_stream;
pub mod speculation;
mod tolerance;

pub use random_data::RandomData;
