//! The form of replies through the built program: grammars, and thoughts apart from answers, calls of tools.

mod structured_output;
mod thinking;
mod tools;
