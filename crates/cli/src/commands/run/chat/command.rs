//! The commands of a chat: lines that begin with a slash. They are never sent to the model.

use std::path::PathBuf;

use crate::terminal::spelling;

/// A command of the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ChatCommand {
    Help,
    Exit,
    /// Forget the conversation.
    New,
    /// Show the instructions, or replace them; an empty text removes them.
    System(Option<String>),
    /// List the options and their values.
    Options,
    /// Change an option: name and value.
    Set(String, String),
    /// Show the model, the settings and the size of the conversation.
    Show,
    /// Answer the last message again.
    Regenerate,
    /// Forget the last message and its reply.
    Undo,
    Save(PathBuf),
    Load(PathBuf),
    /// Show how the tokens of the last reply were chosen, all or the first ones.
    Explain(Option<u32>),
    /// Show the model, or go on with another one.
    Model(Option<String>),
}

/// Names of a command, its arguments, and what it does.
const COMMANDS: [(&[&str], &str, &str); 12] = [
    (&["help", "?"], "", "this list"),
    (&["set"], "[NAME VALUE]", "change an option, such as temperature 0.5, or list them"),
    (&["system"], "[TEXT]", "show or replace the instructions; \"\" removes them"),
    (&["show"], "", "model, settings and size of the conversation"),
    (&["regen", "regenerate"], "", "answer again, with the next seed"),
    (&["undo"], "", "forget the last message and its reply"),
    (&["explain"], "[TOKENS]", "show how each token of the last reply was chosen"),
    (&["new", "clear"], "", "start over"),
    (&["save"], "FILE", "write the conversation to a file as JSON"),
    (&["load"], "FILE", "read a conversation from such a file"),
    (&["model"], "[MODEL]", "show the model, or continue with another one"),
    (&["exit", "quit", "bye"], "", "end the chat, like Ctrl-D"),
];

/// Returns the help text: every command with its other names, then how to write long messages.
pub(super) fn help() -> String {
    let mut text = String::new();
    for (names, arguments, meaning) in COMMANDS {
        let usage = format!("/{} {arguments}", names[0]);
        let others: Vec<String> = names[1..].iter().map(|name| format!("/{name}")).collect();
        let also = if others.is_empty() { String::new() } else { format!(" (also {})", others.join(", ")) };
        text += &format!("  {:<18} {meaning}{also}\n", usage.trim_end());
    }
    text += "  Ctrl-C             stop a reply and keep what is there\n";
    text += "Several lines: begin and end with \"\"\", or end a line with \\.\n";
    text += "A message that begins with a slash needs a space before it.";
    text
}

/// Returns the command of a line; `None` if the line is a message, an error if it is neither.
pub(super) fn parse(line: &str) -> Option<Result<ChatCommand, String>> {
    let rest = line.strip_prefix('/')?;
    let (word, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    Some(read(word, argument.trim()))
}

fn read(word: &str, argument: &str) -> Result<ChatCommand, String> {
    let found = COMMANDS.iter().find(|(names, ..)| names.contains(&word));
    let Some((names, arguments, _)) = found else { return Err(unknown(word)) };
    let usage = || format!("expected /{} {arguments}", names[0]).trim_end().to_owned();
    let given = (!argument.is_empty()).then(|| argument.to_owned());
    let file = || given.as_deref().map(expanded).ok_or_else(usage);
    let command = match names[0] {
        "system" => ChatCommand::System(given.map(|text| if text == "\"\"" { String::new() } else { text })),
        "set" if given.is_none() => ChatCommand::Options,
        "set" => {
            // Ollama's form.
            let argument = argument.strip_prefix("parameter ").map_or(argument, str::trim_start);
            let (name, value) = argument.split_once(char::is_whitespace).ok_or_else(usage)?;
            if name == "system" {
                return Err("/system TEXT replaces the instructions".to_owned());
            }
            ChatCommand::Set(name.to_owned(), value.trim().to_owned())
        }
        "explain" => {
            let number = given.map(|text| text.parse().ok().filter(|&tokens| tokens > 0).ok_or_else(usage));
            ChatCommand::Explain(number.transpose()?)
        }
        "save" => ChatCommand::Save(file()?),
        "load" => ChatCommand::Load(file()?),
        "model" => ChatCommand::Model(given),
        _ if given.is_some() => return Err(format!("/{word} takes no argument, found {argument}")),
        "help" => ChatCommand::Help,
        "show" => ChatCommand::Show,
        "regen" => ChatCommand::Regenerate,
        "undo" => ChatCommand::Undo,
        "new" => ChatCommand::New,
        _ => ChatCommand::Exit,
    };
    Ok(command)
}

/// Returns a path; `~` at its beginning is the home, as in a shell.
fn expanded(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    }
}

/// Returns the error of an unknown command, with the closest known one.
fn unknown(word: &str) -> String {
    let names = COMMANDS.iter().flat_map(|(names, ..)| names.iter().copied());
    let advice = match spelling::closest(word, names).filter(|_| !word.is_empty()) {
        Some(name) => format!("did you mean /{name}?"),
        None => "/help lists the commands; a message that begins with a slash needs a space before it".to_owned(),
    };
    format!("there is no command /{word}: {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_messages_or_errors() {
        let read = |line: &str| parse(line).transpose();
        assert_eq!(read("Hello /help"), Ok(None));
        assert_eq!(read(" /usr/bin is a folder"), Ok(None), "a space makes it a message");
        assert_eq!(read("/set top-p 0.5"), Ok(Some(ChatCommand::Set("top-p".into(), "0.5".into()))));
        assert_eq!(read("/set parameter top_p 1"), Ok(Some(ChatCommand::Set("top_p".into(), "1".into()))));
        assert_eq!(read("/set system Be brief."), Err("/system TEXT replaces the instructions".into()));
        assert_eq!(read("/system  Be brief. "), Ok(Some(ChatCommand::System(Some("Be brief.".into())))));
        assert_eq!(read("/system \"\""), Ok(Some(ChatCommand::System(Some(String::new())))));
        assert_eq!(read("/system"), Ok(Some(ChatCommand::System(None))));
        assert_eq!(read("/explain 3"), Ok(Some(ChatCommand::Explain(Some(3)))));
        assert_eq!(read("/bye"), Ok(Some(ChatCommand::Exit)));
        assert_eq!(read("/save a b.json"), Ok(Some(ChatCommand::Save("a b.json".into()))));
        assert_eq!(read("/explain 0"), Err("expected /explain [TOKENS]".into()));
        assert_eq!(read("/set"), Ok(Some(ChatCommand::Options)));
        assert_eq!(read("/set top-p"), Err("expected /set [NAME VALUE]".into()));
        assert_eq!(read("/undo twice"), Err("/undo takes no argument, found twice".into()));
    }

    #[test]
    fn an_unknown_command_is_an_error_with_the_closest_one() {
        let error = |line: &str| parse(line).unwrap().unwrap_err();
        assert_eq!(error("/hlep"), "there is no command /hlep: did you mean /help?");
        assert!(error("/usr/bin").ends_with("needs a space before it"), "{}", error("/usr/bin"));
        assert!(error("/").starts_with("there is no command /: /help lists"), "{}", error("/"));
    }

    #[test]
    fn the_help_names_every_command_in_80_columns() {
        let help = help();
        assert!(COMMANDS.iter().all(|(names, ..)| help.contains(&format!("  /{}", names[0]))));
        assert!(
            COMMANDS.iter().flat_map(|(names, ..)| *names).all(|name| help.contains(&format!("/{name}"))),
            "{help}"
        );
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    }
}
