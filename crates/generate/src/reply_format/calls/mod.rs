//! Calls of tools in the text of an answer: separates them and turns their arguments into JSON, while the text grows.
//!
//! The splitter follows the row of the format that the grammar of the reply was made from. Text before a trigger is
//! answer; everything from the trigger on is calls, because the grammar allows nothing else there. Only a reply that
//! was cut off ends in the middle of a call.

mod arguments;

use std::sync::Arc;

use pellucid_grammar::{ArgumentSyntax, CallFormat, CallTool, Error, IdSyntax, Parameter, Piece};

use super::parts::{CallDelta, ReplyPart};
use super::thoughts::longest_beginning;
use arguments::Converter;

/// Everything that splitters of one request share.
#[derive(Debug, Clone)]
pub(super) struct CallText {
    format: &'static CallFormat,
    /// Texts of which one begins a call.
    triggers: Vec<String>,
    /// Text that precedes every answer and is not part of it.
    answer_open: Option<String>,
    /// Parameters of each tool, for formats that write each argument by itself.
    tools: Vec<(String, Vec<Parameter>)>,
    /// Distinguishes the ids of this reply from those of others in the conversation.
    seed: u64,
}

impl CallText {
    pub(super) fn new(
        format: &'static CallFormat,
        tools: &[CallTool],
        answer_open: Option<String>,
    ) -> Result<CallText, Error> {
        let triggers = format.triggers(tools.iter().map(|tool| tool.name.as_str()));
        let tools = match format.arguments {
            ArgumentSyntax::Parameters(_) => tools
                .iter()
                .map(|tool| Ok((tool.name.clone(), tool.parameters()?)))
                .collect::<Result<Vec<(String, Vec<Parameter>)>, Error>>()?,
            _ => Vec::new(),
        };
        Ok(CallText { format, triggers, answer_open, tools, seed: 0 })
    }

    /// Sets the seed of the ids of calls.
    pub(super) fn with_seed(self, seed: u64) -> CallText {
        CallText { seed, ..self }
    }

    /// Returns the texts of which one begins a call.
    pub(super) fn triggers(&self) -> &[String] {
        &self.triggers
    }

    fn parameters(&self, name: &str) -> &[Parameter] {
        self.tools.iter().find(|(other, _)| other == name).map_or(&[], |(_, parameters)| parameters)
    }
}

/// Separates calls from the answer of one choice.
#[derive(Debug, Clone)]
pub(super) struct CallSplitter {
    shared: Arc<CallText>,
    choice: usize,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// Number of calls whose name is known, and the name of the last.
    num_calls: usize,
    name: String,
}

#[derive(Debug, Clone)]
enum State {
    /// Nothing was written but white space or a part of the answer's heading.
    Heading,
    /// An answer; `true` while it has nothing but white space.
    Answer(bool),
    /// The text before the first call.
    Open,
    /// A piece of a call, with its index.
    Call(usize),
    /// The arguments of a call; the index of the piece behind them.
    Arguments(usize, Box<Converter>),
    /// Behind a call.
    Between,
    /// Behind the text between two calls: white space.
    Separated,
    /// Behind the last call, or in text that does not follow the format.
    End,
}

impl CallSplitter {
    pub(super) fn new(shared: Arc<CallText>) -> CallSplitter {
        let state = if shared.answer_open.is_some() { State::Heading } else { State::Answer(true) };
        CallSplitter { shared, choice: 0, state, held: String::new(), num_calls: 0, name: String::new() }
    }

    /// Sets the number of the choice, which is part of the ids of its calls.
    pub(super) fn set_choice(&mut self, choice: usize) {
        self.choice = choice;
    }

    /// Whether a control token with this text is a marker, or a part of one.
    pub(super) fn is_marker(&self, text: &str) -> bool {
        let shared = &self.shared;
        let heading = shared.answer_open.iter().any(|marker| marker.contains(text));
        heading || shared.format.markers().any(|marker| marker.contains(text))
    }

    pub(super) fn num_calls(&self) -> usize {
        self.num_calls
    }

    pub(super) fn num_held(&self) -> usize {
        self.held.len()
    }

    /// Whether the text so far ends within calls.
    pub(super) fn is_call(&self) -> bool {
        !matches!(self.state, State::Heading | State::Answer(_))
    }

    /// Adds text of the answer and returns what is decided.
    pub(super) fn push(&mut self, text: &str) -> Vec<ReplyPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Ends the reply and returns what was held back.
    pub(super) fn finish(&mut self) -> Option<ReplyPart> {
        let rest = std::mem::take(&mut self.held);
        match &self.state {
            State::Answer(_) if !rest.is_empty() => Some(ReplyPart::Answer(rest)),
            _ => None,
        }
    }

    /// Takes one step over the held text; returns whether another may follow.
    fn advance(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        match &self.state {
            State::Heading => self.read_heading(),
            State::Answer(is_at_start) => {
                let is_at_start = *is_at_start;
                self.read_answer(is_at_start, parts)
            }
            State::Open => self.skip(self.shared.format.open, State::Call(0)),
            State::Call(index) => {
                let index = *index;
                self.read_piece(index, parts)
            }
            State::Arguments(..) => self.read_arguments(parts),
            State::Between => self.read_between(),
            State::Separated => {
                self.held = self.held.trim_start().to_owned();
                if !self.held.is_empty() {
                    self.state = State::Call(0);
                }
                !self.held.is_empty()
            }
            State::End => {
                self.held.clear();
                false
            }
        }
    }

    fn read_heading(&mut self) -> bool {
        let shared = self.shared.clone();
        let heading = shared.answer_open.as_deref().unwrap_or_default();
        if let Some(rest) = self.held.strip_prefix(heading) {
            self.held = rest.to_owned();
            self.state = State::Answer(true);
            return true;
        }
        let is_trigger = shared.triggers.iter().any(|trigger| self.held.starts_with(trigger.as_str()));
        let is_open = |marker: &str| marker.starts_with(self.held.as_str());
        if !is_trigger && (is_open(heading) || shared.triggers.iter().any(|trigger| is_open(trigger))) {
            return false;
        }
        self.state = State::Answer(true);
        true
    }

    fn read_answer(&mut self, is_at_start: bool, parts: &mut Vec<ReplyPart>) -> bool {
        let shared = self.shared.clone();
        let triggers = &shared.triggers;
        let mut answer = |text: String| parts.extend((!text.is_empty()).then_some(ReplyPart::Answer(text)));
        if shared.format.is_at_start {
            let text = self.held.trim_start();
            if is_at_start && triggers.iter().any(|trigger| text.starts_with(trigger.as_str())) {
                self.held = text.to_owned();
                self.state = State::Open;
                return true;
            }
            if is_at_start && triggers.iter().any(|trigger| trigger.starts_with(text)) {
                return false;
            }
            self.state = State::Answer(false);
            answer(std::mem::take(&mut self.held));
            return false;
        }
        let found = triggers.iter().filter_map(|trigger| self.held.find(trigger.as_str())).min();
        if let Some(at) = found {
            let rest = self.held.split_off(at);
            // White space between the answer and a call belongs to neither.
            answer(std::mem::replace(&mut self.held, rest).trim_end().to_owned());
            self.state = State::Open;
            return true;
        }
        let num_marker = triggers.iter().map(|trigger| longest_beginning(&self.held, trigger)).max().unwrap_or(0);
        let kept = self.held[..self.held.len() - num_marker].trim_end().len();
        let rest = self.held.split_off(kept);
        answer(std::mem::replace(&mut self.held, rest));
        false
    }

    /// Skips a text that the format writes.
    fn skip(&mut self, text: &str, next: State) -> bool {
        if let Some(rest) = self.held.strip_prefix(text) {
            self.held = rest.to_owned();
            self.state = next;
            return true;
        }
        if !text.starts_with(self.held.as_str()) {
            self.state = State::End;
        }
        false
    }

    fn read_piece(&mut self, index: usize, parts: &mut Vec<ReplyPart>) -> bool {
        let shared = self.shared.clone();
        let Some(piece) = shared.format.call.get(index) else {
            self.state = State::Between;
            return true;
        };
        let next = State::Call(index + 1);
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let num_taken = match piece {
            Piece::Text(text) => return self.skip(text, next),
            Piece::Space => self.held.len() - self.held.trim_start().len(),
            Piece::Digits => self.held.len() - self.held.trim_start_matches(|c: char| c.is_ascii_digit()).len(),
            Piece::Id => self.held.len() - self.held.trim_start_matches(|c: char| c.is_ascii_alphanumeric()).len(),
            Piece::Name => self.held.len() - self.held.trim_start_matches(is_name).len(),
            Piece::Arguments => {
                let converter = Converter::new(shared.format.arguments, shared.parameters(&self.name));
                self.state = State::Arguments(index + 1, Box::new(converter));
                return true;
            }
            Piece::Key | Piece::Value => 0,
        };
        if num_taken == self.held.len() {
            return false;
        }
        let rest = self.held.split_off(num_taken);
        let text = std::mem::replace(&mut self.held, rest);
        if *piece == Piece::Name {
            let id = call_id(shared.format.ids, shared.seed, self.choice, self.num_calls);
            let delta =
                CallDelta { index: self.num_calls, id: Some(id), name: Some(text.clone()), ..CallDelta::default() };
            parts.push(ReplyPart::Call(delta));
            self.num_calls += 1;
            self.name = text;
        }
        self.state = next;
        true
    }

    fn read_arguments(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        let State::Arguments(index, converter) = &mut self.state else { return false };
        let mut arguments = String::new();
        let is_done = converter.push(&mut self.held, &mut arguments);
        if is_done {
            self.state = State::Call(*index);
        }
        if !arguments.is_empty() {
            let index = self.num_calls.saturating_sub(1);
            parts.push(ReplyPart::Call(CallDelta { index, arguments, ..CallDelta::default() }));
        }
        is_done
    }

    /// Decides whether another call follows.
    fn read_between(&mut self) -> bool {
        let format = self.shared.format;
        self.held = self.held.trim_start().to_owned();
        let close = format.close;
        if !close.is_empty() && self.held.starts_with(close) || self.held.is_empty() {
            self.state = if self.held.is_empty() { State::Between } else { State::End };
            return !self.held.is_empty();
        }
        if !close.is_empty() && close.starts_with(self.held.as_str()) {
            return false;
        }
        match format.separator {
            Some(separator) if self.held.starts_with(separator) => {
                self.held = self.held[separator.len()..].trim_start().to_owned();
                // White space may follow in the next piece of text.
                self.state = if separator.is_empty() { State::Call(0) } else { State::Separated };
                true
            }
            Some(separator) if separator.starts_with(self.held.as_str()) => false,
            _ => {
                self.state = State::End;
                true
            }
        }
    }
}

/// Returns the id of a call: the same for the same request, another for each call of a conversation.
fn call_id(syntax: IdSyntax, seed: u64, choice: usize, index: usize) -> String {
    const CHARACTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let (prefix, num_characters) = match syntax {
        IdSyntax::Usual => ("call_", 24),
        IdSyntax::NineCharacters => ("", 9),
    };
    // SplitMix64 over the seed, the choice and the index.
    let mut state = seed ^ (choice as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ ((index as u64) << 32);
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let mut id = prefix.to_owned();
    id.extend((0..num_characters).map(|_| char::from(CHARACTERS[(next() % 62) as usize])));
    id
}
