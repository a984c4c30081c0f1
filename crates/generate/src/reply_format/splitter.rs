//! Splits the text of a reply into its parts while it grows.

use std::sync::Arc;

use super::parts::{PartKind, ReplyPart};
use super::thoughts::{ThoughtMarkers, ThoughtSplitter};

/// Splits one choice. What it returns for a whole reply does not depend on how the text was cut into pieces.
#[derive(Debug, Clone, Default)]
pub struct ReplySplitter {
    thoughts: Option<ThoughtSplitter>,
    /// Part of the last text that was decided; markers of thoughts count as thoughts.
    part: PartKind,
}

impl ReplySplitter {
    /// Makes the splitter separate thoughts. `is_open` says that the prompt ends with the opening marker.
    pub fn with_thoughts(self, markers: ThoughtMarkers, is_open: bool) -> ReplySplitter {
        ReplySplitter { thoughts: Some(ThoughtSplitter::new(Arc::new(markers), is_open)), ..self }
    }

    /// Adds the text of a token and returns what is decided by it. Text of control tokens is only compared with
    /// markers, never shown.
    pub fn push(&mut self, text: &str, is_control: bool) -> Vec<ReplyPart> {
        let Some(thoughts) = &mut self.thoughts else {
            let shown = !is_control && !text.is_empty();
            return Vec::from_iter(shown.then(|| ReplyPart::Answer(text.to_owned())));
        };
        if is_control && !thoughts.is_marker(text) {
            return Vec::new();
        }
        let parts = thoughts.push(text);
        self.part = thoughts.part();
        parts
    }

    /// Ends the reply and returns what was held back.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let Some(thoughts) = &mut self.thoughts else { return Vec::new() };
        let rest = thoughts.finish();
        self.part = thoughts.part();
        rest.into_iter().collect()
    }

    /// Bytes that are held back because they may belong to a marker.
    pub fn num_held(&self) -> usize {
        self.thoughts.as_ref().map_or(0, ThoughtSplitter::num_held)
    }

    /// The part to which the last text belongs.
    pub fn part(&self) -> PartKind {
        self.part
    }

    /// Calls that were begun.
    pub fn num_calls(&self) -> usize {
        0
    }
}
