//! The parts of a chat reply: thoughts, the answer, and calls of tools, as the model's own format separates them.
//!
//! A format is known by its markers, which are texts such as `</think>`. They are found in the decoded text, that of
//! control tokens included, so it makes no difference with which tokens a model spells them.

mod calling;
mod calls;
mod marker_tokens;
mod parts;
mod plan;
mod splitter;
mod thinking;
mod thought_constraint;
mod thought_formats;
mod thoughts;
mod tools;

pub use calling::Calling;
pub use marker_tokens::MarkerTokens;
pub use parts::{CallDelta, PartKind, ReplyPart};
pub use plan::ReplyPlan;
pub use splitter::ReplySplitter;
pub use thinking::{REASONING_EFFORTS, ThinkingError, ThinkingSettings};
pub use thought_constraint::ThoughtConstraint;
pub use thoughts::{Channels, ThoughtMarkers};
pub use tools::{MAX_TOOL_NAME, MAX_TOOLS, Tool, ToolChoice, ToolError, ToolRules};
