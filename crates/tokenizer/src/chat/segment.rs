//! A piece of rendered text with its origin. Chat templates produce segments; the tokenizer encodes them.

/// Rendered text from one origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub text: String,
    /// Whether the template or the operator wrote it. Control tokens are recognized in trusted text and nowhere else.
    pub trusted: bool,
}

impl Segment {
    /// Returns a segment of text that the template or the operator wrote.
    pub fn trusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: true }
    }

    /// Returns a segment of text from a request.
    pub fn untrusted(text: impl Into<String>) -> Segment {
        Segment { text: text.into(), trusted: false }
    }
}
