//! [`Communicator`]: what ranks need of each other.
//!
//! Ranks are processes, or groups of threads, that compute one model together. They share out rows of results, never
//! parts of a sum: a product is cut along its outputs, and its parts are gathered. Nothing is ever reduced, so a
//! communicator moves bytes and does no arithmetic, and the number of ranks changes no bit of a result.
//!
//! All ranks call the same operations in the same order. A rank that fails or leaves ends the work of all: every
//! operation then fails with [`Error::Lost`], and stays so.

mod in_process;

pub use in_process::InProcess;

use std::fmt;

use crate::Error;

/// Duration for which a rank waits for the others in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Until the communicator's time limit: the others take part in the same step.
    Step,
    /// Without a limit: the other side may have nothing to do.
    Idle,
}

/// The connection of one rank with all others.
pub trait Communicator: Send + fmt::Debug {
    /// Returns the number of this rank, from 0 on.
    fn rank(&self) -> usize;

    fn num_ranks(&self) -> usize;

    /// Joins the parts of all ranks in ascending order of their numbers, on every rank. `part` is that of this rank;
    /// `lens` has the number of bytes of each, and `all` their sum.
    fn all_gather(&mut self, part: &[u8], lens: &[usize], all: &mut [u8]) -> Result<(), Error>;

    /// Copies the bytes of rank 0 to every other rank, which passes a slice of the same length.
    fn broadcast(&mut self, bytes: &mut [u8], patience: Patience) -> Result<(), Error>;

    /// Returns when every rank has called it.
    fn barrier(&mut self, patience: Patience) -> Result<(), Error>;

    /// Ends the work of all ranks: their operations fail with `reason`.
    fn abort(&mut self, reason: &str);
}

/// Panics unless the lengths fit the parts: a mistake of the caller.
pub(crate) fn check_lens(rank: usize, part: &[u8], lens: &[usize], all: &[u8]) {
    assert_eq!(lens[rank], part.len(), "the length of this rank's part");
    assert_eq!(lens.iter().sum::<usize>(), all.len(), "the length of all parts");
}
