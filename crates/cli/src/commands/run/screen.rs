//! The replies of `pellucid run` on standard output: thoughts dimmed before the answer, and wrapped on a terminal.

use std::io::{IsTerminal, Write};

use anyhow::Result;
use pellucid_generate::{CallDelta, Delta, ToolCall};

use crate::terminal::output::Output;
use crate::terminal::word_wrap::WordWrap;

const DIM: &str = "\x1b[2m";
const NORMAL: &str = "\x1b[0m";

/// How thoughts are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ThoughtDisplay {
    /// In faint colour.
    Dimmed,
    /// Between two lines that name the parts, where there is no colour.
    Titled,
    /// Not at all: a program reads the answer, or the user folds them.
    Hidden,
}

impl ThoughtDisplay {
    /// Returns the display for standard output. A file or pipe gets the answer alone.
    pub(super) fn for_stdout(hides_thinking: bool, wants_color: bool) -> ThoughtDisplay {
        match (std::io::stdout().is_terminal() && !hides_thinking, wants_color) {
            (false, _) => ThoughtDisplay::Hidden,
            (true, true) => ThoughtDisplay::Dimmed,
            (true, false) => ThoughtDisplay::Titled,
        }
    }
}

/// Standard output.
pub(super) struct Screen<'o> {
    pub(super) output: &'o mut Output,
    wrap: WordWrap,
    thoughts: ThoughtDisplay,
    /// Whether the text on the screen ends within thoughts.
    is_thinking: bool,
    /// Whether replies are shown at their end, in JSON.
    pub(super) is_silent: bool,
}

impl<'o> Screen<'o> {
    pub(super) fn new(output: &'o mut Output, thoughts: ThoughtDisplay, is_silent: bool) -> Screen<'o> {
        Screen { output, wrap: WordWrap::for_stdout(), thoughts, is_thinking: false, is_silent }
    }

    /// Writes text of the answer.
    pub(super) fn write(&mut self, text: &str) -> Result<()> {
        self.output.write_all(self.wrap.push(text).as_bytes())?;
        Ok(self.output.flush()?)
    }

    /// Writes a piece of a reply.
    pub(super) fn write_piece(&mut self, piece: &Delta) -> Result<()> {
        if !piece.thoughts.is_empty() && self.thoughts != ThoughtDisplay::Hidden {
            if !self.is_thinking {
                let opening = if self.thoughts == ThoughtDisplay::Dimmed { DIM } else { "(thoughts)\n" };
                self.output.write_all(opening.as_bytes())?;
                self.is_thinking = true;
            }
            self.write(&piece.thoughts)?;
        }
        if !piece.text.is_empty() {
            self.end_thoughts()?;
            self.write(&piece.text)?;
        }
        Ok(())
    }

    /// Writes the last word, ends the line, and lists the calls of the reply.
    fn end_reply(&mut self, reply: &Delta) -> Result<()> {
        self.end_thoughts()?;
        let rest = self.wrap.finish();
        if !reply.text.is_empty() || reply.calls.is_empty() {
            writeln!(self.output, "{rest}")?;
        }
        for call in &reply.calls {
            writeln!(self.output, "{}", call_line(call))?;
        }
        Ok(self.output.flush()?)
    }

    fn end_thoughts(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_thinking) {
            let rest = self.wrap.finish();
            self.wrap = WordWrap::for_stdout();
            let closing = if self.thoughts == ThoughtDisplay::Dimmed { NORMAL } else { "" };
            let title = if self.thoughts == ThoughtDisplay::Dimmed { "" } else { "(answer)\n" };
            write!(self.output, "{rest}{closing}\n\n{title}")?;
        }
        Ok(())
    }
}

/// Adds a piece to its reply, and shows it where there is only one.
pub(super) fn take(piece: Delta, replies: &mut [Delta], screen: &mut Screen<'_>) -> Result<()> {
    if replies.len() == 1 && !screen.is_silent {
        screen.write_piece(&piece)?;
    }
    Ok(replies[piece.choice].append(piece)?)
}

/// Ends the line of a single reply, or shows several replies. Returns the text of a single one.
pub(super) fn end_output(replies: &[Delta], screen: &mut Screen<'_>) -> Result<String> {
    if let [only] = replies {
        screen.end_reply(only)?;
        return Ok(only.text.clone());
    }
    for (i, reply) in replies.iter().enumerate() {
        let score = reply.score.map_or_else(String::new, |score| format!(" (score {score:.4})"));
        screen.write(&format!("--- {}{score}\n", i + 1))?;
        screen.write_piece(reply)?;
        screen.end_reply(reply)?;
    }
    Ok(String::new())
}

/// Returns a call as a line: `call: weather(city="Oslo", days=2)`.
fn call_line(call: &CallDelta) -> String {
    match ToolCall::of(call) {
        Some(ToolCall { name, arguments, .. }) => {
            let arguments: Vec<String> = arguments.iter().map(|(key, value)| format!("{key}={value}")).collect();
            format!("call: {name}({})", arguments.join(", "))
        }
        None => {
            let name = call.name.as_deref().unwrap_or_default();
            format!("call: {name} {} (not complete)", call.arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_lines() {
        let call = |arguments: &str| CallDelta {
            index: 0,
            id: Some("call_1".into()),
            name: Some("weather".into()),
            arguments: arguments.into(),
        };
        assert_eq!(call_line(&call("{}")), "call: weather()");
        let whole = call("{\"city\": \"Oslo\", \"days\": [1, 2]}");
        assert_eq!(call_line(&whole), "call: weather(city=\"Oslo\", days=[1,2])");
        assert_eq!(call_line(&call("{\"city\": \"Os")), "call: weather {\"city\": \"Os (not complete)");
    }
}
