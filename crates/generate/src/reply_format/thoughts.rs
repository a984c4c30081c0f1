//! Thoughts: the text between two markers at the beginning of a reply.

use std::sync::Arc;

use super::parts::{PartKind, ReplyPart};

/// The texts before and after a model's thoughts, such as `<think>` and `</think>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThoughtMarkers {
    /// Begins the thoughts.
    pub open: String,
    /// Ends them.
    pub close: String,
    /// Present if the answer has markers as well.
    pub channels: Option<Channels>,
    /// White space that the model writes before and after the closing marker.
    pub around_close: (String, String),
}

/// Markers of a format in which every part of a reply has a heading, such as harmony.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channels {
    /// Begins another part after the end of one, before its heading. The prompt ends with it. Empty in some formats.
    pub turn: String,
    /// Headings of text for the user. The first is that of the answer after thoughts.
    pub answers: Vec<String>,
    /// Ends such text, if another part may follow.
    pub answer_end: String,
}

impl ThoughtMarkers {
    /// Returns the markers of a format in which the answer has none.
    pub fn new(open: impl Into<String>, close: impl Into<String>) -> ThoughtMarkers {
        let around_close = ("\n".into(), "\n\n".into());
        ThoughtMarkers { open: open.into(), close: close.into(), channels: None, around_close }
    }

    /// Whether a prompt that ends with this text has begun the thoughts, so that the reply continues them.
    pub fn is_opened_by(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open.trim_end())
    }

    /// Whether a prompt that ends with this text has ended the thoughts, so that the reply is the answer.
    pub fn is_closed_by(&self, prompt: &str) -> bool {
        !self.needs_heading() && prompt.trim_end().ends_with(self.close.trim_end())
    }

    /// Returns the text with which thoughts are ended early, up to the beginning of the answer.
    pub fn closing_text(&self) -> String {
        match self.answer_heading() {
            Some(heading) => format!("{}{heading}", self.close),
            None => format!("{}{}{}", self.around_close.0, self.close, self.around_close.1),
        }
    }

    /// Returns the markers up to the heading of the part behind the thoughts, whichever part that is.
    pub fn without_headings(&self) -> ThoughtMarkers {
        let turn = self.channels.as_ref().map_or("", |channels| channels.turn.as_str());
        let close = format!("{}{turn}", self.close);
        ThoughtMarkers { open: self.open.clone(), close, channels: None, around_close: Default::default() }
    }

    /// Whether an answer cannot begin without a heading.
    pub(super) fn needs_heading(&self) -> bool {
        self.channels.as_ref().is_some_and(|channels| !channels.turn.is_empty())
    }

    /// Returns the text between the closing marker and the answer, if the format requires one.
    pub fn answer_heading(&self) -> Option<String> {
        let channels = self.channels.as_ref().filter(|_| self.needs_heading())?;
        Some(format!("{}{}", channels.turn, channels.answers[0]))
    }

    /// Returns every marker.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let channels = self.channels.iter();
        let more = channels.flat_map(|channels| channels.answers.iter().chain([&channels.turn, &channels.answer_end]));
        [&self.open, &self.close].into_iter().chain(more).map(String::as_str)
    }
}

/// Separates thoughts from the rest of a reply.
#[derive(Debug, Clone)]
pub(super) struct ThoughtSplitter {
    markers: Arc<ThoughtMarkers>,
    state: State,
    /// Text that may be the beginning of a marker.
    held: String,
    /// Part of the last byte that was decided. Markers count as thoughts.
    part: PartKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space was written: thoughts may begin.
    Start,
    /// White space after the opening marker, which is not part of the thoughts.
    Opened,
    Thought,
    /// Behind the closing marker: white space that is not part of the answer, or another marker.
    Closed,
    Answer,
    /// An answer with a heading, which may end before the reply does.
    HeadedAnswer,
}

/// The part in which a reply is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ThoughtState {
    /// Thoughts may begin, or the answer.
    Start,
    Thought,
    /// Behind the thoughts, before the answer.
    Closed,
    Answer,
}

/// Result of comparing text with a list of markers.
enum Heading {
    /// The text may become a marker.
    Undecided,
    /// The text begins with the opening marker, or with the heading of an answer; the bytes behind it.
    Thought(usize),
    Answer(usize),
    /// The text begins with no marker; the bytes behind the beginning of a part, which are all bytes without one.
    None(usize),
}

impl ThoughtSplitter {
    /// `is_open` says that the prompt ends with the opening marker.
    pub(super) fn new(markers: Arc<ThoughtMarkers>, is_open: bool) -> ThoughtSplitter {
        let (state, part) = if is_open { (State::Opened, PartKind::Thought) } else { (State::Start, PartKind::Answer) };
        ThoughtSplitter { markers, state, held: String::new(), part }
    }

    /// The part to which the last decided text belongs. Markers, and white space around thoughts, count as thoughts.
    pub(super) fn part(&self) -> PartKind {
        self.part
    }

    /// Returns the part in which the reply is.
    pub(super) fn state(&self) -> ThoughtState {
        match self.state {
            State::Start => ThoughtState::Start,
            State::Opened | State::Thought => ThoughtState::Thought,
            State::Closed => ThoughtState::Closed,
            State::Answer | State::HeadedAnswer => ThoughtState::Answer,
        }
    }

    /// Returns the text that is not decided yet.
    pub(super) fn held(&self) -> &str {
        &self.held
    }

    /// Bytes of the closing marker at the end of the thoughts so far.
    pub(super) fn num_marker_held(&self) -> usize {
        longest_beginning(&self.held, &self.markers.close)
    }

    /// Whether a control token with this text is a marker, or a part of one.
    pub(super) fn is_marker(&self, text: &str) -> bool {
        self.markers.texts().any(|marker| marker.contains(text))
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
        let is_headed = self.markers.channels.is_some();
        match self.state {
            // White space alone is neither a thought nor, behind thoughts, an answer.
            State::Opened => None,
            // The beginning of a heading is text of the format, not of the reply.
            State::Start | State::Closed if is_headed && !rest.trim().is_empty() => None,
            State::Closed => self.answer(rest.trim_start().to_owned()),
            State::Thought => self.thought(rest.trim_end().to_owned()),
            State::Start | State::Answer | State::HeadedAnswer => self.answer(rest),
        }
    }

    /// Takes one step over the held text; returns whether another may follow.
    fn advance(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        match self.state {
            State::Start | State::Closed => self.read_heading(),
            State::Opened => {
                self.remove_white_space();
                if !self.held.is_empty() {
                    self.state = State::Thought;
                }
                !self.held.is_empty()
            }
            State::Thought => {
                let markers = self.markers.clone();
                let close = markers.close.as_str();
                if let Some(at) = self.held.find(close) {
                    let thought = self.take(at, close.len());
                    parts.extend(self.thought(thought.trim_end().to_owned()));
                    (self.state, self.part) = (State::Closed, PartKind::Thought);
                    return true;
                }
                // White space before the closing marker is not part of the thoughts.
                let kept = self.held.len() - longest_beginning(&self.held, close);
                let kept = self.held[..kept].trim_end().len();
                let thought = self.take(kept, 0);
                parts.extend(self.thought(thought));
                false
            }
            State::Answer => {
                let answer = std::mem::take(&mut self.held);
                parts.extend(self.answer(answer));
                false
            }
            State::HeadedAnswer => {
                let markers = self.markers.clone();
                let end = markers.channels.as_ref().map_or("", |channels| channels.answer_end.as_str());
                let (kept, num_marker) = match self.held.find(end) {
                    Some(at) => (at, end.len()),
                    None => (self.held.len() - longest_beginning(&self.held, end), 0),
                };
                let answer = self.take(kept, num_marker);
                parts.extend(self.answer(answer));
                if num_marker > 0 {
                    (self.state, self.part) = (State::Closed, PartKind::Thought);
                }
                num_marker > 0
            }
        }
    }

    /// Takes one step where a part may begin.
    fn read_heading(&mut self) -> bool {
        if self.state == State::Closed {
            self.remove_white_space();
        }
        let (state, num_marker) = match self.heading() {
            Heading::Undecided => return false,
            Heading::Thought(num_bytes) => (State::Opened, num_bytes),
            Heading::Answer(num_bytes) => (State::HeadedAnswer, num_bytes),
            Heading::None(num_bytes) => (State::Answer, num_bytes),
        };
        if num_marker > 0 {
            self.take(0, num_marker);
            self.part = PartKind::Thought;
        }
        self.state = state;
        true
    }

    /// Compares the held text with the markers that may begin a part.
    fn heading(&self) -> Heading {
        let text = self.held.trim_start();
        let channels = self.markers.channels.as_ref();
        let turn = channels.map_or("", |channels| channels.turn.as_str());
        if text.is_empty() || (text.len() < turn.len() && turn.starts_with(text)) {
            return Heading::Undecided;
        }
        let has_turn = !turn.is_empty() && text.starts_with(turn);
        let text = if has_turn { text[turn.len()..].trim_start() } else { text };
        let num_before = self.held.len() - text.len();
        let is_heading = |marker: &str| text.starts_with(marker.trim_start());
        let is_beginning = |marker: &str| marker.trim_start().starts_with(text);
        let mut answers = channels.into_iter().flat_map(|channels| &channels.answers);
        if is_heading(&self.markers.open) {
            Heading::Thought(num_before + self.markers.open.trim_start().len())
        } else if let Some(answer) = answers.clone().find(|answer| is_heading(answer)) {
            Heading::Answer(num_before + answer.trim_start().len())
        } else if is_beginning(&self.markers.open) || answers.any(|answer| is_beginning(answer)) {
            Heading::Undecided
        } else {
            Heading::None(if has_turn { num_before } else { 0 })
        }
    }

    /// Removes `num_text` bytes and the `num_marker` bytes behind them from the held text, and returns the former.
    fn take(&mut self, num_text: usize, num_marker: usize) -> String {
        let rest = self.held.split_off(num_text)[num_marker..].to_owned();
        std::mem::replace(&mut self.held, rest)
    }

    fn remove_white_space(&mut self) {
        let num_bytes = self.held.len() - self.held.trim_start().len();
        if num_bytes > 0 {
            self.take(0, num_bytes);
            self.part = PartKind::Thought;
        }
    }

    fn thought(&mut self, text: String) -> Option<ReplyPart> {
        let part = Some(text).filter(|text| !text.is_empty())?;
        self.part = PartKind::Thought;
        Some(ReplyPart::Thought(part))
    }

    fn answer(&mut self, text: String) -> Option<ReplyPart> {
        let part = Some(text).filter(|text| !text.is_empty())?;
        self.part = PartKind::Answer;
        Some(ReplyPart::Answer(part))
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
    fn split(markers: &ThoughtMarkers, reply: &str, is_open: bool, size: usize) -> (String, String) {
        let mut splitter = ThoughtSplitter::new(Arc::new(markers.clone()), is_open);
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

    fn check(markers: &ThoughtMarkers, cases: &[(&str, bool, &str, &str)]) {
        for &(reply, is_open, thoughts, answer) in cases {
            for size in 1..reply.len() + 1 {
                let parts = split(markers, reply, is_open, size);
                assert_eq!(parts, (thoughts.into(), answer.into()), "{reply:?} by {size}");
            }
        }
    }

    #[test]
    fn thoughts_are_split_whatever_the_pieces() {
        let markers = ThoughtMarkers::new("<think>", "</think>");
        check(
            &markers,
            &[
                ("<think>\nWell.\n\nYes é.\n</think>\n\nParis < London.", false, "Well.\n\nYes é.", "Paris < London."),
                ("\n<think></think>Paris.", false, "", "Paris."),
                ("Hm </thin k></think>Paris </think>.", true, "Hm </thin k>", "Paris </think>."),
                ("Paris. <think>no</think>", false, "", "Paris. <think>no</think>"),
                ("<think>a</think>\n<think>b</think> c", false, "ab", "c"),
                ("<thinking>", false, "", "<thinking>"),
                ("<think>never closed </th", false, "never closed </th", ""),
                ("<think>a</think>\n<th", false, "a", "<th"),
                ("<thi", false, "", "<thi"),
                ("  ", false, "", "  "),
            ],
        );
    }

    #[test]
    fn channels_are_split_whatever_the_pieces() {
        let channels = Channels {
            turn: "<|start|>assistant".into(),
            answers: vec!["<|channel|>final<|message|>".into(), "<|channel|>commentary<|message|>".into()],
            answer_end: "<|end|>".into(),
        };
        let open = "<|channel|>analysis<|message|>";
        let markers = ThoughtMarkers { channels: Some(channels), ..ThoughtMarkers::new(open, "<|end|>") };
        let thought = "<|channel|>analysis<|message|>Hm <|en|>.<|end|>";
        let again = "<|start|>assistant<|channel|>analysis<|message|> So.<|end|>";
        let answer = "<|start|>assistant<|channel|>final<|message|>Paris.";
        check(
            &markers,
            &[
                (&format!("{thought}{answer}"), false, "Hm <|en|>.", "Paris."),
                (&format!("{thought}{again}{answer}"), false, "Hm <|en|>.So.", "Paris."),
                ("<|channel|>final<|message|>Paris.", false, "", "Paris."),
                (&format!("<|channel|>commentary<|message|>One. <|end|>{again}{answer}"), false, "So.", "One. Paris."),
                (&format!("{thought}<|start|>assi"), false, "Hm <|en|>.", ""),
                (&format!("{thought}<|start|>assistant to=f"), false, "Hm <|en|>.", "to=f"),
                ("Paris.", false, "", "Paris."),
                ("<|channel|>fin", false, "", ""),
            ],
        );
        assert_eq!(markers.closing_text(), format!("<|end|>{}", answer.trim_end_matches("Paris.")));
        assert!(!markers.is_opened_by("<|start|>assistant"));
    }

    #[test]
    fn answers_with_tags_lose_them_behind_thoughts() {
        let channels =
            Channels { turn: String::new(), answers: vec!["<response>".into()], answer_end: "</response>".into() };
        let markers = ThoughtMarkers { channels: Some(channels), ..ThoughtMarkers::new("<think>", "</think>") };
        check(
            &markers,
            &[
                ("<think>a</think> <response>b</response>", false, "a", "b"),
                ("b </response> c", false, "", "b </response> c"),
                ("<think>a</think> b", false, "a", "b"),
            ],
        );
    }
}
