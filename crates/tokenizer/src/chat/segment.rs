//! A stretch of rendered text with its origin; chat templates make these, the tokenizer encodes them.

/// Text from one origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub text: String,
    /// Written by the template or the operator. Control tokens are read in trusted text and nowhere else.
    pub trusted: bool,
}

impl Segment {
    pub fn trusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: true }
    }

    pub fn untrusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: false }
    }
}
