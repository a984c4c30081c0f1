//! Speculation in requests and replies: OpenAI's `prediction`, and the counts of drafted tokens.

use pellucid_engine::{DraftCounts, SpeculationStats};
use pellucid_generate::LoadedModel;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{conversation, messages};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};

/// Reads `prediction`: the text that the client expects in the reply.
pub(crate) fn read_prediction(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(value) = fields.take("prediction") else { return Ok(None) };
    let mut fields = Fields::within(fields.path("prediction"), value)?;
    let (kind_path, content_path) = (fields.path("type"), fields.path("content"));
    let kind = fields::string(&kind_path, fields.required("type")?, 64)?;
    if kind != "content" {
        let message = format!("{kind_path}: expected \"content\", found {}", shown(&kind));
        return Err(ApiError::field(kind_path, message).code("unsupported_value"));
    }
    let content = messages::read_content(&content_path, fields.required("content")?)?;
    fields.finish()?;
    Ok(Some(content))
}

/// Returns the ids of a prediction. One that no reply of the model can contain is refused, and if its length in bytes
/// says so, before it is tokenized.
pub(crate) fn encode_prediction(text: &str, model: &LoadedModel) -> Result<Vec<u32>, ApiError> {
    let check = |num_tokens: usize, bound: &str| {
        match num_tokens > model.context_len {
        true => Err(ApiError::field(
            "prediction",
            format!(
                "prediction: this model's maximum context length is {} tokens, but the prediction has {bound}{num_tokens}",
                model.context_len
            ),
        )
        .code("context_length_exceeded")),
        false => Ok(()),
    }
    };
    check(model.tokenizer.min_ids(text.len()), "at least ")?;
    let ids =
        model.tokenizer.try_encode(text).map_err(|error| conversation::prompt_error("prediction", error.into()))?;
    check(ids.len(), "")?;
    Ok(ids)
}

/// Tokens that drafters proposed for a reply. The reply is the same without them.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct SpeculationReport {
    /// Proposed tokens that the model checked.
    drafted: u64,
    /// Proposed tokens that the model chose as well.
    accepted: u64,
    /// Proposed tokens in whose place the model chose another, and those after them.
    rejected: u64,
    /// The same counts by drafter: `draft`, `ngram`, `suffix`, `prediction`, `mtp` or `custom`.
    #[schema(value_type = Object)]
    drafters: Map<String, Value>,
    /// Why no tokens were drafted, if the request itself is the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl SpeculationReport {
    pub(crate) fn new(stats: &SpeculationStats, is_beam_search: bool) -> SpeculationReport {
        let total = stats.total();
        SpeculationReport {
            drafted: total.drafted,
            accepted: total.accepted,
            rejected: total.rejected(),
            drafters: stats
                .used()
                .map(|(drafter, of_drafter)| (drafter.name().to_owned(), counts(of_drafter)))
                .collect(),
            note: is_beam_search.then_some("beam search runs without speculation"),
        }
    }
}

fn counts(counts: DraftCounts) -> Value {
    json!({ "drafted": counts.drafted, "accepted": counts.accepted, "rejected": counts.rejected() })
}
