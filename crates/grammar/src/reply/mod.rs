//! The grammar of an answer that may call tools, in the model's own format.
//!
//! The answer is free text, or a text of the client's grammar. Calls follow a grammar that is made of a row of the
//! table of formats ([`CallFormat`]) and the schemas of the tools. While the text is free, every token is allowed and
//! the parser does nothing; [`ReplyConstraint`] only looks for the texts that begin a call. Thoughts before the answer
//! are constrained elsewhere.
//!
//! Read `format.rs` first, then `calls.rs`, `constraint.rs` and `matcher.rs`. `loosen.rs` is about tools that are not
//! `strict`.

mod calls;
mod constraint;
mod format;
mod loosen;
mod marker;
mod matcher;
mod parameters;
mod quoted;

pub(crate) use calls::lark;
pub use calls::{CallSource, CallTool, NotEnforced};
pub(crate) use constraint::Forbidden;
pub use constraint::{CallRules, ReplyConstraint, ReplyRules};
pub use format::{ArgumentSyntax, CallFormat, FORMATS, IdSyntax, Piece};
pub(crate) use loosen::loosen;
pub use parameters::{Parameter, SimpleTypes, ValueKind};
