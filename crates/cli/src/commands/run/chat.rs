//! The chat: lines with editing and history in, replies out, the conversation kept.

use std::io::Write;

use anyhow::{Context, Result};
use pellucid_tokenizer::message;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Behavior, Config, Editor};
use serde_json::Value;

use super::answer::Answerer;
use crate::flags::prompt::Prompt;
use crate::terminal::output::Output;

const HELP: &str = "/new starts over, /exit or Ctrl-D leaves, Ctrl-C stops a reply";

pub(super) fn chat(answerer: &mut Answerer<'_>, system: Option<Value>, output: &mut Output) -> Result<()> {
    // What is typed and asked belongs to the terminal; standard output is for replies.
    let config = Config::builder().behavior(Behavior::PreferTerm).build();
    let mut editor: Editor<(), MemHistory> =
        Editor::with_history(config, MemHistory::new()).context("could not take over the terminal for line editing")?;
    say(HELP);
    let mut messages: Vec<Value> = system.iter().cloned().collect();
    loop {
        let text = match read(&mut editor) {
            Ok(text) => text,
            Err(ReadlineError::Interrupted) => {
                say("(Ctrl-D or /exit leaves)");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error).context("could not read a line"),
        };
        match text.trim() {
            "" => continue,
            "/exit" | "/quit" | "/bye" => return Ok(()),
            "/help" | "/?" => {
                say(HELP);
                continue;
            }
            "/new" | "/clear" => {
                messages = system.iter().cloned().collect();
                say("(a new conversation)");
                continue;
            }
            unknown if unknown.starts_with('/') && !unknown.contains(' ') && unknown.len() > 1 => {
                say(&format!("there is no {unknown}: {HELP}"));
                continue;
            }
            _ => {}
        }
        messages.push(message("user", &text));
        let prompt = Prompt::Chat(messages.clone());
        match answerer.answer(&prompt, output) {
            Ok(reply) => messages.push(message("assistant", &reply.text)),
            // The question is taken back, so that a shorter one can follow: the conversation before it is not lost.
            Err(error) if !crate::terminal::output::is_reader_gone(&error) => {
                messages.pop();
                let is_full = matches!(error.downcast_ref(), Some(pellucid_engine::Error::PromptTooLong { .. }));
                let way_out = if is_full { "; /new starts over, and a larger --context would hold more" } else { "" };
                say(&format!("error: {error:#}{way_out}"));
            }
            Err(error) => return Err(error),
        }
    }
}

/// One message: a line, or several of which all but the last end in a backslash.
fn read(editor: &mut Editor<(), MemHistory>) -> Result<String, ReadlineError> {
    let mut text = editor.readline("> ")?;
    while let Some(line) = text.strip_suffix('\\') {
        text = format!("{line}\n{}", editor.readline("| ")?);
    }
    // A line that cannot be remembered is still a line.
    let _ = editor.add_history_entry(text.as_str());
    Ok(text)
}

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
