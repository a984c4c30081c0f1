//! Splits the text of a reply into its parts while it grows.

use std::sync::Arc;

use super::calls::{CallSplitter, CallText};
use super::parts::{PartKind, ReplyPart};
use super::thoughts::{ThoughtMarkers, ThoughtSplitter};

/// Splits one choice. What it returns for a whole reply does not depend on how the text was cut into pieces.
#[derive(Debug, Clone, Default)]
pub struct ReplySplitter {
    thoughts: Option<ThoughtSplitter>,
    calls: Option<CallSplitter>,
    /// Part of the last text that was decided; markers of thoughts count as thoughts.
    part: PartKind,
}

impl ReplySplitter {
    /// Makes the splitter separate thoughts. `is_open` says that the prompt ends with the opening marker.
    pub fn with_thoughts(self, markers: ThoughtMarkers, is_open: bool) -> ReplySplitter {
        ReplySplitter { thoughts: Some(ThoughtSplitter::new(Arc::new(markers), is_open)), ..self }
    }

    /// Makes the splitter separate calls of tools.
    pub(super) fn with_calls(self, calls: Arc<CallText>) -> ReplySplitter {
        ReplySplitter { calls: Some(CallSplitter::new(calls)), ..self }
    }

    /// Whether the splitter separates calls of tools.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// Sets the number of the choice, which is part of the ids of its calls.
    pub(crate) fn set_choice(&mut self, choice: usize) {
        if let Some(calls) = &mut self.calls {
            calls.set_choice(choice);
        }
    }

    /// Adds the text of a token and returns what is decided by it. Text of control tokens is only compared with
    /// markers, never shown.
    pub fn push(&mut self, text: &str, is_control: bool) -> Vec<ReplyPart> {
        let of_thoughts = self.thoughts.as_ref().is_some_and(|thoughts| thoughts.is_marker(text));
        let of_calls = self.calls.as_ref().is_some_and(|calls| calls.is_marker(text));
        if is_control && !of_thoughts && !of_calls {
            return Vec::new();
        }
        let parts = match &mut self.thoughts {
            Some(thoughts) => {
                let parts = thoughts.push(text);
                self.part = thoughts.part();
                parts
            }
            None => Vec::from_iter((!text.is_empty()).then(|| ReplyPart::Answer(text.to_owned()))),
        };
        self.split_calls(parts)
    }

    /// Ends the reply and returns what was held back.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let rest = self.thoughts.as_mut().and_then(ThoughtSplitter::finish);
        if let Some(thoughts) = &self.thoughts {
            self.part = thoughts.part();
        }
        let mut parts = self.split_calls(rest.into_iter().collect());
        parts.extend(self.calls.as_mut().and_then(CallSplitter::finish));
        parts
    }

    /// Bytes that are held back because they may belong to a marker.
    pub fn num_held(&self) -> usize {
        let of_thoughts = self.thoughts.as_ref().map_or(0, ThoughtSplitter::num_held);
        of_thoughts + self.calls.as_ref().map_or(0, CallSplitter::num_held)
    }

    /// The part to which the last text belongs.
    pub fn part(&self) -> PartKind {
        self.part
    }

    /// Calls that were begun.
    pub fn num_calls(&self) -> usize {
        self.calls.as_ref().map_or(0, CallSplitter::num_calls)
    }

    /// Separates the calls in the text of the answer.
    fn split_calls(&mut self, parts: Vec<ReplyPart>) -> Vec<ReplyPart> {
        let Some(calls) = &mut self.calls else { return parts };
        let mut split = Vec::new();
        for part in parts {
            match part {
                ReplyPart::Answer(text) => split.extend(calls.push(&text)),
                other => split.push(other),
            }
        }
        if self.part == PartKind::Answer && calls.is_call() {
            self.part = PartKind::Call;
        }
        split
    }
}
