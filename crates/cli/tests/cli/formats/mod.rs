//! The form of replies through the built program: grammars, and thoughts apart from answers.

mod structured_output;
mod thinking;
