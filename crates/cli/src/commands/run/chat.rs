//! The chat of `pellucid run`: reads lines with editing and history, shows replies and keeps the conversation.

use anyhow::{Context, Result};
use pellucid_tokenizer::message;
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Behavior, Config, Editor};
use serde_json::Value;

use super::answer::Answerer;
use crate::flags::prompt::Prompt;
use crate::terminal::log::note as say;
use crate::terminal::output::{Output, is_output_error};

const HELP: &str = "/new starts over, /exit or Ctrl-D ends the chat, Ctrl-C stops a reply";

pub(super) fn chat(answerer: &mut Answerer<'_>, system: Option<Value>, output: &mut Output) -> Result<()> {
    // Prompts and editing go to the terminal, because standard output is for replies only.
    let config = Config::builder().behavior(Behavior::PreferTerm).build();
    let mut editor: Editor<(), MemHistory> =
        Editor::with_history(config, MemHistory::new()).context("could not open the terminal for line editing")?;
    say(HELP);
    let mut messages: Vec<Value> = system.iter().cloned().collect();
    loop {
        let text = match read(&mut editor) {
            Ok(text) => text,
            Err(ReadlineError::Interrupted) => {
                say("(Ctrl-D or /exit ends the chat)");
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
                say(&format!("unknown command {unknown}: {HELP}"));
                continue;
            }
            _ => {}
        }
        messages.push(message("user", &text));
        let prompt = Prompt::Chat(messages.clone());
        match answerer.answer(&prompt, output) {
            Ok(reply) => messages.push(message("assistant", &reply.text)),
            // Without the message that failed, the user can continue the conversation with a shorter one.
            Err(error) if !is_output_error(&error) => {
                messages.pop();
                let is_full = matches!(error.downcast_ref(), Some(pellucid_engine::Error::PromptTooLong { .. }));
                let advice = if is_full { "; start over with /new, or use a larger --context" } else { "" };
                say(&format!("error: {error:#}{advice}"));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads one message: a line, or several lines of which all but the last end in a backslash.
fn read(editor: &mut Editor<(), MemHistory>) -> Result<String, ReadlineError> {
    let mut text = editor.readline("> ")?;
    while let Some(line) = text.strip_suffix('\\') {
        text = format!("{line}\n{}", editor.readline("| ")?);
    }
    // A line that does not fit into the history is still a message.
    let _ = editor.add_history_entry(text.as_str());
    Ok(text)
}
