//! Replies that the server shapes while they are generated: drafts, guards, grammars, thoughts and calls.

mod drafted_replies;
mod guard;
mod structured_output;
mod thinking;
mod tools;
