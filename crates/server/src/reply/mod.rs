//! A request that was read and checked, and the reply to it while it is generated: its events, what they cost, how it
//! ended. This file knows no HTTP; `respond`, `stream` and `websocket` send the pieces in the form that
//! `form` defines and each API implements.
//!
//! When a client disconnects, the HTTP library drops the future or the body that holds the [`Reply`]. That drops its
//! `Generation`, whose requests the engine cancels before its next step, and its account, which records the outcome.

pub(crate) mod buffer;
pub(crate) mod form;
pub(crate) mod guard;
pub(crate) mod parts;
pub(crate) mod respond;
pub(crate) mod stream;
pub(crate) mod websocket;

use std::sync::Arc;
use std::task::{Context, Poll};

use pellucid_engine::Error;
use pellucid_generate::{Finish, Generation, GenerationEvent, GenerationRequest, JudgedPrompt, PromptRequest, Summary};
use pellucid_sampling::{MAX_LOGPROBS, SamplingParams};

use crate::http::error::ApiError;
use crate::limits::account::Account;
use crate::metrics::Outcome;
use crate::models::lease::TextLease;
use crate::openai::probe;
use crate::openai::sampling::SamplingFields;
use crate::openai::shared_fields::Streaming;
use crate::openai::structured_output;
use crate::openai::whole_reply::token_bytes;
use crate::reply::parts::PIECES_IN_FLIGHT;
use crate::running::Listed;

/// Which of OpenAI's two APIs a request uses; it decides the shape of the JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    Completions,
}

/// Memory that the engine takes for each token of a prediction and each sequence: a copy, and three indexes of n-grams
/// of up to 16 bytes.
const PREDICTED_TOKEN_BYTES: usize = size_of::<u32>() + 3 * 16;
/// Memory of a token of a prompt whose ids are reported: a copy, and its JSON in a buffer that grows.
const REPORTED_ID_BYTES: usize = size_of::<u32>() + 2 * 8;

/// A request that was read and checked.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) dialect: Dialect,
    pub(crate) prompts: Vec<PromptRequest>,
    pub(crate) stop: Vec<String>,
    /// Sampling fields as the client gave them; `prompts` hold the parameters that they mean.
    pub(crate) sampling: SamplingFields,
    /// Number of most probable tokens to report beside each token; `None` reports no log probabilities.
    pub(crate) logprobs: Option<u32>,
    pub(crate) streaming: Option<Streaming>,
    pub(crate) user: Option<String>,
    /// The tier that the reply names, if the request named one.
    pub(crate) service_tier: Option<&'static str>,
    /// Whether the reply may call tools.
    pub(crate) may_call: bool,
    /// Whether a grammar constrains the whole reply, so that one that is cut off is not complete.
    pub(crate) has_grammar: bool,
    /// Parts of the tools' schemas that calls need not satisfy.
    pub(crate) not_enforced: Arc<[String]>,
}

impl Spec {
    /// Memory that the request takes while its reply is generated, the text of the reply not included.
    pub(crate) fn held_bytes(&self) -> usize {
        let num_top = self.logprobs.unwrap_or(0) as usize;
        let prompt = |prompt: &PromptRequest| {
            let PromptRequest { request, echo, .. } = prompt;
            let num_choices = request.beams.map_or(request.num_choices, |beams| beams.num_returned);
            let scores = if request.score_prompt { num_choices * token_bytes(num_top) } else { 0 };
            let echoed = echo.as_ref().map_or(0, |text| (1 + num_choices) * text.len());
            // The engine and the reader of the reply have the ids.
            let predicted = request.prediction.len()
                * (size_of::<u32>() + request.best_of.max(request.num_choices) * PREDICTED_TOKEN_BYTES);
            let num_grammars = if request.constraint.is_some() { request.best_of } else { 0 };
            let reported = if prompt.reports_ids { request.prompt.len() * REPORTED_ID_BYTES } else { 0 };
            let parsers = num_grammars * structured_output::BYTES_PER_REPLY;
            let judged = prompt.judged.as_ref().map_or(0, JudgedPrompt::held_bytes);
            let probed = request.probe.map_or(0, |wanted| probe::held_bytes(&wanted, request.prompt.len()));
            judged
                + probed
                + reported
                + parsers
                + request.prompt.len() * (2 * size_of::<u32>() + scores)
                + predicted
                + echoed
        };
        let names: usize = self.not_enforced.iter().map(|path| size_of::<String>() + path.len()).sum();
        self.prompts.iter().map(prompt).sum::<usize>() + PIECES_IN_FLIGHT + names
    }

    pub(crate) fn num_prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.request.prompt.len()).sum()
    }

    /// Log probabilities reported for each token of the output. A trace shows up to [`MAX_LOGPROBS`] candidates.
    pub(crate) fn logprobs_per_token(&self) -> usize {
        let is_traced = self.prompts.iter().any(|prompt| prompt.request.trace);
        let traced = if is_traced { MAX_LOGPROBS as usize } else { 0 };
        self.logprobs.map_or(0, |count| count as usize + 1) + traced
    }

    /// Splits off what the generation needs; the rest describes the sampling in effect.
    pub(crate) fn into_generation(mut self) -> (GenerationRequest, Sampling) {
        let params = self.prompts.first().map(|prompt| prompt.request.sampling.clone()).unwrap_or_default();
        let is_beam_search = self.prompts.iter().any(|prompt| prompt.request.beams.is_some());
        let has_grammar = self.has_grammar;
        let explains_cache = self.prompts.iter().any(|prompt| prompt.request.explain_cache);
        let logs_misses = tracing::enabled!(tracing::Level::DEBUG);
        self.prompts.iter_mut().for_each(|prompt| prompt.request.explain_cache |= logs_misses);
        let generation = GenerationRequest { prompts: self.prompts, stop: self.stop, reports_progress: false };
        let not_enforced = self.not_enforced;
        let fields = self.sampling;
        (generation, Sampling { fields, params, is_beam_search, has_grammar, not_enforced, explains_cache })
    }
}

/// How the tokens of a reply are sampled.
#[derive(Debug, Clone)]
pub(crate) struct Sampling {
    /// Sampling fields as the client gave them.
    pub(crate) fields: SamplingFields,
    /// The parameters that they mean.
    pub(crate) params: SamplingParams,
    pub(crate) is_beam_search: bool,
    /// Whether a grammar constrains the reply.
    pub(crate) has_grammar: bool,
    /// Parts of the tools' schemas that calls need not satisfy.
    pub(crate) not_enforced: Arc<[String]>,
    /// Whether the reply tells why prompts were not found whole in the prefix cache.
    pub(crate) explains_cache: bool,
}

/// A reply that is being generated. Dropping it cancels it.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) generation: Generation,
    pub(crate) sampling: Sampling,
    pub(crate) account: Account,
    /// The model that generates, which stays loaded until the reply is complete.
    pub(crate) model: TextLease,
    /// The request in the operators' list.
    pub(crate) listed: Listed,
}

impl Reply {
    /// Returns the next event and charges the tenant for the output so far; `None` when the reply is complete.
    pub(crate) fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<GenerationEvent, ApiError>>> {
        let event = self.generation.poll_event(context);
        self.account.charge(self.generation.num_output_tokens());
        event.map(|event| event.map(|event| event.map_err(|error| self.fail_with(error))))
    }

    pub(crate) async fn next_event(&mut self) -> Option<Result<GenerationEvent, ApiError>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// Records a reply that is complete.
    pub(crate) fn close(&mut self) -> Summary {
        let mut summary = self.generation.summary();
        guard::log_blocked(&self.account, &summary);
        self.account.charge_probe(&summary);
        for miss in &summary.misses {
            tracing::debug!(request_id = self.account.request_id(), reason = miss.sentence(), "prefix not reused");
        }
        if !self.sampling.explains_cache {
            summary.misses.clear();
        }
        let is_late = summary.finishes.contains(&Some(Finish::Deadline));
        self.account.close(if is_late { Outcome::TimedOut } else { Outcome::Completed }, &summary);
        summary
    }

    /// Records a reply that could not be completed.
    pub(crate) fn fail(&mut self) {
        self.account.close(Outcome::Failed, &self.generation.summary());
    }

    /// Takes memory for the reply, or ends it.
    pub(crate) fn hold_at_least(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.account.hold_at_least(bytes).inspect_err(|_| self.fail())
    }

    /// Records a reply that `error` ends, and returns the error for the client.
    fn fail_with(&mut self, error: Error) -> ApiError {
        let outcome = if error == Error::Cancelled { Outcome::CancelledByOperator } else { Outcome::Failed };
        self.account.close(outcome, &self.generation.summary());
        error.into()
    }
}
