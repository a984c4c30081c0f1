//! Parts of a reply: their kinds and their pieces.

/// The kind of a part of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PartKind {
    /// Text for the user.
    #[default]
    Answer,
    /// Text that the model writes for itself before it answers.
    Thought,
    /// A call of a tool.
    Call,
}

/// A piece of a part. Markers between parts belong to none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyPart {
    /// The next text of the answer.
    Answer(String),
    /// The next text of the thoughts.
    Thought(String),
    /// The next piece of a call.
    Call(CallDelta),
}

/// A piece of a call; the pieces of one call have the same index and follow each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Number of the call within the choice, from 0.
    pub index: usize,
    /// Identifies the call in the conversation; set in its first piece. The same request gets the same ids.
    pub id: Option<String>,
    /// Name of the tool; set in the first piece.
    pub name: Option<String>,
    /// The next characters of the arguments, which are a JSON object.
    pub arguments: String,
}
