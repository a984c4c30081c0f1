//! Guards: filters that judge prompts before the model sees them, and replies before anybody else does.
//!
//! A [`Guard`] passes or blocks. [`Guards`] is the list of a loaded model with the rule for guards that fail;
//! `GuardedChoice` holds the pieces of one reply back until every guard has passed them. Blocked text, its tokens and
//! its traces never leave this crate. `patterns` is a guard that compares text with regular expressions, `model_guard`
//! one that asks another model.
//!
//! Guards see text behind stop strings and the separation of thoughts and calls, so they judge what a client would
//! read. The engine sends tokens only after it has verified them, so no guard sees a draft.

mod guarded_choice;
mod guards;
mod model_guard;
mod patterns;
mod prompt_text;
mod reply_text;
mod threads;

use std::fmt;

pub use guarded_choice::SEGMENT_CHARACTERS;
pub(crate) use guarded_choice::{GuardedChoice, Piece};
pub use guards::{GuardCount, Guards, JudgedPrompt, Judging, OnGuardError, Refusal, TokenVerdict, VerdictKind};
pub use model_guard::{ModelGuard, VerdictFormat};
pub use patterns::{MAX_MATCH_BYTES, PatternError, PatternGuard};
pub use prompt_text::{PromptText, Turn};
pub use reply_text::ReplyText;

/// Judges prompts and replies.
pub trait Guard: Send + Sync + fmt::Debug {
    /// Name in logs, metrics and reports, such as `patterns`.
    fn name(&self) -> &'static str;

    /// Judges a prompt. May block; it is called neither on the engine's thread nor in an async task.
    fn judge_prompt(&self, prompt: &PromptText) -> Result<Verdict, GuardError>;

    /// Judges a reply so far, of which everything up to the last [`SEGMENT_CHARACTERS`] characters has passed before.
    /// May block; it is called neither on the engine's thread nor in an async task.
    fn judge_reply(&self, prompt: &PromptText, reply: &ReplyText) -> Result<Verdict, GuardError>;

    /// Returns a scanner that judges a reply piece by piece, instead of [`Guard::judge_reply`], if the guard is fast
    /// enough to judge every token.
    fn scanner(&self) -> Option<Box<dyn ReplyScanner>> {
        None
    }
}

/// Judges one reply while it grows. The result must not depend on how the text is cut into pieces.
pub trait ReplyScanner: Send + Sync + fmt::Debug {
    /// Adds the text of piece number `piece` that belongs to `passage`. Numbers never decrease.
    fn push(&mut self, piece: usize, passage: Passage, text: &str) -> Scan;

    /// Ends the reply.
    fn finish(&mut self) -> Scan;
}

/// A text of a reply that a client reads by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// All thoughts, joined.
    Thoughts,
    /// The whole answer, joined.
    Answer,
    /// Name and arguments of the call with this number.
    Call(usize),
}

/// The state of a reply that is being judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scan {
    /// Pieces before this number have passed; later ones are held back.
    Passed(usize),
    /// The reply is blocked.
    Blocked {
        /// Number of the first piece that must not be shown.
        from: usize,
        /// The rule that blocked it, in words for the operator.
        rule: String,
    },
}

/// A guard's decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The text may be used.
    Pass,
    /// The text is blocked by this rule, in words for the operator.
    Block(String),
}

/// A guard could not decide.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GuardError(pub String);
