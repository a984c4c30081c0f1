//! The draft model alone: its proposals are those of decoding with it, whatever was rejected before, and nothing that
//! it does wrong goes further than an empty draft.

mod catch_up;
mod chained;
mod hostile;
mod proposals;
mod support;
