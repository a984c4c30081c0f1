//! Development only: tiny models, a fake model, and CPU backends for the tests of several crates. Nothing here is
//! shipped; the suites and goldens that `pellucid selftest` carries are in the crate `selftest`.

#![forbid(unsafe_code)]

mod automaton;
mod cpu;
pub mod cpu_products;
mod fake_model;
mod invariance_cases;
mod tiny_model;
mod virtual_clock;

pub use automaton::{Automaton, AutomatonState};
pub use cpu::{cpu, exact_isa};
pub use fake_model::{FakeModel, FakeSlots};
pub use invariance_cases::{InvarianceCase, invariance_cases};
pub use tiny_model::{TINY_TEMPLATE, TinyModel, tiny_model};
pub use virtual_clock::{Machine, VirtualClock};
