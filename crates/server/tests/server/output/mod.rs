//! Replies that the server shapes while they are generated: drafts, guards, grammars, thoughts, calls and ids.

mod drafted_replies;
mod guard;
mod structured_output;
mod thinking;
mod token_ids;
mod tools;
