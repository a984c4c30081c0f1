//! The flags of a prompt, and how it becomes token ids; `run` and `explain` share them.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pellucid_generate::{ChatPrompt, LoadedModel};
use pellucid_tokenizer::message;
use serde_json::Value;

use crate::flags::chat_template::TemplateArgs;
use crate::flags::text_file;
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::{log, stdin};

/// Maximum time to the first byte of standard input beside a prompt.
const FIRST_BYTE_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(crate) struct PromptArgs {
    /// Model, if it is one: a name of `pellucid models`, a path,
    /// OWNER/REPO or an address of the hub; else the prompt
    #[arg(value_name = "MODEL", verbatim_doc_comment)]
    first: Option<String>,

    /// Text to answer [default: standard input, if it is not a terminal].
    /// Standard input beside a prompt is added to it
    #[arg(value_name = "PROMPT", verbatim_doc_comment)]
    words: Vec<String>,

    /// Model; every other argument is the prompt then
    /// [default: qwen2.5-coder-1.5b, 1.1 GB, downloaded on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    model: Option<String>,

    /// Add the text of a file to the prompt; may be given again
    #[arg(long, value_name = "PATH")]
    file: Vec<PathBuf>,

    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,

    /// Continue the prompt as plain text, without the model's chat template
    #[arg(long, conflicts_with = "chat_template")]
    pub(crate) raw: bool,

    #[command(flatten)]
    pub(crate) template: TemplateArgs,
}

/// The model and the prompt of a command line.
#[derive(Debug)]
pub(crate) struct Question {
    /// `None` for the default model.
    pub(crate) model: Option<String>,
    /// `None` if there is neither an argument nor standard input: then `run` chats.
    pub(crate) prompt: Option<String>,
}

/// A prompt for the model.
pub(crate) enum Prompt {
    /// Messages for the chat template.
    Chat(Vec<Value>),
    /// Text to continue.
    Text(String),
}

impl PromptArgs {
    /// Returns the model of a command line that must have no prompt; `None` for the default model.
    pub(crate) fn model_alone(&self) -> Result<Option<String>> {
        match (&self.model, &self.first, &self.words[..]) {
            (model, None, []) => Ok(model.clone()),
            (None, first, []) => Ok(first.clone()),
            _ => bail_usage!("--page takes no PROMPT: the page has a field for it"),
        }
    }

    /// Returns the model of a command line, whatever the prompt is; `None` for the default model.
    pub(crate) fn model(&self, hub: &Hub) -> Result<Option<String>> {
        Ok(self.split(hub)?.0)
    }

    /// Returns the model and the prompt: the words of the command line, the files, and standard input.
    pub(crate) fn read(&self, hub: &Hub) -> Result<Question> {
        let (model, prompt) = self.split(hub)?;
        if prompt.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
            bail_usage!("the prompt is empty");
        }
        let mut texts = Vec::with_capacity(self.file.len() + 1);
        for path in &self.file {
            texts.push((format!("File {}", path.display()), text_file::read(path).context("--file")?));
        }
        // Without a prompt, standard input is the prompt, and waiting for it is what was asked for.
        let piped = stdin::read_context(prompt.as_ref().map(|_| FIRST_BYTE_LIMIT))?;
        let prompt = match (prompt, piped) {
            (Some(prompt), piped) => {
                texts.extend(piped.map(|text| ("Standard input".to_owned(), text)));
                Some(prompt)
            }
            (None, piped) => piped,
        };
        match prompt {
            Some(prompt) => Ok(Question { model, prompt: Some(with_texts(prompt, &texts)) }),
            None if !texts.is_empty() => bail_usage!("--file needs a PROMPT that says what to do with the text"),
            None if std::io::stdin().is_terminal() => Ok(Question { model, prompt: None }),
            None => bail_usage!("there is no prompt: standard input is empty"),
        }
    }

    /// Tells the model from the prompt. Without `--model`, the first word is the model if it names one; a prompt of
    /// several words must be quoted, so that a misspelled model does not become a part of it.
    fn split(&self, hub: &Hub) -> Result<(Option<String>, Option<String>)> {
        let rest = (!self.words.is_empty()).then(|| self.words.join(" "));
        let Some(first) = &self.first else { return Ok((self.model.clone(), None)) };
        if self.model.is_some() {
            let prompt = rest.map_or_else(|| first.clone(), |rest| format!("{first} {rest}"));
            return Ok((self.model.clone(), Some(prompt)));
        }
        if hub.names_model(first)? {
            Hub::refuse_no_model(first)?;
            return Ok((Some(first.clone()), rest));
        }
        let is_word = !first.contains(char::is_whitespace);
        match (rest, hub.similar_name(first).filter(|_| is_word)) {
            (None, None) => Ok((None, Some(first.clone()))),
            (None, Some(name)) => bail_usage!(
                "there is no model `{first}`; did you mean {name}? If the word is the prompt, name a model with --model"
            ),
            (Some(_), Some(name)) => bail_usage!("there is no model `{first}`; did you mean {name}?"),
            (Some(_), None) if Path::new(first).is_dir() => bail_usage!(
                "the first of several arguments is the model, but the folder `{first}` has no config.json; give the \
                 path of a GGUF file in it, or put a prompt in quotes"
            ),
            (Some(_), None) => bail_usage!(
                "the first of several arguments is the model, but there is no model `{first}`; put a prompt in quotes, \
                 or name a model (`pellucid models` lists them)"
            ),
        }
    }

    /// Returns the system message, which comes first.
    fn system(&self) -> Option<Value> {
        self.system.as_ref().map(|text| message("system", text))
    }

    /// Returns a conversation if the model has a chat template; without one, or with --raw, text to continue.
    pub(crate) fn for_model(&self, prompt: String, model: &LoadedModel) -> Result<Prompt> {
        if model.template.is_some() && !self.raw {
            return Ok(Prompt::Chat(self.system().into_iter().chain([message("user", &prompt)]).collect()));
        }
        if let Some(error) = model.template_error.as_ref().filter(|_| !self.raw) {
            bail!("{error}; --raw works without a template");
        }
        if self.system.is_some() {
            bail_usage!("--system: this model has no chat template, so there is no place for instructions");
        }
        if !self.raw {
            log::note("note: this model has no chat template; its reply continues the prompt");
        }
        Ok(Prompt::Text(prompt))
    }
}

impl Prompt {
    /// Returns the token ids, with those that the model expects before every text.
    pub(crate) fn ids(&self, model: &LoadedModel) -> Result<Vec<u32>> {
        Ok(match self {
            Prompt::Chat(messages) => model.prompts().encode_chat(&ChatPrompt::new(messages))?,
            Prompt::Text(text) => model.prompts().encode_text(text)?,
        })
    }
}

/// Returns the prompt followed by each text under its title, in a fence as in Markdown. The fence has more backquotes
/// than any run of them in the text, so no text can end it.
fn with_texts(prompt: String, texts: &[(String, String)]) -> String {
    let mut whole = prompt;
    for (title, text) in texts {
        let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(3.max(longest + 1));
        let line_end = if text.ends_with('\n') { "" } else { "\n" };
        whole = format!("{}\n\n{title}:\n{fence}\n{text}{line_end}{fence}\n", whole.trim_end());
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_follow_the_prompt_in_fences_that_they_cannot_end() {
        let text = |title: &str, text: &str| (title.to_owned(), text.to_owned());
        assert_eq!(with_texts("Why?".into(), &[]), "Why?");
        assert_eq!(
            with_texts("Sum up".into(), &[text("File a.txt", "one\ntwo"), text("Standard input", "x\n")]),
            "Sum up\n\nFile a.txt:\n```\none\ntwo\n```\n\nStandard input:\n```\nx\n```\n"
        );
        let fenced = with_texts("p".into(), &[text("t", "a\n````\nb\n")]);
        assert_eq!(fenced, "p\n\nt:\n`````\na\n````\nb\n`````\n");
    }
}
