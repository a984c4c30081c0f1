//! `/api/embed`: vectors of texts in Ollama's form.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use pellucid_generate::finished_vector;
use serde::Serialize;
use utoipa::ToSchema;

use super::options;
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::http::routes::{BodyRefusals, Refusals, read_body};
use crate::models::lease::VectorLease;
use crate::openai::embeddings::{self, Computed, EmbeddingJob, EmbeddingRequest, Text};
use crate::openai::openapi::schemas;
use crate::reply::parts::{self, JsonParts};
use crate::state::SharedApp;

/// Texts whose vectors are wanted.
#[derive(Debug, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct OllamaEmbedRequest {
    #[schema(max_length = 512)]
    model: String,
    #[schema(schema_with = schemas::texts)]
    input: Vec<String>,
    /// Cut texts that are longer than the model's context; false refuses them.
    #[schema(default = true)]
    truncate: Option<bool>,
    /// Values of each vector, for models that were trained for shorter vectors.
    #[schema(minimum = 1, maximum = 65536)]
    dimensions: Option<usize>,
    /// Only an empty object: no option changes a vector.
    #[schema(schema_with = schemas::empty_object, required = false)]
    options: (),
    /// Time that the model stays loaded: a duration or seconds, 0 to unload it after the reply, -1 to keep it.
    #[schema(schema_with = super::schemas::keep_alive, required = false)]
    keep_alive: Option<String>,
}

/// Vectors of texts, in their order.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct OllamaEmbedReply {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// Translates a request into one of OpenAI's API.
fn read(value: Json, model: &VectorLease) -> Result<EmbeddingJob, ApiError> {
    let mut fields = Fields::of(value)?;
    let name = fields.required("model")?;
    let name = fields::string("model", name, 512)?;
    let plain = name.strip_suffix(":latest").filter(|plain| model.names().any(|own| own == *plain));
    let input = fields.required("input")?;
    let truncate = fields.boolean("truncate")?.unwrap_or(true);
    let dimensions = fields.whole("dimensions", 1..=65_536)?;
    if let Some(options) = fields.take("options") {
        Fields::within("options".into(), options)?.finish()?;
    }
    let keep_alive = options::read_keep_alive(&mut fields)?;
    options::check_unload(keep_alive, model)?;
    keep_alive.into_iter().for_each(|keep_alive| model.set_keep_alive(keep_alive));
    fields.finish()?;
    let request = EmbeddingRequest {
        model: plain.unwrap_or(&name).to_owned(),
        input: read_texts(input)?,
        encoding_format: Default::default(),
        dimensions,
        normalize: Some(true),
        truncate_prompt_tokens: truncate.then_some(-1),
        user: None,
    };
    request.job(model)
}

/// Reads a text or a list of texts. Ollama has no token ids here, unlike OpenAI's API.
fn read_texts(value: Json) -> Result<Vec<Text>, ApiError> {
    if let Json::Array(values) = &value
        && let Some(other) = values.iter().find(|value| !matches!(value, Json::String(_)))
    {
        return Err(fields::wrong_type("input", "a string or a list of strings", other));
    }
    embeddings::read_input(value)
}

/// Compute vectors of texts
#[utoipa::path(post, path = "/api/embed", tag = "Ollama", request_body = OllamaEmbedRequest, responses(
    (status = 200, description = "The vectors, in the order of the texts", body = OllamaEmbedReply),
    Refusals, BodyRefusals))]
pub(crate) async fn embed(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (job, admission) = read_body(&app, &caller, request, true, read).await?;
    let num_dimensions = job.num_dimensions;
    let num_tokens: usize = job.inputs.iter().map(|input| input.ids.len()).sum();
    let Computed { found, account, model } = embeddings::compute(&app, &caller, admission, job.inputs).await?;
    let mut parts = JsonParts::default();
    parts.literal("{\"model\":");
    parts.value(&model.id);
    parts.literal(",\"embeddings\":[");
    for (index, values) in found.vectors().enumerate() {
        parts.literal(if index > 0 { ",[" } else { "[" });
        parts.list(finished_vector(values, num_dimensions, true).into_iter(), |value, out| out.json(&value));
        parts.literal("]");
    }
    let nanoseconds = found.total_time.as_nanos() as u64;
    parts.literal(&format!(
        "],\"total_duration\":{nanoseconds},\"load_duration\":0,\"prompt_eval_count\":{num_tokens}}}"
    ));
    parts::response(parts, account)
}
