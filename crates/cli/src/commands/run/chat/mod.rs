//! The chat of `pellucid run`: reads messages and commands, shows replies and keeps the conversation.

mod command;
mod conversation;
mod input;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use pellucid_generate::Finish;
use pellucid_sampling::{Preset, SamplingParams};

use super::answer::{Answer, Answerer, DEFAULT_MAX_TOKENS};
use crate::commands::explain::{Explanation, Limit};
use crate::flags::json_file;
use crate::flags::prompt::Prompt;
use crate::flags::sampling::{SamplingArgs, listed, wrapped};
use crate::flags::speculation::drafters_text;
use crate::flags::usage_error::without_os_codes;
use crate::terminal::cells::one_line;
use crate::terminal::format::grouped;
use crate::terminal::interrupt::{CleanupGuard, Interrupt};
use crate::terminal::log::note as say;
use crate::terminal::output::{Output, is_output_error};
use crate::terminal::spelling;
use command::ChatCommand;
use conversation::Conversation;
use input::{Entered, Input};

/// Candidates that `/explain` shows for each token.
const CANDIDATES: usize = 8;

/// A chat. It survives a change of the model.
pub(super) struct Chat {
    input: Input,
    conversation: Conversation,
    /// The sampling flags with the changes by `/set`.
    pub(super) sampling: SamplingArgs,
    /// The file of the last `/save` or `/load`, which `/save` may write again.
    file: Option<PathBuf>,
}

/// Why a chat has ended with this model.
pub(super) enum ChatEnd {
    Exit,
    /// The user wants to go on with the model of this name.
    Model(String),
}

impl Chat {
    pub(super) fn open(history: PathBuf, system: Option<String>, sampling: SamplingArgs) -> Result<Chat> {
        let input = Input::open(history)?;
        say("/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat");
        Ok(Chat { input, conversation: Conversation::new(system), sampling, file: None })
    }

    /// While the returned value lives, Ctrl-C ends the program and writes the conversation to a file before: loading a
    /// model cannot be stopped, and a download takes long.
    pub(super) fn save_on_exit(&self, model: &str, file: PathBuf, interrupt: &Interrupt) -> Option<CleanupGuard> {
        let text = format!("{:#}\n", self.conversation.to_json(model));
        let save = move || match std::fs::write(&file, text) {
            Ok(()) => format!("the conversation is in {0}; in a chat, /load {0} goes on with it", file.display()),
            Err(error) => without_os_codes(&format!("the conversation was not saved: {}: {error}", file.display())),
        };
        (self.conversation.num_turns() > 0).then(|| interrupt.on_exit(save))
    }

    /// Chats with one model until the user leaves it.
    pub(super) fn run(
        &mut self,
        answerer: &mut Answerer<'_>,
        is_colored: bool,
        output: &mut Output,
    ) -> Result<ChatEnd> {
        // The end tokens and the tokens of texts differ between models.
        answerer.sampling = self.sampling.params(&answerer.model.tokenizer, &answerer.model.sampling)?;
        let mut session = Session { chat: self, answerer, is_colored, last: None };
        loop {
            let message = match session.chat.input.read()? {
                Entered::End => return Ok(ChatEnd::Exit),
                Entered::Interrupt => {
                    say("(Ctrl-D or /exit ends the chat)");
                    continue;
                }
                Entered::Message(text) => text,
                Entered::Line(line) => match command::parse(&line) {
                    None => line,
                    Some(Ok(ChatCommand::Exit)) => return Ok(ChatEnd::Exit),
                    Some(Ok(ChatCommand::Model(Some(name)))) => return Ok(ChatEnd::Model(name)),
                    Some(command) => {
                        let done = command.map_err(|error| anyhow!("{error}"));
                        report(done.and_then(|command| session.execute(command, output)))?;
                        continue;
                    }
                },
            };
            if !message.trim().is_empty() {
                report(session.ask(message, output))?;
            }
        }
    }
}

/// Shows an error; the chat goes on, unless its replies cannot be written any more.
fn report(done: Result<()>) -> Result<()> {
    match done {
        Err(error) if is_output_error(&error) => Err(error),
        Err(error) => {
            say(&format!("error: {}", without_os_codes(&format!("{error:#}"))));
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Returns the names of the options that `/set` changes, and the values of those that are no numbers.
fn options() -> String {
    let names: Vec<&str> = ["max-tokens", "speculate"].into_iter().chain(SamplingArgs::names()).collect();
    let presets = listed(&Preset::ALL.map(Preset::name), "or");
    format!("{}\nspeculate is on or off; preset is {presets}", wrapped(&names.join(", "), 80))
}

/// Rejects the name of an option that does not exist and is close to one that does.
fn check_option(name: &str) -> Result<()> {
    let name = name.trim_start_matches('-').replace('_', "-");
    let known = || SamplingArgs::names().chain(["max-tokens", "speculate"]);
    match spelling::closest(&name, known()) {
        Some(close) if !known().any(|known| known == name) => {
            bail!("there is no option {name}: did you mean {close}?")
        }
        _ => Ok(()),
    }
}

/// A chat with one model.
struct Session<'s, 'a> {
    chat: &'s mut Chat,
    answerer: &'s mut Answerer<'a>,
    is_colored: bool,
    last: Option<LastReply>,
}

/// The reply that `/explain` explains.
struct LastReply {
    /// The messages that it answers.
    prompt: Prompt,
    num_tokens: usize,
    /// Why it ended; `None` if Ctrl-C ended it.
    finish: Option<Finish>,
    /// The options that it was sampled with: `/set` may have changed them since.
    sampled: Sampled,
}

/// Options of a reply, and where they come from.
#[derive(Debug, Clone, Default)]
struct Sampled {
    params: SamplingParams,
    origin: String,
    preset: Option<Preset>,
}

impl LastReply {
    /// Returns how many of its tokens to explain, at most `max_tokens`, and why there are no more.
    fn part(&self, max_tokens: Option<u32>) -> (usize, Limit) {
        // A token that ends a reply is explained, but is no part of it.
        let has_end = matches!(
            self.finish,
            Some(Finish::EndToken(Some(_)) | Finish::StopToken(Some(_)) | Finish::ToolCalls(Some(_)))
        );
        let all = (self.num_tokens + usize::from(has_end)).max(1);
        match max_tokens.map(|tokens| tokens as usize).filter(|&tokens| tokens < all) {
            Some(tokens) => (tokens, Limit::First { total: self.num_tokens }),
            None => (all, Limit::End(self.finish.clone())),
        }
    }
}

impl Session<'_, '_> {
    /// Answers a message and keeps both. A message that fails is not kept.
    fn ask(&mut self, message: String, output: &mut Output) -> Result<()> {
        let sampled = Sampled {
            params: self.answerer.sampling.clone(),
            origin: self.chat.sampling.origin(&self.answerer.model.sampling),
            preset: self.chat.sampling.preset(),
        };
        let (prompt, reply) = self.answer(&message, output)?;
        self.last = Some(LastReply { prompt, num_tokens: reply.num_tokens, finish: reply.finish, sampled });
        self.chat.conversation.add(message, reply.text);
        Ok(())
    }

    /// Answers a message. The oldest turns that no longer fit into the context are forgotten.
    fn answer(&mut self, message: &str, output: &mut Output) -> Result<(Prompt, Answer)> {
        let mut num_dropped = 0;
        // A reply needs tokens of the context too: up to its limit, but at most half of them.
        let context_len = self.answerer.model.context_len;
        let for_reply = self.answerer.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS).min(context_len / 2);
        loop {
            let prompt = Prompt::Chat(self.chat.conversation.messages_and(message));
            let num_ids = self.answerer.thinking.encode(&prompt, &self.answerer.model, &self.answerer.plan)?.ids.len();
            if num_ids + for_reply <= context_len || !self.chat.conversation.drop_oldest() {
                if num_dropped > 0 {
                    say(&format!("(the context is full: the oldest {num_dropped} messages were forgotten)"));
                }
                let answer = self.answerer.answer(&prompt, output)?;
                return Ok((prompt, answer));
            }
            num_dropped += 2;
        }
    }

    fn execute(&mut self, command: ChatCommand, output: &mut Output) -> Result<()> {
        match command {
            ChatCommand::Help => say(&command::help()),
            ChatCommand::New => {
                self.chat.conversation.clear();
                self.last = None;
                say("(a new conversation)");
            }
            ChatCommand::System(None) => say(self.chat.conversation.system.as_deref().unwrap_or("(no instructions)")),
            ChatCommand::System(Some(text)) => {
                self.chat.conversation.system = (!text.is_empty()).then_some(text);
                say("(the instructions apply from the next message on)");
            }
            ChatCommand::Options => say(&options()),
            ChatCommand::Set(name, value) => self.set(&name, &value)?,
            ChatCommand::Show | ChatCommand::Model(_) => say(&self.describe()?),
            ChatCommand::Regenerate => self.regenerate(output)?,
            ChatCommand::Undo => match self.chat.conversation.undo() {
                Some(message) => {
                    self.last = None;
                    say(&format!("(forgotten: {message})"));
                }
                None => bail!("there is no message to forget"),
            },
            ChatCommand::Save(file) => self.save(&file)?,
            ChatCommand::Load(file) => self.load(&file)?,
            ChatCommand::Explain(max_tokens) => self.explain(max_tokens, output)?,
            // The caller handles it.
            ChatCommand::Exit => {}
        }
        Ok(())
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        if matches!(name, "max-tokens" | "max_tokens") {
            let tokens = value.parse().ok().filter(|&tokens: &usize| tokens > 0);
            let tokens = tokens.with_context(|| format!("max-tokens: expected a number above 0, found {value}"))?;
            self.answerer.max_tokens = Some(tokens);
        } else if name == "speculate" {
            self.set_speculation(value)?;
        } else {
            check_option(name)?;
            let sampling = self.chat.sampling.changed(name, value)?;
            let model = &self.answerer.model;
            let params = sampling.params(&model.tokenizer, &model.sampling)?;
            // Only `/set seed` sets back what `/regen` has counted up.
            let seed = if name.trim_start_matches('-') == "seed" { params.seed } else { self.answerer.sampling.seed };
            self.answerer.sampling = SamplingParams { seed, ..params };
            self.chat.sampling = sampling;
        }
        say(&format!("(from the next reply on: {})", self.settings()?));
        Ok(())
    }

    /// Switches the drafters on or off. Which ones there are is decided at the start: a draft model takes memory.
    fn set_speculation(&mut self, value: &str) -> Result<()> {
        self.answerer.speculate = match value {
            "off" => false,
            "on" if self.answerer.drafters.is_off() => {
                bail!("speculate: this chat has no drafters; start it with --speculate ngram")
            }
            "on" => true,
            _ => bail!("speculate: expected on or off, found {value}; --speculate names drafters at the start"),
        };
        Ok(())
    }

    /// Returns the sampling steps, the seed and the limit of a reply.
    fn settings(&self) -> Result<String> {
        let mut text = super::chain_text(&self.chat.sampling, &self.answerer.sampling, &self.answerer.model)?;
        if self.answerer.sampling.temperature > 0.0 {
            text += &format!(", seed {}", self.answerer.sampling.seed);
        }
        if !self.answerer.sampling.stop_ids.is_empty() {
            let text_of = |&id: &u32| format!("\"{}\"", one_line(&self.answerer.model.tokenizer.decode(&[id], false)));
            let tokens: Vec<String> = self.answerer.sampling.stop_ids.iter().map(text_of).collect();
            text += &format!(", stop-token {}", tokens.join(" "));
        }
        text += &format!(", max-tokens {}", self.answerer.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS));
        if !self.answerer.drafters.is_off() {
            text += if self.answerer.speculate { ", speculate on" } else { ", speculate off" };
        }
        Ok(text)
    }

    fn describe(&self) -> Result<String> {
        let conversation = &self.chat.conversation;
        let model = &self.answerer.model;
        let messages = conversation.messages();
        let num_ids = if messages.is_empty() {
            0
        } else {
            self.answerer.thinking.encode(&Prompt::Chat(messages), model, &self.answerer.plan)?.ids.len()
        };
        Ok(format!(
            "model         {}\ndrafters      {}\ninstructions  {}\nsettings      {}\n\
             conversation  {} messages, {} of {} tokens",
            model.id,
            drafters_text(&self.answerer.drafters),
            conversation.system.as_deref().unwrap_or("none"),
            self.settings()?,
            2 * conversation.num_turns(),
            grouped(num_ids as u64),
            grouped(model.context_len as u64),
        ))
    }

    fn regenerate(&mut self, output: &mut Output) -> Result<()> {
        let before = self.chat.conversation.clone();
        let Some(message) = self.chat.conversation.undo() else { bail!("there is no message to answer again") };
        if self.answerer.sampling.temperature > 0.0 {
            self.answerer.sampling.seed = self.answerer.sampling.seed.wrapping_add(1);
        } else {
            say("(without sampling the reply is the same; /set temperature 0.7 changes that)");
        }
        let done = self.ask(message, output);
        if done.is_err() {
            self.chat.conversation = before;
        }
        done
    }

    fn explain(&mut self, max_tokens: Option<u32>, output: &mut Output) -> Result<()> {
        let Some(last) = &self.last else { bail!("there is no reply to explain") };
        let (max_tokens, limit) = last.part(max_tokens);
        let explanation = Explanation {
            probe: None,
            name: self.answerer.model.id.clone(),
            params: last.sampled.params.clone(),
            plan: self.answerer.plan.clone(),
            thinking: self.answerer.thinking.clone(),
            origin: last.sampled.origin.clone(),
            preset: last.sampled.preset,
            loop_guard: self.answerer.loop_guard,
            stops: self.answerer.stops.clone(),
            speculate: self.answerer.speculate,
            has_drafters: !self.answerer.drafters.is_off(),
            max_tokens,
            limit,
            num_candidates: CANDIDATES,
            is_colored: self.is_colored,
            is_json: false,
            columns: None,
        };
        let done = explanation.write(&self.answerer.model, &last.prompt, self.answerer.interrupt, output);
        // Ctrl-C ends the explanation and not the chat.
        match done {
            Err(error) if error.is::<crate::terminal::interrupt::Interrupted>() => Ok(()),
            done => done,
        }
    }

    fn save(&mut self, file: &Path) -> Result<()> {
        if file.exists() && self.chat.file.as_deref() != Some(file) {
            bail!("{} exists already; name another file", file.display());
        }
        let text = format!("{:#}\n", self.chat.conversation.to_json(&self.answerer.model.id));
        std::fs::write(file, text).with_context(|| format!("could not write {}", file.display()))?;
        self.chat.file = Some(file.to_owned());
        say(&format!("({} messages in {})", 2 * self.chat.conversation.num_turns(), file.display()));
        Ok(())
    }

    fn load(&mut self, file: &Path) -> Result<()> {
        let loaded =
            Conversation::from_json(&json_file::read(file)?).map_err(|error| anyhow!("{}: {error}", file.display()))?;
        self.chat.conversation = loaded;
        self.last = None;
        self.chat.file = Some(file.to_owned());
        say(&format!("({} messages from {})", 2 * self.chat.conversation.num_turns(), file.display()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_has_the_tokens_of_the_reply_and_the_one_that_ended_it() {
        let part = |finish: Option<Finish>, max_tokens| {
            let reply =
                LastReply { prompt: Prompt::Text(String::new()), num_tokens: 5, finish, sampled: Sampled::default() };
            reply.part(max_tokens)
        };
        assert!(matches!(part(Some(Finish::EndToken(Some(2))), None), (6, Limit::End(Some(_)))));
        assert!(matches!(part(Some(Finish::EndToken(None)), None), (5, Limit::End(Some(_)))), "a grammar's end");
        assert!(matches!(part(None, Some(9)), (5, Limit::End(None))));
        assert!(matches!(part(Some(Finish::MaxTokens), Some(3)), (3, Limit::First { total: 5 })));
    }
}
