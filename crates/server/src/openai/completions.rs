//! `/v1/completions`: reads a request to continue texts and turns it into requests to the engine.

use std::sync::Arc;

use pellucid_generate::{FillInTokens, LoadedModel, PromptRequest};
use pellucid_sampling::MAX_LOGPROBS;
use utoipa::ToSchema;

use super::conversation::prompt_error;
use super::openapi::schemas;
use super::sampling::SamplingFields;
use super::shared_fields::{self, MAX_CHOICES, SharedFields};
use crate::http::blocking;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::http::long_text::with_capacity;
use crate::limits::tenants::Tenant;
use crate::reply::{Dialect, Spec};
use crate::state::Limits;

/// OpenAI's default for this route.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Fields of a completions request that chat does not have.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct CompletionFields {
    /// A text, token ids, or a list of either.
    #[schema(schema_with = schemas::prompt)]
    pub(crate) prompt: Vec<Prompt>,
    /// Maximum tokens of the reply; 0 only with `echo`.
    #[schema(minimum = 0, maximum = 2147483647, default = 16)]
    pub(crate) max_tokens: Option<usize>,
    /// Report the log probability of each token, and of this number of most probable tokens at its position.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) logprobs: Option<u32>,
    /// The text after the gap that the reply fills; the prompt is the text before it. For models with control tokens
    /// for it.
    pub(crate) suffix: Option<String>,
    /// Return the prompt before the reply.
    pub(crate) echo: Option<bool>,
    /// Number of replies to generate, of which the `n` most probable are returned.
    #[schema(minimum = 1, maximum = 128)]
    pub(crate) best_of: Option<usize>,
}

/// A prompt to continue.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A completions request whose fields were read.
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    completion: CompletionFields,
    shared: SharedFields,
    sampling: SamplingFields,
}

impl CompletionRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<CompletionRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let shared = SharedFields::read(&mut fields)?;
        let completion = CompletionFields {
            prompt: read_prompts(fields.required("prompt")?)?,
            max_tokens: fields.whole("max_tokens", 0..=i64::from(i32::MAX))?,
            logprobs: fields.whole("logprobs", 0..=i64::from(MAX_LOGPROBS))?,
            suffix: fields.string("suffix", usize::MAX)?.filter(|text| !text.is_empty()),
            echo: fields.boolean("echo")?,
            best_of: fields.whole("best_of", 1..=MAX_CHOICES as i64)?,
        };
        let sampling = SamplingFields::read(&mut fields)?;
        fields.refuse("prediction", |_| false, "only /v1/chat/completions has it")?;
        fields.finish()?;
        let request = CompletionRequest { completion, shared, sampling };
        request.check()?;
        shared_fields::check_model(&request.shared.model, model)?;
        Ok(request)
    }

    /// Refuses combinations of fields that contradict each other.
    fn check(&self) -> Result<(), ApiError> {
        let CompletionRequest { completion, shared, sampling } = self;
        shared.check_seed(sampling)?;
        let (n, best_of) = (shared.num_choices(), completion.best_of);
        if let Some(best_of) = best_of.filter(|&best_of| best_of < n) {
            return Err(ApiError::field(
                "best_of",
                format!("best_of: expected at least n, which is {n}, found {best_of}"),
            ));
        }
        if best_of.is_some_and(|best_of| best_of > n) && !shared.stop.is_empty() {
            return Err(ApiError::field("stop", "best_of ranks whole replies, so it cannot be combined with stop"));
        }
        if best_of.is_some() && shared.beam_width.is_some() {
            return Err(ApiError::field("best_of", "beam search cannot be combined with best_of"));
        }
        if completion.max_tokens == Some(0) && completion.echo != Some(true) {
            return Err(ApiError::field("max_tokens", "max_tokens: expected at least 1 without echo, found 0"));
        }
        if completion.max_tokens == Some(0) && shared.beam_width.is_some() {
            return Err(ApiError::field("beam_width", "beam_width: cannot be combined with max_tokens: 0"));
        }
        if completion.suffix.is_some() {
            if completion.echo == Some(true) {
                return Err(ApiError::field("echo", "echo cannot be combined with suffix"));
            }
            if completion.prompt.iter().any(|prompt| matches!(prompt, Prompt::Ids(_))) {
                return Err(ApiError::field("suffix", "suffix needs a prompt of text, found token ids"));
            }
        }
        let num_replies = completion.prompt.len() * best_of.unwrap_or(n);
        if num_replies > MAX_CHOICES {
            let message =
                format!("prompt: expected at most {MAX_CHOICES} replies over all prompts, found {num_replies}");
            return Err(ApiError::field("prompt", message));
        }
        Ok(())
    }

    /// Checks the request against the model and the tenant, and encodes its prompts.
    pub(crate) fn spec(self, model: &LoadedModel, limits: &Limits, tenant: &Tenant) -> Result<Spec, ApiError> {
        let CompletionRequest { completion, mut shared, sampling } = self;
        let sampling = if shared.beam_width.is_none() { sampling.with_defaults(model) } else { sampling };
        let echoes = completion.echo == Some(true);
        let max_tokens = completion.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        let mut params = shared_fields::sampling_params(&sampling, completion.logprobs, model)?;
        if completion.suffix.is_some() && sampling.ignore_eos != Some(true) {
            params.end_ids.extend(FillInTokens::end_ids(&model.tokenizer));
            params.end_ids.sort_unstable();
            params.end_ids.dedup();
        }
        let output = shared.structured_output.as_ref();
        let constraint = output.map(|output| output.compile(model, tenant, shared.beam_width)).transpose()?;
        let mut prompts = with_capacity(completion.prompt.len())?;
        for prompt in completion.prompt {
            blocking::current().check()?;
            let (ids, text) = encode(prompt, completion.suffix.as_deref(), echoes, model)?;
            shared_fields::check_context(&ids, Some(max_tokens), sampling.min_tokens(), model, "prompt")?;
            // The engine generates at least one token; with `max_tokens: 0` it is not shown.
            let mut request = shared.request(ids, params.clone(), Some(max_tokens.max(1)), limits, tenant)?;
            request.best_of = completion.best_of.unwrap_or(request.num_choices).max(request.num_choices);
            request.constraint = constraint.clone();
            request.score_prompt = echoes && completion.logprobs.is_some();
            let (echo, drops_output) = (echoes.then_some(text), max_tokens == 0);
            let reports_ids = shared.reports_ids();
            prompts.push(PromptRequest { echo, drops_output, reports_ids, ..PromptRequest::text(request) });
        }
        Ok(Spec {
            dialect: Dialect::Completions,
            streaming: shared.streaming(),
            prompts,
            sampling,
            logprobs: completion.logprobs,
            user: shared.end_user(),
            service_tier: shared.client.tier_used(),
            may_call: false,
            not_enforced: Arc::default(),
            has_grammar: shared.structured_output.is_some(),
            stop: shared.stop,
        })
    }
}

/// Returns the ids of a prompt and its text, which is empty for ids unless it `is_shown`.
fn encode(
    prompt: Prompt,
    suffix: Option<&str>,
    is_shown: bool,
    model: &LoadedModel,
) -> Result<(Vec<u32>, String), ApiError> {
    let encoder = model.prompts().within(model.context_len);
    let failed = |error| prompt_error(if suffix.is_some() { "suffix" } else { "prompt" }, error);
    match (prompt, suffix) {
        (Prompt::Text(text), Some(suffix)) => Ok((encoder.encode_fill_in(&text, suffix).map_err(failed)?, text)),
        (Prompt::Text(text), None) => Ok((encoder.encode_text(&text).map_err(failed)?, text)),
        (Prompt::Ids(ids), _) => {
            check_ids(&ids, model)?;
            let text = if is_shown { model.tokenizer.try_decode(&ids, true) } else { Ok(String::new()) };
            Ok((ids, text.map_err(|error| failed(error.into()))?))
        }
    }
}

fn check_ids(ids: &[u32], model: &LoadedModel) -> Result<(), ApiError> {
    match ids.iter().find(|&&id| id as usize >= model.vocab_size) {
        Some(id) => {
            let message = format!("prompt: the token id {id} is outside the vocabulary of {}", model.vocab_size);
            Err(ApiError::field("prompt", message).code("out_of_range"))
        }
        None => Ok(()),
    }
}

fn read_prompts(value: Json) -> Result<Vec<Prompt>, ApiError> {
    let empty = || ApiError::field("prompt", "prompt: expected a prompt of at least one token, found an empty one");
    let values = match value {
        Json::String(text) if text.is_empty() => return Err(empty()),
        Json::String(text) => return Ok(vec![Prompt::Text(text)]),
        Json::Array(values) if values.is_empty() => return Err(empty()),
        Json::Array(values) => values,
        other => return Err(fields::wrong_type("prompt", "a string, token ids, or a list of either", &other)),
    };
    if matches!(values[0], Json::Integer(_) | Json::Float(_)) {
        return Ok(vec![Prompt::Ids(fields::ids("prompt", values)?)]);
    }
    let values = fields::array("prompt", Json::Array(values), MAX_CHOICES)?;
    let one = |value| match value {
        Json::String(text) if text.is_empty() => Err(empty()),
        Json::String(text) => Ok(Prompt::Text(text)),
        Json::Array(ids) if ids.is_empty() => Err(empty()),
        Json::Array(values) => Ok(Prompt::Ids(fields::ids("prompt", values)?)),
        other => Err(fields::wrong_type("prompt", "a string, token ids, or a list of either", &other)),
    };
    let is_text = matches!(values[0], Json::String(_));
    let mut prompts: Vec<Prompt> = with_capacity(values.len())?;
    for value in values {
        prompts.push(one(value)?);
    }
    if prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)) != is_text) {
        return Err(ApiError::field(
            "prompt",
            "prompt: expected a list of texts or a list of token ids, found both in one list",
        ));
    }
    Ok(prompts)
}
