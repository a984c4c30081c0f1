//! `/v1/rerank`: orders documents by their relevance to a query, with the fields of Jina, Cohere and vLLM.
//!
//! A cross-encoder scores each pair of query and document with its classifier, from 0 to 1. With any other model the
//! score is the cosine of the angle between the vectors of query and document, from -1 to 1.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use pellucid_engine::EmbeddingInput;
use pellucid_generate::{LoadedEmbedder, cosine};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Computed, MAX_TEXTS, Text};
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::http::routes::{BodyRefusals, Refusals, read_body};
use crate::models::lease::VectorLease;
use crate::openai::conversation::prompt_error;
use crate::openai::{embeddings, openapi::schemas};
use crate::random;
use crate::reply::parts::{self, JsonParts};
use crate::state::SharedApp;

/// Maximum documents of one request; the query is one more text.
const MAX_DOCUMENTS: usize = MAX_TEXTS - 1;
const MAX_WORD_LEN: usize = 512;

/// A query, and documents to order by their relevance to it.
#[derive(Debug, ToSchema)]
pub(crate) struct RerankRequest {
    /// The model's id, as `/v1/models` lists it.
    #[schema(max_length = 512)]
    pub(crate) model: String,
    #[schema(min_length = 1)]
    pub(crate) query: String,
    /// Texts, or objects with a `text`.
    #[schema(schema_with = schemas::documents)]
    pub(crate) documents: Vec<String>,
    /// Results to return [default: all].
    #[schema(minimum = 1, maximum = 2047)]
    pub(crate) top_n: Option<usize>,
    /// Whether results have the text of their document.
    #[schema(default = true)]
    pub(crate) return_documents: Option<bool>,
    /// Cut texts to this number of tokens; -1 is the model's maximum. Longer texts are refused otherwise.
    #[schema(minimum = -1, maximum = 16777216)]
    pub(crate) truncate_prompt_tokens: Option<i64>,
}

/// Documents, the most relevant first.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct RerankResponse {
    id: String,
    model: String,
    results: Vec<RerankResult>,
    usage: RerankUsage,
    /// How documents were scored: `classifier`, the probability that a cross-encoder gives to the pair, or `cosine`,
    /// the cosine of the angle between the vectors of query and document.
    scoring: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct RerankResult {
    /// Index of the document in the request.
    index: usize,
    relevance_score: f32,
    document: Option<RerankDocument>,
}

#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct RerankDocument {
    text: String,
}

/// Numbers of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RerankUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// A checked request. The inputs are pairs, or the query and then the documents.
#[derive(Debug)]
struct RerankJob {
    inputs: Vec<EmbeddingInput>,
    /// The texts to return; empty if none are.
    documents: Vec<String>,
    num_results: usize,
}

impl RerankRequest {
    fn read(value: Json) -> Result<RerankRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let [model, query, documents] = ["model", "query", "documents"].map(|name| fields.required(name));
        let documents = fields::array("documents", documents?, MAX_DOCUMENTS)?;
        let request = RerankRequest {
            model: fields::string("model", model?, MAX_WORD_LEN)?,
            query: fields::string("query", query?, usize::MAX)?,
            documents: documents.into_iter().enumerate().map(read_document).collect::<Result<_, _>>()?,
            top_n: fields.whole("top_n", 1..=MAX_DOCUMENTS as i64)?,
            return_documents: fields.boolean("return_documents")?,
            truncate_prompt_tokens: fields.integer("truncate_prompt_tokens", -1..=1 << 24)?,
        };
        fields.finish()?;
        if request.query.is_empty() {
            return Err(ApiError::field("query", "query: an empty string is not allowed"));
        }
        if request.documents.is_empty() {
            return Err(ApiError::field("documents", "documents: an empty list is not allowed"));
        }
        Ok(request)
    }

    fn job(self, model: &LoadedEmbedder) -> Result<RerankJob, ApiError> {
        embeddings::check_name(&self.model, model)?;
        let max_tokens = embeddings::truncation(self.truncate_prompt_tokens, model)?;
        let mut inputs = Vec::with_capacity(self.documents.len() + 1);
        if !model.info().scores_pairs {
            inputs.push(embeddings::encode(Text::Words(self.query.clone()), "query", max_tokens, model)?);
        }
        for (index, document) in self.documents.iter().enumerate() {
            let param = format!("documents[{index}]");
            inputs.push(match model.info().scores_pairs {
                true => {
                    let pair = model.encode_pair(&self.query, document, max_tokens);
                    embeddings::check_length(pair.map_err(|error| prompt_error(&param, error))?, &param, model)?
                }
                false => embeddings::encode(Text::Words(document.clone()), &param, max_tokens, model)?,
            });
        }
        let num_results = self.top_n.unwrap_or(usize::MAX).min(self.documents.len());
        let documents = if self.return_documents == Some(false) { Vec::new() } else { self.documents };
        Ok(RerankJob { inputs, documents, num_results })
    }
}

fn read_document((index, value): (usize, Json)) -> Result<String, ApiError> {
    let path = format!("documents[{index}]");
    let text = match value {
        Json::Object(_) => {
            let mut fields = Fields::within(path.clone(), value)?;
            let text = fields.required("text")?;
            fields.finish()?;
            fields::string(&format!("{path}.text"), text, usize::MAX)?
        }
        Json::String(text) => text,
        other => return Err(fields::wrong_type(&path, "a string or an object with a text", &other)),
    };
    if text.is_empty() {
        return Err(ApiError::field(&path, format!("{path}: an empty string is not allowed")));
    }
    Ok(text)
}

/// Order documents by their relevance to a query
///
/// With the fields of Jina, Cohere and vLLM. A cross-encoder scores pairs with its classifier; with other models the
/// score is the cosine of the angle between the vectors of document and query.
#[utoipa::path(post, path = "/v1/rerank", tag = "Text", request_body = RerankRequest, responses(
    (status = 200, description = "The documents, the most relevant first", body = RerankResponse),
    Refusals, BodyRefusals))]
pub(crate) async fn rerank(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read = |value, model: &VectorLease| RerankRequest::read(value)?.job(model);
    let (job, admission) = read_body(&app, &caller, request, true, read).await?;
    let RerankJob { inputs, mut documents, num_results } = job;
    let num_tokens = inputs.iter().map(|input| input.ids.len()).sum();
    let Computed { found, account, model } = embeddings::compute(&app, &caller, admission, inputs).await?;
    let mut vectors = found.vectors();
    let (scoring, scores): (&str, Vec<f32>) = if model.info().scores_pairs {
        ("classifier", vectors.map(|score| score[0]).collect())
    } else {
        let query = vectors.next().ok_or_else(ApiError::internal)?;
        ("cosine", vectors.map(|vector| cosine(query, vector)).collect())
    };
    let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    // Of equal scores, the first document comes first: the sort is stable.
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    ranked.truncate(num_results);
    let mut parts = JsonParts::default();
    parts.literal("{\"id\":");
    parts.value(&random::id("rerank-"));
    parts.literal(",\"model\":");
    parts.value(&model.id);
    parts.literal(&format!(",\"scoring\":\"{scoring}\",\"results\":["));
    for (position, (index, score)) in ranked.into_iter().enumerate() {
        let separator = if position > 0 { "," } else { "" };
        parts.literal(&format!("{separator}{{\"index\":{index},\"relevance_score\":"));
        parts.value(&score);
        if let Some(text) = documents.get_mut(index) {
            parts.literal(",\"document\":{\"text\":\"");
            parts.text(std::mem::take(text));
            parts.literal("\"}");
        }
        parts.literal("}");
    }
    parts.literal("],\"usage\":");
    parts.value(&RerankUsage { prompt_tokens: num_tokens, total_tokens: num_tokens });
    parts.literal("}");
    parts::response(parts, account)
}
