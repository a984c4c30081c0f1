//! The engine on the CPU: batch invariance, failures that end only their own requests, limits, and fairness between
//! tenants.

mod batch_invariance;
mod constraints;
mod devices;
mod draft_model;
mod failures;
mod look_ahead;
mod loop_guard;
mod memory_shares;
mod ranks;
mod requests;
mod speculation;
mod support;
mod windows;
