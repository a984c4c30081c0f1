//! `/v1/models`: lists the served models.

use pellucid_generate::{LoadedEmbedder, LoadedModel, ShorterVectors};
use serde::Serialize;
use utoipa::ToSchema;

use super::sampling::default_parameters;
use super::shared_fields::unknown_model;
use crate::http::error::ApiError;
use crate::state::App;

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
    /// Maximum tokens of prompt and reply together, or of a text whose vector is computed.
    max_model_len: usize,
    system_fingerprint: String,
    /// Purposes of the model: `chat` and `completions`, or `embeddings` and `rerank`.
    capabilities: Vec<&'static str>,
    /// Format in which the model calls tools, by its name in the documentation; `generic` if its chat template has
    /// none. Absent for models that do not chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_format: Option<&'static str>,
    /// Sampling parameters of a request that gives none: for each field its `value`, and its `source`, which is
    /// `server` (a flag of the server), `model` (the model's files recommend it) or `openai` (OpenAI's default). Absent
    /// for models that compute vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    sampling_defaults: Option<serde_json::Value>,
    /// The vectors of a model that computes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<EmbeddingCard>,
}

/// The vectors of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingCard {
    /// Values of a vector.
    dimensions: usize,
    /// Values that `dimensions` of a request may ask for instead: a list, `any` number up to `dimensions`, or `none`.
    #[schema(value_type = Object)]
    shorter: serde_json::Value,
    /// How the rows of a text become its vector: `mean`, `cls` or `last`.
    pooling: &'static str,
}

/// All names of the served models, each as a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelCard>,
}

impl ModelCard {
    fn of_generator(name: &str, model: &LoadedModel) -> ModelCard {
        ModelCard {
            id: name.to_owned(),
            root: model.id.clone(),
            object: "model",
            created: model.created,
            owned_by: "pellucid",
            max_model_len: model.context_len,
            system_fingerprint: model.fingerprint.clone(),
            capabilities: match model.template {
                Some(_) => vec!["chat", "completions"],
                None => vec!["completions"],
            },
            tool_format: model.template.as_ref().map(|_| model.calling().format().name),
            sampling_defaults: Some(default_parameters(model)),
            embedding: None,
        }
    }

    fn of_embedder(name: &str, model: &LoadedEmbedder) -> ModelCard {
        let info = model.info();
        ModelCard {
            id: name.to_owned(),
            root: model.id.clone(),
            object: "model",
            created: model.created,
            owned_by: "pellucid",
            max_model_len: info.context_len,
            system_fingerprint: model.fingerprint.clone(),
            capabilities: if info.scores_pairs { vec!["rerank"] } else { vec!["embeddings", "rerank"] },
            tool_format: None,
            sampling_defaults: None,
            embedding: (!info.scores_pairs).then(|| EmbeddingCard {
                dimensions: info.num_dimensions,
                shorter: match &model.shorter {
                    ShorterVectors::None => "none".into(),
                    ShorterVectors::Any => "any".into(),
                    ShorterVectors::Listed(lengths) => lengths.clone().into(),
                },
                pooling: info.pooling.name(),
            }),
        }
    }

    pub(crate) fn find(name: &str, app: &App) -> Result<ModelCard, ApiError> {
        if let Some(model) = app.model.get().filter(|model| model.names().any(|own| own == name)) {
            return Ok(ModelCard::of_generator(name, model));
        }
        match &app.embedder {
            Some(model) if model.names().any(|own| own == name) => Ok(ModelCard::of_embedder(name, model)),
            _ => Err(unknown_model(name, app.model_names().into_iter())),
        }
    }
}

impl ModelList {
    pub(crate) fn new(app: &App) -> ModelList {
        let generator = app.model.get().into_iter();
        let generator = generator.flat_map(|model| model.names().map(|name| ModelCard::of_generator(name, model)));
        let embedder = app.embedder.iter();
        let embedder = embedder.flat_map(|model| model.names().map(|name| ModelCard::of_embedder(name, model)));
        ModelList { object: "list", data: generator.chain(embedder).collect() }
    }
}
