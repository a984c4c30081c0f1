//! Requests to tokens: ids in, ids out. Text lives in `tokenizer` and in the program; devices are chosen by the program.
//!
//! A [`Session`] serves one sequence at a time. The loop that serves many at once will take its place behind the same request.

mod error;
pub mod kv_cache;
mod request;
mod session;
mod stats;

pub use error::Error;
pub use request::{FinishReason, Request};
pub use session::{Event, Reply, Session};
pub use stats::Stats;
