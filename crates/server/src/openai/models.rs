//! `/v1/models`: lists the served model.

use pellucid_generate::LoadedModel;
use serde::Serialize;
use utoipa::ToSchema;

use super::sampling::default_parameters;
use super::shared_fields::check_model;
use crate::http::error::ApiError;

/// A served model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    id: String,
    /// The name that replies have. Differs from `id` for an alias.
    root: String,
    /// `model`.
    object: &'static str,
    /// Time of loading, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    /// Maximum tokens of prompt and reply together.
    max_model_len: usize,
    system_fingerprint: String,
    /// Sampling parameters of a request that gives none: for each field its `value`, and its `source`, which is
    /// `server` (a flag of the server), `model` (the model's files recommend it) or `openai` (OpenAI's default).
    #[schema(value_type = Object)]
    sampling_defaults: serde_json::Value,
}

/// All names of the served model, each as a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelCard>,
}

impl ModelCard {
    fn new(name: &str, model: &LoadedModel) -> ModelCard {
        ModelCard {
            id: name.to_owned(),
            root: model.id.clone(),
            object: "model",
            created: model.created,
            owned_by: "pellucid",
            max_model_len: model.context_len,
            system_fingerprint: model.fingerprint.clone(),
            sampling_defaults: default_parameters(model),
        }
    }

    pub(crate) fn find(name: &str, model: &LoadedModel) -> Result<ModelCard, ApiError> {
        check_model(name, model)?;
        Ok(ModelCard::new(name, model))
    }
}

impl ModelList {
    pub(crate) fn new(model: &LoadedModel) -> ModelList {
        ModelList { object: "list", data: model.names().map(|name| ModelCard::new(name, model)).collect() }
    }
}
