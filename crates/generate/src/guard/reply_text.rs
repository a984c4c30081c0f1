//! The text of a reply so far, as guards see it that judge whole texts.

use pellucid_engine::{Error, fallible};

use crate::Delta;

/// The beginning of a reply, up to and including the segment to be judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplyText {
    /// Thoughts.
    pub thoughts: String,
    /// The answer.
    pub answer: String,
    /// Name and arguments of each call.
    pub calls: Vec<String>,
    /// Whether the reply ends here.
    pub is_complete: bool,
}

impl ReplyText {
    /// Adds a piece; fails if there is no memory for it.
    pub(super) fn add(&mut self, delta: &Delta) -> Result<(), Error> {
        fallible::append(&mut self.thoughts, &delta.thoughts)?;
        fallible::append(&mut self.answer, &delta.text)?;
        for call in &delta.calls {
            while self.calls.len() <= call.index {
                fallible::push(&mut self.calls, String::new())?;
            }
            let text = &mut self.calls[call.index];
            if let Some(name) = &call.name {
                fallible::append(text, name)?;
                fallible::append(text, " ")?;
            }
            fallible::append(text, &call.arguments)?;
        }
        self.is_complete |= delta.finish.is_some();
        Ok(())
    }

    /// Returns all texts, joined by line breaks.
    pub fn joined(&self) -> String {
        let texts = [self.thoughts.as_str(), self.answer.as_str()];
        let texts = texts.into_iter().chain(self.calls.iter().map(String::as_str));
        texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

/// Characters of a piece that a guard has to judge.
pub(super) fn num_characters(delta: &Delta) -> usize {
    let calls = delta.calls.iter().map(|call| call.name.as_ref().map_or(0, String::len) + call.arguments.len());
    delta.thoughts.chars().count() + delta.text.chars().count() + calls.sum::<usize>()
}
