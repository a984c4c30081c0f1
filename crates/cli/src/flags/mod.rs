//! Flags of the command line that several commands share, and their meaning.

pub(crate) mod compute;
