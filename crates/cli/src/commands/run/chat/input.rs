//! The lines of a chat: edited on the terminal, with a history that later chats find again.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, Config, Editor};

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";
/// Lines that the history keeps.
const HISTORY_LINES: usize = 1000;

/// The user's side of the terminal.
pub(super) struct Input {
    editor: Editor<(), FileHistory>,
    history: PathBuf,
}

/// An entry of the user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entered {
    /// A line that may be a command.
    Line(String),
    /// A message of several lines, which is never a command.
    Message(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    End,
}

impl Input {
    /// Opens the terminal. The history is read from a file, if it is there.
    pub(super) fn open(history: PathBuf) -> Result<Input> {
        // Prompts and editing go to the terminal, because standard output is for replies only.
        let config = Config::builder().behavior(Behavior::PreferTerm).max_history_size(HISTORY_LINES);
        let config = config.context("could not set the size of the history")?.build();
        let mut editor = Editor::with_config(config).context("could not open the terminal for line editing")?;
        // There is none before the first chat; one that cannot be read or written must not prevent a chat.
        let _ = history.parent().map(std::fs::create_dir_all);
        let _ = editor.load_history(&history);
        Ok(Input { editor, history })
    }

    pub(super) fn read(&mut self) -> Result<Entered> {
        let entered = match read(|prompt| self.editor.readline(prompt)) {
            Ok(entered) => entered,
            Err(ReadlineError::Interrupted) => return Ok(Entered::Interrupt),
            Err(ReadlineError::Eof) => return Ok(Entered::End),
            Err(error) => return Err(error).context("could not read a line"),
        };
        if let Entered::Line(text) | Entered::Message(text) = &entered {
            // A line that cannot be kept is still a message.
            let _ = self.editor.add_history_entry(text);
            let _ = self.editor.append_history(&self.history);
        }
        Ok(entered)
    }
}

/// Reads a line, or the lines between two marks of three quotes, or lines of which all but the last end in a
/// backslash.
fn read(mut line: impl FnMut(&str) -> Result<String, ReadlineError>) -> Result<Entered, ReadlineError> {
    let mut text = line("> ")?;
    if let Some(rest) = text.trim_start().strip_prefix(QUOTES) {
        let mut text = rest.to_owned();
        loop {
            if let Some(message) = text.trim_end().strip_suffix(QUOTES) {
                return Ok(Entered::Message(message.trim_matches('\n').to_owned()));
            }
            text = format!("{text}\n{}", line("| ")?);
        }
    }
    let mut is_long = false;
    while let Some(before) = text.strip_suffix('\\') {
        is_long = true;
        text = format!("{before}\n{}", line("| ")?);
    }
    Ok(if is_long { Entered::Message(text) } else { Entered::Line(text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(lines: &[&str]) -> Entered {
        let mut lines = lines.iter();
        read(|_| lines.next().map(|line| line.to_string()).ok_or(ReadlineError::Eof)).unwrap()
    }

    #[test]
    fn a_message_may_have_several_lines() {
        assert_eq!(entered(&["one", "two"]), Entered::Line("one".into()));
        assert_eq!(entered(&["one\\", "two\\", "three"]), Entered::Message("one\ntwo\nthree".into()));
        assert_eq!(entered(&["\"\"\"", "one", "  two", "\"\"\"", "x"]), Entered::Message("one\n  two".into()));
        assert_eq!(entered(&["\"\"\"one", "/two\"\"\""]), Entered::Message("one\n/two".into()));
        assert_eq!(entered(&["\"\"\"one\"\"\""]), Entered::Message("one".into()));
    }
}
