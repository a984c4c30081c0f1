//! Flags about what a reply may be and where it ends; `run` and `explain` share them.

pub(crate) mod grammar;
pub(crate) mod stop;
pub(crate) mod thinking;
pub(crate) mod tools;
