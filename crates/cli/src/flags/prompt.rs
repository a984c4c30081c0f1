//! The flags of a prompt, and how it becomes token ids; `run` and `explain` share them.

use std::io::IsTerminal;

use anyhow::{Result, bail};
use pellucid_generate::{ChatPrompt, LoadedModel};
use pellucid_tokenizer::message;
use serde_json::Value;

use crate::flags::chat_template::TemplateArgs;
use crate::terminal::{log, stdin};

#[derive(Debug, clap::Args)]
pub(crate) struct PromptArgs {
    /// Text to answer [default: standard input, if it is not a terminal]
    prompt: Option<String>,

    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    /// [default: qwen2.5-coder-1.5b, 1.1 GB, downloaded on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    pub(crate) model: Option<String>,

    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,

    /// Continue the prompt as plain text, without the model's chat template
    #[arg(long, conflicts_with = "chat_template")]
    pub(crate) raw: bool,

    #[command(flatten)]
    pub(crate) template: TemplateArgs,
}

/// A prompt for the model.
pub(crate) enum Prompt {
    /// Messages for the chat template.
    Chat(Vec<Value>),
    /// Text to continue.
    Text(String),
}

impl PromptArgs {
    /// Returns the argument, or else standard input; `None` if that is a terminal.
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
            bail!("--system: this model has no chat template, so there is no place for instructions");
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
