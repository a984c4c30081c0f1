//! A model that is ready to answer: its engine runs, its tokenizer and chat template are read.

use std::sync::{Arc, OnceLock};

use pellucid_engine::{EngineHandle, TenantId};
use pellucid_grammar::{CompiledGrammar, GrammarSource, ReplyConstraint, ReplyRules};
use pellucid_sampling::SamplingDefaults;
use pellucid_tokenizer::{ChatTemplate, DateTime, Tokenizer};

use crate::{Calling, GenerationRequest, Grammars, Guards, Judging, PromptEncoder, PromptRequest, Refusal, Thinking};

/// A model behind a running engine. The program that opened the files and chose the device builds it.
#[derive(Debug)]
pub struct LoadedModel {
    /// Name of the model, as requests and reports use it.
    pub id: String,
    /// Further names by which requests may call it. Replies have `id`.
    pub aliases: Vec<String>,
    /// Identifies model, build and instruction set: equal requests to equal fingerprints return equal bytes.
    /// Empty where nothing reports it, because computing it reads a part of every file.
    pub fingerprint: String,
    /// Converts between text and token ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Compiled chat template. `None` for models that were not trained to chat, and when `template_error` is set.
    pub template: Option<ChatTemplate>,
    /// Why the model's chat template does not compile, with the file's path.
    pub template_error: Option<String>,
    /// Maximum tokens of a prompt and its reply together.
    pub context_len: usize,
    /// Number of logits that the model computes; a tokenizer may define fewer tokens.
    pub vocab_size: usize,
    /// Sampling options of a request that gives none: those that the model's files recommend, and the operator's.
    pub sampling: SamplingDefaults,
    /// Facts about the model's files.
    pub details: ModelDetails,
    /// Time of loading, in seconds since 1970.
    pub created: u64,
    /// Compiles and keeps the grammars of structured output.
    pub grammars: Grammars,
    /// The thoughts of the model; see [`LoadedModel::thinking`].
    pub thinking: OnceLock<Thinking>,
    /// Judge prompts and replies.
    pub guards: Guards,
    /// How the model calls tools; see [`LoadedModel::calling`].
    pub calling: OnceLock<Calling>,
    /// Submits requests to the engine. Dropping the model stops the engine.
    pub engine: EngineHandle,
    /// Clock for chat templates that write the date; usually [`utc_now`](crate::utc_now).
    pub now: fn() -> DateTime,
}

/// Facts about a model's files, for listings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelDetails {
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// Name of the architecture, such as `qwen2`.
    pub family: String,
    /// Elements of all tensors.
    pub num_parameters: u64,
    /// Type of most of the weights' bytes, such as `Q4_K`.
    pub quantization: String,
    /// Size of the files.
    pub num_bytes: u64,
}

impl LoadedModel {
    /// Returns every name that requests may use, `id` first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.aliases).map(String::as_str)
    }

    /// Compiles a grammar for this model, or returns the one that `tenant` used before. Takes long: up to a second for
    /// the first one, which prepares the vocabulary.
    pub fn grammar(
        &self,
        tenant: TenantId,
        source: GrammarSource,
    ) -> Result<Arc<CompiledGrammar>, pellucid_grammar::Error> {
        self.grammars.get(tenant, source, &self.tokenizer, self.vocab_size)
    }

    /// Lets the guards judge prompts that were not judged yet. May take long. A model with guards accepts no others.
    pub fn judge(&self, request: &mut GenerationRequest) -> Result<(), Refusal> {
        if self.guards.is_empty() { Ok(()) } else { self.guards.judge_all(&mut request.prompts, &self.tokenizer) }
    }

    /// Lets the guards judge prompts as [`LoadedModel::judge`] does, on a thread of theirs, for async tasks.
    pub fn judge_apart(&self, prompts: Vec<PromptRequest>) -> Judging {
        self.guards.judge_apart(prompts, &self.tokenizer)
    }

    /// Returns the constraint on answers and calls, made of compiled parts.
    pub(crate) fn reply_constraint(&self, rules: ReplyRules) -> Result<ReplyConstraint, pellucid_grammar::Error> {
        Ok(self.grammars.compiler(&self.tokenizer, self.vocab_size)?.reply(rules))
    }

    /// Returns the encoder that makes prompts for this model.
    pub fn prompts(&self) -> PromptEncoder<'_> {
        PromptEncoder::new(&self.tokenizer, self.template.as_ref(), self.now).with_calling(*self.calling())
    }
}
