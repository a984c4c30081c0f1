//! What is asked: the flags of a prompt, and how it becomes ids. The same for `run` and `explain`.

use std::io::{IsTerminal, Write};

use anyhow::{Result, bail};
use pellucid_generate::{ChatPrompt, LoadedModel};
use pellucid_tokenizer::message;
use serde_json::Value;

use crate::terminal::stdin;

#[derive(Debug, clap::Args)]
pub(crate) struct PromptArgs {
    /// What to answer [default: standard input, when that is not a terminal]
    prompt: Option<String>,

    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    /// [default: smollm2, fetched on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    pub(crate) model: Option<String>,

    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    /// Continue the prompt as plain text, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
}

/// A prompt as the model is to read it.
pub(crate) enum Prompt {
    /// Messages for the chat template.
    Chat(Vec<Value>),
    /// Text to be continued.
    Text(String),
}

impl PromptArgs {
    /// The prompt: the argument, or standard input; `None` when that is a terminal.
    pub(crate) fn read(&self) -> Result<Option<String>> {
        let prompt = match &self.prompt {
            Some(prompt) => prompt.clone(),
            None if std::io::stdin().is_terminal() => return Ok(None),
            None => stdin::read_text()?,
        };
        if prompt.trim().is_empty() {
            bail!("the prompt is empty");
        }
        Ok(Some(prompt))
    }

    /// The message that goes before all others.
    pub(crate) fn system(&self) -> Option<Value> {
        self.system.as_ref().map(|text| message("system", text))
    }

    /// A conversation where the model has a template for one, text to continue where it has none or is not to use it.
    pub(crate) fn shape(&self, prompt: String, model: &LoadedModel) -> Result<Prompt> {
        if model.template.is_some() && !self.raw {
            return Ok(Prompt::Chat(self.system().into_iter().chain([message("user", &prompt)]).collect()));
        }
        if let Some(error) = model.template_error.as_ref().filter(|_| !self.raw) {
            bail!("{error}; --raw does without");
        }
        if self.system.is_some() {
            bail!("--system: this model has no chat template, so there is no place for instructions");
        }
        if !self.raw {
            let _ =
                writeln!(std::io::stderr(), "note: this model has no chat template; its reply continues the prompt");
        }
        Ok(Prompt::Text(prompt))
    }
}

impl Prompt {
    /// The ids of a prompt, with what the model wants before it.
    pub(crate) fn ids(&self, model: &LoadedModel) -> Result<Vec<u32>> {
        Ok(match self {
            Prompt::Chat(messages) => model.prompts().encode_chat(&ChatPrompt::new(messages))?,
            Prompt::Text(text) => model.prompts().encode_text(text)?,
        })
    }
}
