//! `/v1/models`: what is served here.

use pellucid_generate::LoadedModel;
use serde::Serialize;
use utoipa::ToSchema;

use super::common::check_model;
use crate::error::ApiError;

/// A model that can be asked.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    id: String,
    /// `model`.
    object: &'static str,
    /// When it was loaded, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    /// Tokens that prompt and reply may take together.
    max_model_len: usize,
    system_fingerprint: String,
}

/// All of them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelCard>,
}

impl ModelCard {
    fn new(model: &LoadedModel) -> ModelCard {
        ModelCard {
            id: model.id.clone(),
            object: "model",
            created: model.created,
            owned_by: "pellucid",
            max_model_len: model.context_len,
            system_fingerprint: model.fingerprint.clone(),
        }
    }

    pub(crate) fn find(name: &str, model: &LoadedModel) -> Result<ModelCard, ApiError> {
        check_model(name, model)?;
        Ok(ModelCard::new(model))
    }
}

impl ModelList {
    pub(crate) fn new(model: &LoadedModel) -> ModelList {
        ModelList { object: "list", data: vec![ModelCard::new(model)] }
    }
}
