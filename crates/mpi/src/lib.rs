//! Ranks that are processes started by `mpiexec`: a [`Communicator`](pellucid_tensor::Communicator) over MPI.
//!
//! The library is `libmpi_abi.so.1`, the standard ABI of MPI 5, which MPICH and Intel MPI have: it is opened at run
//! time, and nothing of MPI is needed to build. Fifteen functions are used.
//!
//! - `abi`: the functions, their types and constants, as the standard defines them.
//! - `world`: all processes of a job, and the operations between them, each with a time limit.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod abi;
mod world;

pub use world::{MpiOptions, World};

/// Why MPI cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no MPI library with the standard ABI was found ({}); install one, such as `pip install mpich`, and start \
         the program with its mpiexec",
        tried.join("; ")
    )]
    NoLibrary { tried: Vec<String> },
    #[error("{library}: the function {function} is missing: not an MPI library with the standard ABI of MPI 5")]
    NoFunction { library: String, function: &'static str },
    #[error("{library} has version {found} of the standard ABI; expected {expected}")]
    WrongAbi { library: String, expected: i32, found: i32 },
    #[error("MPI failed in {function}: {reason}")]
    Failed { function: &'static str, reason: String },
    #[error("MPI was opened before: a process is one rank of one job")]
    OpenedTwice,
}
