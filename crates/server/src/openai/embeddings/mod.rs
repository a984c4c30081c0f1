//! `/v1/embeddings`: vectors of texts.

mod base64;
pub(crate) mod rerank;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use pellucid_engine::{EmbeddingInput, Embeddings};
use pellucid_generate::{LoadedEmbedder, finished_vector};
use serde::Serialize;
use utoipa::ToSchema;

use super::openapi::schemas;
use super::shared_fields::unknown_model;
use crate::http::body::Admission;
use crate::http::caller::Caller;
use crate::http::drain::Phase;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::http::routes::{BodyRefusals, Refusals, read_body};
use crate::limits::account::Account;
use crate::metrics::Outcome;
use crate::models::lease::VectorLease;
use crate::openai::conversation::prompt_error;
use crate::reply::parts::{self, JsonParts, PIECES_IN_FLIGHT};
use crate::reply::respond::shutting_down;
use crate::state::SharedApp;

/// Maximum texts of one request.
pub(crate) const MAX_TEXTS: usize = 2048;
const MAX_WORD_LEN: usize = 512;

/// Texts whose vectors are wanted.
#[derive(Debug, ToSchema)]
pub(crate) struct EmbeddingRequest {
    /// The model's id, as `/v1/models` lists it.
    #[schema(max_length = 512)]
    pub(crate) model: String,
    /// A text, token ids, or a list of up to 2048 of either. Token ids include those that the model expects before and
    /// after a text.
    #[schema(schema_with = schemas::embedding_input)]
    pub(crate) input: Vec<Text>,
    /// `float` for numbers, `base64` for little-endian 32-bit floats in Base64.
    #[schema(schema_with = schemas::encoding_format, required = false)]
    pub(crate) encoding_format: EncodingFormat,
    /// Values of each vector, for models that were trained for shorter vectors.
    #[schema(minimum = 1, maximum = 65536)]
    pub(crate) dimensions: Option<usize>,
    /// Divide each vector by its length.
    #[schema(default = true)]
    pub(crate) normalize: Option<bool>,
    /// Cut texts to this number of tokens; -1 is the model's maximum. Longer texts are refused otherwise.
    #[schema(minimum = -1, maximum = 16777216)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
    /// Identifies the end user. Appears in the log as a hash, and nowhere else.
    #[schema(max_length = 512)]
    pub(crate) user: Option<String>,
}

/// One of the texts of a request.
#[derive(Debug, PartialEq)]
pub(crate) enum Text {
    Words(String),
    Ids(Vec<u32>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

/// Vectors of texts, in their order.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct EmbeddingList {
    /// `list`.
    object: &'static str,
    data: Vec<EmbeddingObject>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct EmbeddingObject {
    /// `embedding`.
    object: &'static str,
    index: usize,
    /// Numbers, or a text with `encoding_format` `base64`.
    #[schema(schema_with = schemas::embedding)]
    embedding: Vec<f32>,
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct EmbeddingUsage {
    /// Tokens of all texts, with those that the model expects before and after a text.
    pub(crate) prompt_tokens: usize,
    pub(crate) total_tokens: usize,
}

/// A checked request.
#[derive(Debug)]
pub(crate) struct EmbeddingJob {
    pub(crate) inputs: Vec<EmbeddingInput>,
    pub(crate) num_dimensions: usize,
    normalize: bool,
    format: EncodingFormat,
    user: Option<String>,
}

impl EmbeddingRequest {
    pub(crate) fn read(value: Json) -> Result<EmbeddingRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let model = fields.required("model")?;
        let input = fields.required("input")?;
        let format = fields.string("encoding_format", MAX_WORD_LEN)?;
        let request = EmbeddingRequest {
            model: fields::string("model", model, MAX_WORD_LEN)?,
            input: read_input(input)?,
            encoding_format: match format.as_deref() {
                None | Some("float") => EncodingFormat::Float,
                Some("base64") => EncodingFormat::Base64,
                Some(other) => {
                    let message =
                        format!("encoding_format: expected \"float\" or \"base64\", found {}", fields::shown(other));
                    return Err(ApiError::field("encoding_format", message));
                }
            },
            dimensions: fields.whole("dimensions", 1..=65_536)?,
            normalize: fields.boolean("normalize")?,
            truncate_prompt_tokens: fields.integer("truncate_prompt_tokens", -1..=1 << 24)?,
            user: fields.string("user", MAX_WORD_LEN)?,
        };
        fields.finish()?;
        Ok(request)
    }

    /// Encodes the texts, and checks everything against the model.
    pub(crate) fn job(self, model: &LoadedEmbedder) -> Result<EmbeddingJob, ApiError> {
        check_name(&self.model, model)?;
        if model.info().scores_pairs {
            let message = format!("{:?} scores pairs of texts and computes no vectors; /v1/rerank uses it", model.id);
            return Err(ApiError::field("model", message).code("model_not_supported"));
        }
        let full = model.info().num_dimensions;
        let num_dimensions = self.dimensions.unwrap_or(full);
        if !model.shorter.allows(num_dimensions, full) {
            let message = format!("dimensions: expected {}, found {num_dimensions}", model.shorter.describe(full));
            return Err(ApiError::field("dimensions", message));
        }
        let max_tokens = truncation(self.truncate_prompt_tokens, model)?;
        let encode = |(index, text)| encode(text, &format!("input[{index}]"), max_tokens, model);
        Ok(EmbeddingJob {
            inputs: self.input.into_iter().enumerate().map(encode).collect::<Result<_, _>>()?,
            num_dimensions,
            normalize: self.normalize.unwrap_or(true),
            format: self.encoding_format,
            user: self.user,
        })
    }
}

/// Reads a text, token ids, or a list of either.
pub(crate) fn read_input(value: Json) -> Result<Vec<Text>, ApiError> {
    let one = |value: Json| match value {
        Json::String(words) if words.is_empty() => {
            Err(ApiError::field("input", "input: an empty string is not allowed"))
        }
        Json::String(words) => Ok(Text::Words(words)),
        Json::Array(ids) if ids.is_empty() => Err(ApiError::field("input", "input: an empty list is not allowed")),
        Json::Array(ids) => Ok(Text::Ids(fields::ids("input", ids)?)),
        other => Err(fields::wrong_type("input", "strings or lists of token ids", &other)),
    };
    match value {
        Json::String(_) => Ok(vec![one(value)?]),
        Json::Array(values) if values.is_empty() => {
            Err(ApiError::field("input", "input: an empty list is not allowed"))
        }
        Json::Array(values) if matches!(values[0], Json::Integer(_) | Json::Float(_)) => {
            Ok(vec![one(Json::Array(values))?])
        }
        value => fields::array("input", value, MAX_TEXTS)?.into_iter().map(one).collect(),
    }
}

/// Refuses a name other than those of the model that computes vectors.
pub(crate) fn check_name(name: &str, model: &LoadedEmbedder) -> Result<(), ApiError> {
    if model.names().any(|own| own == name) { Ok(()) } else { Err(unknown_model(name, model.names())) }
}

/// Returns the number of tokens to which texts are cut.
pub(crate) fn truncation(wanted: Option<i64>, model: &LoadedEmbedder) -> Result<Option<usize>, ApiError> {
    let own = model.tokenizer.prefix().len() + model.tokenizer.suffix().len();
    let limit = model.info().context_len;
    match wanted {
        None => Ok(None),
        Some(-1) => Ok(Some(limit)),
        Some(tokens) if (own as i64 + 1..=limit as i64).contains(&tokens) => Ok(Some(tokens as usize)),
        Some(tokens) => {
            let message = format!("truncate_prompt_tokens: expected -1 or {} to {limit}, found {tokens}", own + 1);
            Err(ApiError::field("truncate_prompt_tokens", message).code("out_of_range"))
        }
    }
}

/// Encodes a text, and checks its length and its ids.
pub(crate) fn encode(
    text: Text,
    param: &str,
    max_tokens: Option<usize>,
    model: &LoadedEmbedder,
) -> Result<EmbeddingInput, ApiError> {
    let info = model.info();
    let input = match text {
        Text::Words(words) => model.encode(&words, max_tokens).map_err(|error| prompt_error(param, error))?,
        Text::Ids(mut ids) => {
            if let Some(id) = ids.iter().find(|id| **id as usize >= info.vocab_size) {
                let message = format!("{param}: expected token ids below {}, found {id}", info.vocab_size);
                return Err(ApiError::field(param, message).code("out_of_range"));
            }
            ids.truncate(max_tokens.unwrap_or(usize::MAX));
            EmbeddingInput::new(ids)
        }
    };
    check_length(input, param, model)
}

/// Refuses texts without tokens and texts that are too long.
pub(crate) fn check_length(
    input: EmbeddingInput,
    param: &str,
    model: &LoadedEmbedder,
) -> Result<EmbeddingInput, ApiError> {
    let info = model.info();
    match input.ids.len() {
        0 => Err(ApiError::field(param, format!("{param} has no tokens"))),
        count if count > info.context_len => {
            let limit = info.context_len;
            let message = format!("this model's maximum context length is {limit} tokens, but {param} has {count}");
            Err(ApiError::field(param, message).code("context_length_exceeded"))
        }
        _ => Ok(input),
    }
}

/// Compute vectors of texts
///
/// A vector depends on its text alone, to the bit: not on the other texts, other requests or threads.
#[utoipa::path(post, path = "/v1/embeddings", tag = "OpenAI", request_body = EmbeddingRequest, responses(
    (status = 200, description = "The vectors, in the order of the texts", body = EmbeddingList),
    Refusals, BodyRefusals))]
pub(crate) async fn embeddings(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read = |value, model: &VectorLease| EmbeddingRequest::read(value)?.job(model);
    let (job, admission) = read_body(&app, &caller, request, true, read).await?;
    if let Some(user) = &job.user {
        tracing::debug!(request_id = caller.request_id, user = app.tenants.current().pseudonym(user), "end user");
    }
    let EmbeddingJob { inputs, num_dimensions, normalize, format, .. } = job;
    let num_tokens = inputs.iter().map(|input| input.ids.len()).sum();
    let Computed { found, account, model } = compute(&app, &caller, admission, inputs).await?;
    let mut parts = JsonParts::default();
    parts.literal("{\"object\":\"list\",\"data\":[");
    for (index, values) in found.vectors().enumerate() {
        let vector = finished_vector(values, num_dimensions, normalize);
        let separator = if index > 0 { "," } else { "" };
        parts.literal(&format!("{separator}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":"));
        match format {
            EncodingFormat::Float => {
                parts.literal("[");
                parts.list(vector.into_iter(), |value, out| out.json(&value));
                parts.literal("]}");
            }
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                parts.literal("\"");
                parts.text(base64::encode(&bytes));
                parts.literal("\"}");
            }
        }
    }
    parts.literal("],\"model\":");
    parts.value(&model.id);
    parts.literal(",\"usage\":");
    parts.value(&EmbeddingUsage { prompt_tokens: num_tokens, total_tokens: num_tokens });
    parts.literal("}");
    parts::response(parts, account)
}

/// Vectors, the account of their request, which the reply keeps until it is written, and the model.
pub(crate) struct Computed {
    pub(crate) found: Embeddings,
    pub(crate) account: Account,
    pub(crate) model: VectorLease,
}

/// Charges a request, computes its vectors and closes its account.
pub(crate) async fn compute(
    app: &SharedApp,
    caller: &Caller,
    admission: Admission<LoadedEmbedder>,
    inputs: Vec<EmbeddingInput>,
) -> Result<Computed, ApiError> {
    let Admission { mut permit, model } = admission;
    let num_tokens = inputs.iter().map(|input| input.ids.len()).sum();
    // Values twice: as the model returns them, and as they are written.
    let held = inputs.len() * model.info().num_dimensions * 2 * size_of::<f32>() + num_tokens * size_of::<u32>();
    let charged = permit.hold(held + PIECES_IN_FLIGHT).and_then(|()| permit.charge_prompt(num_tokens, false, 0));
    if let Err(error) = charged {
        app.metrics.count(&caller.tenant.config.name, Some(model.index()), Outcome::Limited);
        permit.refuse(&error);
        return Err(error);
    }
    let tenant = permit.tenant.id;
    let mut account = Account::open_for_vectors(app, permit, model.index(), caller, num_tokens);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let ticket = match model.handle.submit(tenant, inputs, move |result| _ = sender.send(result)) {
        Ok(ticket) => ticket,
        Err(error) => {
            let error = ApiError::from(error);
            let is_busy = error.status == axum::http::StatusCode::TOO_MANY_REQUESTS;
            account.refuse(&error, Some(if is_busy { Outcome::Limited } else { Outcome::Failed }));
            return Err(error);
        }
    };
    let mut stopping = std::pin::pin!(app.drain.reached(Phase::Stopping));
    let result = tokio::select! {
        biased;
        result = receiver => result.unwrap_or(Err(pellucid_engine::Error::Stopped)),
        () = &mut stopping => {
            account.close_for_vectors(Outcome::Failed, None);
            return Err(shutting_down());
        }
        () = tokio::time::sleep(app.limits.request_timeout) => {
            account.close_for_vectors(Outcome::TimedOut, None);
            let seconds = app.limits.request_timeout.as_secs();
            let message = format!("the vectors were not computed within {seconds} s; send fewer texts at a time");
            return Err(ApiError::unavailable("timeout", message, 1));
        }
    };
    drop(ticket);
    match result {
        Ok(found) if found.values.iter().all(|value| value.is_finite()) => {
            account.close_for_vectors(Outcome::Completed, Some(&found));
            Ok(Computed { found, account, model })
        }
        Ok(_) => {
            tracing::error!(request_id = caller.request_id, "the model computed values that are not finite");
            account.close_for_vectors(Outcome::Failed, None);
            Err(ApiError::internal())
        }
        Err(error) => {
            account.close_for_vectors(Outcome::Failed, None);
            Err(error.into())
        }
    }
}
