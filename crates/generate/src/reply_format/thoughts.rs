//! Thoughts: the text between two markers at the beginning of a reply.

use super::parts::{PartKind, ReplyPart};

/// The texts before and after a model's thoughts, such as `<think>` and `</think>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThoughtMarkers {
    /// Begins the thoughts.
    pub open: String,
    /// Ends them.
    pub close: String,
}

/// Separates thoughts from the rest of a reply.
#[derive(Debug, Clone)]
pub(super) struct ThoughtSplitter {
    markers: ThoughtMarkers,
    state: State,
    /// Text that may be the beginning of a marker.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space was written: thoughts may begin.
    Start,
    /// White space after the opening marker, which is not part of the thoughts.
    Opened,
    Thought,
    /// White space after the closing marker, which is not part of the answer.
    Closed,
    Answer,
}

impl ThoughtSplitter {
    /// `is_open` says that the prompt ends with the opening marker.
    pub(super) fn new(markers: ThoughtMarkers, is_open: bool) -> ThoughtSplitter {
        let state = if is_open { State::Opened } else { State::Start };
        ThoughtSplitter { markers, state, held: String::new() }
    }

    /// The part to which the text so far belongs.
    pub(super) fn part(&self) -> PartKind {
        if matches!(self.state, State::Opened | State::Thought) { PartKind::Thought } else { PartKind::Answer }
    }

    /// Whether a control token with this text is a marker, or a part of one.
    pub(super) fn is_marker(&self, text: &str) -> bool {
        self.markers.open.contains(text) || self.markers.close.contains(text)
    }

    pub(super) fn num_held(&self) -> usize {
        self.held.len()
    }

    /// Adds text and returns what is decided.
    pub(super) fn push(&mut self, text: &str) -> Vec<ReplyPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the reply and returns what was held back.
    pub(super) fn finish(&mut self) -> Option<ReplyPart> {
        let rest = std::mem::take(&mut self.held);
        let part = match self.state {
            // White space alone is neither a thought nor, behind thoughts, an answer.
            State::Opened | State::Closed => return None,
            State::Thought => ReplyPart::Thought(rest.trim_end().to_owned()),
            State::Start | State::Answer => ReplyPart::Answer(rest),
        };
        Some(part).filter(|part| !matches!(part, ReplyPart::Thought(text) | ReplyPart::Answer(text) if text.is_empty()))
    }

    /// Takes one step over the held text; returns whether another may follow.
    fn advance(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        match self.state {
            State::Start => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(self.markers.open.as_str()) {
                    self.held = rest.to_owned();
                    self.state = State::Opened;
                } else if text.is_empty() || self.markers.open.starts_with(text) {
                    return false;
                } else {
                    self.state = State::Answer;
                }
                true
            }
            State::Opened | State::Closed => {
                self.held = self.held.trim_start().to_owned();
                if self.held.is_empty() {
                    return false;
                }
                self.state = if self.state == State::Opened { State::Thought } else { State::Answer };
                true
            }
            State::Thought => {
                let close = self.markers.close.as_str();
                if let Some(at) = self.held.find(close) {
                    let rest = self.held.split_off(at)[close.len()..].to_owned();
                    let thought = std::mem::replace(&mut self.held, rest);
                    parts.push(ReplyPart::Thought(thought.trim_end().to_owned()));
                    self.state = State::Closed;
                    return true;
                }
                // White space before the closing marker is not part of the thoughts.
                let kept = self.held.len() - longest_beginning(&self.held, close);
                let kept = self.held[..kept].trim_end().len();
                let rest = self.held.split_off(kept);
                let thought = std::mem::replace(&mut self.held, rest);
                if !thought.is_empty() {
                    parts.push(ReplyPart::Thought(thought));
                }
                false
            }
            State::Answer => {
                if !self.held.is_empty() {
                    parts.push(ReplyPart::Answer(std::mem::take(&mut self.held)));
                }
                false
            }
        }
    }
}

/// Returns the length of the longest end of `text` that is a beginning of `marker`, but not all of it.
pub(super) fn longest_beginning(text: &str, marker: &str) -> usize {
    let most = text.len().min(marker.len().saturating_sub(1));
    (1..=most).rev().find(|&len| marker.is_char_boundary(len) && text.ends_with(&marker[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a reply that arrives in pieces of `size` characters into thoughts and answer.
    fn split(reply: &str, is_open: bool, size: usize) -> (String, String) {
        let markers = ThoughtMarkers { open: "<think>".into(), close: "</think>".into() };
        let mut splitter = ThoughtSplitter::new(markers, is_open);
        let characters: Vec<char> = reply.chars().collect();
        let (mut thoughts, mut answer) = (String::new(), String::new());
        let mut take = |part| match part {
            ReplyPart::Thought(text) => thoughts.push_str(&text),
            ReplyPart::Answer(text) => answer.push_str(&text),
            ReplyPart::Call(_) => unreachable!(),
        };
        for piece in characters.chunks(size) {
            splitter.push(&piece.iter().collect::<String>()).into_iter().for_each(&mut take);
        }
        splitter.finish().into_iter().for_each(take);
        (thoughts, answer)
    }

    #[test]
    fn thoughts_are_split_whatever_the_pieces() {
        for (reply, is_open, thoughts, answer) in [
            ("<think>\nWell.\n\nYes é.\n</think>\n\nParis < London.", false, "Well.\n\nYes é.", "Paris < London."),
            ("\n<think></think>Paris.", false, "", "Paris."),
            ("Hm </thin k></think>Paris </think>.", true, "Hm </thin k>", "Paris </think>."),
            ("Paris. <think>no</think>", false, "", "Paris. <think>no</think>"),
            ("<thinking>", false, "", "<thinking>"),
            ("<think>never closed </th", false, "never closed </th", ""),
            ("<thi", false, "", "<thi"),
            ("  ", false, "", "  "),
        ] {
            for size in 1..reply.len() + 1 {
                assert_eq!(split(reply, is_open, size), (thoughts.into(), answer.into()), "{reply:?} by {size}");
            }
        }
    }
}
