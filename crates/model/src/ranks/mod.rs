//! Several ranks that compute one model, each its share of the rows of every weight.
//!
//! The law: ranks share out rows of results, never parts of a sum. A product is cut along its outputs, its parts are
//! gathered, and nothing is reduced. Every value is computed by one rank with the arithmetic of a single one, so any
//! number of ranks gives the same bits.
//!
//! - [`cut`], [`shares`] and [`sharing`]: who computes what.
//! - [`exchange`]: gathers, and the products and norms around them. Mixers and `mlp.rs` call [`project`].
//! - [`message`] and [`follow`]: rank 0 announces each step, and the others follow it. Only rank 0 has an engine.
//! - [`group`]: loads a rank, or all ranks that are threads of one process.
//! - [`identity`]: ranks that would not give the same bits are refused before any weight is loaded.

mod cut;
mod exchange;
mod follow;
mod group;
mod identity;
mod message;
mod shares;
mod sharing;

pub use exchange::GatherStats;
pub(crate) use exchange::{Ranks, project};
pub use group::GroupMember;
pub use identity::RankIdentity;
pub(crate) use shares::WeightRows;
pub(crate) use sharing::{Columns, Sharing};
