//! Fields that chat and completions share, and how they become requests to the engine.

use std::time::Duration;

use pellucid_engine::{BeamParams, EarlyStopping, MAX_WIDTH, ProbeRequest, Request, Scope};
use pellucid_generate::LoadedModel;
use pellucid_sampling::{MAX_LOGPROBS, SamplingParams};
use utoipa::ToSchema;

use super::client_fields::ClientFields;
use super::openapi::schemas;
use super::probe::{self, ProbeFields};
use super::sampling::SamplingFields;
use super::structured_output::{self, StructuredOutput};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::state::Limits;

/// Maximum stop strings of one request, and bytes of each.
pub(crate) const MAX_STOPS: usize = 16;
pub(crate) const MAX_STOP_LEN: usize = 512;
/// Maximum replies of one request, over all its prompts.
pub(crate) const MAX_CHOICES: usize = MAX_WIDTH;
const MAX_WORD_LEN: usize = 512;

/// Fields that chat and completions share. Null means absent.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct SharedFields {
    /// The model's id, as `/v1/models` lists it.
    #[schema(max_length = 512)]
    pub(crate) model: String,
    /// Send the reply piece by piece, as server-sent events.
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Replies to return.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub(crate) n: Option<usize>,
    /// The reply ends before the first of these texts: one text, or up to 16.
    #[schema(schema_with = schemas::stop, required = false)]
    pub(crate) stop: Vec<String>,
    /// Identifies the end user. Appears in the log as a hash, and nowhere else.
    #[schema(max_length = 512)]
    pub(crate) user: Option<String>,
    /// Number of beams; replaces sampling by beam search.
    #[schema(minimum = 2, maximum = 128)]
    pub(crate) beam_width: Option<usize>,
    /// A beam's score is divided by its length to this power; needs `beam_width`.
    #[schema(minimum = -100, maximum = 100)]
    pub(crate) length_penalty: Option<f32>,
    /// When to stop after `n` beams have ended: true at once, false by a heuristic, "never" when no better beam is
    /// possible; needs `beam_width`.
    #[schema(schema_with = schemas::early_stopping)]
    pub(crate) early_stopping: Option<EarlyStopping>,
    /// Requests of one tenant with a lower value are served first.
    #[schema(minimum = -1000, maximum = 1000, default = 0)]
    pub(crate) priority: Option<i32>,
    /// Only requests with the same salt share cached prefixes.
    #[schema(max_length = 512)]
    pub(crate) cache_salt: Option<String>,
    /// End a reply that repeats itself, with `finish_reason` `repetition`. Not with `beam_width`.
    #[schema(default = false)]
    pub(crate) loop_guard: Option<bool>,
    /// Format of the reply.
    #[schema(schema_with = structured_output::response_format, rename = "response_format", required = false)]
    pub(crate) structured_output: Option<StructuredOutput>,
    /// Grammar of the reply, under the names of vLLM. It is read into `structured_output`.
    #[schema(schema_with = structured_output::structured_outputs, required = false)]
    pub(crate) structured_outputs: (),
    /// Report how each token was chosen.
    pub(crate) trace: Option<bool>,
    /// Report why the prompt was not found whole in the prefix cache.
    #[schema(default = false)]
    pub(crate) explain_cache: Option<bool>,
    /// Report the ids of the tokens of the prompt and of each reply.
    #[schema(default = false)]
    pub(crate) return_token_ids: Option<bool>,
    /// Compute one token of the reply again and report what is inside the model.
    #[schema(value_type = Option<ProbeFields>)]
    pub(crate) probe: Option<ProbeRequest>,
    /// Let the server's drafters propose tokens. The reply is the same without them.
    #[schema(default = true)]
    pub(crate) speculate: Option<bool>,
    /// Time limit in milliseconds, at which the reply ends.
    #[schema(minimum = 1, maximum = 86400000)]
    pub(crate) timeout_ms: Option<u64>,
    #[schema(ignore)]
    pub(crate) client: ClientFields,
}

/// Options of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ToSchema)]
pub(crate) struct StreamOptions {
    /// End with a chunk that has usage and no choices.
    pub(crate) include_usage: Option<bool>,
    /// Pad chunks so that their size does not reveal the length of tokens.
    #[schema(default = true)]
    pub(crate) include_obfuscation: Option<bool>,
}

impl SharedFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<SharedFields, ApiError> {
        let model = fields.required("model")?;
        let early_stopping = match fields.take("early_stopping") {
            None => None,
            Some(Json::Bool(true)) => Some(EarlyStopping::Always),
            Some(Json::Bool(false)) => Some(EarlyStopping::Heuristic),
            Some(Json::String(word)) if word == "never" => Some(EarlyStopping::Never),
            Some(other) => return Err(fields::wrong_type("early_stopping", "a boolean or \"never\"", &other)),
        };
        let shared = SharedFields {
            model: fields::string("model", model, MAX_WORD_LEN)?,
            stream: fields.boolean("stream")?,
            stream_options: StreamOptions::read(fields)?,
            n: fields.whole("n", 1..=MAX_CHOICES as i64)?,
            stop: fields.strings("stop", MAX_STOPS, MAX_STOP_LEN)?,
            user: fields.string("user", MAX_WORD_LEN)?,
            beam_width: fields.whole("beam_width", 2..=MAX_WIDTH as i64)?,
            length_penalty: fields.number("length_penalty", -100.0..=100.0)?,
            early_stopping,
            priority: fields.whole("priority", -1000..=1000)?,
            cache_salt: fields.string("cache_salt", MAX_WORD_LEN)?,
            loop_guard: fields.boolean("loop_guard")?,
            structured_output: StructuredOutput::read(fields)?,
            structured_outputs: (),
            trace: fields.boolean("trace")?,
            explain_cache: fields.boolean("explain_cache")?,
            return_token_ids: fields.boolean("return_token_ids")?,
            probe: probe::read(fields)?,
            speculate: fields.boolean("speculate")?,
            timeout_ms: fields.whole("timeout_ms", 1..=86_400_000)?,
            client: ClientFields::read(fields)?,
        };
        if shared.stream_options.is_some() && shared.stream != Some(true) {
            return Err(ApiError::field("stream_options", "stream_options needs stream: true"));
        }
        let needs_beams =
            [("length_penalty", shared.length_penalty.is_some()), ("early_stopping", shared.early_stopping.is_some())];
        if let Some((name, _)) = needs_beams.iter().find(|(_, given)| *given && shared.beam_width.is_none()) {
            return Err(ApiError::field(*name, format!("{name} has no effect without beam_width")));
        }
        Ok(shared)
    }

    /// Refuses a seed with beam search, which does not sample. The engine checks other sampling fields, but every
    /// request to the engine has a seed.
    pub(crate) fn check_seed(&self, sampling: &SamplingFields) -> Result<(), ApiError> {
        match (self.beam_width, sampling.seed()) {
            (Some(_), Some(_)) => Err(ApiError::field("seed", "beam search cannot be combined with seed")),
            _ => Ok(()),
        }
    }

    /// Returns the identifier of the end user. OpenAI replaces `user` by `safety_identifier`, which therefore wins.
    pub(crate) fn end_user(&mut self) -> Option<String> {
        self.client.safety_identifier.take().or_else(|| self.user.take())
    }

    /// Whether to report the ids of tokens.
    pub(crate) fn reports_ids(&self) -> bool {
        self.return_token_ids == Some(true)
    }

    pub(crate) fn num_choices(&self) -> usize {
        self.n.unwrap_or(1)
    }

    fn beams(&self) -> Option<BeamParams> {
        Some(BeamParams {
            width: self.beam_width?,
            num_returned: self.num_choices(),
            length_penalty: self.length_penalty.unwrap_or(1.0),
            early_stopping: self.early_stopping.unwrap_or(EarlyStopping::Heuristic),
        })
    }

    /// Returns how to stream the reply; `None` for a whole reply.
    pub(crate) fn streaming(&self) -> Option<Streaming> {
        let options = self.stream_options.unwrap_or_default();
        (self.stream == Some(true)).then(|| Streaming {
            include_usage: options.include_usage.unwrap_or(false),
            obfuscates: options.include_obfuscation.unwrap_or(true),
        })
    }

    /// Returns the engine's request for one prompt.
    pub(crate) fn request(
        &self,
        prompt: Vec<u32>,
        sampling: SamplingParams,
        max_tokens: Option<usize>,
        limits: &Limits,
        tenant: &Tenant,
    ) -> Result<Request, ApiError> {
        if self.trace == Some(true) && !tenant.config.trace {
            let message =
                "trace is not allowed for this key, because it reveals more of the model than log probabilities";
            return Err(
                ApiError::refused(axum::http::StatusCode::FORBIDDEN, "trace_not_allowed", message).param("trace")
            );
        }
        if self.probe.is_some() {
            probe::check_right(tenant)?;
        }
        let longest = limits.request_timeout;
        let deadline = match self.timeout_ms.map(Duration::from_millis) {
            Some(wanted) if wanted > longest => {
                let message =
                    format!("timeout_ms: expected at most {}, found {}", longest.as_millis(), wanted.as_millis());
                return Err(ApiError::field("timeout_ms", message));
            }
            wanted => wanted.unwrap_or(longest),
        };
        let scope = match &self.cache_salt {
            Some(salt) => Scope::salted(tenant.id, salt),
            None => Scope::of(tenant.id),
        };
        let beams = self.beams();
        let num_choices = if beams.is_some() { 1 } else { self.num_choices() };
        Ok(Request {
            scope,
            max_tokens,
            num_choices,
            best_of: num_choices,
            beams,
            loop_guard: self.loop_guard == Some(true),
            trace: self.trace == Some(true),
            probe: self.probe,
            explain_cache: self.explain_cache == Some(true),
            speculate: self.speculate != Some(false),
            // The engine serves higher values first; the API follows vLLM, where lower values come first.
            priority: -self.priority.unwrap_or(0),
            deadline: Some(deadline),
            ..Request::new(prompt, sampling)
        })
    }
}

/// Options of a streamed reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streaming {
    pub(crate) include_usage: bool,
    pub(crate) obfuscates: bool,
}

impl StreamOptions {
    fn read(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
        let Some(value) = fields.take("stream_options") else { return Ok(None) };
        let mut fields = Fields::within(fields.path("stream_options"), value)?;
        let options = StreamOptions {
            include_usage: fields.boolean("include_usage")?,
            include_obfuscation: fields.boolean("include_obfuscation")?,
        };
        fields.finish()?;
        Ok(Some(options))
    }
}

/// Returns the sampling parameters for the model, with the number of log probabilities to report.
pub(crate) fn sampling_params(
    fields: &SamplingFields,
    logprobs: Option<u32>,
    model: &LoadedModel,
) -> Result<SamplingParams, ApiError> {
    debug_assert!(logprobs.is_none_or(|count| count <= MAX_LOGPROBS));
    Ok(SamplingParams { logprobs, ..fields.params(model)? })
}

/// Refuses a prompt that leaves too few tokens of the context for the reply.
pub(crate) fn check_context(
    prompt: &[u32],
    max_tokens: Option<usize>,
    min_tokens: Option<u32>,
    model: &LoadedModel,
    param: &str,
) -> Result<(), ApiError> {
    let context = model.context_len;
    // LiteLLM recognizes this error by OpenAI's wording, not by its code.
    let refused = |message: String| Err(ApiError::field(param, message).code("context_length_exceeded"));
    if prompt.len() >= context {
        let count = prompt.len();
        return refused(format!("this model's maximum context length is {context} tokens, but the prompt has {count}"));
    }
    if let (Some(least), Some(most)) = (min_tokens, max_tokens)
        && least as usize > most
    {
        return Err(ApiError::field("min_tokens", format!("min_tokens ({least}) must not exceed max_tokens ({most})")));
    }
    match max_tokens {
        Some(wanted) if prompt.len() + wanted > context => refused(format!(
            "this model's maximum context length is {context} tokens, but the request needs {}: {} for the prompt \
             and up to {wanted} for the reply",
            prompt.len() + wanted,
            prompt.len(),
        )),
        _ => Ok(()),
    }
}

/// Refuses a name other than those of the served model.
pub(crate) fn check_model(name: &str, model: &LoadedModel) -> Result<(), ApiError> {
    if model.names().any(|own| own == name) {
        return Ok(());
    }
    Err(unknown_model(name, model.names()))
}

/// Returns the refusal of a name that is none of `names`.
pub(crate) fn unknown_model<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> ApiError {
    let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
    let message = format!("the model {} does not exist; this server has {}", fields::shown(name), names.join(", "));
    ApiError::refused(axum::http::StatusCode::NOT_FOUND, "model_not_found", message).param("model")
}
